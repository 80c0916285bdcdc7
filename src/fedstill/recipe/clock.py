"""The table `federation.clock` of a recipe: numbers, laws, a file with a line for each client."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstill.core.errors import unknown
from fedstill.federation.clock import BY_CLIENT, LAWS, Clock
from fedstill.recipe.fields import read_values

WHERE = "federation.clock"
FILE = "file"
COLUMN = "client"
LARGEST = 10_000_000  # bytes of such a file


def read_clock(table: Any, faults: list[str]) -> Clock | None:
    """The clock that a table describes; numbers of its file stand in it by client."""
    if not isinstance(table, Mapping):
        faults.append(f"{WHERE} must be a table, not {table!r}")
        return None
    before = len(faults)
    given = {key: value for key, value in table.items() if key != FILE}
    for name in BY_CLIENT:
        if isinstance(given.get(name), Mapping) and "law" in given[name]:
            given[name] = _law(given[name], f"{WHERE}.{name}", faults)
    if FILE in table:
        columns = _columns(table[FILE], faults)
        faults += [
            f"{WHERE}.{name} stands in the recipe and in {table[FILE]}; leave one of them out"
            for name in columns
            if name in given
        ]
        given |= columns
    return read_values(Clock, given, WHERE, faults) if len(faults) == before else None


def _law(table: Mapping[str, Any], where: str, faults: list[str]) -> Any:
    name = table["law"]
    if not isinstance(name, str) or name not in LAWS:
        faults.append(f"{where}.law: " + unknown("law", str(name), LAWS))
        return None
    values = {key: value for key, value in table.items() if key != "law"}
    return read_values(LAWS[name], values, where, faults)


def _columns(path: Any, faults: list[str]) -> dict[str, dict[str, float]]:
    """By column the number of each client."""
    where = f"{WHERE}.{FILE} = {path!r}"
    if not isinstance(path, str):
        faults.append(f"{where}: must be the name of a CSV file")
        return {}
    try:
        if Path(path).stat().st_size > LARGEST:
            faults.append(f"{where}: is larger than {LARGEST} bytes")
            return {}
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        faults.append(f"{where}: cannot be read: {error}")
        return {}
    head, *rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if any(row)] or [[]]
    wanted = f"the columns {COLUMN} and one or more of {', '.join(BY_CLIENT)}"
    if COLUMN not in head or len({*head}) < max(2, len(head)):
        faults.append(f"{where}: must have {wanted}, each once; its first line is {head}")
        return {}
    strange = [name for name in head if name not in (COLUMN, *BY_CLIENT)]
    faults += [f"{where}: " + unknown("column", name, (COLUMN, *BY_CLIENT)) for name in strange]
    found: dict[str, dict[str, float]] = {name: {} for name in head if name in BY_CLIENT}
    for row in rows:
        if len(row) != len(head):
            faults.append(f"{where}: the line {row} has {len(row)} cells, not {len(head)}")
            continue
        cells = dict(zip(head, row, strict=True))
        client = cells[COLUMN]
        if any(client in numbers for numbers in found.values()):
            faults.append(f"{where}: {client} stands in two lines")
        for name, numbers in found.items():
            try:
                numbers[client] = float(cells[name])
            except ValueError:
                faults.append(f"{where}: {name} of {client} is {cells[name]!r}, not a number")
    return found
