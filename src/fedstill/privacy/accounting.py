"""From noise, rates and numbers of releases to epsilon; plain numbers, no tensors.

Releases of whole data with normal noise compose exactly: μ² = Σ 1/σ² (Dong, Roth, Su 2022), and
(ε, δ) follows from μ in closed form (Balle, Wang 2018). Where records were sampled, an accountant
of privacy loss distributions is asked: the package dp-accounting, of the extra `dp`.

An accountant adds up releases whose rates and noise are fixed in advance. Those that follow from
noisy counts are not: see `_after_counts`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import erfc, exp, inf, isfinite, log, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

from fedstill.core.errors import BadValue

INTERVAL = 1e-3  # of the accountant's grid of privacy losses; it rounds to the safe side
LEAST_SIGMA = 0.05  # no noise below this is looked for
TOLERANCE = 1e-3  # of ε, by which a plan may cost less than its budget
NARROW = 1e-4  # of a noise, by which a search does not try to find it more exactly
COUNTS_SHARE = 0.05  # of μ², which noisy class counts take where labels are private
STEEPNESS = 0.7  # of how δ falls with ε, samples against normal noise: about what training has
TAIL = 1e-9  # of δ: as much as counts may be further off than is looked at
POINTS = 128  # at which δ is looked at, on either side
LARGE = 500.0  # ε of a budget beyond which counts and what follows are added up plainly
IMMENSE = 1e5  # μ² of releases whose ε is taken for infinite: the accountant's grid grows with it
FURTHEST = 650.0  # ε at which an accountant is asked for δ: exp(ε) of much larger ones overflows


class Releases(NamedTuple):
    """Some releases alike: noise in units of the sensitivity, rate of sampling, how many."""

    sigma: float
    rate: float
    number: int


def delta_of(epsilon: float, mu: float) -> float:
    """The δ at ε of normal noise with μ = sensitivity / deviation, exactly."""
    if mu <= 0:
        return 0.0
    second = _log_above(epsilon / mu + mu / 2) + epsilon
    return _above(epsilon / mu - mu / 2) - (exp(second) if second < 700 else math.inf)


def epsilon_of(mu: float, delta: float) -> float:
    """The ε at δ of normal noise with μ, to the safe side; infinite without noise."""
    if mu <= 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    high = mu * mu / 2 + mu * sqrt(2 * log(1 / delta)) + 10
    return _halved(lambda epsilon: delta_of(epsilon, mu) > delta, 0.0, high)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest μ whose (ε, δ) is within the budget."""
    high = 1.0
    while delta_of(epsilon, high) < delta:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(epsilon, middle) < delta else (low, middle)
    return low


def sigma_for(epsilon: float, delta: float, releases: int) -> float:
    """The noise multiplier of each of so many releases of whole data that together cost ε."""
    return sqrt(releases) / mu_of(epsilon, delta)


def epsilon_of_releases(releases: Sequence[Releases], delta: float, counts: float = 0.0) -> float:
    """The ε of all these releases together: closed form, or the accountant where some sampled.

    `counts` is the μ of noisy counts that were told before, where rates follow from them.
    """
    alike: dict[tuple[float, float], int] = {}
    for sigma, rate, count in releases:
        if count and rate > 0:
            alike[sigma, rate] = alike.get((sigma, rate), 0) + count
    if any(sigma <= 0 for sigma, _ in alike) or _about(alike) > IMMENSE:
        return math.inf
    squared = sum(count / sigma**2 for (sigma, rate), count in alike.items() if rate == 1)
    sampled = tuple(
        Releases(sigma, rate, count) for (sigma, rate), count in sorted(alike.items()) if rate < 1
    )
    if counts:
        return _after_counts(counts, squared, sampled, delta)
    return _fixed(squared, sampled, delta)


def _about(alike: Mapping[tuple[float, float], int]) -> float:
    """About μ² of releases: of samples as `_guess` has it, at most that of whole data."""
    return sum(
        count * min(1 / sigma**2, rate**2 * _sampled(sigma))
        for (sigma, rate), count in alike.items()
    )


def _sampled(sigma: float) -> float:
    return exp(min(50.0, 1 / sigma**2)) - 1


