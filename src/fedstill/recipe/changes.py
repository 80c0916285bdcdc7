"""Single changes to the tables of a recipe: which table, which of several methods they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedstill.core import ranges
from fedstill.core.errors import unknown
from fedstill.core.method import Method
from fedstill.core.names import short
from fedstill.methods import METHOD_NAMES

UNSET = "unset"  # as a value in [quick]: the key is taken away
METHOD_KEYS = ("name", "label", "preset")  # of a method's table, besides its fields


def change(
    tables: dict[str, Any], name: str, keys: Sequence[str], value: Any, *, quick: bool
) -> str | None:
    """Set a value in the table of a name; what is wrong with the keys, or None.

    A key of `method` reaches the methods that have it, or one method after its label. Where none
    has it, it is set in all, so that checking refuses it; a quick change is dropped if it is a
    key of any method at all.
    """
    found = tables.setdefault(name, {})
    targets = [found]
    if name == "method":
        methods = found if isinstance(found, list) else [found]
        targets, keys = _meant(methods, keys)
        if not targets:
            known = any(_fits(keys[0], kind) for kind in METHOD_NAMES.table.values())
            if len(keys) > 1 and len(methods) > 1 and not known:
                return unknown("label", keys[0], map(label_of, methods))
            if quick:
                return None if known else unknown("key", keys[0], keys_of(methods))
            targets = methods
    try:
        for target in targets:
            if len(keys) > 1 and _is_method(keys[0], _kind(target)):
                _open(target, keys[0])
            _set(target, keys, value, unset=quick and value == UNSET)
    except TypeError:
        return f"{name}.{'.'.join(keys)} is not a table"
    return None


def dotted(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; `run.rounds` without quotes is a table in TOML and means the same."""
    for key, value in table.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _meant(methods: Sequence[Any], keys: Sequence[str]) -> tuple[list[Any], list[str]]:
    """The methods that a key addresses, by label or because they have it; the key in them."""
    rest = ".".join(keys)
    named = [table for table in methods if rest.startswith(f"{label_of(table)}.")]
    if named:
        label = max(map(label_of, named), key=len)  # labels may hold dots
        inner = rest.removeprefix(f"{label}.").split(".")
        return [table for table in named if label_of(table) == label], inner
    return [table for table in methods if _fits(keys[0], _kind(table))], list(keys)


def reaches(method: Any, keys: Sequence[str]) -> bool:
    """Whether a key of `method` means this method's table, by its label or because it has it."""
    return bool(_meant([method], keys)[0])


def label_of(table: Any) -> str:
    """What a method's table is called: its label, else its name without the path of a file."""
    found = table if isinstance(table, Mapping) else {}
    return str(found.get("label", short(str(found.get("name", "")))))


def _kind(table: Any) -> type[Method] | None:
    """The class of a method's table, where its name is known."""
    name = table.get("name") if isinstance(table, Mapping) else None
    return None if METHOD_NAMES.wrong(name) else METHOD_NAMES[str(name)]


def _fits(key: str, kind: type[Method] | None) -> bool:
    return key in METHOD_KEYS or (kind is not None and key in _fields(kind))


def _is_method(key: str, kind: type[Method] | None) -> bool:
    """Whether a key of a method's table holds a method itself."""
    return kind is not None and ranges.hints(kind).get(key) is Method


def _open(table: dict[str, Any], key: str) -> None:
    """A method that is given by its name alone, as a table that can take values."""
    if isinstance(table.get(key), str):
        table[key] = {"name": table[key]}


def keys_of(methods: Sequence[Any]) -> set[str]:
    kinds = [kind for kind in map(_kind, methods) if kind is not None]
    return {*METHOD_KEYS, *(name for kind in kinds for name in _fields(kind))}


def _fields(kind: type[Method]) -> set[str]:
    return {f.name for f in fields(kind) if f.init}


def _set(table: Any, keys: Sequence[str], value: Any, *, unset: bool) -> None:
    for key in keys[:-1]:
        table = _as_table(table).setdefault(key, {})
    if unset:
        _as_table(table).pop(keys[-1], None)
    else:
        _as_table(table)[keys[-1]] = value


def _as_table(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"{found!r} is not a table")
    return found
