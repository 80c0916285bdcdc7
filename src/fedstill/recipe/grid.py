"""Grids: a recipe's methods, seeds and swept values, as one thing; nothing is run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedstill.core.errors import RecipeError, unknown
from fedstill.core.files import without_folder
from fedstill.core.names import absolute
from fedstill.recipe.changes import keys_of, label_of, reaches
from fedstill.recipe.check import checked
from fedstill.recipe.read import with_value
from fedstill.recipe.tables import GRID, GRID_PARTS, Recipe, Table

HOLD_OUT = 0.2  # of the training examples, where values are chosen and the recipe names no share
SPAN = re.compile(r"(?P<low>[^.\s]\S*?)\.\.(?P<high>\S+)")


@dataclass(frozen=True)
class Span:
    """A range from which `--search` draws."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (",log" if self.log else "")


@dataclass(frozen=True)
class Sweep:
    """A key of the recipe and the values it takes: some, or a range to search in."""

    key: str
    values: tuple[Any, ...] = ()
    span: Span | None = None

    @property
    def first(self) -> Any:
        """A value that it takes."""
        return self.values[0] if self.span is None else self.span.low


@dataclass(frozen=True)
class Point:
    """A method with the values it has at one place of a grid."""

    recipe: Recipe
    values: Mapping[str, Any]  # of the swept keys that reach this method


@dataclass(frozen=True)
class Grid:
    """All that a recipe and the command line ask for."""

    tables: Table
    seeds: tuple[int, ...]
    sweeps: tuple[Sweep, ...] = ()
    select: str | None = None  # the score by which values are chosen on held-out examples
    search: int | None = None  # trials in a larger space

    def points(self) -> list[Point]:
        """Every method with every combination of the values that reach it, in their order."""
        found: list[Point] = []
        for method in self.methods():
            sweeps = self.reaching(method)
            for values in product(*(sweep.values for sweep in sweeps)):
                pairs = zip(sweeps, values, strict=True)
                found.append(self.point(method, {s.key: value for s, value in pairs}))
        return found

    def point(self, method: Table, values: Mapping[str, Any]) -> Point:
        """A method of the recipe with some values changed; reported numbers stay with its own."""
        tables = {**self.tables, "method": method}
        (own,) = checked(tables)
        for key, value in values.items():
            tables = with_value(tables, key, value)
        (recipe,) = checked(tables)
        if replace(recipe, reported={}) != replace(own, reported={}):
            recipe = replace(recipe, reported={})
        return Point(recipe, dict(values))

    def methods(self) -> list[Table]:
        """The tables of the methods."""
        methods = self.tables.get("method", [])
        return methods if isinstance(methods, list) else [methods]

    def reaching(self, method: Table) -> list[Sweep]:
        """The sweeps that change something in a method's runs."""
        return [sweep for sweep in self.sweeps if _reaches(sweep.key, method)]

    def holding_out(self) -> Grid:
        """The same grid, scored on training examples that are held out."""
        data = self.tables.get("data", {})
        held = {**data, "hold_out": data.get("hold_out", HOLD_OUT)}
        return replace(self, tables={**self.tables, "data": held})

    def testing(self) -> Grid:
        """The same grid, scored on the test sets."""
        data = {k: v for k, v in self.tables.get("data", {}).items() if k != "hold_out"}
        return replace(self, tables={**self.tables, "data": data})

    def as_tables(self) -> Table:
        """The recipe with its grid, from which the same grid is read again."""
        sweep = {s.key: list(s.values) if s.span is None else str(s.span) for s in self.sweeps}
        grid: Table = {"seeds": list(self.seeds), "sweep": sweep}
        grid |= {"select": self.select} if self.select else {}
        grid |= {"search": self.search} if self.search else {}
        return {**self.tables, GRID: grid}


def grid_of(
    tables: Table,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    sweeps: Sequence[str] = (),
    select: str | None = None,
    search: int | None = None,
) -> Grid:
    """The grid of a recipe's tables; what is given here takes the place of its table [grid]."""
    table = tables.get(GRID, {})
    faults = _faults_of(table)
    if faults:
        raise RecipeError(faults)
    plain = {name: inner for name, inner in tables.items() if name != GRID}
    methods = plain.get("method")
    if only and isinstance(methods, list):
        plain["method"] = [method for method in methods if label_of(method) in only]
    written = [Sweep(key, *_values(value)) for key, value in table.get("sweep", {}).items()]
    grid = Grid(
        plain,
        tuple(seeds or table.get("seeds", ()) or (plain.get("run", {}).get("seed", 0),)),
        tuple([sweep_of(text) for text in sweeps] or written),
        select or table.get("select"),
        search or table.get("search"),
    )
    _check(grid)
    return grid


def joined(grid: Grid, before: Grid) -> Grid | None:
    """A grid with the methods, seeds and values of another one too; None if keys are others."""
    added = {sweep.key: sweep for sweep in grid.sweeps}
    if {sweep.key for sweep in before.sweeps} != added.keys():
        return None
    own = {label_of(method): method for method in grid.methods()}
    held = {label_of(method): method for method in before.methods()}
    methods = [*(held | own).values()]
    sweeps = [
        Sweep(each.key, tuple(dict.fromkeys([*each.values, *added[each.key].values])))
        for each in before.sweeps
    ]
    return replace(
        grid,
        tables={**grid.tables, "method": methods if len(methods) > 1 else methods[0]},
        seeds=tuple(dict.fromkeys([*before.seeds, *grid.seeds])),
        sweeps=tuple(sweeps),
    )


