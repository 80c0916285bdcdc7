"""What a run says of its privacy, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fedstill.core.errors import BadValue
from fedstill.core.release import Spending
from fedstill.privacy.ledger import composed
from fedstill.privacy.privacy import PROMISE, Privacy

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
    told: dict[str, Any] = {}
    try:
        spent = {node: composed(own, privacy.delta) for node, own in by_node(rows).items()}
        told = {"epsilon_spent": max(spent.values(), default=0.0), "epsilon_by_client": spent}
    except BadValue as error:  # a place that only writes down what others spent
        told = {"epsilon_spent": None, "epsilon_note": str(error)}
    return {
        **privacy.table(),
        **told,
        "noise_by_client": {node: _noise(privacy, own) for node, own in by_node(rows).items()},
        "promise": PROMISE[privacy.labels],
        "limits": list(privacy.limits),
    }


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