def sigma_of_plan(
    plan: Sequence[Releases],
    epsilon: float,
    delta: float,
    fixed: Sequence[Releases] = (),
    counts: float = 0.0,
) -> float:
    """The one noise multiplier with which a plan, beside what is fixed, costs ε.

    The sigmas of the plan are factors of it. It is found to the safe side: the plan costs a
    thousandth less than ε at most. `counts` is the μ of noisy counts that rates follow from.
    """

    def cost(sigma: float) -> float:
        return epsilon_of_releases(
            [*(each._replace(sigma=each.sigma * sigma) for each in plan), *fixed], delta, counts
        )

    if not counts and all(each.rate == 1 for each in [*plan, *fixed]):
        left = mu_of(epsilon, delta) ** 2 - sum(each.number / each.sigma**2 for each in fixed)
        if left <= 0:
            raise BadValue(f"epsilon = {epsilon:g}: nothing is left of it for what is released")
        return sqrt(sum(each.number / each.sigma**2 for each in plan) / left)
    told = [Releases(1 / counts, 1.0, 1)] if counts else []
    return _searched(cost, _guess(plan, epsilon, delta, [*fixed, *told]), epsilon)


def _guess(
    plan: Sequence[Releases], epsilon: float, delta: float, fixed: Sequence[Releases]
) -> float:
    """About the noise of a plan: many sampled releases are like one with normal noise.

    Bu, Dong, Long, Su 2020: μ² = Σ rate² · number · (exp(1/σ²) - 1).
    """
    wanted = mu_of(epsilon, delta) ** 2

    def too_small(sigma: float) -> bool:
        every = [*(each._replace(sigma=each.sigma * sigma) for each in plan), *fixed]
        found = 0.0
        for each in every:
            one = _sampled(each.sigma) if each.rate < 1 else 1 / each.sigma**2
            found += each.rate**2 * each.number * one
        return found > wanted

    return _halved(too_small, LEAST_SIGMA, 1e6)


def _searched(cost: Callable[[float], float], first: float, epsilon: float) -> float:
    """Where a falling cost comes to ε, at most a thousandth below; few costs are asked for.

    Where it jumps over ε, the noise just behind the jump.
    """
    below: tuple[float, float] | None = None  # too little noise, and its cost
    above: tuple[float, float] | None = None  # enough, and more than is needed
    sigma = first
    for turn in range(60):
        found = cost(sigma)
        if epsilon * (1 - TOLERANCE) <= found <= epsilon:
            return sigma
        below, above = ((sigma, found), above) if found > epsilon else (below, (sigma, found))
        if below is not None and above is not None:
            if above[0] < below[0] * (1 + NARROW):
                break  # here the cost jumps over ε
            sigma = _between(below, above, epsilon * (1 - TOLERANCE / 2), halve=turn % 4 == 3)
        elif sigma == LEAST_SIGMA and above is not None:
            return sigma
        else:
            # Where only one side is known, ε is taken for a power of σ; for a flatter one later.
            power = 0.9 * max(1, turn)
            factor = (found / epsilon) ** power if found > 0 else 0.5
            sigma = max(LEAST_SIGMA, sigma * (factor if isfinite(factor) else 2.0))
        if sigma > 1e6:
            break
    if above is None:
        raise BadValue(f"epsilon = {epsilon:g}: no noise is enough for what is planned")
    return above[0]


def _between(
    below: tuple[float, float], above: tuple[float, float], wanted: float, *, halve: bool
) -> float:
    """A noise between two whose costs are known: on the line through their logarithms.

    With `halve` their geometric middle, which shrinks the range whatever the curve is.
    """
    (low, high_cost), (high, low_cost) = below, above
    if halve or low_cost <= 0 or math.isinf(high_cost):
        return sqrt(low * high)
    share = log(high_cost / wanted) / log(high_cost / low_cost)
    return float(low * (high / low) ** share)


def _fixed(squared: float, sampled: tuple[Releases, ...], delta: float) -> float:
    """The ε of whole releases with μ² and of sampled ones, all fixed in advance."""
    return _accounted(squared, sampled, delta) if sampled else epsilon_of(sqrt(squared), delta)


@lru_cache(maxsize=4096)
def _accounted(squared: float, sampled: tuple[Releases, ...], delta: float) -> float:
    """The accountant's ε of whole releases with μ² and of sampled ones."""
    return float(_added_up(squared, sampled).get_epsilon(delta))


def _added_up(squared: float, sampled: tuple[Releases, ...]) -> Any:
    """An accountant that knows of whole releases with μ² and of sampled ones."""
    dp = accountant()
    total = dp.pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=INTERVAL
    )
    if squared:
        total.compose(dp.GaussianDpEvent(1 / sqrt(squared)))
    for sigma, rate, count in sampled:
        event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
        total.compose(dp.SelfComposedDpEvent(event, count))
    return total


