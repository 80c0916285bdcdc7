"""The ledger: who spent what; it refuses what would pass the budget, before it is released."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fedstill.core.errors import FedstillError
from fedstill.core.records import NodeId
from fedstill.core.release import Spending, Use
from fedstill.privacy.accounting import Releases, epsilon_of_releases, sigma_of_plan

SLACK = 1e-6  # relative, for the rounding of sums


class BudgetSpent(FedstillError):
    """A release that would cost more than is left."""


def composed(rows: Iterable[Spending], delta: float) -> float:
    """The ε of one node's rows together."""
    return epsilon_of_releases([Releases(r.sigma, r.rate, r.releases) for r in rows], delta)


def calibrated(uses: Sequence[Use], epsilon: float, delta: float) -> float:
    """The noise multiplier with which one node's planned uses cost exactly ε.

    Uses that name their own noise keep it; the others share what is left. 0 where nothing is
    planned.
    """
    open_uses = [use for use in uses if use.sigma is None and use.releases]
    if not open_uses:
        return 0.0
    fixed = [Releases(use.sigma, use.rate, use.releases) for use in uses if use.sigma is not None]
    plan = [Releases(1.0, use.rate, use.releases) for use in open_uses]
    return sigma_of_plan(plan, epsilon, delta, fixed)


@dataclass
class Ledger:
    """What every node spent, and the budget that none may pass.

    `planned` are the uses of each node that the noise was found for: as long as a node does no
    more than those, nothing needs to be added up.
    """

    epsilon: float
    delta: float
    planned: dict[NodeId, list[Spending]] = field(default_factory=dict)
    rows: dict[NodeId, list[Spending]] = field(default_factory=dict)

    def spend(self, row: Spending) -> None:
        """Before a release is made: refuse it, or write it down."""
        own = [*self.rows.get(row.node, []), row]
        if not self._as_planned(row.node, own):
            after = composed(own, self.delta)
            if after > self.epsilon * (1 + SLACK):
                raise BudgetSpent(
                    f"{row.node}: {row.step} in round {row.round} would bring epsilon to "
                    f"{after:.3g}, but the budget is {self.epsilon:g} at delta = {self.delta:g}; "
                    "ask for fewer rounds or releases, or a larger privacy.epsilon"
                )
        self.rows[row.node] = own

    def epsilons(self) -> dict[NodeId, float]:
        """What each node has spent so far."""
        return {node: composed(rows, self.delta) for node, rows in self.rows.items()}

    def _as_planned(self, node: NodeId, rows: Sequence[Spending]) -> bool:
        """Whether these rows are no more than those of the plan, kind by kind."""
        left = _by_kind(self.planned.get(node, ()))
        return all(count <= left.get(kind, 0) for kind, count in _by_kind(rows).items())


def _by_kind(rows: Iterable[Spending]) -> dict[tuple[float, float], int]:
    """How many releases there are of each noise and rate."""
    found: dict[tuple[float, float], int] = {}
    for row in rows:
        found[row.sigma, row.rate] = found.get((row.sigma, row.rate), 0) + row.releases
    return found
