"""A run's folder as typed rows; no plots."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedstill.core.errors import RunFolderError
from fedstill.core.release import Spending
from fedstill.logbook.events import LEDGER, Note, Number, Traffic
from fedstill.logbook.rows import Rows
from fedstill.logbook.writer import header

R = TypeVar("R")
DESCRIPTIONS = ("recipe.toml", "experiment.json")  # one of them says what was run
GRID_FILE = "grid.toml"  # what a folder of several runs is, and the order of its cells


class Summary(dict[str, Any]):
    """What summary.json holds; which scores are in it depends on whose models were scored."""

    def __missing__(self, name: object) -> Any:
        known, why = list(self), ""
        if "accuracy" in str(name):
            known = [key for key in self if "accuracy" in key and "by_client" not in key]
            known = [key for key in known if not key.startswith("best_")]
            why = " (a common model has average_accuracy, clients' own averaged_local_accuracy)"
        raise KeyError(f"the summary has no {name!r}{why}; it has {', '.join(known) or 'none'}")


@dataclass(frozen=True)
class Run(Rows):
    """A run read back from its folder, or one that has none."""

    folder: Path | None
    summary: Mapping[str, Any]
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]


def read_run(folder: Path | str, *, unfinished: bool = False) -> Run:
    """All that a run left; with `unfinished`, also a run that has no summary yet."""
    folder = Path(folder)
    _check_folder(folder)
    if not unfinished and not (folder / "summary.json").exists():
        raise RunFolderError(
            f"{folder} has no summary.json: the run is not finished; fedstill resume {folder}"
        )
    rows = read_rows(folder)
    return Run(
        rows.metrics,
        rows.messages,
        rows.notes,
        folder,
        Summary(_mapping(folder / "summary.json", json.loads)),
        _description(folder),
        _mapping(folder / "environment.json", json.loads),
        privacy=rows.privacy,
    )


def runs_below(path: Path) -> list[Path]:
    """Each folder that holds a run, in or below a path: cells of grids in their order, then others.

    Others are in the order of their names.
    """
    if not path.is_dir():
        return []
    found = sorted({file.parent for name in DESCRIPTIONS for file in path.rglob(name)})
    cells: dict[Path, None] = {}
    for file in sorted(path.rglob(GRID_FILE)):
        listed = _mapping(file, tomllib.loads).get("grid", {}).get("cells", [])
        cells |= dict.fromkeys(file.parent / str(cell) for cell in listed)
    return sorted(found, key=[*cells, *(f for f in found if f not in cells)].index)


def read_rows(folder: Path | str) -> Rows:
    """The tables of a folder, finished or not; a cut last line is left out."""
    folder = Path(folder)
    _check_folder(folder)
    return Rows(
        _rows(folder / "metrics.csv", _number),
        _rows(folder / "messages.csv", _traffic),
        _rows(folder / "notes.csv", _note),
        privacy=_rows(folder / LEDGER, _spending) if (folder / LEDGER).exists() else (),
    )


def check_single(folder: Path) -> None:
    """Refuse a folder of runs in place of one of them, and name one."""
    below = [run for run in runs_below(folder) if run != folder]
    if below:
        count = f"{len(below)} runs" if len(below) > 1 else "a run"
        raise RunFolderError(f"{folder} holds {count} below it; name one, such as {below[-1]}")


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise RunFolderError(f"there is no run folder {folder}")
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, expected the folder of a run")
    if not any((folder / name).exists() for name in (*DESCRIPTIONS, "metrics.csv")):
        check_single(folder)
        inside = sorted(path.name for path in folder.iterdir())
        found = ", ".join(inside[:5]) + (", …" if len(inside) > 5 else "") or "nothing"
        raise RunFolderError(
            f"{folder} is not the folder of a run: "
            f"expected recipe.toml and metrics.csv in it, found {found}"
        )


def _description(folder: Path) -> dict[str, Any]:
    """The recipe of a run, or the tables of the objects that it was made of."""
    recipe, objects = (folder / name for name in DESCRIPTIONS)
    if recipe.exists():
        return _mapping(recipe, tomllib.loads)
    return _mapping(objects, json.loads)


def _rows(path: Path, read: Callable[[list[str]], R]) -> list[R]:
    lines = _complete_lines(path)
    if not lines or lines[0] != header(path.name):
        found = lines[0] if lines else ""
        raise RunFolderError(
            f"{path} has the columns {found!r}, expected {header(path.name)!r}; "
            "it was written by another version or program"
        )
    rows: list[R] = []
    width = len(lines[0].split(","))
    try:
        for cells in csv.reader(lines[1:]):
            if len(cells) != width:
                raise ValueError(f"expected {width} cells, found {len(cells)}")
            rows.append(read(cells))
    except (ValueError, OverflowError, csv.Error) as error:
        raise RunFolderError(f"{path}, line {len(rows) + 2}: {error}") from error
    return rows


def _complete_lines(path: Path) -> list[str]:
    """The lines of a table, without one that a kill cut in the middle."""
    if not path.exists():
        raise RunFolderError(f"{path} is missing; the run has not begun, or the file was removed")
    whole = path.read_bytes().rpartition(b"\n")[0]
    return whole.decode("utf-8", errors="replace").split("\n") if whole else []


def _mapping(path: Path, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds {type(value).__name__}, expected a table of names")
    return value


def _number(cells: list[str]) -> Number:
    round, step, node, name, target, value = cells
    return Number(int(round), step, node, name, target, float(value) if value else math.nan)


def _traffic(cells: list[str]) -> Traffic:
    round, step, sender, direction, field, floats, size, hearers = cells
    if direction not in ("up", "down", "peer"):
        raise ValueError(f"unknown direction {direction!r}; known: up, down, peer")
    return Traffic(
        int(round),
        step,
        sender,
        direction,  # type: ignore[arg-type]
        field,
        int(floats),
        int(size),
        int(hearers),
    )


def _spending(cells: list[str]) -> Spending:
    round, step, node, mechanism, sigma, rate, releases = cells
    return Spending(int(round), step, node, mechanism, float(sigma), float(rate), int(releases))


def _note(cells: list[str]) -> Note:
    round, kind, node, text = cells
    return Note(int(round), kind, node, text)
