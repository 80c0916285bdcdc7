"""Ranges and choices of hyper-parameters, written in their type hints; checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedstill.core.errors import ProtocolError, unknown


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; an open end is excluded."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        ends = ("(" if self.open_low else "[", ")" if self.open_high else "]")
        return f"in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"


Positive = Annotated[float, Range(0, open_low=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, open_high=True)]  # momentum and the like
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]


_WORDS: Mapping[Any, str] = {
    float: "a number",
    int: "a whole number",
    str: "text",
    bool: "true or false",
}


def hints(kind: type) -> Mapping[str, Any]:
    """The field types of a dataclass, resolved; once for each class."""
    return _resolved(kind)


@cache
def _resolved(kind: Any) -> Mapping[str, Any]:
    return resolved(kind)


def resolved(owner: Any) -> dict[str, Any]:
    """The hints of a class or a function as the objects that they name."""
    try:
        return get_type_hints(owner, include_extras=True)
    except NameError as error:
        raise ProtocolError(
            f"{owner.__qualname__}: a hint names {error.name!r}, which is not found at the top of "
            f"{owner.__module__}; hints are read while a program runs, so let what they name be "
            "imported or defined at the top of the file, not inside a function nor under "
            "TYPE_CHECKING; or leave out `from __future__ import annotations`"
        ) from error


def fault(name: str, value: Any, hint: Any) -> str | None:
    """What is wrong with a value for a hinted field, or None."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        wrong = fault(name, value, base)
        if wrong:
            return wrong
        for mark in marks:
            if isinstance(mark, Range) and not mark.holds(value):
                return f"{name} = {value!r}: must be {mark}"
        return None
    if get_origin(hint) in (Union, UnionType):
        wrongs = [fault(name, value, option) for option in get_args(hint)]
        if None in wrongs:
            return None
        return next(w for w, o in zip(wrongs, get_args(hint), strict=True) if o is not NoneType)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        if value in choices and type(value) in {type(c) for c in choices}:
            return None
        return f"{name} = {value!r}: " + unknown("choice", str(value), map(str, choices))
    return _type_fault(name, value, hint)


def _type_fault(name: str, value: Any, hint: Any) -> str | None:
    kind = get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type):
        return None
    if kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if good and not math.isfinite(value):
            return f"{name} = {value!r}: must be a finite number"
    elif kind is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    elif kind is tuple:
        good = isinstance(value, tuple)
    else:
        good = isinstance(value, kind)
    if good:
        return None
    wanted = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name} = {value!r}: must be {wanted}{_remedy(value, kind)}"


def _remedy(value: Any, kind: type) -> str:
    """How a number of numpy or torch becomes one that a recipe can hold."""
    if kind not in (int, float) or not hasattr(value, "item"):
        return ""
    return f" of Python; write {kind.__name__}(…) around it"


def faults(instance: Any) -> list[str]:
    """A line for every field of a dataclass instance whose value its hint forbids."""
    named = hints(type(instance))
    found = (fault(f.name, getattr(instance, f.name), named[f.name]) for f in fields(instance))
    return [line for line in found if line]


def in_words(hint: Any) -> str:
    """What a hinted field may hold, in few words: `above 0`, `integer, at least 1`, `real, noise`.

    A choice is the list of its words.
    """
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        ranges = [str(mark) for mark in marks if isinstance(mark, Range)]
        kind = "integer, " if base is int else ""
        return kind + " and ".join(ranges) if ranges else in_words(base)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(in_words(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    words = {**_WORDS, bool: "true, false", NoneType: "nothing", tuple: "a list"}
    kind = get_origin(hint) or hint
    return words.get(kind, getattr(kind, "__name__", str(kind)))
