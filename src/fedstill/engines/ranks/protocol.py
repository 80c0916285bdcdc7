"""What the ranks of a job say to each other: records of their own over a line of bytes.

Rank 0 leads. It asks, and whoever is asked answers: with what was asked for, or with what went
wrong. So no rank waits for one that failed. Nothing here is pickled: everything is a record, in
the bytes of the wire.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedstill.channels.coded import Layer, unwrapped, wrapped
from fedstill.core.errors import FedstillError, RankError
from fedstill.core.records import Message, NodeId, Record, State
from fedstill.wire import codec

LEADER = 0
T = TypeVar("T")
R = TypeVar("R", bound=Record)


class Disconnected(RankError):
    """The process at the other end has ended."""


class Transport(Protocol):
    """Joins the ranks of a job; `seat` is a rank's number among those of its machine."""

    rank: int
    size: int
    local_rank: int

    def send(self, rank: int, data: bytes) -> None: ...

    def receive(self, rank: int) -> bytes | memoryview: ...


class Letter(Record):
    """A message, as the wire writes it."""

    kind: int  # its place among the kinds that the method sends
    data: Tensor
    layers: tuple[Tensor, ...]  # what channels put beside it, outermost first


class Left(Record):
    """What a step left behind on one node; messages are places in a list of letters."""

    message: dict[str, int] | None  # by hearer; for everybody under no name
    addressed: bool
    numbers: dict[str, float]
    spent: tuple[str, ...]
    rejected: dict[str, str]
    absent: str | None
    changed: bool  # whether it remembers something else now
    blank: bool  # whether it remembers nothing
    channels: bool  # whether channels remember something else at it
    lost: bool  # whether a channel lost a message


class Begin(Record):
    """Build a run and take part in it. Not answered: what goes wrong is said when asked."""

    recipe: str


class Over(Record):
    """The run, or the whole job, has ended. Not answered."""


class Ready(Record):
    """Is the run built, of the same data by the same code?"""

    digest: str
    versions: str


class Play(Record):
    """Play a step on nodes that are yours."""

    step: str
    round: int
    inboxes: dict[str, dict[str, int]]  # by node and sender, the place of a letter
    letters: tuple[Letter, ...]
    toward: str | None  # where messages travel


class Look(Record):
    """Score nodes that are yours."""

    step: str
    round: int
    nodes: tuple[str, ...]


class Recall(Record):
    """What does a node remember?"""

    node: str


class Remember(Record):
    """A node remembers this from now on."""

    node: str
    memory: Tensor | None


class Drop(Record):
    """A node has never acted."""

    node: str


class SpillTo(Record):
    """Memories beyond the limit lie in this folder."""

    folder: str


class Done(Record):
    """Yes."""


class Failed(Record):
    """No, because."""

    text: str


class Played(Record):
    """What a step left behind."""

    nodes: dict[str, Left]
    letters: tuple[Letter, ...]


class Seen(Record):
    """Metrics by name, by model and by test set."""

    scores: dict[str, dict[str, dict[str, float]]]


class Memory(Record):
    """What a node remembers."""

    data: Tensor | None


KINDS: tuple[type[Record], ...] = (
    Begin, Over, Ready, Play, Look, Recall, Remember, Drop, SpillTo,
    Done, Failed, Played, Seen, Memory,
)  # fmt: skip


def say(transport: Transport, rank: int, record: Record) -> None:
    """Send a record, with its kind before it."""
    transport.send(rank, bytes([KINDS.index(type(record))]) + codec.encode(record))


def hear(transport: Transport, rank: int) -> Record:
    """The next record from a rank."""
    data = memoryview(transport.receive(rank))
    return codec.decode(data[1:], KINDS[data[0]], limits=codec.OWN)


def say_to_all(transport: Transport, record: Record) -> None:
    """Tell every rank but the leader, who speaks."""
    for rank in range(1, transport.size):
        say(transport, rank, record)


def ask(
    transport: Transport, questions: Mapping[int, Record], meanwhile: Callable[[], T]
) -> tuple[T, dict[int, Record]]:
    """Ask some ranks, do one's own work while they do theirs, and take all answers.

    They are taken whatever failed, so that the next question gets its own answer.
    """
    for rank, question in questions.items():
        say(transport, rank, question)
    try:
        own = meanwhile()
    except Exception:
        with suppress(Disconnected):
            for rank in questions:
                hear(transport, rank)
        raise
    answers = {rank: hear(transport, rank) for rank in questions}
    for rank, answer in answers.items():
        if isinstance(answer, Failed):
            raise RankError(f"rank {rank}: {answer.text}")
    return own, answers


def ask_one(transport: Transport, rank: int, question: Record) -> Record:
    """The answer of one rank."""
    return ask(transport, {rank: question}, lambda: None)[1][rank]


def failed(error: Exception) -> Failed:
    """What to tell the leader: a message meant for people, or all that is known."""
    known = isinstance(error, FedstillError)
    return Failed(str(error) if known else "".join(traceback.format_exception(error)).strip())


def excuse(transport: Transport, error: Exception) -> None:
    """Answer every question with what went wrong, until the run is over."""
    while not isinstance(hear(transport, LEADER), Over):
        say(transport, LEADER, failed(error))


class Letters:
    """Messages as bytes; one that several hear is written once."""

    def __init__(self, kinds: list[type[Message]], held: Sequence[type[Record]] = ()):
        self.kinds, self.held = kinds, held
        self._written: dict[int, Letter] = {}

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
        message = decoded(letter.data, self.kinds[letter.kind], device, self.held)
        return wrapped(message, tuple(decoded(data, Layer, device) for data in letter.layers))

    def _letter(self, message: Message) -> Letter:
        if id(message) not in self._written:
            innermost, layers = unwrapped(message)
            kind = type(innermost)
            if kind not in self.kinds:
                raise RankError(
                    f"{kind.__name__} is sent, but no step of the method has it in its hints; "
                    "over several ranks, hint the very class that a step returns"
                )
            self._written[id(message)] = Letter(
                self.kinds.index(kind),
                as_tensor(codec.encode(innermost)),
                tuple(as_tensor(codec.encode(layer)) for layer in layers),
            )
        return self._written[id(message)]


def packed(state: State | None) -> Tensor | None:
    """A memory as bytes."""
    return None if state is None else as_tensor(codec.encode(state))


def unpacked(
    data: Tensor | None,
    kind: type[State] | None,
    device: torch.device | str,
    held: Sequence[type[Record]] = (),
) -> State | None:
    """The memory that `packed` wrote."""
    if data is None:
        return None
    if kind is None:
        raise RankError("a node remembers something, but no step hints its memory")
    return decoded(data, kind, device, held)


def decoded(
    data: Tensor, kind: type[R], device: torch.device | str, held: Sequence[type[Record]] = ()
) -> R:
    """A record that another rank wrote."""
    return codec.decode(as_bytes(data), kind, limits=codec.OWN, device=device, held=held)


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor of their own."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> memoryview:
    """The bytes of such a tensor, where they are."""
    return data.numpy().data
