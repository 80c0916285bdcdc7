"""Engines that look closely at a method, and what is compared; no promises."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.method import Method, Step
from fedstill.core.node import SERVER, Addressed, Inbox
from fedstill.core.records import Direction, Message, NodeId, Record, State
from fedstill.engines.engine import Outcome
from fedstill.engines.loops.compiled import TRACED, Compiler
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Population
from fedstill.logbook.writer import MemoryLog
from fedstill.testing.outside import Marks, held_outside
from fedstill.wire import codec

Memories = Mapping[NodeId, Mapping[str, Tensor]]


class Differs(FedstillError):
    """What differed, in words."""


class Backwards(InProcess):
    """Plays the last node first."""

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        return super().play(step, round, dict(reversed(list(inboxes.items()))), toward)


class Traced(InProcess):
    """Traces every step as for compilation, and plays what was traced operation by operation."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.resisted: list[str] = []  # why loops could not be traced
        self.compiler = Compiler(self.resisted, worthwhile=1, backend=TRACED)


class Standing(NamedTuple):
    """What a method must leave as it was."""

    values: dict[str, Any]
    hashed: int
    generators: dict[str, Any]
    outside: Marks
    examples: dict[str, str]  # of each party, and what is public

    @classmethod
    def of(cls, method: Method, population: Population) -> Standing:
        """As it is now."""
        data = {name: population.party(name).data for name in population.clients}
        digests = {f"examples of {name}": own.digest() for name, own in data.items()}
        digests["public examples"] = population.public.digest()
        held = held_outside(method)
        return cls(copy.copy(vars(method)), hash(method), global_generators(), held, digests)


class Reading(NamedTuple):
    """How a message was read: by which step, from whom, beside what, with which memory."""

    step: Step
    round: int
    sender: NodeId
    hearer: NodeId
    inbox: Inbox[Any]
    state: State | None


class Heard(InProcess):
    """Keeps what was said: round, step, sender and message, and its tensors as they then were.

    Of each step and kind that travels, the first message with who said it to whom. Of memories,
    what a step wrote into instead of replacing it.
    """

    log: MemoryLog
    before: Standing
    after: Standing

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.said: list[tuple[int, str, NodeId, Message]] = []
        self.copies: list[dict[str, Tensor]] = []
        self.first: dict[
            tuple[str, str], tuple[int, NodeId, NodeId, Message]
        ] = {}  # by step and kind
        self.readings: dict[int, Reading] = {}  # of those, by the message's id
        self.overwritten: list[tuple[str, NodeId, str]] = []  # step, node, name in its memory

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        kept = {node: self.states[node] for node in inboxes if node in self.states}
        before = {node: copied(state) for node, state in kept.items() if state is not None}
        self._remember_readings(step, round, inboxes)
        outcomes = super().play(step, round, inboxes, toward)
        for node, was in before.items():
            names = altered(kept[node], was)
            self.overwritten += [(step.name, node, name) for name in names]
        for sender, outcome in outcomes.items():
            for message in _messages(outcome):
                self.said.append((round, step.name, sender, message))
                self.copies.append(copied(message))
            if toward is not None and outcome.message is not None:
                self._remember(step, round, sender, outcome.message, toward)
        return outcomes

    def _remember(
        self, step: Step, round: int, sender: NodeId, said: Message | Addressed[Message],
        toward: Direction,
    ) -> None:  # fmt: skip
        """Keep the first message of its step and kind, with one of those who hear it."""
        clients = self.experiment.population.clients
        hearer = SERVER if toward == "up" else next(name for name in clients if name != sender)
        message: Message | None = None if isinstance(said, Addressed) else said
        if isinstance(said, Addressed):
            hearer, message = next(iter(sorted(said.items())), (hearer, None))
        if message is not None:
            key = (step.title, type(message).__name__)
            self.first.setdefault(key, (round, sender, hearer, message))

    def _remember_readings(
        self, step: Step, round: int, inboxes: Mapping[NodeId, Inbox[Any]]
    ) -> None:
        """Keep how the first messages are read by those who are kept as their hearers."""
        for _, sender, hearer, message in self.first.values():
            if hearer in inboxes and inboxes[hearer].get(sender) is message:
                state = self.node(hearer, round, step.name).state
                reading = Reading(step, round, sender, hearer, inboxes[hearer], state)
                self.readings.setdefault(id(message), reading)

    def rejects(self, honest: Message, lie: Message) -> bool:
        """Whether the step that read a message rejects a lie in its place (`Node.reject`)."""
        reading = self.readings.get(id(honest))
        if reading is None:
            return False
        step, round, sender, hearer, inbox, state = reading
        now = self.states[hearer]
        self.states[hearer] = state
        try:
            lied_to = {hearer: Inbox({**inbox, sender: lie})}
            return sender in super().play(step, round, lied_to)[hearer].rejected
        except FedstillError:  # it failed instead
            return False
        finally:
            self.states[hearer] = now

    def counted(self) -> dict[tuple[int, str, NodeId], int]:
        """Floats that the logbook has, by round, step and sender."""
        found: dict[tuple[int, str, NodeId], int] = {}
        for row in self.log.messages:
            where = (row.round, row.step, row.sender)
            found[where] = found.get(where, 0) + row.floats
        return found


