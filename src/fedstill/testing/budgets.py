"""A method whose clients' records are private: whether it does what was planned for it."""

from __future__ import annotations

from dataclasses import replace

from fedstill.core.errors import BadValue, StepError
from fedstill.core.method import Method
from fedstill.core.records import NodeId
from fedstill.engines.execution import Execution
from fedstill.federation.budget import planned
from fedstill.privacy.ledger import BudgetSpent
from fedstill.privacy.privacy import Plan, Privacy
from fedstill.privacy.summary import by_node
from fedstill.testing import worlds
from fedstill.testing.closely import Differs
from fedstill.testing.worlds import World

ASKED = Privacy(4.0, 1e-3, releases=2)
REFUSED = "cannot be private as it stands: its step"
ADVICE = "what is asked of records may depend on neither their values nor what was learned of them"
Rows = list[tuple[str, int, float]]  # mechanism, releases and rate of each use


def expect_as_planned(method: Method, world: World, rounds: int) -> None:
    """What each client spends in some rounds is what was rehearsed; or the method is refused.

    Nothing is added as noise, so no accountant is needed: whatever is not planned is too much.
    """
    try:
        uses = planned(
            worlds.experiment(method, world, rounds, privacy=ASKED), Execution(device="cpu")
        )
    except BadValue as error:
        if REFUSED in str(error):
            return
        raise
    asked = replace(ASKED, plan=Plan(dict.fromkeys(uses, 0.0), uses))
    try:
        _, log = worlds.played(method, world, rounds, privacy=asked)
    except StepError as error:
        if not isinstance(error.__cause__, BudgetSpent):
            raise
        raise Differs(
            f"{error.step} of {error.node} asks more of records in round {error.round} than was "
            f"planned; {ADVICE}"
        ) from error
    rows = by_node(log.privacy)
    spent: dict[NodeId, Rows] = {
        client: [(row.mechanism, row.releases, row.rate) for row in rows.get(client, [])]
        for client in uses
    }
    for client, own in uses.items():
        wanted: Rows = [(use.mechanism, use.releases, use.rate) for use in own]
        if spent[client] != wanted:
            raise Differs(
                f"{client} was planned to spend {_told(wanted)}, but spent {_told(spent[client])}; "
                f"{ADVICE}"
            )


def _told(rows: Rows) -> str:
    return ", ".join(f"{releases} x {kind} at rate {rate:g}" for kind, releases, rate in rows) or (
        "nothing"
    )
