"""TensorChannel: codes tensor by tensor; which tensors, and what of them, is said here once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator, Tensor

from fedstill.channels.channel import Channel, Edge
from fedstill.channels.coded import Coded, Parts, coded, field_of
from fedstill.core import trees
from fedstill.core.errors import WireError
from fedstill.core.ranges import Count
from fedstill.core.records import (
    CHANGE,
    EXACT,
    POSITIONAL,
    Message,
    Record,
    Weights,
    is_buffer,
    marked_fields,
    open_fields,
)


@dataclass(frozen=True, kw_only=True)
class TensorChannel(Channel):
    """Codes tensors one by one: a subclass says how one is coded and decoded.

        @dataclass(frozen=True)
        class Signs(TensorChannel):
            def encode(self, tensor, rng):
                return {"signs": tensor.sign().to(torch.int8), "size": tensor.abs().mean()}

            def decode(self, parts, shape):
                return parts["signs"] * parts["size"]

    Left as they are: whole numbers, fields hinted `Positional` or `Exact`, statistics of norm
    layers (a rounded variance could be zero), tensors smaller than `least`, and the fields in
    `leave`. With `of_change` a tensor that a client has heard from the server under the same name
    is coded as its difference from that; both ends know it. With `feedback` what coding took from
    a difference is added to the next one at that node, so that nothing is lost in the long run.
    A tensor that is no difference, such as an image, has no next one to be added to.
    """

    leave: tuple[str, ...] = ()  # fields of messages that travel as they are
    least: Count = 16  # entries of a tensor that is coded
    of_change: bool = False
    feedback: bool = False

    keeps_shapes: ClassVar[bool] = True

    def encode(self, tensor: Tensor, rng: Generator) -> Parts:
        """What travels in place of a floating tensor; whatever is drawn comes from `rng`."""
        return {"values": tensor}

    def decode(self, parts: Parts, shape: tuple[int, ...]) -> Tensor:
        """The tensor that parts stand for, up to what coding loses."""
        return parts["values"]

    def worth(self, tensor: Tensor) -> bool:
        """Whether a floating tensor that may be coded becomes smaller by it."""
        return True

    def send(self, message: Message, edge: Edge, memory: Weights) -> tuple[Message | None, Weights]:
        """The message with its tensors coded, and what coding took from differences."""
        known = twins(message, edge.heard) if self.of_change else {}
        changes = known.keys() | marked(message, CHANGE)
        found: dict[str, Parts] = {}
        left_out: Weights = {}
        for name, tensor in self._chosen(message):
            value = tensor - known[name] if name in known else tensor
            feeds = self.feedback and name in changes
            if feeds and name in memory and memory[name].shape == value.shape:
                value = value + memory[name].to(value)
            found[name] = self.encode(value, edge.rng(name))
            if feeds:
                back = self.decode(found[name], tuple(value.shape)).reshape(value.shape)
                left_out[name] = value - back
        return coded(message, found), left_out

    def receive(self, message: Message, heard: Message | None) -> Message:
        """The message with its tensors decoded."""
        if not isinstance(message, Coded):
            raise WireError(
                f"{type(message).__name__} came plain where {type(self).__name__} codes messages; "
                "use the same channels on both sides"
            )
        restored = message.restored(self.decode)
        known = twins(message.rest, heard, front=1) if self.of_change else {}
        if not known:
            return restored
        return trees.with_tensors(
            restored,
            [
                tensor + known[name] if name in message.parts and name in known else tensor
                for name, tensor in trees.named_tensors(restored)
            ],
        )

    def _chosen(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a message that are coded, by their dotted names."""
        exact = marked(message, EXACT) | marked(message, POSITIONAL)
        for name, tensor in trees.named_tensors(message):
            if not tensor.is_floating_point() or name in exact or is_statistic(name):
                continue
            if tensor.numel() < self.least or field_of(message, name) in self.leave:
                continue
            if self.worth(tensor):
                yield name, tensor


def is_statistic(name: str) -> bool:
    """Whether a dotted name is that of a norm layer's statistic, coded or not."""
    return any(is_buffer(part) for part in name.split("."))


def marked(message: Record, mark: str) -> set[str]:
    """The dotted names of all tensors in fields whose hints have a mark."""
    return set(_marked(message, mark, ""))


def _marked(value: Any, mark: str, name: str) -> Iterator[str]:
    if isinstance(value, Record):
        with_mark = marked_fields(type(value), mark)
        for field in trees.field_names(type(value)):
            item, path = getattr(value, field), _under(name, field)
            if field in with_mark:
                yield from (found for found, _ in trees.named_tensors(item, path))
            else:
                yield from _marked(item, mark, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _marked(item, mark, _under(name, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for place, item in enumerate(value):
            yield from _marked(item, mark, _under(name, place))


def _under(name: str, part: object) -> str:
    return f"{name}.{part}" if name else str(part)


def bare(message: Record, name: str) -> str:
    """A tensor's dotted name in the message that is held, where it stands in one."""
    first, _, rest = name.partition(".")
    return bare(getattr(message, first), rest) if first in open_fields(type(message)) else name


def twins(message: Message, heard: Message | None, front: int = 0) -> Weights:
    """For the tensors of a message those of the same name, shape and type that were heard.

    In a message whose coded tensors are empty, shapes stand behind `front` more axes. What is
    marked as a change is one already.
    """
    if heard is None or isinstance(message, Coded):
        return {}
    known = dict(trees.named_tensors(heard))
    changes = marked(message, CHANGE)
    found: Weights = {}
    for name, tensor in trees.named_tensors(message):
        other = known.get(name, known.get(bare(message, name)))
        if other is None or name in changes or other.dtype != tensor.dtype:
            continue
        if tuple(other.shape) == tuple(tensor.shape[front:]):
            found[name] = other
    return found
