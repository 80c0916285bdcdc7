"""Records: what travels (Message) and what stays (State); no encoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from types import new_class
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import Tensor

from fedstill.core import trees
from fedstill.core.errors import ProtocolError

NodeId = str
Direction = Literal["up", "down", "peer"]  # to the server, from the server, between clients
DIRECTIONS: tuple[Direction, ...] = ("up", "down", "peer")
Weights = dict[str, Tensor]  # as in a state dict: parameters and buffers, by dotted name

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
        return {
            name: 0 if name in skipped else _numbers(getattr(self, name))
            for name in trees.field_names(type(self))
        }

    def bytes(self) -> dict[str, int]:
        """Payload by field: every tensor's own size, eight for a number, a text's length."""
        return {name: _bytes(getattr(self, name)) for name in trees.field_names(type(self))}

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return replace(self, **changes)  # type: ignore[type-var]


class Message(Record):
    """What travels between nodes."""


class State(Record):
    """What a node remembers from step to step; never sent."""


R = TypeVar("R", bound=Record)


def extended(kind: type[R], doc: str, **more: Any) -> type[R]:
    """A kind of record with more fields, given by name and type; asked again, the same kind."""
    taken = sorted(set(more) & set(record_hints(kind)))
    if taken:
        raise ProtocolError(f"{kind.__name__} has a field {taken[0]} already; name the new another")
    key: Any = kind
    made: type[R] = _extended(key, doc, tuple(more.items()))
    return made


@cache
def _extended(kind: Any, doc: str, more: tuple[tuple[str, Any], ...]) -> Any:
    def body(names: dict[str, Any]) -> None:
        names |= {"__doc__": doc, "__annotations__": dict(more), "__module__": kind.__module__}

    return new_class(kind.__name__, (kind,), exec_body=body)


def grown(record: Record, kind: type[R], **more: Any) -> R:
    """A record as one of a kind that has its fields and more."""
    held = {name: getattr(record, name) for name in trees.field_names(type(record))}
    return kind(**{**held, **more})


def record_hints(kind: type[Record]) -> dict[str, Any]:
    """The field types of a record, resolved."""
    return get_type_hints(kind, include_extras=True)


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
        return sum(_numbers(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_numbers(item) for item in value)
    return 1 if isinstance(value, (int, float)) else 0


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Record):
        return sum(value.bytes().values())
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    if isinstance(value, str):
        return len(value.encode())
    return 8 if isinstance(value, (int, float)) else 0
