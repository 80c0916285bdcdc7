"""A method whose clients' records are private: whether it does what was planned for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fedstill.core.data import Data
from fedstill.core.errors import BadValue, FedstillError, StepError
from fedstill.core.method import Method
from fedstill.core.node import Node
from fedstill.core.records import Message, NodeId
from fedstill.core.release import Spending, Use
from fedstill.core.secret import Secret
from fedstill.engines.execution import Execution
from fedstill.engines.scoring import EVALUATION
from fedstill.federation.budget import planned
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.privacy.ledger import BudgetSpent
from fedstill.privacy.privacy import Plan, Privacy
from fedstill.privacy.summary import by_node
from fedstill.testing import worlds
from fedstill.testing.closely import Differs, Heard, shown_examples
from fedstill.testing.worlds import World

ASKED = Privacy(4.0, 1e-3, releases=2)
ROUNDS = 2
REFUSED = "cannot be private as it stands: its step"
ADVICE = "what is asked of records may depend on neither their values nor what was learned of them"
KEY, *OTHER_KEYS = b"one", b"two", b"three", b"four"  # what noise is made with
Rows = list[tuple[str, int, float]]  # mechanism, releases and rate of each use
Uses = dict[NodeId, list[Use]]
Telling = dict[tuple[int, str, str], Any]  # what a client told: when, what in words, in which step


class Unprivate(FedstillError):
    """A method cannot be private, and why."""


def planned_uses(method: Method, world: World) -> Uses:
    """What each client is to ask of its records."""
    asked = worlds.experiment(method, world, ROUNDS, privacy=ASKED)
    try:
        return planned(asked, Execution(device="cpu"))
    except BadValue as error:
        if REFUSED in str(error):
            raise Unprivate(str(error)) from error
        raise


def summed_up(uses: Uses) -> str:
    """What the first client is to spend, for whoever wants to know whether it is accounted for."""
    client, own = next(iter(uses.items()))
    releases: Counter[tuple[str, float]] = Counter()
    for use in own:
        releases[use.mechanism, use.rate] += use.releases
    rows = [(kind, number, rate) for (kind, rate), number in releases.items()]
    return f"in {ROUNDS} rounds {client} spends {_told(rows)}"


def expect_as_planned(method: Method, world: World, uses: Uses) -> None:
    """What each client spends is what was rehearsed.

    Nothing is added as noise, so no accountant is needed: whatever is not planned is too much.
    """
    asked = replace(ASKED, plan=Plan(dict.fromkeys(uses, 0.0), uses))
    try:
        engine, log = worlds.played(method, world, ROUNDS, Heard, privacy=asked)
    except StepError as error:
        if not isinstance(error.__cause__, BudgetSpent):
            raise
        raise Differs(
            f"{error.step} of {error.node} asks more of records in round {error.round} than was "
            f"planned; {ADVICE}"
        ) from error
    for where in shown_examples(engine, world):
        raise Differs(f"with [privacy], {where} holds a training example")
    rows = by_node(log.privacy)
    for client, own in uses.items():
        spent: Rows = [(row.mechanism, row.releases, row.rate) for row in rows.get(client, [])]
        if spent != _rows(own):
            raise Differs(
                f"{client} was planned to spend {_told(_rows(own))}, but spent {_told(spent)}; "
                f"{ADVICE}"
            )


class Change(NamedTuple):
    """What is another one from some use of a client's records on; 0 is the beginning."""

    use: int = 0
    key: bytes = KEY
    data: Data | None = None


class Changed(Node[Any]):
    """A client whose noise or records are others from some use of them on."""

    change: Change
    uses: list[Use]  # so far, in all steps

    @classmethod
    def of(cls, node: Node[Any], change: Change, uses: list[Use]) -> Self:
        """The same client, changed."""
        made = cls.__new__(cls)
        vars(made).update(vars(node), change=change, uses=uses)
        return made

    def spend(self, use: Use) -> Data:
        data = super().spend(use)
        self.uses.append(use)
        return data if self.change.data is None or not self._begun else self.change.data

    def secret(self, purpose: str, *, once: bool = False) -> Secret:
        other = copy(self)
        other._key = self.change.key if self._begun else KEY
        return super(Changed, other).secret(purpose, once=once)

    @property
    def _begun(self) -> bool:
        return len(self.uses) >= self.change.use


