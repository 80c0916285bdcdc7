"""Student's t for means of a few seeds: intervals and a paired test; plain arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_TINY, _PRECISE = 1e-300, 1e-14


@dataclass(frozen=True)
class Paired:
    """How much one method is above another on the same seeds, and how likely that is by chance."""

    against: str
    difference: float
    low: float  # of the 95 % confidence interval
    high: float
    p: float  # two-sided
    n: int


def paired(against: str, mine: Sequence[float], theirs: Sequence[float]) -> Paired | None:
    """A paired t-test of scores with the same seeds in the same order; None below two seeds."""
    gaps = [a - b for a, b in zip(mine, theirs, strict=True)]
    if len(gaps) < 2:
        return None
    mean, deviation = statistics.fmean(gaps), statistics.stdev(gaps)
    half = half_width(deviation, len(gaps))
    error = deviation / math.sqrt(len(gaps))
    if error == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = 2 * (1 - cumulative(abs(mean) / error, len(gaps) - 1))
    return Paired(against, mean, mean - half, mean + half, p, len(gaps))


def half_width(deviation: float, n: int) -> float:
    """Half of the confidence interval of a mean of n values with this sample deviation."""
    return quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)


def quantile(probability: float, freedom: int) -> float:
    """The value below which t lies with a probability of one half or more, by bisection."""
    low, high = 0.0, 1.0
    while cumulative(high, freedom) < probability:
        low, high = high, 2 * high
    while high - low > _PRECISE * max(1.0, high):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if cumulative(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def cumulative(t: float, freedom: int) -> float:
    """The probability that Student's t with some degrees of freedom is at most t, for t >= 0."""
    return 1 - incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges quickly for the other end
        return 1 - incomplete_beta(1 - x, b, a)
    factor = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    return factor * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of the continued fraction."""
    c, d = 1.0, 1 / _off_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _off_zero(1 + term * d)
            c = _off_zero(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < _PRECISE:
            break
    return value


def _off_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
