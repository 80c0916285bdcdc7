"""What a user asks of privacy, and the plan that its noise was found for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import log, sqrt
from typing import Annotated, Any, Literal

from fedstill.core import ranges
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Positive, Range
from fedstill.core.records import NodeId
from fedstill.core.release import Spending, Terms, Use
from fedstill.privacy.accounting import COUNTS_SHARE, mu_of

MOST_EPSILON = 1000
MOST_RELEASES = 1000

PROMISE = {
    "public": (
        "one record of one client: its image replaced by nothing. Which labels a client holds, and "
        "how many of each, is public"
    ),
    "private": "one record of one client, with its label: there or not there",
}
SIMULATED = (
    "noise is simulated: it is drawn from the recipe's seed, so whoever knows that can remove it"
)
TOLD = (
    "as far as answers came: what a site released too late is in its own ledger alone, and never "
    "beyond the budget"
)
LIMITS = (
    "of this run alone: further runs on the same records, with other seeds or settings, add up",
    "of training records; test records are scored exactly",
    SIMULATED,
    TOLD,
    "what a network makes of a record is computed in floating point, in batches with others",
)


@dataclass(frozen=True)
class Plan:
    """What a rehearsal found: each client's uses, and the noise with which they cost ε."""

    noise: Mapping[NodeId, float]
    uses: Mapping[NodeId, Sequence[Use]]
    secret: bool = False  # noise is made at sites, with keys that never leave them
    budget: tuple[float, float] | None = None  # ε and δ that it was found for

    def rows(self) -> dict[NodeId, list[Spending]]:
        """The uses as rows of a ledger."""
        return {
            node: [
                Spending(0, "", node, use.mechanism, self.sigma(node, use), use.rate, use.releases)
                for use in uses
            ]
            for node, uses in self.uses.items()
        }

    def sigma(self, node: NodeId, use: Use) -> float:
        """The noise of a use: its own, or that of its node."""
        return self.noise[node] if use.sigma is None else use.sigma


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of every client's records, over a whole run.

        Experiment(FedDM(start="noise"), population, privacy=Privacy(epsilon=4, clip=12))

    Records are *sealed*: a method reads them through mechanisms alone, and each release is written
    to a ledger, which refuses what would pass the budget. The noise is found before the run so that
    all that is planned costs exactly ε at δ. With `labels = "private"` the number of examples of
    each class is told with noise too. The papers' mechanisms (`mechanism = "paper"`: FedDM's,
    `"desa"`: that of DeSA's code) are for comparison: they promise nothing, and no ε is reported.
    """

    epsilon: Annotated[float, Range(0, MOST_EPSILON, open_low=True)]
    delta: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 1e-5
    labels: Literal["public", "private"] = "public"
    clip: Positive = 12.0  # of what a network makes of a record
    gradient_clip: Positive = 1.0  # of a record's gradient
    releases: Annotated[int, Range(1, MOST_RELEASES)] = 4  # networks a round to match under
    mechanism: Literal["valid", "paper", "desa"] = "valid"  # "desa": the form of its code
    plan: Plan | None = field(default=None, repr=False, metadata={"key": False})

    def __post_init__(self) -> None:
        if wrong := ranges.faults(self):
            raise BadValue([f"privacy.{line}" for line in wrong])

    @property
    def valid(self) -> bool:
        """Whether anything is promised."""
        return self.mechanism == "valid"

    @property
    def found(self) -> bool:
        """Whether there is a plan, and its noise was not found for another budget."""
        return self.plan is not None and self.plan.budget in (None, (self.epsilon, self.delta))

    @property
    def limits(self) -> Sequence[str]:
        """What is not promised."""
        left_out = SIMULATED if self.plan is not None and self.plan.secret else TOLD
        return [line for line in LIMITS if line != left_out]

    @property
    def counts_sigma(self) -> float | None:
        """The noise of class counts; None where they are public."""
        if self.labels == "public" or not self.valid:
            return None
        return 1 / (mu_of(self.epsilon, self.delta) * sqrt(COUNTS_SHARE))

    @property
    def claimed_sigma(self) -> float:
        """The noise that the papers take for ε, for each step of each round anew."""
        return sqrt(2 * log(1.25 / self.delta)) / self.epsilon

    def terms(self, node: NodeId) -> Terms:
        """What is asked of a node; the noise must have been found."""
        if not self.valid:
            sigma = self.claimed_sigma
        elif self.plan is None or not self.found:
            raise BadValue(
                "privacy: the noise has not been found yet; play the experiment by fedstill.run, "
                "or with fedstill.federation.budget.calibrated(experiment, execution)"
            )
        else:
            sigma = self.plan.noise.get(node, 0.0)
        return Terms(
            self.clip, self.gradient_clip, self.releases, sigma, self.counts_sigma,
            paper=not self.valid, grouped=self.mechanism == "desa",
        )  # fmt: skip

    def table(self) -> dict[str, Any]:
        """What was asked, as a table."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}