@lru_cache(maxsize=4096)
def _after_counts(
    counts: float, squared: float, sampled: tuple[Releases, ...], delta: float
) -> float:
    """The ε of noisy counts with this μ, and of releases whose rates and noise follow from them.

    Let l be the privacy loss of the counts that came, and δ'(ε') what the releases that follow
    from them cost. Together they cost δ(ε) = E δ'(ε - l). If δ'(ε') ≤ δ exp(-λ (ε' - ε + ρ)) for
    *all* counts that may come, then δ(ε) ≤ δ exp(-λρ) E exp(λl) = δ where ρ = (λ + 1) μ² / 2, which
    is the Rényi divergence of the counts, of order λ + 1. The λ is fixed by the noise of the counts
    and by δ, before any counts come; every λ is right, and the nearer to how δ' falls, the less
    noise is needed. Where l lies, but for a billionth of δ, is looked at point by point. Counts
    that are all 0 are covered: nothing is released then, and δ' of nothing is the least there is.

    Near `FURTHEST` an accountant has no δ to look at, so beyond a `LARGE` budget, which the noise
    of the counts tells too, each half takes δ / 2 and their ε are added: this holds whatever the
    second half makes of the first (Dwork, Rothblum, Vadhan 2010), and costs about a tenth of ε.
    """
    if epsilon_of(counts / sqrt(COUNTS_SHARE), delta) > LARGE:
        return epsilon_of(counts, delta / 2) + _fixed(squared, sampled, delta / 2)
    mean, wide = counts**2 / 2, -NormalDist().inv_cdf(TAIL * delta) * counts
    slope = STEEPNESS * _steepness(counts / sqrt(COUNTS_SHARE), delta)
    offset, step = (slope + 1) * mean, wide / POINTS
    total = _added_up(squared, sampled) if sampled else _Normal(sqrt(squared))
    first = float(total.get_epsilon(delta))  # without counts: it cannot be less
    target = log(delta * (1 - 2 * TAIL))
    for points in (4 * POINTS, 64 * POINTS) if isfinite(first) else ():
        grid = [first - mean + step * at for at in range(-POINTS, points + POINTS + 2)]
        # δ falls: what it is at the left of two points must be allowed at the right one.
        needed = [
            right + offset + (log(cost) - target) / slope if cost > 0 else -inf
            for right, cost in zip(grid[1:], _deltas(total, grid), strict=False)
        ]
        for at in range(points):
            here = first + step * at
            most = max(needed[at : at + 2 * POINTS + 2])
            if most <= here + step:
                return max(most, here)
    return inf


class _Normal(NamedTuple):
    """What an accountant says of normal noise with μ, in closed form."""

    mu: float

    def get_epsilon(self, delta: float) -> float:
        return epsilon_of(self.mu, delta)

    def get_delta(self, epsilons: Sequence[float]) -> list[float]:
        return [max(0.0, delta_of(epsilon, self.mu)) for epsilon in epsilons]


def _deltas(total: Any, grid: Sequence[float]) -> list[float]:
    """What an accountant's releases cost at each ε, also below 0, where δ = 1 - e^ε (1 - δ(-ε)).

    Beyond the furthest ε they cost no more than at it.
    """
    furthest = inf if isinstance(total, _Normal) else FURTHEST
    asked = sorted({min(abs(epsilon), furthest) for epsilon in grid})
    found = dict(zip(asked, map(float, total.get_delta(asked)), strict=True))
    costs = [found[min(abs(epsilon), furthest)] for epsilon in grid]
    return [
        cost if epsilon >= 0 else 1 - exp(epsilon) * (1 - cost)
        for epsilon, cost in zip(grid, costs, strict=True)
    ]


def _steepness(mu: float, delta: float) -> float:
    """How fast log δ falls with ε, of normal noise with μ, where it comes to δ."""
    epsilon = epsilon_of(mu, delta)
    return exp(epsilon + _log_above(epsilon / mu + mu / 2)) / delta


def accountant() -> Any:
    """The package dp-accounting; a clear error where it is not installed."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise BadValue(
            "privacy: training on samples of records needs the package dp-accounting to know what "
            "it costs; install it with pip install 'fedstill[dp]', or match class sums"
        ) from error


def _above(x: float) -> float:
    """The chance that a standard normal number exceeds x."""
    return 0.5 * erfc(x / sqrt(2))


def _log_above(x: float) -> float:
    """Its logarithm; far out from below by the leading terms of the tail."""
    if x < 25:
        return log(_above(x))
    return -x * x / 2 - log(x) - 0.5 * log(2 * math.pi) + log(1 - 1 / (x * x))


def _halved(too_small: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition ceases to hold, from above."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return high