def sweep_of(text: str) -> Sweep:
    """`method.lr=0.01,0.1`, or a range to search in: `method.lr=0.001..0.1,log`."""
    key, equals, values = text.partition("=")
    if not equals or "." not in key.strip(".") or not values.strip():
        raise RecipeError(
            f"--sweep {text}: write a key of the recipe and its values, "
            "e.g. --sweep method.lr=0.01,0.1"
        )
    listed, span = _values(values.strip())
    return Sweep(key.strip(), tuple(_settled(value) for value in listed), span)


def point_name(values: Mapping[str, Any]) -> str:
    """`lr=0.01, mu=1`: the swept values for people, by the last words of their keys."""
    return ", ".join(f"{key}={_word(value)}" for key, value in short_keys(values).items())


def short_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under the last word of each key, or the whole key where that is not clear."""
    last = [key.rpartition(".")[2] for key in values]
    return {
        word if last.count(word) == 1 else key: value
        for word, (key, value) in zip(last, values.items(), strict=True)
    }


def _values(given: Any) -> tuple[tuple[Any, ...], Span | None]:
    if isinstance(given, list):
        return tuple(given), None
    text = str(given)
    if span := _span(text):
        return (), span
    try:
        return tuple(tomllib.loads(f"values = [{text}]")["values"]), None
    except tomllib.TOMLDecodeError:
        return tuple(map(_value, text.split(","))), None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _span(text: str) -> Span | None:
    ends, _, way = text.partition(",")
    found = SPAN.fullmatch(ends.strip())
    if found is None:
        return None
    low, high = (_value(found[end]) for end in ("low", "high"))
    numbers = all(isinstance(end, (int, float)) for end in (low, high))
    if not numbers or not low < high or way.strip() not in ("", "log"):
        raise RecipeError(
            f"sweep {text}: a range is two numbers, the lower first, and `,log` where steps are "
            "factors, e.g. method.lr=0.001..0.1,log"
        )
    if way and low <= 0:
        raise RecipeError(f"sweep {text}: a range of factors begins above 0, not at {low}")
    return Span(low, high, bool(way))


def _settled(value: Any) -> Any:
    """A reference to a file as it is meant on the command line, wherever it is read again."""
    return absolute(value, Path.cwd()) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """A value for names: of a reference to a file without where it lies."""
    return without_folder(value) if isinstance(value, str) else value


def _word(value: Any) -> str:
    if isinstance(value, float):
        return str(value).removesuffix(".0")  # as tables name it
    return str(value).lower() if isinstance(value, bool) else str(plain(value))


def _reaches(key: str, method: Table) -> bool:
    name, *keys = key.split(".")
    return name != "method" or reaches(method, keys)


def _faults_of(table: Any) -> list[str]:
    """What is wrong with the table [grid] of a recipe."""
    if not isinstance(table, Mapping):
        return [f"{GRID} must be a table, not {table!r}"]
    known = ", ".join(GRID_PARTS)
    faults = [
        f"{GRID}.{key}: unknown key; known: {known}" for key in table if key not in GRID_PARTS
    ]
    seeds, search = table.get("seeds", []), table.get("search")
    if not isinstance(seeds, list) or not all(isinstance(s, int) and s >= 0 for s in seeds):
        faults.append(f"{GRID}.seeds must be a list of whole numbers from 0 on, not {seeds!r}")
    elif len(set(seeds)) < len(seeds):
        faults.append(f"{GRID}.seeds: each seed once, not {seeds!r}")
    if not isinstance(table.get("sweep", {}), Mapping):
        faults.append(f'{GRID}.sweep must be a table, e.g. "method.lr" = [0.01, 0.1]')
    if search is not None and not (isinstance(search, int) and search > 0):
        faults.append(f"{GRID}.search must be a number of trials from 1 on, not {search!r}")
    return faults


def _check(grid: Grid) -> None:
    faults = []
    spans = [sweep for sweep in grid.sweeps if sweep.span is not None]
    keys = [sweep.key for sweep in grid.sweeps]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            faults.append(f"--sweep {key} stands twice; list all its values in one")
    for sweep in grid.sweeps:
        if sweep.key == "run.seed":
            faults.append("--sweep run.seed: seeds are listed with --seeds 0 1 2")
        elif not any(_reaches(sweep.key, method) for method in grid.methods()):
            strange = unknown("key", sweep.key.removeprefix("method."), keys_of(grid.methods()))
            faults.append(f"--sweep {sweep.key}: no method of this recipe has this key: {strange}")
        if any(sweep.values.count(value) > 1 for value in sweep.values):
            faults.append(f"--sweep {sweep.key}: a value stands twice")
    if spans and not grid.search:
        faults += [f"--sweep {s.key}={s.span}: a range needs --search TRIALS" for s in spans]
    if grid.search and not grid.select:
        faults.append("--search: say by which score, e.g. --select average_accuracy")
    if grid.select and not grid.sweeps:
        faults.append(
            "--select: there is nothing to choose from; add values with --sweep, "
            "e.g. --sweep method.lr=0.01,0.1"
        )
    if faults:
        raise RecipeError(faults)