def copied(record: Record) -> dict[str, Tensor]:
    """Its tensors as they are now."""
    return {name: tensor.clone() for name, tensor in record.tensors().items()}


def altered(record: Record | None, before: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not what they were, are gone, or have come."""
    now = {} if record is None else record.tensors()
    return [
        name
        for name in {**before, **now}
        if name not in before or name not in now or not _same(now[name], before[name])
    ]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def _messages(outcome: Outcome) -> Iterator[Message]:
    """Each message of an outcome once."""
    if isinstance(outcome.message, Addressed):
        yield from {id(each): each for each in outcome.message.values()}.values()
    elif outcome.message is not None:
        yield outcome.message


def memories(engine: InProcess) -> Memories:
    """The tensors that every node remembers."""
    return {node: state.tensors() for node, state in engine.states.items() if state is not None}


def scores(log: MemoryLog, name: str = "accuracy") -> dict[tuple[int, str, str], float]:
    """A metric by round, model and test set."""
    rows = [row for row in log.metrics if row.step == "evaluate" and row.name == name]
    return {(row.round, row.node, row.target): row.value for row in rows}


def written(log: MemoryLog) -> tuple[list[Any], ...]:
    """All rows but the times: notes first, which say why others differ."""
    return log.notes, [row for row in log.metrics if row.name != "seconds"], log.messages


def expect_same(
    left: Memories, right: Memories, one: str, other: str, tolerance: float = 0.0
) -> None:
    if left.keys() != right.keys():
        raise Differs(f"{one}, {', '.join(left)} remember something; {other}, {', '.join(right)}")
    for node, tensors in left.items():
        if tensors.keys() != right[node].keys():
            raise Differs(f"{node} remembers other names {one} than {other}")
        for name, tensor in tensors.items():
            twin = right[node][name]
            if tensor.shape != twin.shape:
                raise Differs(f"{name} of {node} is {list(tensor.shape)} {one}, and "
                              f"{list(twin.shape)} {other}")  # fmt: skip
            if not torch.allclose(tensor, twin, rtol=tolerance, atol=tolerance, equal_nan=True):
                apart = (tensor.double() - twin.double()).abs().max()
                raise Differs(
                    f"{name}, which {node} remembers, is not the same {one} and {other}: they are "
                    f"up to {float(apart):.2g} apart"
                )


def expect_same_after_the_wire(record: Record, method: Method) -> None:
    """A record comes back from its bytes as it was."""
    kind = type(record)
    again = codec.decode(codec.encode(record), kind, held=method.holds)
    expect_same({"": record.tensors()}, {"": again.tensors()}, "before the wire", "after it")
    if again.floats() != record.floats():
        raise Differs(f"{kind.__name__} has other fields after the wire than before it")


def expect_finite(engine: InProcess, when: str) -> None:
    """Nobody remembers a NaN or an infinity."""
    for node, tensors in memories(engine).items():
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor.float()).all()):
                raise Differs(f"{when}, {name} of {node} is not finite")


def shown_examples(engine: Heard, population: Population) -> list[str]:
    """Where messages hold training examples, as they are stored or as networks see them."""
    parties = [population.party(name).data for name in population.clients]
    seen = [data.all().x.flatten(1) for data in parties if len(data)]
    stored = [pool.stored[rows].flatten(1).float() for data in parties for pool, rows in data.parts]
    return [
        f"{name}, sent by {sender} in {step}"
        for _, step, sender, message in engine.said
        for name, tensor in message.tensors().items()
        if any(holds_row(tensor, rows) for rows in (*seen, *stored))
    ]


def holds_row(tensor: Tensor, rows: Tensor) -> bool:
    """Whether some stretch of a tensor, read row after row, is one of the given rows.

    Rows of a single number are met by chance, and not looked for.
    """
    width = rows.shape[1]
    if width < 2 or not len(rows) or not tensor.numel() or tensor.numel() % width:
        return False
    stretches = tensor.reshape(-1, width).float().to(rows.device)
    return bool((torch.cdist(stretches, rows) < 1e-4).any())


def global_generators() -> dict[str, Any]:
    """The states of the generators that belong to nobody."""
    numpy_state: Any = np.random.get_state()
    return {
        "torch's global generator": torch.random.get_rng_state().tolist(),
        "numpy's global generator": [numpy_state[1].tolist(), *numpy_state[2:]],
        "Python's global generator": random.getstate(),
    }
