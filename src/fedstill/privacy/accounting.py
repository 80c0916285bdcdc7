"""From noise, rates and numbers of releases to epsilon; plain numbers, no tensors.

Releases of whole data with normal noise compose exactly: μ² = Σ 1/σ² (Dong, Roth, Su 2022), and
(ε, δ) follows from μ in closed form (Balle, Wang 2018). Where records were sampled, an accountant
of privacy loss distributions is asked: the package dp-accounting, of the extra `dp`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import erfc, exp, log, sqrt
from typing import Any, NamedTuple

from fedstill.core.errors import BadValue

INTERVAL = 1e-3  # of the accountant's grid of privacy losses; it rounds to the safe side
LEAST_SIGMA = 0.05  # no noise below this is looked for
TOLERANCE = 1e-3  # of ε, by which a plan may cost less than its budget


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


def epsilon_of_releases(releases: Sequence[Releases], delta: float) -> float:
    """The ε of all these releases together: closed form, or the accountant where some sampled."""
    alike: dict[tuple[float, float], int] = {}
    for sigma, rate, count in releases:
        if count and rate > 0:
            alike[sigma, rate] = alike.get((sigma, rate), 0) + count
    if any(sigma <= 0 for sigma, _ in alike):
        return math.inf
    squared = sum(count / sigma**2 for (sigma, rate), count in alike.items() if rate == 1)
    sampled = tuple(
        Releases(sigma, rate, count) for (sigma, rate), count in sorted(alike.items()) if rate < 1
    )
    if not sampled:
        return epsilon_of(sqrt(squared), delta)
    return _accounted(squared, sampled, delta)


def sigma_of_plan(
    plan: Sequence[Releases], epsilon: float, delta: float, fixed: Sequence[Releases] = ()
) -> float:
    """The one noise multiplier with which a plan, beside what is fixed, costs ε.

    The sigmas of the plan are factors of it. It is found to the safe side: the plan costs a
    thousandth less than ε at most.
    """

    def cost(sigma: float) -> float:
        return epsilon_of_releases(
            [*(each._replace(sigma=each.sigma * sigma) for each in plan), *fixed], delta
        )

    if all(each.rate == 1 for each in [*plan, *fixed]):
        left = mu_of(epsilon, delta) ** 2 - sum(each.number / each.sigma**2 for each in fixed)
        if left <= 0:
            raise BadValue(f"epsilon = {epsilon:g}: nothing is left of it for what is released")
        return sqrt(sum(each.number / each.sigma**2 for each in plan) / left)
    return _searched(cost, _guess(plan, epsilon, delta, fixed), epsilon)


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
            one = exp(min(50.0, 1 / each.sigma**2)) - 1 if each.rate < 1 else 1 / each.sigma**2
            found += each.rate**2 * each.number * one
        return found > wanted

    return _halved(too_small, LEAST_SIGMA, 1e6)


def _searched(cost: Callable[[float], float], first: float, epsilon: float) -> float:
    """Where a falling cost comes to ε, at most a thousandth below; few costs are asked for."""
    below: tuple[float, float] | None = None  # too little noise, and its cost
    above: tuple[float, float] | None = None  # enough, and more than is needed
    sigma = first
    for turn in range(60):
        found = cost(sigma)
        if epsilon * (1 - TOLERANCE) <= found <= epsilon:
            return sigma
        below, above = ((sigma, found), above) if found > epsilon else (below, (sigma, found))
        if below is not None and above is not None:
            sigma = _between(below, above, epsilon * (1 - TOLERANCE / 2), halve=turn % 4 == 3)
        elif sigma == LEAST_SIGMA and above is not None:
            return sigma
        else:
            # Where only one side is known, ε is taken for a power of σ; for a flatter one later.
            power = 0.9 * max(1, turn)
            sigma = max(LEAST_SIGMA, sigma * ((found / epsilon) ** power if found > 0 else 0.5))
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


@lru_cache(maxsize=4096)
def _accounted(squared: float, sampled: tuple[Releases, ...], delta: float) -> float:
    """The accountant's ε of whole releases with μ² and of sampled ones."""
    dp = accountant()
    total = dp.pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=INTERVAL
    )
    if squared:
        total.compose(dp.GaussianDpEvent(1 / sqrt(squared)))
    for sigma, rate, count in sampled:
        event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
        total.compose(dp.SelfComposedDpEvent(event, count))
    return float(total.get_epsilon(delta))


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
