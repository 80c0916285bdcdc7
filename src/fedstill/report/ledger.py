"""Printed numbers of papers beside those of our runs, cell by cell and claim by claim."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedstill.core.errors import FedstillError, unknown
from fedstill.report.groups import Statistic, statistic

WITHIN = 2.0  # points that are as near as seeds and machines allow
Verdict = Literal["within", "found", "excluded", "open", "other data"]
STATES: tuple[Verdict, ...] = get_args(Verdict)[1:]  # what may be said of a difference
Judgement = Literal[
    "confirmed", "smaller", "smaller or none", "refuted", "undecided", "not measured"
]
PAPERS, RUNS = "papers", "runs"  # folders of a ledger


@dataclass(frozen=True)
class Cell:
    """One number that a paper prints, in per cent, and which number of which run stands beside it.

    `score` is a key of a run's summary; with a `target` it is a table by test set or by client.
    """

    paper: str
    table: str
    column: str
    data: str
    label: str
    target: str | None
    score: str
    value: float
    spread: float | None
    recipes: tuple[str, ...]  # any of them reproduces it


@dataclass(frozen=True)
class Entry:
    """One run of a recipe, as it is kept in a ledger."""

    recipe: str
    label: str
    seed: int
    summary: Mapping[str, Any]
    changes: tuple[str, ...] = ()  # of the recipe's values that decide numbers
    origin: str = ""  # device, precision, and where the numbers were written down first
    claims_only: bool = False  # too short to stand beside a printed number

    def score(self, name: str, target: str | None = None) -> float | None:
        """A score in per cent; None where the run does not have it."""
        found = self.summary.get(name)
        if target is not None:
            found = found.get(target) if isinstance(found, Mapping) else None
        return 100 * float(found) if isinstance(found, (int, float)) else None


@dataclass(frozen=True)
class Reading:
    """What is known of a difference; it holds for the cells that have all its values."""

    state: Verdict
    why: str
    of: Mapping[str, str] = field(default_factory=dict)  # fields of a cell, as text

    def holds_for(self, cell: Cell) -> bool:
        return all(getattr(cell, name) == value for name, value in self.of.items())


@dataclass(frozen=True)
class Row:
    """A cell with what was measured for it."""

    cell: Cell
    ours: Statistic
    seeds: tuple[int, ...]
    changes: tuple[str, ...]
    verdict: Verdict
    why: str

    @property
    def difference(self) -> float:
        return self.ours.mean - self.cell.value


@dataclass(frozen=True)
class Claim:
    """A paper's statement that one method is better than another, by so many points."""

    paper: str
    says: str
    better: tuple[str, str]  # recipe and label
    worse: tuple[str, str]
    score: str  # or, of one client or test set, `score:client`
    by: float | None
    worse_score: str = ""  # of the other method, where it has no such score


@dataclass(frozen=True)
class Judged:
    """A claim with the differences by seed, their mean, and half the width of its interval."""

    claim: Claim
    judgement: Judgement
    differences: Mapping[int, float]
    mean: float | None
    half: float | None  # of the 95 % interval; None below two seeds
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """Everything that is printed, and everything that was measured."""

    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]  # of the cells that were measured
    claims: tuple[Judged, ...]
    entries: tuple[Entry, ...] = ()  # the runs that all this was made from

    def counts(self) -> Counter[Verdict]:
        return Counter(row.verdict for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "printed": len(self.cells),
            "measured": len(self.rows),
            "verdicts": dict(self.counts()),
            "cells": [_row_as_dict(row) for row in self.rows],
            "claims": [_judged_as_dict(judged) for judged in self.claims],
        }


def ledger_of(folder: Path | str, more: Iterable[Entry] = ()) -> Ledger:
    """The ledger that lies in a folder, its runs joined by others; the latter come first."""
    folder = Path(folder)
    papers = sorted((folder / PAPERS).glob("*.toml"))
    if not papers:
        raise FedstillError(
            f"{folder} is not a ledger: expected printed numbers as {folder / PAPERS}/*.toml"
        )
    cells, readings, claims = [], [], []
    for path in papers:
        found = _paper(path)
        cells += found[0]
        readings += found[1]
        claims += found[2]
    entries = _distinct([*more, *read_entries(folder)])
    rows = [row for cell in cells if (row := row_of(cell, entries, readings)) is not None]
    judged = [judged_of(claim, entries) for claim in claims]
    return Ledger(tuple(cells), tuple(rows), tuple(judged), tuple(entries))


