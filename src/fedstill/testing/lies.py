"""Lies: a message with one thing changed that no honest party would send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core.records import WEIGHTS, Message, Record, marked_fields

HUGE = 10**18
IMMENSE = 1e30
_OTHER = {torch.float32: torch.float64, torch.int64: torch.int32, torch.uint8: torch.int16}


class Lie(NamedTuple):
    """What was changed in which field, and the message that then travels."""

    field: str
    what: str
    message: Message

    def __str__(self) -> str:
        return f"{self.field}: {self.what}"


def lies(message: Message) -> Iterator[Lie]:
    """Each field of a message lied about, one lie at a time.

    Another shape, another type, a name missing, one name more, numbers out of range, 1e30. Of
    names only those of weights can be missing; in another table a name left out is silence.
    """
    for field, what, lied in _lies(message, ""):
        yield Lie(field, what, lied)


def _lies(value: Any, name: str, *, whole: bool = False) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, Tensor):
        yield from ((name, what, lied) for what, lied in _of_tensor(value))
    elif isinstance(value, Record):
        complete = marked_fields(type(value), WEIGHTS)
        for each in fields(value):  # type: ignore[arg-type]
            inner = f"{name}.{each.name}" if name else each.name
            own = getattr(value, each.name)
            for field, what, lied in _lies(own, inner, whole=each.name in complete):
                yield field, what, value.replace(**{each.name: lied})
    elif isinstance(value, dict):
        yield from _of_dict(value, name, whole)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        for lied in (-1, 2**70 if isinstance(value, int) else IMMENSE, float("nan")):
            yield name, f"{lied} in place of {value}", lied


def _of_dict(value: dict[str, Any], name: str, whole: bool) -> Iterator[tuple[str, str, Any]]:
    some = [*value][:1] + [*value][1:][-1:]  # the first and the last name stand for all
    for key in some:
        for field, what, lied in _lies(value[key], f"{name}.{key}"):
            yield field, what, {**value, key: lied}
        if whole:
            yield name, f"without {key!r}", {k: v for k, v in value.items() if k != key}
    strange = value[some[0]] if some else torch.zeros(1)
    yield name, "with one more name", {**value, "liar": strange}


def _of_tensor(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows = value if value.dim() else value.reshape(1)
    if value.dim() and len(value) > 1:
        yield "its first row alone", value[:1]
    yield "one row more", torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    yield "one axis more", value.unsqueeze(-1).expand(*value.shape, 2).contiguous()
    if value.dtype in _OTHER:
        yield "another type", value.to(_OTHER[value.dtype])
    if not value.numel():
        return
    if value.is_floating_point():
        yield "values of 1e30", torch.full_like(value, IMMENSE)
        yield "NaN", torch.full_like(value, torch.nan)
    elif value.dtype == torch.int64:
        yield "values of -1", torch.full_like(value, -1)
        yield "values of 10^18", torch.full_like(value, HUGE)
