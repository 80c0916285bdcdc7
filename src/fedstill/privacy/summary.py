"""What a run says of its privacy, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstill.core.errors import BadValue
from fedstill.core.release import Spending
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import PROMISE, Privacy

MOST_KINDS = 256  # of one node's samples; an accountant takes up to seconds for each
NO_PROMISE = (
    "none: the papers' mechanism clips the gradient of many records together instead of each "
    "record's share in it, and counts neither steps nor rounds; it is here for comparison alone"
)


def by_node(rows: Iterable[Spending]) -> dict[str, list[Spending]]:
    """The rows of each node, in the order of their first ones."""
    found: dict[str, list[Spending]] = {}
    for row in rows:
        found.setdefault(row.node, []).append(row)
    return found


def summary_of(privacy: Privacy, rows: Iterable[Spending]) -> dict[str, Any]:
    """The table `privacy` of summary.json: what was promised, and what each client spent."""
    if not privacy.valid:
        return {**privacy.table(), "promise": NO_PROMISE, "epsilon_spent": None}
    return {
        **privacy.table(),
        **_told(privacy.delta, by_node(rows)),
        "noise_by_client": {node: _noise(privacy, own) for node, own in by_node(rows).items()},
        "promise": PROMISE[privacy.labels],
        "limits": list(privacy.limits),
    }


def _told(delta: float, rows: Mapping[str, Sequence[Spending]]) -> dict[str, Any]:
    """What each client spent. A coordinator writes down what sites say, which may be anything."""
    try:
        spent = {node: epsilon_of_rows(own, delta) for node, own in rows.items()}
    except BadValue as error:  # a place that only writes down what others spent
        return {"epsilon_spent": None, "epsilon_note": str(error)}
    finite = {node: epsilon for node, epsilon in spent.items() if math.isfinite(epsilon)}
    if len(finite) == len(spent):
        return {"epsilon_spent": max(spent.values(), default=0.0), "epsilon_by_client": spent}
    beyond = ", ".join(node for node in spent if node not in finite)
    note = f"more was spent than can be accounted for, by {beyond}"
    return {"epsilon_spent": None, "epsilon_note": note, "epsilon_by_client": finite}


def epsilon_of_rows(rows: Sequence[Spending], delta: float) -> float:
    """The ε of one node's rows; infinite where too many samples differ to be added up."""
    kinds = {(row.sigma, row.rate) for row in rows if row.rate < 1}
    return composed(rows, delta) if len(kinds) <= MOST_KINDS else math.inf


def words_of(privacy: Privacy) -> list[str]:
    """What a reader must know of a private run."""
    if not privacy.valid:
        return [
            f'mechanism = "{privacy.mechanism}", claimed epsilon {privacy.epsilon:g} for each '
            f"round: what is promised is {NO_PROMISE}"
        ]
    return [
        f"epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g} for the whole run, of "
        f"{PROMISE[privacy.labels]}",
        *privacy.limits,
    ]


def _noise(privacy: Privacy, rows: list[Spending]) -> float | None:
    """The noise multiplier of a client, without that of its class counts."""
    own = [row.sigma for row in rows if row.sigma != privacy.counts_sigma]
    return max(own, default=None) if all(math.isfinite(sigma) for sigma in own) else None