def row_of(cell: Cell, entries: Sequence[Entry], readings: Sequence[Reading]) -> Row | None:
    """The cell with the mean of its runs; runs as the recipe has them, or else changed ones."""
    pairs = [(recipe, cell.label) for recipe in cell.recipes]
    whole = [entry for entry in entries if not entry.claims_only]
    by_seed, changes = measured(pairs, cell.score, cell.target, whole)
    if not by_seed:
        return None
    ours = _mean(list(by_seed.values()))
    near = abs(ours.mean - cell.value) <= max(WITHIN, cell.spread or 0.0)
    reading = next((each for each in readings if each.holds_for(cell)), None)
    if reading is not None and (reading.state == "other data" or not near):
        verdict, why = reading.state, reading.why
    else:
        verdict, why = ("within" if near else "open"), ""
    return Row(cell, ours, tuple(by_seed), changes, verdict, why)


def measured(
    pairs: Sequence[tuple[str, str]], score: str, target: str | None, entries: Sequence[Entry]
) -> tuple[dict[int, float], tuple[str, ...]]:
    """A score by seed, and what was changed of the recipe: runs with the fewest changes count.

    `pairs` are recipes with a label; of two equal runs the one of the pair named first counts.
    """
    known = [
        (entry, value)
        for pair in pairs
        for entry in entries
        if (entry.recipe, entry.label) == pair and (value := entry.score(score, target)) is not None
    ]
    if not known:
        return {}, ()
    fewest = min((entry.changes for entry, _ in known), key=lambda each: (len(each), each))
    by_seed: dict[int, float] = {}
    for entry, value in known:
        if entry.changes == fewest:
            by_seed.setdefault(entry.seed, value)
    return dict(sorted(by_seed.items())), fewest


def judged_of(claim: Claim, entries: Sequence[Entry]) -> Judged:
    """The claim by the differences of runs with equal seeds and the interval of their mean."""
    (better, one), (worse, other) = _alike(
        _by_changes(claim.better, claim.score, entries),
        _by_changes(claim.worse, claim.worse_score or claim.score, entries),
    )
    changes = tuple(dict.fromkeys((*one, *other)))
    paired = {seed: better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys())}
    found = statistic(paired.values())
    if found is None:
        return Judged(claim, "not measured", {}, None, None)
    half = found.half_width
    return Judged(claim, _judgement(claim.by, found.mean, half), paired, found.mean, half, changes)


def _judgement(printed: float | None, mean: float, half: float | None) -> Judgement:
    """Where the interval lies, beside zero and beside the printed gain."""
    if half is None:
        return "undecided"
    if mean + half < 0:
        return "refuted"
    above_zero = mean - half > 0
    if printed is not None and mean + half < printed:
        return "smaller" if above_zero else "smaller or none"
    return "confirmed" if above_zero else "undecided"


Measured = tuple[Mapping[int, float], tuple[str, ...]]  # a score by seed, and what was changed


def _by_changes(pair: tuple[str, str], score: str, entries: Sequence[Entry]) -> list[Measured]:
    """A score by seed of one recipe and label, for each set of changes.

    The fewest changes come first, and of as many the longest runs.
    """
    name, _, target = score.partition(":")
    found: dict[tuple[str, ...], dict[int, float]] = {}
    rounds: dict[tuple[str, ...], int] = {}
    for entry in entries:
        value = entry.score(name, target or None)
        if (entry.recipe, entry.label) == pair and value is not None:
            found.setdefault(entry.changes, {}).setdefault(entry.seed, value)
            rounds.setdefault(entry.changes, int(entry.summary.get("rounds", 0)))
    ordered = sorted(found, key=lambda changes: (len(changes), -rounds[changes], changes))
    return [(found[changes], changes) for changes in ordered]


def _alike(some: Sequence[Measured], others: Sequence[Measured]) -> tuple[Measured, Measured]:
    """Of each list one: alike but for values of the method, with the most seeds in common.

    Of several the one with the fewest changes, then the longest. Where none are alike nothing can
    be compared.
    """
    pairs = [
        (one, other)
        for one in some
        for other in others
        if _around(one[1]) == _around(other[1]) and one[0].keys() & other[0].keys()
    ]
    if pairs:
        return min(pairs, key=lambda pair: -len(pair[0][0].keys() & pair[1][0].keys()))
    nothing: Measured = ({}, ())
    return nothing, nothing


def _around(changes: Sequence[str]) -> list[str]:
    """Changes of data, networks and rounds, which both methods of a claim must share."""
    return sorted(change for change in changes if not change.startswith("method."))


def read_entries(folder: Path) -> list[Entry]:
    """The runs that are kept in a ledger's folder."""
    entries = []
    for path in sorted((folder / RUNS).rglob("*.json")):
        try:
            tables = json.loads(path.read_text(encoding="utf-8"))
            entries += [_entry(table) for table in tables]
        except (ValueError, KeyError, TypeError) as error:
            raise FedstillError(f"{path} cannot be read as runs of a ledger: {error!r}") from error
    return entries


