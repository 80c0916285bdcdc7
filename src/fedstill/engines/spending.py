"""Whose records were used how: asked before, kept beside what a node remembers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedstill.core.errors import SealedData
from fedstill.core.node import COUNTS, SERVER, Node
from fedstill.core.records import NodeId, State, Weights
from fedstill.core.release import Spending, Use
from fedstill.engines.outbox import Kept, channels_of
from fedstill.privacy.ledger import Ledger
from fedstill.privacy.privacy import Privacy

LEDGER = "privacy ledger"  # where a ledger lies among what is kept; no step has such a name
States = MutableMapping[NodeId, State | None]


class Purse:
    """Seals the examples of nodes, and grants uses of them as far as the budget goes.

    Uses are granted in the method's `steps` alone, whose spending is written down. Who only
    rehearses is `unlimited`: everything is granted there, and what was asked is kept.
    """

    def __init__(
        self, privacy: Privacy, states: States, steps: Collection[str], *, unlimited: bool = False
    ):
        self.privacy, self.states, self.unlimited = privacy, states, unlimited
        self.steps = steps
        plan = {} if privacy.plan is None else privacy.plan.rows()
        self.ledger = Ledger(privacy.epsilon, privacy.delta, plan)
        self.asked: dict[NodeId, list[Use]] = {}

    def seal(self, node: Node[Any]) -> None:
        """Close a client's examples; the server has none of its own."""
        if node.id != SERVER:
            released = sum(row.releases for row in spent(self.states, node.id))
            node.seal(self.privacy.terms(node.id), partial(self.grant, node), released)

    def grant(
        self, node: Node[Any], round: int, step: str, use: Use, earlier: Sequence[Spending]
    ) -> Spending:
        """The row of a use that is within the budget; else an error."""
        sigma = use.sigma
        if sigma is None:
            sigma = 0.0 if node.privacy is None else node.privacy.sigma
        row = Spending(round, step, node.id, use.mechanism, sigma, use.rate, use.releases)
        before = spent(self.states, node.id)
        if use.mechanism == COUNTS and any(each.mechanism == COUNTS for each in before):
            return replace(row, releases=0)
        if step not in self.steps:
            raise SealedData(
                f"private records are used in steps alone, not as {node.id} is asked for "
                f"{use.mechanism} in {step!r}: what a memory begins with and how a model answers "
                "must not depend on them"
            )
        if self.unlimited:
            self.asked.setdefault(node.id, []).append(use)
        elif self.privacy.valid:
            self.ledger.rows[node.id] = [*before, *earlier]
            self.ledger.spend(row)
        return row

    def keep(self, node: Node[Any]) -> None:
        """Write down what a step that succeeded has spent."""
        if node.spent:
            put(self.states, node.id, [*spent(self.states, node.id), *node.spent])


def spent(states: Mapping[NodeId, State | None], node: NodeId) -> list[Spending]:
    """What a node has spent so far, alike releases added up; rounds and steps are not known."""
    kept = states.get(channels_of(node))
    found = kept.messages.get(LEDGER, {}) if isinstance(kept, Kept) else {}
    return [
        Spending(0, "", node, mechanism, sigma, rate, int(releases))
        for mechanism, table in found.items()
        for sigma, rate, releases in zip(
            *(table[name].tolist() for name in ("sigma", "rate", "releases")), strict=True
        )
    ]


def put(states: States, node: NodeId, rows: Iterable[Spending]) -> None:
    """Keep rows beside what a node remembers, alike ones added up."""
    alike: dict[str, dict[tuple[float, float], int]] = {}
    for row in rows:
        kinds = alike.setdefault(row.mechanism, {})
        kinds[row.sigma, row.rate] = kinds.get((row.sigma, row.rate), 0) + row.releases
    tables = {mechanism: _table(kinds) for mechanism, kinds in alike.items()}
    kept = states.get(channels_of(node))
    messages = kept.messages if isinstance(kept, Kept) else {}
    states[channels_of(node)] = Kept({**messages, LEDGER: tables})


def _table(kinds: Mapping[tuple[float, float], int]) -> Weights:
    columns = zip(*((*kind, number) for kind, number in kinds.items()), strict=True)
    names = ("sigma", "rate", "releases")
    return {
        name: torch.tensor(column, dtype=torch.float64)
        for name, column in zip(names, columns, strict=True)
    }
