"""The ledger: who spent what; it refuses what would pass the budget, before it is released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from fedstill.core.errors import FedstillError
from fedstill.core.node import COUNTS
from fedstill.core.records import NodeId
from fedstill.core.release import SUMS, Spending, Use
from fedstill.privacy.accounting import Releases, epsilon_of_releases, sigma_of_plan

SLACK = 1e-6  # relative, for the rounding of sums


class BudgetSpent(FedstillError):
    """A release that would cost more than is left."""


def composed(rows: Iterable[Spending], delta: float) -> float:
    """The ε of one node's rows together."""
    every = [*rows]
    counts = _counts([(row.mechanism, row.sigma, row.releases) for row in every])
    others = [row for row in every if not (counts and row.mechanism == COUNTS)]
    return epsilon_of_releases(
        [Releases(row.sigma, row.rate, row.releases) for row in others], delta, counts
    )


def calibrated(uses: Sequence[Use], epsilon: float, delta: float) -> float:
    """The noise multiplier with which one node's planned uses cost exactly ε.

    Uses that name their own noise keep it; the others share what is left. 0 where nothing is
    planned.
    """
    open_uses = [use for use in uses if use.sigma is None and use.releases]
    if not open_uses:
        return 0.0
    counts = _counts([(use.mechanism, use.sigma or 0.0, use.releases) for use in uses])
    fixed = [
        Releases(use.sigma, use.rate, use.releases)
        for use in uses
        if use.sigma is not None and not (counts and use.mechanism == COUNTS)
    ]
    plan = [Releases(1.0, use.rate, use.releases) for use in open_uses]
    return sigma_of_plan(plan, epsilon, delta, fixed, counts)


@dataclass
class Ledger:
    """What every node spent, and the budget that none may pass.

    `planned` are the uses of each node that the noise was found for: as long as a node does no
    more than those, nothing needs to be added up. Releases of whole data may differ from the plan,
    as far as the budget goes: that μ² adds up holds for noise that is chosen on the way too. It is
    not known that an accountant's sum of samples does, so samples beyond the plan are refused.
    """

    epsilon: float
    delta: float
    planned: dict[NodeId, list[Spending]] = field(default_factory=dict)
    rows: dict[NodeId, list[Spending]] = field(default_factory=dict)

    def spend(self, row: Spending) -> None:
        """Before a release is made: refuse it, or write it down."""
        before = self.rows.get(row.node, [])
        own = [*before, row]
        if not self._as_planned(row.node, own):
            if self.planned and any(each.rate < 1 for each in own):
                raise BudgetSpent(self._beyond_plan(row, before))
            after = composed(own, self.delta)
            if after > self.epsilon * (1 + SLACK):
                raise BudgetSpent(
                    f"{row.node}: {row.step} in round {row.round} would bring epsilon to "
                    f"{after:.3g}, but the budget is {self.epsilon:g} at delta = {self.delta:g}; "
                    "ask for fewer rounds or releases, or a larger privacy.epsilon"
                )
        self.rows[row.node] = own

    def _beyond_plan(self, row: Spending, before: Sequence[Spending]) -> str:
        """Why samples that were not planned are refused, and what to do."""
        if not self._as_planned(row.node, before):
            return (
                f"{row.node}: what it spent before {row.step} in round {row.round} is not what is "
                "planned now: when this run began, its noise was found by other versions or from "
                "other data. Go on with the data and the versions of fedstill and dp-accounting "
                "that it began with, or run the recipe again in a new folder"
            )
        return (
            f"{row.node}: {row.step} in round {row.round} asks for {row.releases} releases of "
            f"{row.mechanism} at rate {row.rate:.4g} beyond what was planned; what samples cost "
            "together is known only if it was planned before the first, so a step must not make "
            "what it asks for depend on what was learned"
        )

    def epsilons(self) -> dict[NodeId, float]:
        """What each node has spent so far."""
        return {node: composed(rows, self.delta) for node, rows in self.rows.items()}

    def _as_planned(self, node: NodeId, rows: Sequence[Spending]) -> bool:
        """Whether these rows are no more than those of the plan, kind by kind."""
        left = _by_kind(self.planned.get(node, ()))
        return all(count <= left.get(kind, 0) for kind, count in _by_kind(rows).items())


def _counts(rows: Iterable[tuple[str, float, int]]) -> float:
    """The μ of counts that were told with noise, where rates of other releases follow from them.

    0 where there are none: releases of whole data cost the same whatever the counts are, so those
    are one release among others.
    """
    every = [*rows]
    if all(mechanism in (COUNTS, SUMS) for mechanism, _, _ in every):
        return 0.0
    told = [(sigma, number) for mechanism, sigma, number in every if mechanism == COUNTS]
    return sqrt(sum(number / sigma**2 for sigma, number in told if sigma > 0))


def _by_kind(rows: Iterable[Spending]) -> dict[tuple[float, float], int]:
    """How many releases there are of each noise and rate."""
    found: dict[tuple[float, float], int] = {}
    for row in rows:
        found[row.sigma, row.rate] = found.get((row.sigma, row.rate), 0) + row.releases
    return found
