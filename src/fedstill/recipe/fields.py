"""A dataclass from a table of TOML values, with every fault of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from fedstill.core import ranges
from fedstill.core.errors import BadValue, DataError, unknown

T = TypeVar("T")


def read_table(
    kind: type[T], table: Any, where: str, faults: list[str], beside: Collection[str] = ()
) -> T | None:
    """A dataclass from a table; what is wrong is added to `faults`.

    Keys `beside` are read elsewhere, and known to whoever misspelt one.
    """
    if not isinstance(table, Mapping):
        faults.append(f"{where} must be a table, not {table!r}")
        return None
    named = ranges.hints(kind)
    own = {f.name: f for f in fields(kind) if f.init and f.metadata.get("key", True)}  # type: ignore[arg-type]
    before = len(faults)
    known = {*own, *beside}
    faults += [f"{where}.{key}: " + unknown("key", key, known) for key in table if key not in own]
    given = {key: as_hinted(value, named[key]) for key, value in table.items() if key in own}
    for key, value in given.items():
        wrong = ranges.fault(f"{where}.{key}", value, named[key])
        if wrong:
            faults.append(wrong)
    for key, item in own.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and key not in given:
            faults.append(f"{where}.{key} is missing")
    return kind(**given) if len(faults) == before else None


def read_values(
    kind: type[T], table: Any, where: str, faults: list[str], beside: Collection[str] = ()
) -> T | None:
    """As `read_table`; also what is wrong with the values together is added to `faults`."""
    try:
        return read_table(kind, table, where, faults, beside)
    except BadValue as error:
        faults += [f"{where}: {line.split(': ', 1)[-1]}" for line in error.faults]
    except DataError as error:
        faults.append(f"{where}: {error}")
    return None


def as_hinted(value: Any, hint: Any) -> Any:
    """A TOML value in the form a hint asks for: lists as tuples, whole numbers as floats."""
    if get_origin(hint) is Annotated:
        return as_hinted(value, get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        listed = any((get_origin(option) or option) is tuple for option in options)
        if len(options) == 1 or (isinstance(value, list) and listed):
            return as_hinted(value, options[0] if len(options) == 1 else tuple)
        return value
    if isinstance(value, list) and (get_origin(hint) or hint) is tuple:
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
