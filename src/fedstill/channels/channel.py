"""Channel: what is done to a message where it leaves and where it arrives; several in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from fedstill.core import ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.records import DIRECTIONS, Direction, Message, Weights


@dataclass(frozen=True)
class Edge:
    """Where a message leaves a node: which way it goes, and what its channels may use.

    `rng(purpose)` is a generator of the sender's own for this step and round. `heard` is what the
    sender has last read from the very party that will read the message; both ends know it. Only
    clients that answer the server have heard something.
    """

    direction: Direction
    rng: Callable[[str], Generator]
    heard: Message | None = None


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Codes messages where they leave and decodes them where they arrive; this one does nothing.

    A frozen dataclass of options, given by name. `send` may keep tensors from message to message:
    what it returns beside the message is its memory at that node, which it gets at the next message
    of the same step. A message that it returns as None is lost. `receive` is given what `send`
    returned. Whatever is random is drawn from `edge.rng`. To code tensors one by one, derive from
    `TensorChannel`.
    """

    directions: tuple[Direction, ...] = ("up", "down")  # ways on which it acts; also "peer"

    keeps_shapes: ClassVar[bool] = False
    """Whether a message that is read has the very shapes that the coded one announces; then one of
    wrong shapes is refused before it is decoded."""

    def __post_init__(self) -> None:
        wrong = [*ranges.faults(self), *self.faults()]
        if wrong:
            raise BadValue([f"{type(self).__name__}: {line}" for line in wrong])

    def faults(self) -> Sequence[str]:
        """What is wrong with the options together; a line each."""
        if not isinstance(self.directions, tuple):
            return ()
        strange = [str(name) for name in self.directions if name not in DIRECTIONS]
        return [f"directions: {unknown('direction', name, DIRECTIONS)}" for name in strange]

    def send(self, message: Message, edge: Edge, memory: Weights) -> tuple[Message | None, Weights]:
        """What travels in the message's place, and what is remembered for the next one."""
        return message, memory

    def receive(self, message: Message, heard: Message | None) -> Message:
        """The message that is read; `heard` is as it was at the sender's edge."""
        return message


Memory = dict[str, Weights]
"""What channels remember at one node for one kind of message, by each one's place in the row."""


def sent(
    channels: Sequence[Channel], message: Message, edge: Edge, memory: Memory
) -> tuple[Message | None, Memory]:
    """A message after the channels on its way, in order, and what they remember then."""
    kept: Memory = {}
    carried: Message | None = message
    for place, channel in enumerate(channels):
        if edge.direction not in channel.directions:
            continue
        if carried is None:  # lost before it came here
            break
        key = str(place)
        own = Edge(edge.direction, _of_channel(edge.rng, key), edge.heard)
        carried, remembered = channel.send(carried, own, memory.get(key, {}))
        if remembered:
            kept[key] = remembered
    return carried, {**memory, **kept}


def received(
    channels: Sequence[Channel], message: Message, direction: Direction, heard: Message | None
) -> Message:
    """The message that was sent, as the channels on its way leave it to its reader."""
    for channel in reversed(channels):
        if direction in channel.directions:
            message = channel.receive(message, heard)
    return message


def _of_channel(rng: Callable[[str], Generator], place: str) -> Callable[[str], Generator]:
    return lambda purpose: rng(f"channel {place}: {purpose}")
