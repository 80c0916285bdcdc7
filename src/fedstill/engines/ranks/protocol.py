"""What the ranks of a job say to each other: records of their own over a line of bytes.

Rank 0 leads. It asks, and whoever is asked answers: with what was asked for, or with what went
wrong. So no rank waits for one that failed. Nothing here is pickled: everything is a record, in
the bytes of the wire.
"""

from __future__ import annotations

import struct
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from torch import Tensor

from fedstill.core.errors import FedstillError, RankError, WireError
from fedstill.core.records import Record, State
from fedstill.wire import codec

LEADER = 0
T = TypeVar("T")
R = TypeVar("R", bound=Record)


class Disconnected(RankError):
    """The process at the other end has ended."""


class Abandoned(RankError):
    """The leader has given up the run."""


class Late(RankError):
    """Nothing has come in the time that was given."""


class Transport(Protocol):
    """Joins ranks; `local_rank` is a rank's number among those of its machine.

    The ranks of one job share their data and trust each other, and when one fails, all end. Others
    are sites behind walls: each has its own data alone, and what it sends is read with the limits
    for strangers; who is late or fails is absent.
    """

    rank: int
    size: int
    local_rank: int
    one_job: bool

    def send(self, rank: int, data: bytes) -> None: ...

    def receive(self, rank: int, seconds: float | None = None) -> bytes | memoryview:
        """What a rank sent next; raises Late when nothing has come in so many seconds."""


class Letter(Record):
    """A message, as the wire writes it."""

    kind: int  # its place among the kinds that the method sends
    data: Tensor
    layers: tuple[Tensor, ...]  # what channels put beside it, outermost first


class Spent(Record):
    """A row of the ledger, as a rank tells it."""

    mechanism: str
    sigma: float
    rate: float
    releases: int


class Left(Record):
    """What a step left behind on one node; messages are places in a list of letters."""

    message: dict[str, int] | None  # by hearer; for everybody under no name
    addressed: bool
    numbers: dict[str, float]
    spent: tuple[Spent, ...]
    rejected: dict[str, str]
    absent: str | None
    changed: bool  # whether it remembers something else now
    blank: bool  # whether it remembers nothing
    channels: bool  # whether channels remember something else at it
    lost: bool  # whether a channel lost a message
    work: tuple[int, int] | None = None  # steps and operations, where a clock counts them


class Begin(Record):
    """Build a run and take part in it. Not answered: what goes wrong is said when asked."""

    recipe: str


class Over(Record):
    """The run, or the whole job, has ended. Not answered."""


class GivenUp(Record):
    """The run has failed, whatever it was at, and another may begin. Not answered."""


class Undo(Record):
    """The answer to a question has not arrived: what was done for it is undone. Not answered."""

    question: int


class Ready(Record):
    """Asks whether a rank has built the run, of the same data by the same code."""

    digest: str
    versions: str


class Play(Record):
    """Asks a rank to play a step on nodes that it keeps."""

    step: str
    round: int
    inboxes: dict[str, dict[str, int]]  # by node and sender, the place of a letter
    letters: tuple[Letter, ...]
    toward: str | None  # where messages travel
    again: int  # how often the step came before in its round


class Score(Record):
    """Asks a rank to score the models of nodes that it keeps, and the server's on their tests."""

    round: int
    holders: tuple[str, ...]  # whose own models
    crosswise: bool  # on the tests of all that they are scored on; else on their own
    server: Tensor | None  # what the server's model is scored by
    targets: tuple[str, ...]  # on whose tests it is


class Recall(Record):
    """Asks a rank what a node remembers."""

    node: str


class Remember(Record):
    """Tells a rank what a node remembers from now on."""

    node: str
    memory: Tensor | None


class Drop(Record):
    """Tells a rank to forget that a node has ever acted."""

    node: str


class SpillTo(Record):
    """Tells a rank the folder for memories beyond the limit."""

    folder: str


class Keep(Record):
    """Tells a rank to keep what a node remembers now, and what it did the last so many times."""

    node: str
    times: int


class Restore(Record):
    """Tells a rank to give a node the memory again that was kept under this mark."""

    node: str
    mark: str


class AtSite(State):
    """What a client remembers lies at its site, under a mark: the SHA-256 of its bytes."""

    mark: str


class Done(Record):
    """The answer of a rank that has done what it was asked to."""


class Failed(Record):
    """The answer of a rank that could not do what it was asked to, and why."""

    text: str


class Played(Record):
    """The answer to `Play`: what the step left behind on each node."""

    nodes: dict[str, Left]
    letters: tuple[Letter, ...]


class Seen(Record):
    """The answer to `Score`: metrics by name, by model and by test set."""

    scores: dict[str, dict[str, dict[str, float]]]


