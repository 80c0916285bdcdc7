"""Messages and memories as bytes and back; who sends them to whom is not known here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedstill.channels.coded import Coded, Layer, unwrapped, wrapped
from fedstill.core.errors import RankError, WireError
from fedstill.core.method import Method, Step, steps_of
from fedstill.core.node import Addressed
from fedstill.core.records import Message, NodeId, Record, State
from fedstill.core.release import Spending
from fedstill.core.work import Work
from fedstill.engines.engine import Outcome
from fedstill.engines.memories import Memories
from fedstill.engines.outbox import channels_of
from fedstill.engines.ranks.protocol import Left, Letter, Spent
from fedstill.wire import codec

R = TypeVar("R", bound=Record)
MOST_LAYERS = 64  # channels that may have coded a letter


class Letters:
    """Messages as bytes; one that several hear is written once."""

    def __init__(
        self,
        kinds: list[type[Message]],
        held: Sequence[type[Record]] = (),
        limits: codec.Limits = codec.OWN,
    ):
        self.kinds, self.held, self.limits = kinds, held, limits
        # With each letter its message, which must live: else another may come to have its id.
        self._written: dict[int, tuple[Message, Letter]] = {}

    def enclosed(
        self, mail: Mapping[NodeId, Mapping[NodeId, Message]]
    ) -> tuple[dict[str, dict[str, int]], tuple[Letter, ...]]:
        """Mappings of messages as places in a list of letters."""
        places: dict[int, int] = {}
        letters: list[Letter] = []
        table: dict[str, dict[str, int]] = {}
        for node, messages in mail.items():
            for message in messages.values():
                if id(message) not in places:
                    places[id(message)] = len(letters)
                    letters.append(self._letter(message))
            table[node] = {name: places[id(message)] for name, message in messages.items()}
        return table, tuple(letters)

    def opened(self, letters: tuple[Letter, ...], device: torch.device) -> list[Message]:
        """The messages; one that several hear is one object again."""
        return [self._opened(one, device) for one in letters]

    def _opened(self, letter: Letter, device: torch.device) -> Message:
        if not 0 <= letter.kind < len(self.kinds):
            raise WireError(
                f"a letter of kind {letter.kind} came, the method has {len(self.kinds)}"
            )
        kind = self.kinds[letter.kind]
        if len(letter.layers) > MOST_LAYERS:
            raise WireError(
                f"{kind.__name__}: coded by {len(letter.layers)} channels, the limit is "
                f"{MOST_LAYERS}"
            )
        message = decoded(letter.data, kind, device, self.held, self.limits)
        layers = (decoded(data, Layer, device, (), self.limits) for data in letter.layers)
        made = wrapped(message, tuple(layers))
        if isinstance(made, Coded) and made.decoded_bytes() > self.limits.bytes:
            raise WireError(
                f"{kind.__name__}: {made.decoded_bytes()} bytes once decoded, the limit is "
                f"{self.limits.bytes}"
            )
        return made

    def _letter(self, message: Message) -> Letter:
        if id(message) not in self._written:
            innermost, layers = unwrapped(message)
            kind = type(innermost)
            if kind not in self.kinds:
                raise RankError(
                    f"{kind.__name__} is sent, but no step of the method has it in its hints; "
                    "over several ranks, hint the very class that a step returns"
                )
            letter = Letter(
                self.kinds.index(kind),
                as_tensor(codec.encode(innermost)),
                tuple(as_tensor(codec.encode(layer)) for layer in layers),
            )
            self._written[id(message)] = (message, letter)
        return self._written[id(message)][1]


def packed(state: State | None) -> Tensor | None:
    """A memory as bytes."""
    return None if state is None else as_tensor(codec.encode(state))


def at_place(messages: Sequence[Message], place: int) -> Message:
    """The message at a place in a list of letters."""
    if not 0 <= place < len(messages):
        raise WireError(f"letter {place} is named, but {len(messages)} came")
    return messages[place]


def unpacked(
    data: Tensor | None,
    kind: type[State] | None,
    device: torch.device | str,
    held: Sequence[type[Record]] = (),
    limits: codec.Limits = codec.OWN,
) -> State | None:
    """The memory that `packed` wrote."""
    if data is None:
        return None
    if kind is None:
        raise RankError("a node remembers something, but no step hints its memory")
    return decoded(data, kind, device, held, limits)


def decoded(
    data: Tensor,
    kind: type[R],
    device: torch.device | str,
    held: Sequence[type[Record]] = (),
    limits: codec.Limits = codec.OWN,
) -> R:
    """A record that another rank wrote."""
    return codec.decode(as_bytes(data), kind, limits=limits, device=device, held=held)


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor of their own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> memoryview:
    """The bytes of such a tensor, where they are."""
    if data.dtype is not torch.uint8 or data.dim() != 1:
        raise WireError(f"bytes came as {data.dtype} of shape {list(data.shape)}")
    return data.numpy().data


def by_hearer(message: Message | Addressed[Any]) -> Mapping[NodeId, Message]:
    return message if isinstance(message, Addressed) else {"": message}


def outcome_of(
    left: Left, messages: Sequence[Message], round: int, step: str, node: NodeId
) -> Outcome:
    """What a node left behind in a step, as its rank tells it."""
    message: Message | Addressed[Any] | None = None
    if left.message is not None:
        found = {hearer: at_place(messages, place) for hearer, place in left.message.items()}
        message = Addressed(found) if left.addressed else found[""]
    spent = [
        Spending(round, step, node, row.mechanism, row.sigma, row.rate, row.releases)
        for row in left.spent
    ]
    work = None if left.work is None else Work(*left.work)
    return Outcome(
        message, left.numbers, spent, left.rejected, left.absent, lost=left.lost, work=work
    )


def left_of(
    node: NodeId, outcome: Outcome, places: dict[str, int] | None, states: Memories
) -> Left:
    """What a step left behind, as it is told to another process; its messages are letters."""
    return Left(
        places,
        isinstance(outcome.message, Addressed),
        dict(outcome.numbers),
        spent_of(outcome.spent),
        dict(outcome.rejected),
        outcome.absent,
        node in states.changed,
        states.is_blank(node),
        channels_of(node) in states.changed,
        outcome.lost,
        None if outcome.work is None else (outcome.work.steps, outcome.work.operations),
    )


def spent_of(rows: Iterable[Spending]) -> tuple[Spent, ...]:
    """Rows of a ledger as they are told to another process, which knows whose they are."""
    return tuple(Spent(row.mechanism, row.sigma, row.rate, row.releases) for row in rows)


def kinds_of(method: Method) -> list[type[Message]]:
    """Every kind of message that a method sends."""
    return list(dict.fromkeys(step.sends for step in steps_of(method) if step.sends))


def steps_by_name(method: Method) -> dict[str, Step]:
    """A method's steps; ranks speak of them by name, so two may not share one."""
    found: dict[str, Step] = {}
    for step in steps_of(method):
        other = found.setdefault(step.name, step)
        alike = (step.place, step.reads, step.sends, step.act.__qualname__)
        if (other.place, other.reads, other.sends, other.act.__qualname__) != alike:
            raise RankError(
                f"{type(method).__name__} has two different steps {step.name}; give each a name "
                "of its own to play it over several ranks"
            )
    return found
