"""Coded: a message as it travels, counted by the fields of the message that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import WireError
from fedstill.core.records import Message, Record, open_fields

Parts = dict[str, Tensor]
"""What travels in place of one tensor, by names that the channel chooses."""


class Coded(Message):
    """A message some of whose tensors travel in another form.

    `rest` is the message with an empty tensor in the place of each coded one; its shape is that of
    the original behind a first axis of length zero. `parts` has what travels for each, by its
    dotted name. A message that several channels code is coded inside coded.
    """

    rest: Message
    parts: dict[str, Parts]

    def floats(self) -> dict[str, int]:
        """Numbers that travel, by field of the message: entries of parts, indices included."""
        return self._counted(self.rest.floats(), lambda part: part.numel())

    def bytes(self) -> dict[str, int]:
        """Payload that travels, by field of the message."""
        return self._counted(self.rest.bytes(), lambda part: part.nbytes)

    def _counted(self, counts: dict[str, int], size: Callable[[Tensor], int]) -> dict[str, int]:
        counts = dict(counts)
        for name, parts in self.parts.items():
            counts[field_of(self.rest, name)] += sum(map(size, parts.values()))
        return counts

    def decoded_bytes(self) -> int:
        """What the coded tensors will take once they are decoded, by the shapes that came."""
        inner = self.rest.decoded_bytes() if isinstance(self.rest, Coded) else 0
        places = dict(trees.named_tensors(self.rest))
        coded = [places[name] for name in self.parts if name in places]
        return inner + sum(math.prod(p.shape[1:]) * p.element_size() for p in coded)

    def announced(self) -> Message:
        """The message that it says it is: what is to be decoded has a shape, and no memory."""

        def promised(name: str, place: Tensor) -> Tensor:
            return place.new_empty(place.shape[1:], device="meta") if name in self.parts else place

        items = trees.named_tensors(self.rest)
        message = trees.with_tensors(self.rest, [promised(*item) for item in items])
        return message.announced() if isinstance(message, Coded) else message

    def restored(self, decode: Callable[[Parts, tuple[int, ...]], Tensor]) -> Message:
        """The message with every coded tensor made from its parts and its shape.

        Parts may have come from anywhere: those that do not fit are refused by name.
        """
        places = dict(trees.named_tensors(self.rest))
        strangers = sorted(set(self.parts) - set(places))
        if strangers:
            raise WireError(
                f"{type(self.rest).__name__} has no tensor {strangers[0]!r}, but one came coded "
                "under that name; use the same channels on both sides"
            )

        def filled(name: str, place: Tensor) -> Tensor:
            if name not in self.parts:
                return place
            shape = tuple(place.shape[1:])
            try:
                return decode(self.parts[name], shape).reshape(shape).to(place.dtype)
            except Exception as error:  # whatever came, decoding it does no harm
                raise WireError(
                    f"{name} cannot be decoded to {list(shape)} from its parts "
                    f"{', '.join(self.parts[name]) or '(none)'}: {type(error).__name__}: {error}"
                ) from error

        return trees.with_tensors(self.rest, [filled(*item) for item in places.items()])


def fitting(parts: Parts, **shapes: Sequence[int]) -> list[Tensor]:
    """Parts by name, where each has the shape that its channel gives it.

    Parts of other shapes would be stretched over each other: a few bytes could become a tensor that
    no memory holds before anybody compares it with the shape that was announced.
    """
    for name, shape in shapes.items():
        if tuple(parts[name].shape) != tuple(shape):
            raise ValueError(f"{name} of {list(parts[name].shape)}, expected {list(shape)}")
    return [parts[name] for name in shapes]


def coded(message: Message, parts: dict[str, Parts]) -> Coded:
    """A message with these of its tensors taken out and their parts put beside it."""

    def left(name: str, tensor: Tensor) -> Tensor:
        return tensor.new_empty((0, *tensor.shape)) if name in parts else tensor

    items = trees.named_tensors(message)
    return Coded(trees.with_tensors(message, [left(*item) for item in items]), parts)


def field_of(message: Message, name: str) -> str:
    """The field of the innermost message by which a tensor of this dotted name is counted."""
    first, _, rest = name.partition(".")
    if isinstance(message, Coded):
        return field_of(message.rest, rest)
    if first not in open_fields(type(message)):
        return first
    inner = field_of(getattr(message, first), rest)
    return f"{first}.{inner}" if inner in trees.field_names(type(message)) else inner


class Layer(Record):
    """What one channel put beside a message, in a form that the wire can write."""

    parts: dict[str, Parts]


def unwrapped(message: Message) -> tuple[Message, tuple[Layer, ...]]:
    """The innermost message, of a kind that the method names, and the layers, outermost first."""
    layers: list[Layer] = []
    while isinstance(message, Coded):
        layers.append(Layer(message.parts))
        message = message.rest
    return message, tuple(layers)


def wrapped(message: Message, layers: tuple[Layer, ...]) -> Message:
    """The coded message that was unwrapped."""
    for layer in reversed(layers):
        message = Coded(message, layer.parts)
    return message