class Changing(Heard):
    """Plays with one client changed."""

    client: NodeId
    change: Change

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.uses: list[Use] = []

    def _bare(self, id: NodeId, round: int, step: str, again: int = 0) -> Node[Any]:
        node = super()._bare(id, round, step, again)
        return Changed.of(node, self.change, self.uses) if id == self.client else node


def expect_noise(method: Method, world: World, uses: Uses) -> None:
    """Whatever a client's records change in what it sends and logs, other noise changes too.

    It is played as it is; with another record in the place of the first client's first one; and
    with other noise. How many records there are of each class is public. The same once more where
    record and noise are changed from a later use of the records on: a mean without noise under
    weights that were trained with noise would else seem to have some.
    """
    asked = replace(ASKED, plan=Plan(dict.fromkeys(uses, 1.0), uses))
    client = next(iter(world.clients))
    others = _with_another_record(world, client)

    def told(change: Change, world: World = world) -> tuple[Telling, Sequence[Spending]]:
        engine = worlds.engine_for(method, world, Changing, ROUNDS, privacy=asked)
        engine.client, engine.change, log = client, change, MemoryLog()
        run(engine, log)
        return _telling(client, engine, log), by_node(log.privacy).get(client, [])

    plain, rows = told(Change())
    for use in (0, *_kinds_of_use(rows)[1:]):
        # At the beginning records are others for whoever reads them past the ledger, too.
        data = others.party(client).data if use else None
        moved, _ = told(Change(use, data=data), world if use else others)
        silent = [what for what in plain if _differ(plain[what], moved.get(what))]
        # Whole numbers, such as guessed classes, may be what they were by chance: noise is drawn
        # often.
        for key in OTHER_KEYS:
            if not silent:
                break
            noisy, _ = told(Change(use, key))
            silent = [what for what in silent if not _differ(plain[what], noisy.get(what))]
        for _, what, step in silent:
            raise Differs(
                f"with [privacy], {what} depends on single records and has no noise; clip what "
                "each record contributes and add noise of node.privacy.sigma times the clip from "
                f"node.secret('{step}')"
            )


def _telling(client: NodeId, engine: Heard, log: MemoryLog) -> Telling:
    """All numbers that a client sent or logged."""
    sent = [(step, message) for _, step, who, message in engine.said if who == client]
    logged = [row for row in log.metrics if row.node == client and row.step != EVALUATION]
    return {
        (place, f"{name}, which {client} sent in {step},", step): value
        for place, (step, message) in enumerate(sent)
        for name, value in _numbers(message).items()
    } | {
        (row.round, f"{row.name}, which {client} logged in {row.step},", row.step): row.value
        for row in logged
    }


def _kinds_of_use(rows: Sequence[Spending]) -> list[int]:
    """The first use of each kind, counted from 1: in another step, or later in its step."""
    earlier: Counter[tuple[int, str]] = Counter()
    first: dict[tuple[str, int], int] = {}
    for number, row in enumerate(rows, 1):
        earlier[row.round, row.step] += 1
        first.setdefault((row.step, earlier[row.round, row.step]), number)
    return list(first.values())


def _with_another_record(world: World, client: NodeId) -> World:
    """The same federation, in which somebody's first record is another one of its class."""
    party = world.party(client)
    own = worlds.alone(party.data)
    if len(own):
        stored = own.parts[0].pool.stored
        stored[0] = 255 - stored[0] if stored.dtype == torch.uint8 else -stored[0]
    parties = {**world.parties, client: replace(party, data=own)}
    return World(parties, world.server_model, world.public)


def _numbers(message: Message) -> dict[str, Any]:
    """Its tensors and plain numbers by name."""
    plain = {f.name: getattr(message, f.name) for f in fields(message)}
    plain = {name: value for name, value in plain.items() if isinstance(value, (int, float))}
    return {**plain, **message.tensors()}


def _differ(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not torch.equal(left, right)
    return left is not right and left != right


def _rows(uses: Sequence[Use]) -> Rows:
    return [(use.mechanism, use.releases, use.rate) for use in uses]


def _told(rows: Rows) -> str:
    return ", ".join(f"{releases} x {kind} at rate {rate:g}" for kind, releases, rate in rows) or (
        "nothing"
    )
