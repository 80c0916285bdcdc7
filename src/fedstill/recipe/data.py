"""The table `data` of a recipe read once: its partition, public and virtual data are objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from fedstill.core.errors import DataError, unknown
from fedstill.data import PARTITION_NAMES, Partition, entry_named
from fedstill.methods.virtual import Virtual
from fedstill.recipe.fields import read_table, read_values
from fedstill.recipe.tables import DataTable, PublicTable, Table

T = TypeVar("T", DataTable, PublicTable)


def read_data(table: Any, faults: list[str]) -> DataTable | None:
    """The table as typed objects; what is wrong with it is added to `faults`."""
    if not isinstance(table, Mapping):
        return read_table(DataTable, table, "data", faults)
    readers = {"partition": _partition, "virtual": _virtual, "public": _public}
    written = {key: value for key, value in table.items() if key in readers}
    plain = {key: value for key, value in table.items() if key not in readers}
    data = _read_set(DataTable, plain, "data", faults)
    if data is not None:
        _check_set("data", data.name, data.options, faults)
        if (data.mean is None) != (data.std is None):
            faults.append("data.mean and data.std stand together; give both, or neither of them")
    made: Table = {key: readers[key](value, faults) for key, value in written.items()}
    return None if data is None else replace(data, **made, written=written)


def _partition(table: Any, faults: list[str]) -> Partition | None:
    if not isinstance(table, Mapping):
        faults.append(f"data.partition must be a table, not {table!r}")
        return None
    kind = table.get("kind")
    if kind is None:
        known = ", ".join(sorted(PARTITION_NAMES.known()))
        faults.append(f"data.partition.kind is missing; known: {known}")
        return None
    if wrong := PARTITION_NAMES.wrong(kind):
        faults.append(f"data.partition.kind: {wrong}")
        return None
    values = {key: value for key, value in table.items() if key != "kind"}
    return read_values(PARTITION_NAMES[kind], values, "data.partition", faults)


def _virtual(table: Any, faults: list[str]) -> Virtual | None:
    return read_values(Virtual, table, "data.virtual", faults)


def _public(table: Any, faults: list[str]) -> PublicTable | None:
    public = _read_set(PublicTable, table, "data.public", faults)
    if public is not None:
        _check_set("data.public", public.name, public.options, faults)
    return public


def _read_set(kind: type[T], table: Any, where: str, faults: list[str]) -> T | None:
    """A table that names a data set; an option of the set that stands beside its name is told."""
    if not isinstance(table, Mapping):
        return read_table(kind, table, where, faults)
    astray = _options_of(table.get("name")) & {*table} - {field.name for field in fields(kind)}
    faults += [
        f"{where}.{key}: this is an option of {table['name']}; write it as {where}.options.{key}"
        for key in table
        if key in astray
    ]
    rest = {key: value for key, value in table.items() if key not in astray}
    found = read_table(kind, rest, where, faults)
    return None if astray else found


def _options_of(name: Any) -> set[str]:
    """The options of a data set; none where there is no such set."""
    try:
        return {*entry_named(name).options} if isinstance(name, str) else set()
    except DataError:
        return set()


def _check_set(where: str, name: str, options: Table, faults: list[str]) -> None:
    try:
        known = entry_named(name).options
    except DataError as error:
        faults.append(f"{where}.name: {error}")
        return
    faults += [
        f"{where}.options: " + unknown(f"option of {name}", option, known)
        for option in options
        if option not in known
    ]
