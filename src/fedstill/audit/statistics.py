"""What guesses prove: curves, exact intervals, lower bounds of epsilon and mu; no training.

A score is high where an attack believes that a record was inside. Every bound here holds with the
confidence that is asked for, whatever the attack is, as long as thresholds and numbers of guesses
were fixed before the guesses were looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedstill.core.errors import BadValue

Scores = npt.NDArray[np.float64]
Inside = npt.NDArray[np.bool_]
CONFIDENCE = 0.95
LARGEST = 60.0  # an epsilon that no number of guesses can reach


@dataclass(frozen=True, eq=False)
class Curve:
    """A receiver operating characteristic: a point for each threshold, from (0, 0) to (1, 1).

    Records with equal scores are accepted together, so ties cannot be ordered in the attack's
    favour.
    """

    false: Scores  # [threshold], share of the records outside that are called inside
    true: Scores  # [threshold], share of the records inside that are called inside
    inside: int  # records
    outside: int

    @cached_property
    def auc(self) -> float:
        """The area under the curve, by straight lines between its points."""
        heights = (self.true[1:] + self.true[:-1]) / 2
        return float((np.diff(self.false) * heights).sum())

    def true_at(self, false: float) -> float:
        """The largest true positive rate of a threshold with at most this false positive rate.

        No point is made up between thresholds: with fewer records outside than 1 / `false`, it is
        the rate without any false positive.
        """
        return float(self.true[self.false <= false].max())

    @cached_property
    def balanced(self) -> float:
        """The best balanced accuracy of any threshold."""
        return float((self.true + 1 - self.false).max() / 2)

    def thinned(self, most: int = 400) -> list[tuple[float, float]]:
        """So many of its points at most, the first ones dense enough for logarithmic axes."""
        last = len(self.false) - 1
        places = np.unique(np.r_[0, np.geomspace(1, max(1, last), most - 1).astype(int)])
        kept = places[places <= last]
        return [(float(self.false[i]), float(self.true[i])) for i in kept]


def curve(scores: Any, inside: Any) -> Curve:
    """The curve of an attack; both arguments may have any, the same, shape."""
    score, member = _checked(scores, inside)
    order = np.argsort(-score, kind="stable")
    hits, ranked = member[order], score[order]
    ends = np.r_[np.flatnonzero(np.diff(ranked)), len(ranked) - 1]  # the last of equal scores
    true, false = np.cumsum(hits)[ends], np.cumsum(~hits)[ends]
    within, without = int(member.sum()), int((~member).sum())
    return Curve(np.r_[0.0, false / without], np.r_[0.0, true / within], within, without)


def _checked(scores: Any, inside: Any) -> tuple[Scores, Inside]:
    score = np.asarray(scores, dtype=np.float64).ravel()
    member = np.asarray(inside, dtype=bool).ravel()
    if score.shape != member.shape:
        raise BadValue(
            f"an attack gave {len(score)} scores for {len(member)} records; give one for each"
        )
    if not np.isfinite(score).all():
        raise BadValue(f"{int((~np.isfinite(score)).sum())} scores of an attack are not finite")
    if member.all() or not member.any():
        raise BadValue("all records are on the same side; an attack needs some inside, some not")
    return score, member


def clopper_pearson(right: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact two-sided interval of a share, of which so many trials showed so many."""
    rest = (1 - confidence) / 2
    low = 0.0 if right == 0 else float(stats.beta.ppf(rest, right, trials - right + 1))
    high = 1.0 if right == trials else float(stats.beta.ppf(1 - rest, right + 1, trials - right))
    return low, high


@dataclass(frozen=True)
class Told:
    """How often an attack said "inside" of what was inside, and of what was not."""

    true: int
    inside: int
    false: int
    outside: int

    def bounds(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The least true and the largest false positive rate, both at once with confidence."""
        # Of two two-sided intervals one end each: together they fail as often as one interval does.
        least, _ = clopper_pearson(self.true, self.inside, confidence)
        _, most = clopper_pearson(self.false, self.outside, confidence)
        return least, most

    def mu(self, confidence: float = CONFIDENCE) -> float:
        """The least mu that the trade-off of Gaussian privacy allows for these rates.

        A mechanism that is mu-private lets no test have both error rates below the Gaussian curve
        (Dong, Roth, Su 2022): mu is at least z(true) - z(false).
        """
        least, most = self.bounds(confidence)
        if least <= 0 or most >= 1 or least <= most:
            return 0.0
        return float(stats.norm.ppf(least) - stats.norm.ppf(most))

    def epsilon(self, delta: float, confidence: float = CONFIDENCE) -> float:
        """The least epsilon at delta: true <= e^epsilon · false + delta, whatever the mechanism."""
        least, most = self.bounds(confidence)
        return max(0.0, math.log((least - delta) / most)) if least > delta else 0.0


def told(scores: Any, inside: Any, threshold: float) -> Told:
    """What an attack says with a threshold that was fixed beforehand."""
    score, member = _checked(scores, inside)
    says = score > threshold
    within = int(member.sum())
    return Told(
        int((says & member).sum()), within, int((says & ~member).sum()), len(member) - within
    )


@dataclass(frozen=True)
class OneRun:
    """What guesses on the records of one run prove (Steinke, Nasr, Jagielski 2023)."""

    records: int  # each was inside with a chance of one half, by coins of its own
    guesses: int
    right: int
    epsilon: float  # at least, with `confidence`
    confidence: float = CONFIDENCE


def one_run(
    scores: Any,
    inside: Any,
    *,
    guessed_in: int,
    guessed_out: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> OneRun:
    """Guess "in" for so many of the highest scores, "out" for so many of the lowest.

    The two numbers must be fixed before the scores are looked at. Among equal scores those are
    taken that stand first, so that records must not be sorted by membership.
    """
    score, member = _checked(scores, inside)
    records = len(score)
    if guessed_in < 0 or guessed_out < 0 or not 0 < guessed_in + guessed_out <= records:
        raise BadValue(
            f"{guessed_in} guesses in and {guessed_out} out of {records} records; give two "
            "numbers from 0 on whose sum is at least 1 and at most the number of records"
        )
    order = np.argsort(-score, kind="stable")
    hits = member[order]
    right = int(hits[:guessed_in].sum() + (~hits[records - guessed_out :]).sum())
    guesses = guessed_in + guessed_out
    least = one_run_epsilon(records, guesses, right, delta, confidence)
    return OneRun(records, guesses, right, least, confidence)


def one_run_p_value(records: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely so many right guesses or more can be at most, with (epsilon, delta)-privacy.

    Theorem 5.2 there: a guess is right with a chance of at most q = 1 / (1 + e^-epsilon), beside
    what delta allows for.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return min(1.0, tail)
    below = stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, chance)
    most = float((np.cumsum(below) / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * records * delta * most)


@lru_cache(maxsize=1024)
def one_run_epsilon(
    records: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The largest epsilon that so many right guesses refute; 0 where they refute none."""
    allowed = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(records, guesses, right, epsilon, delta) <= allowed

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST and refuted(high):
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def most_one_run_can_show(guesses: int, delta: float, records: int) -> float:
    """The bound if every guess were right: what an audit of this size can prove at best."""
    return one_run_epsilon(records, guesses, guesses, delta)