class Memory(Record):
    """The answer to `Recall`: what a node remembers, as bytes."""

    data: Tensor | None


KINDS: tuple[type[Record], ...] = (
    Begin, Over, Undo, Ready, Play, Score, Recall, Remember, Drop, SpillTo,
    Keep, Restore, Done, Failed, Played, Seen, Memory, AtSite, GivenUp,
)  # fmt: skip


_NUMBERS = count(1)  # of questions: an answer that comes late is not taken for another's
_HEAD = struct.Struct("<BQ")  # the kind of a record and the number of its question


@dataclass(frozen=True)
class Absent:
    """Why a site gave no answer that can be used, and the number of the question."""

    reason: str
    number: int


def limits_of(transport: Transport) -> codec.Limits:
    """How much is read: all that one's own job says, of strangers what is safe."""
    return codec.OWN if transport.one_job else codec.STRANGERS


def say(transport: Transport, rank: int, record: Record, number: int = 0) -> None:
    """Send a record, with its kind and the number of its question before it."""
    head = _HEAD.pack(KINDS.index(type(record)), number)
    transport.send(rank, head + codec.encode(record))


def hear(transport: Transport, rank: int) -> Record:
    """The next record from a rank."""
    return numbered(transport, rank)[1]


def numbered(transport: Transport, rank: int, seconds: float | None = None) -> tuple[int, Record]:
    """The next record from a rank, with the number of the question that it is or answers."""
    data = memoryview(transport.receive(rank, seconds))
    if len(data) < _HEAD.size:
        raise WireError(f"{len(data)} bytes came, expected {_HEAD.size} and a record")
    place, number = _HEAD.unpack(data[: _HEAD.size])
    if place >= len(KINDS):
        raise WireError(f"a record of kind {place} came, there are {len(KINDS)}")
    record = codec.decode(data[_HEAD.size :], KINDS[place], limits=limits_of(transport))
    return number, record


def say_to_all(transport: Transport, record: Record) -> None:
    """Tell every rank but the leader, who speaks."""
    for rank in range(1, transport.size):
        say(transport, rank, record)


def ask(
    transport: Transport,
    questions: Mapping[int, Record],
    meanwhile: Callable[[], T],
    seconds: float | None = None,
) -> tuple[T, dict[int, Record | Absent]]:
    """Ask some ranks, do one's own work while they do theirs, and take an answer of each.

    That is what was asked for, `Failed`, or `Absent`. They are taken whatever failed, so that the
    next question gets its own answer. All have so many seconds together.
    """
    number = next(_NUMBERS)
    until = None if seconds is None else time.monotonic() + seconds
    answers: dict[int, Record | Absent] = {}
    for rank, question in questions.items():
        try:
            say(transport, rank, question, number)
        except Disconnected as error:
            if transport.one_job:
                raise
            answers[rank] = Absent(str(error), number)
    asked = [rank for rank in questions if rank not in answers]
    try:
        own = meanwhile()
    except Exception:
        with suppress(Disconnected):
            for rank in asked:
                _answer(transport, rank, number, until)
        raise
    answers |= {rank: _answer(transport, rank, number, until) for rank in asked}
    return own, {rank: answers[rank] for rank in questions}


def _answer(transport: Transport, rank: int, number: int, until: float | None) -> Record | Absent:
    """A rank's answer to a question; answers to earlier ones, which come late, are left aside."""
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        try:
            answered, record = numbered(transport, rank, left)
        except (Late, Disconnected, WireError) as error:
            if transport.one_job:
                raise
            return Absent(str(error), number)
        if answered == number:
            return record


def all_answered(answers: Mapping[int, Record | Absent]) -> dict[int, Record]:
    """The answers, where every rank gave what was asked for; else the first failure is raised."""
    found: dict[int, Record] = {}
    for rank, answer in answers.items():
        if isinstance(answer, Failed):
            raise RankError(f"rank {rank}: {answer.text}")
        if isinstance(answer, Absent):
            raise RankError(f"rank {rank}: {answer.reason}")
        found[rank] = answer
    return found


def ask_one(transport: Transport, rank: int, question: Record) -> Record:
    """The answer of one rank."""
    return all_answered(ask(transport, {rank: question}, lambda: None)[1])[rank]


def failed(error: Exception) -> Failed:
    """What to tell the leader: a message meant for people, or all that is known."""
    known = isinstance(error, FedstillError)
    return Failed(str(error) if known else "".join(traceback.format_exception(error)).strip())


def excuse(transport: Transport, error: Exception) -> None:
    """Answer every question with what went wrong, until the run is over."""
    while True:
        number, request = numbered(transport, LEADER)
        if isinstance(request, Over | GivenUp):
            return
        say(transport, LEADER, failed(error), number)
