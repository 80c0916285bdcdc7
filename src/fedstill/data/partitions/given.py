"""Splits that draw nothing: by the domains of a set, or as a file of one's own says."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.partitions.partition import (
    Partition,
    Rows,
    check_clients,
    check_disjoint,
    checked_rows,
)

COLUMNS = ("client", "row")
FORMS = (
    'a JSON file {"client": [rows, …], …}, '
    "or a CSV file with the columns client and row and a line for each training example"
)


@dataclass(frozen=True)
class Domains(Partition):
    """One client per domain of the set, in the order of their numbers; nothing is drawn."""

    by_domain: ClassVar[bool] = True

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client, where `labels` are the numbers of the domains."""
        check_clients(1, len(labels))
        return [np.flatnonzero(labels == domain).astype(np.int64) for domain in np.unique(labels)]


@dataclass(frozen=True)
class FromFile(Partition):
    """Clients and their rows as a file says, JSON or CSV; nothing is drawn.

    Rows count the training examples of the set from 0. A relative path counts from where the
    program runs.
    """

    path: str

    def split(self, labels: Rows, seed: int) -> dict[str, Rows]:
        """The rows of every client, by the names in the file."""
        path = Path(self.path)
        readers = {".json": _from_json, ".csv": _from_csv}
        if path.suffix.lower() not in readers:
            raise DataError(f"{path} is no file of a partition; use {FORMS}")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"the partition {path} cannot be read: {fault}") from fault
        found = {
            name: np.sort(checked_rows(f"{path}: client {name!r}", rows, len(labels)))
            for name, rows in readers[path.suffix.lower()](path, text).items()
        }
        check_disjoint(str(path), found)
        return found


def _from_json(path: Path, text: str) -> dict[str, object]:
    try:
        table = json.loads(text, object_pairs_hook=_once)
    except ValueError as fault:
        raise DataError(f"{path} is not a JSON file ({fault}); use {FORMS}") from fault
    if not isinstance(table, dict):
        raise DataError(
            f"{path} must hold a table of clients, but holds {text[:40]!r}; use {FORMS}"
        )
    return table


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose names differ; json itself keeps the last of two in silence."""
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"it names {', '.join(twice)} twice")
    return dict(pairs)


def _from_csv(path: Path, text: str) -> dict[str, object]:
    lines = csv.DictReader(text.splitlines())
    if not set(COLUMNS) <= set(lines.fieldnames or ()):
        raise DataError(
            f"{path} must begin with a line that names the columns client and row, "
            f"but begins with {text[:40]!r}"
        )
    found: dict[str, list[int]] = {}
    for line in lines:
        client, row = line["client"], line["row"]
        if not client or not row or not row.strip().isdecimal():
            raise DataError(
                f"{path}, line {lines.line_num}: a client and a whole number from 0 are needed, "
                f"but there are {client!r} and {row!r}"
            )
        found.setdefault(client, []).append(int(row))
    return dict(found)
