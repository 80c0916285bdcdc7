"""What a coordinator, sites and peers say to each other: records in the bytes of the wire.

A request names the memory to start from by its mark, and a step is a function of memory and inbox.
So a request may be repeated, and an answer may be lost, and neither does any harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from fedstill.core.errors import SiteError, WireError, told
from fedstill.core.records import Record
from fedstill.engines.ranks.protocol import Left, Letter, Spent
from fedstill.wire import codec

NEVER = "never"  # the mark of a memory that was not made yet
BLANK = "blank"  # the mark of one who has acted and remembers nothing
MOST_KEPT = 32  # checkpoints of a run between sites
MOST_MARKS = 2 * (MOST_KEPT + 1)  # that a request may ask to keep
TITLES = {"run": "run", "node": "site", "recipe": "recipe", "wire": "wire format"}
SAME_CODE = (
    "; install the same release, or check out the same commit, at all parties "
    "(`fedstill --version` shows both)"
)

R = TypeVar("R", bound=Record)


class Hello(Record):
    """Asks whether a site takes part in this run, by the same recipe and the same code."""

    run: str
    node: str
    recipe: str  # the digest that was agreed on
    fedstill: str  # the version and the code of each package that is used; see core.source
    wire: int
    torch: str


def difference(here: Hello, there: Hello, names: Iterable[str]) -> tuple[str, str, str] | None:
    """The first of these fields in which two parties differ, by both values; and what to do."""
    for name in names:
        own, other = (str(getattr(side, name)) for side in (here, there))
        if own != other and name == "fedstill":
            return *_other_code(own, other), SAME_CODE
        if own != other:
            return f"{TITLES[name]} {told(own)}", f"{TITLES[name]} {told(other)}", ""
    return None


def _other_code(own: str, other: str) -> tuple[str, str]:
    """Of the packages on either side those that the other has not."""
    here, there = own.split(", "), other.split(", ")
    return (
        told(", ".join(one for one in here if one not in there) or "nothing besides"),
        told(", ".join(one for one in there if one not in here) or "nothing besides"),
    )


class Present(Record):
    """The answer to `Hello`; counts only where the site's policy allows it."""

    node: str
    torch: str
    examples: int | None
    counts: dict[str, int]  # training examples by class
    spent: tuple[Spent, ...] = ()  # of its privacy before the run, on virtual data


class Act(Record):
    """Asks a site to play a step from the memory of a mark."""

    run: str
    node: str
    round: int
    number: int  # of the act in its round: a step may be listed several times
    step: str
    again: int  # how often the step came before in its round
    toward: str | None  # where messages travel
    after: str  # the mark of the memory to start from
    channels: str  # and of what channels remember there
    keep: tuple[str, ...]  # marks that a checkpoint may come back to
    inbox: dict[str, int]  # by sender, the place of a letter
    letters: tuple[Letter, ...]


class Acted(Record):
    """The answer to `Act`: what the step left behind, and the marks of the memories now."""

    run: str
    node: str
    round: int
    number: int
    step: str
    left: Left
    letters: tuple[Letter, ...]
    mark: str
    channels: str


class Examine(Record):
    """Asks a site to score the server's model, or its own, on its own tests."""

    run: str
    node: str
    round: int
    after: str  # the mark of the memory that its own model is in; empty: not asked for
    server: Tensor | None  # what the server's model is scored by


class Examined(Record):
    """The answer to `Examine`: metrics by name."""

    run: str
    node: str
    round: int
    server: dict[str, float] | None
    own: dict[str, float] | None


class Over(Record):
    """Tells a site that the run has ended."""

    run: str
    node: str


class Done(Record):
    """The answer to `Over`."""

    node: str


class Refused(Record):
    """The answer of a site that does not do what it was asked to, and why."""

    node: str
    text: str


KINDS: tuple[type[Record], ...] = (
    Hello, Present, Act, Acted, Examine, Examined, Over, Done, Refused,
)  # fmt: skip


def written(record: Record) -> bytes:
    """A record as it travels: its kind, then its bytes."""
    return bytes([KINDS.index(type(record))]) + codec.encode(record)


def read(data: bytes | memoryview, limits: codec.Limits = codec.STRANGERS) -> Record:
    """What another party said; all that is not one of these records is a WireError."""
    view = memoryview(data)
    if len(view) > limits.bytes:
        raise WireError(f"{len(view)} bytes came, the limit is {limits.bytes}")
    if not len(view) or view[0] >= len(KINDS):
        raise WireError("what came is none of the records that sites exchange")
    return codec.decode(view[1:], KINDS[view[0]], limits=limits)


def answered(kind: type[R], asked: Record, answer: Record) -> R:
    """The answer, where it is of this kind and speaks of what was asked; else a SiteError."""
    if isinstance(answer, Refused):
        raise SiteError(f"refused: {told(answer.text)}")
    if not isinstance(answer, kind):
        raise SiteError(f"answered {type(answer).__name__}, not {kind.__name__}")
    for name in ("run", "node", "round", "number", "step"):
        if hasattr(asked, name) and hasattr(answer, name):
            was, came = getattr(asked, name), getattr(answer, name)
            if was != came:
                raise SiteError(
                    f"answered for {name} {told(str(came))}, but was asked for {told(str(was))}"
                )
    return answer
