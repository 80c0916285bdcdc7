"""Events go to a run's folder or to lists; files are appended to, and only a rewind shortens."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from fedstill.core.errors import RunFolderError
from fedstill.core.files import replacing, write_whole
from fedstill.core.release import Spending
from fedstill.logbook.events import ALL_TABLES, LEDGER, TABLES, Event, Note, Number, Traffic
from fedstill.logbook.rows import Rows


class Logbook(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None:
        """Keep one event."""


class MemoryLog:
    """Keeps events in lists."""

    def __init__(self) -> None:
        self.metrics: list[Number] = []
        self.messages: list[Traffic] = []
        self.notes: list[Note] = []
        self.privacy: list[Spending] = []

    def write(self, event: Event) -> None:
        """Keep one event."""
        if isinstance(event, Number):
            self.metrics.append(event)
        elif isinstance(event, Traffic):
            self.messages.append(event)
        elif isinstance(event, Spending):
            self.privacy.append(event)
        else:
            self.notes.append(event)

    def rows(self) -> Rows:
        """What was written so far, ready for questions."""
        return Rows(
            tuple(self.metrics), tuple(self.messages), tuple(self.notes),
            privacy=tuple(self.privacy),
        )  # fmt: skip


class FolderLog:
    """Appends to the tables of a run's folder; rows are durable after `flush`.

    The ledger of privacy is there from its first row on.

    A last line that a kill cut in the middle is dropped when the folder is opened again.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._files: dict[str, TextIO] = {}
        with _refusing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, event: Event) -> None:
        """Add one row to the table of its kind."""
        try:
            if isinstance(event, Number):
                self._metrics.writerow(_cells(event))
            elif isinstance(event, Traffic):
                self._messages.writerow(_cells(event))
            elif isinstance(event, Spending):
                csv.writer(self._ledger(), lineterminator="\n").writerow(_cells(event))
            else:
                self._notes.writerow(_cells(event))
        except OSError as error:
            raise _refusal(error, self.folder) from error

    def flush(self) -> None:
        """Return when all rows so far are on the disk."""
        with _refusing(self.folder):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    def rewind(self, round: int) -> None:
        """Drop every row of a later round, as if the run had stopped after this one."""
        self.close()
        with _refusing(self.folder):
            for name in ALL_TABLES:
                _keep_until(self.folder / name, round)
            self._open()

    def close(self) -> None:
        """Make all rows durable and let the files go."""
        self.flush()
        with _refusing(self.folder):
            for file in self._files.values():
                file.close()
            self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        for name in TABLES:
            self._open_table(name)
        self._metrics, self._messages, self._notes = (
            csv.writer(file, lineterminator="\n") for file in self._files.values()
        )

    def _open_table(self, name: str) -> TextIO:
        path = self.folder / name
        _drop_cut_line(path)
        if not path.exists() or path.stat().st_size == 0:
            write_whole(path, header(name) + "\n")  # no kill leaves a table without it
        _check_header(path)
        self._files[name] = path.open("a", encoding="utf-8", newline="")
        return self._files[name]

    def _ledger(self) -> TextIO:
        return self._files.get(LEDGER) or self._open_table(LEDGER)


def header(table: str) -> str:
    """The first line of a table."""
    return ",".join(field.name for field in fields(ALL_TABLES[table]))


def write_json(path: Path | str, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    path = Path(path)
    with _refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(path, f"{text}\n")


def _cells(event: Event) -> tuple[str | int, ...]:
    """A row whose numbers read back exactly, NaN as nothing; a note stays on one line."""
    if isinstance(event, Number):
        value = "" if math.isnan(event.value) else repr(float(event.value))
        return (event.round, event.step, event.node, event.name, event.target, value)
    if isinstance(event, Traffic):
        where = (event.round, event.step, event.sender, event.direction, event.field)
        return (*where, int(event.floats), int(event.bytes), int(event.hearers))
    if isinstance(event, Spending):
        numbers = (repr(event.sigma), repr(event.rate), event.releases)
        return (event.round, event.step, event.node, event.mechanism, *numbers)
    return (event.round, event.kind, event.node, " ".join(event.text.splitlines()))


def _drop_cut_line(path: Path) -> None:
    """Shorten a file to its last complete line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            file.truncate(end)


def _check_header(path: Path) -> None:
    with path.open(encoding="utf-8", errors="replace") as file:
        found = file.readline().rstrip("\n")
    if found != header(path.name):
        raise RunFolderError(
            f"{path} has the columns {found!r}, expected {header(path.name)!r}; "
            "it was written by another version or program: choose another folder"
        )


def _keep_until(path: Path, round: int) -> None:
    if not path.exists():
        return
    _drop_cut_line(path)
    with path.open("rb") as old, replacing(path) as new:
        for number, line in enumerate(old, start=1):
            if number == 1 or _round_of(line, path, number) <= round:
                new.write(line)


def _round_of(line: bytes, path: Path, number: int) -> int:
    first = line.split(b",", 1)[0]
    try:
        return int(first)
    except ValueError as error:
        raise RunFolderError(
            f"{path}, line {number}: expected the number of a round, found {first!r}"
        ) from error


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what the system refuses into an error that names path and reason."""
    try:
        yield
    except OSError as error:
        raise _refusal(error, path) from error


def _refusal(error: OSError, path: Path) -> RunFolderError:
    where, reason = error.filename or path, error.strerror or str(error)
    return RunFolderError(
        f"cannot write {where}: {reason}; choose a folder that can be written, with space left"
    )