def entries_text(entries: Iterable[Entry]) -> str:
    """Runs as the JSON of a file of a ledger."""
    tables = [
        {
            "recipe": entry.recipe,
            "label": entry.label,
            "seed": entry.seed,
            "changes": list(entry.changes),
            "origin": entry.origin,
            **({"claims_only": True} if entry.claims_only else {}),
            "summary": entry.summary,
        }
        for entry in entries
    ]
    return json.dumps(tables, indent=1, ensure_ascii=False) + "\n"


def _mean(scores: Sequence[float]) -> Statistic:
    """Of one score or more."""
    found = statistic(scores)
    if found is None:
        raise ValueError("the mean of no scores is undefined; at least one is needed")
    return found


def _distinct(entries: Iterable[Entry]) -> list[Entry]:
    """The first of the runs that are of one recipe, label, seed and change."""
    kept: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        kept.setdefault((entry.recipe, entry.label, entry.seed, entry.changes), entry)
    return list(kept.values())


def _entry(table: Mapping[str, Any]) -> Entry:
    return Entry(
        table["recipe"],
        table["label"],
        int(table["seed"]),
        dict(table["summary"]),
        tuple(table.get("changes", ())),
        table.get("origin", ""),
        bool(table.get("claims_only", False)),
    )


def _paper(path: Path) -> tuple[list[Cell], list[Reading], list[Claim]]:
    """The printed cells of one file, what is known of differences, and the paper's claims."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        name = tables["paper"]
        cells = [cell for table in tables.get("table", ()) for cell in _cells(name, table)]
        readings = [_reading(name, table) for table in tables.get("reading", ())]
        claims = [_claim(name, table) for table in tables.get("claim", ())]
    except (ValueError, KeyError, TypeError) as error:
        raise FedstillError(f"{path} cannot be read as printed numbers: {error!r}") from error
    return cells, readings, claims


def _cells(paper: str, table: Mapping[str, Any]) -> list[Cell]:
    found = []
    for label, printed in table["cells"].items():
        each = printed if isinstance(printed, Mapping) else {None: printed}
        for target, numbers in each.items():
            value, *rest = numbers if isinstance(numbers, list) else [numbers]
            found.append(
                Cell(
                    paper, table["name"], table["column"], table["data"], label, target,
                    table["score"], float(value), float(rest[0]) if rest else None,
                    tuple(table["recipes"]),
                )
            )  # fmt: skip
    return found


def _reading(paper: str, table: Mapping[str, Any]) -> Reading:
    state, why = table["state"], table["why"]
    if state not in STATES:
        raise ValueError(f"state {state!r}; known: {', '.join(STATES)}")
    known = ("table", "column", "data", "label", "target", "score", "state", "why")
    for key in table:
        if key not in known:
            raise ValueError(unknown("key of a reading", key, known))
    of = {key: str(value) for key, value in table.items() if key not in ("state", "why")}
    return Reading(state, why, {"paper": paper, **of})


def _claim(paper: str, table: Mapping[str, Any]) -> Claim:
    recipe = table["recipe"]
    return Claim(
        paper,
        table["says"],
        (recipe, table["better"]),
        (table.get("worse_recipe", recipe), table["worse"]),
        table["score"],
        float(table["by"]) if "by" in table else None,
        table.get("worse_score", ""),
    )


def _row_as_dict(row: Row) -> dict[str, Any]:
    cell = row.cell
    return {
        "paper": cell.paper,
        "table": cell.table,
        "column": cell.column,
        "data": cell.data,
        "label": cell.label,
        "target": cell.target,
        "score": cell.score,
        "printed": cell.value,
        "printed_spread": cell.spread,
        "ours": round(row.ours.mean, 4),
        "spread": None if row.ours.spread is None else round(row.ours.spread, 4),
        "seeds": list(row.seeds),
        "difference": round(row.difference, 4),
        "verdict": row.verdict,
        "why": row.why,
        "changes": list(row.changes),
    }


def _judged_as_dict(judged: Judged) -> dict[str, Any]:
    return {
        "paper": judged.claim.paper,
        "says": judged.claim.says,
        "printed": judged.claim.by,
        "judgement": judged.judgement,
        "differences": {str(seed): round(x, 4) for seed, x in judged.differences.items()},
        "mean": None if judged.mean is None else round(judged.mean, 4),
        "half_interval": None if judged.half is None else round(judged.half, 4),
        "changes": list(judged.changes),
    }
