"""Records: what travels (Message) and what stays (State); no encoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    dataclass_transform,
    get_args,
    get_origin,
)

from torch import Tensor

from fedstill.core import ranges, trees

NodeId = str
Direction = Literal["up", "down", "peer"]  # to the server, from the server, between clients
DIRECTIONS: tuple[Direction, ...] = ("up", "down", "peer")

WEIGHTS = "weights"
Weights = Annotated[dict[str, Tensor], WEIGHTS]
"""As in a state dict, parameters and buffers by dotted name; in a message, those of a network."""

POSITIONAL = "positional"
Positional = Annotated[Tensor, POSITIONAL]
"""Indices or labels that a fixed order would imply: counted in bytes, not in floats."""

EXACT = "exact"
Exact = Annotated[Tensor, EXACT]
"""Numbers that must arrive as they are, such as counts and variances: no channel rounds them."""

CHANGE = "change"
Change = Annotated[Weights, CHANGE]
"""What is added to something the receiver has: a channel may make good later what it left out."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@lru_cache(maxsize=2**14)
def is_buffer(name: str) -> bool:
    """Whether a name of a state dict is a statistic rather than a trainable parameter."""
    return name.rsplit(".", 1)[-1] in _BUFFERS


@dataclass_transform(frozen_default=True)
class Record:
    """A frozen dataclass by inheritance; fields are trees (tensors, dicts, tuples, scalars)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, eq=False)(cls)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its dotted name."""
        return dict(trees.named_tensors(self))

    def floats(self) -> dict[str, int]:
        """Numbers by field, as papers count them: None is zero, a scalar one, positions zero."""
        skipped = positional_fields(type(self))
        return self._by_field(
            lambda name, value: 0 if name in skipped else _numbers(value), Record.floats
        )

    def bytes(self) -> dict[str, int]:
        """Payload by field: every tensor's own size, eight for a number, a text's length."""
        return self._by_field(lambda name, value: _bytes(value), Record.bytes)

    def _by_field(
        self, count: Callable[[str, Any], int], within: Callable[[Record], dict[str, int]]
    ) -> dict[str, int]:
        """A count by field; a record in a field of any kind is counted by its own fields."""
        names, unfolded = trees.field_names(type(self)), open_fields(type(self))
        counted: dict[str, int] = {}
        for name in names:
            value = getattr(self, name)
            if name in unfolded and value is not None:
                for inner, number in within(value).items():
                    counted[f"{name}.{inner}" if inner in names else inner] = number
            else:
                counted[name] = count(name, value)
        return counted

    def held_kinds(self) -> list[type[Record]]:
        """The kinds of the records that stand in fields of any kind, here and further in."""
        held = [getattr(self, name) for name in sorted(open_fields(type(self)))]
        return [kind for one in held if one for kind in (type(one), *one.held_kinds())]

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]


Pictured = tuple[Tensor, Tensor]
"""[image, ...] and [image]: images and the class of each."""


class Message(Record):
    """What travels between nodes."""

    def pictures(self) -> Pictured | None:
        """The set of images that this message shows, for the pictures of a run."""
        return None


class State(Record):
    """What a node remembers from step to step; never sent."""


OPEN_KINDS: tuple[type[Record], ...] = (Record, Message, State)
"""As the hint of a field: a record of any kind stands there; a method says which it may be."""


def record_hints(kind: type[Record]) -> dict[str, Any]:
    """The field types of a record, resolved."""
    return ranges.resolved(kind)


def open_fields(kind: type[Record]) -> frozenset[str]:
    """Names of the fields that hold a record whose kind their hint leaves open."""
    key: Any = kind
    return _open(key)


@cache
def _open(kind: Any) -> frozenset[str]:
    return frozenset(name for name, hint in record_hints(kind).items() if hint in OPEN_KINDS)


def positional_fields(kind: type[Record]) -> frozenset[str]:
    """Names of the fields whose numbers a fixed order would imply."""
    return marked_fields(kind, POSITIONAL)


def marked_fields(kind: type[Record], mark: str) -> frozenset[str]:
    """Names of the fields in whose hints a mark stands."""
    key: Any = kind
    return _marked(key, mark)


@cache
def _marked(kind: Any, mark: str) -> frozenset[str]:
    def marked(hint: Any) -> bool:
        if get_origin(hint) is Annotated and mark in get_args(hint)[1:]:
            return True
        return any(marked(part) for part in get_args(hint) if part is not hint)

    return frozenset(name for name, hint in record_hints(kind).items() if marked(hint))


def _numbers(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Record):
        return sum(value.floats().values())
    if isinstance(value, dict):
        items = value.values()
        return sum([i.numel() if isinstance(i, Tensor) else _numbers(i) for i in items])
    if isinstance(value, (list, tuple)):
        return sum(_numbers(item) for item in value)
    return 1 if isinstance(value, (int, float)) else 0


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Record):
        return sum(value.bytes().values())
    if isinstance(value, dict):
        items = value.values()
        return sum([i.nbytes if isinstance(i, Tensor) else _bytes(i) for i in items])
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    if isinstance(value, str):
        return len(value.encode())
    return 8 if isinstance(value, (int, float)) else 0
