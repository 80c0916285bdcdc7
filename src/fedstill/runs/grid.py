"""Grids of runs: a folder for every cell, gone on with after any stop, the best point chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from fedstill.core.errors import BadValue, FedstillError, RecipeError, RunFolderError, unknown
from fedstill.core.files import write_whole
from fedstill.core.method import Method, Place
from fedstill.engines import checkpoint
from fedstill.engines.ranks.protocol import Transport
from fedstill.federation.run import Watch
from fedstill.logbook.reader import GRID_FILE
from fedstill.logbook.writer import write_json
from fedstill.metrics import lowest, name_of
from fedstill.recipe.changes import label_of
from fedstill.recipe.check import checked
from fedstill.recipe.grid import (
    Grid,
    Point,
    Sweep,
    grid_of,
    joined,
    plain,
    point_name,
    short_keys,
)
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import GRID, Recipe
from fedstill.recipe.toml import toml_text
from fedstill.report.groups import (
    ACCURACY,
    BEST_SCORE,
    CLIENT_SCORES,
    SCORES,
    SERVER_SCORE,
    scores_of,
)
from fedstill.runs import folder as folders
from fedstill.runs.digest import decisive
from fedstill.runs.recipes import begin_held, recipe_of, resume_held, seeded
from fedstill.runs.session import check_rounds, check_same

HELD_OUT, CHOSEN = "held-out", "chosen"  # folders of a grid in which values are chosen
CHOICE = "choice.json"
LONGEST = 60  # characters of a point in a folder's name


@dataclass(frozen=True)
class Cell:
    """One run of a grid: a recipe with its seed, where it stands, and where it goes."""

    recipe: Recipe
    folder: Path
    values: Mapping[str, Any]

    @property
    def title(self) -> str:
        """`fedavg, lr=0.01`: the method and the swept values."""
        return ", ".join(word for word in (self.recipe.label, point_name(self.values)) if word)

    @property
    def finished(self) -> bool:
        """Whether the run has ended, after as many rounds as the recipe asks for."""
        try:
            played: int = _summary(self.folder)["rounds"]
        except (FileNotFoundError, NotADirectoryError):
            return False
        return played >= self.recipe.run.rounds

    @property
    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return (self.folder / "recipe.toml").exists()


PlayAll = Callable[[Sequence[Cell]], None]


def cells_of(
    grid: Grid, out: Path, points: Sequence[Point] | None = None, like: Grid | None = None
) -> list[Cell]:
    """A cell for each point and seed: `out` itself for a single run, else folders below it.

    A part of a larger grid lies where that has it, `like` which it is.
    """
    points = grid.points() if points is None else points
    several = len({point.recipe.label for point in points}) > 1
    seeds = len(grid.seeds) > 1
    if like is not None:
        several, seeds = several or len(like.methods()) > 1, seeds or len(like.seeds) > 1
    made: dict[Path, Cell] = {}
    for point in points:
        recipe = point.recipe
        place = out / folders.safe(recipe.label) if several else out
        place = place / _folder_name(point.values) if point.values else place
        for seed in grid.seeds:
            folder = place / f"seed-{seed}" if seeds else place
            if folder in made:
                raise RecipeError(
                    f"method.label: {made[folder].title!r} and {recipe.label!r} would share the "
                    f"folder {folder}; change one of them"
                )
            made[folder] = Cell(seeded(recipe, seed), folder, point.values)
    return list(made.values())


def first_cells(grid: Grid, out: Path, like: Grid | None = None) -> list[Cell]:
    """The cells that are known before any has run."""
    if grid.search:
        return []
    if grid.select:
        return cells_of(grid.holding_out(), out / HELD_OUT, like=like)
    return cells_of(grid, out, like=like)


def whole_of(grid: Grid, cells: Sequence[Cell], out: Path) -> tuple[Grid, Sequence[Cell]] | None:
    """A grid with all that a folder holds already; None where it holds these cells and others.

    Nothing that was begun is forgotten: methods, seeds and values are added to what is there.
    """
    if grid.search or not (out / GRID_FILE).exists():
        return grid, cells
    table = read_recipe(out / GRID_FILE).get(GRID, {})
    held = {cell for cell in table.get("cells", []) if cell.split("/")[0] != CHOSEN}
    if held <= _places(cells, out):
        return grid, cells
    if _places(cells, out) <= held and not grid.select:
        return None
    more = joined(grid, read_grid(out))
    every = [] if more is None or grid.select else cells_of(more, out)
    if more is None or (missing := held - _places(every, out)):
        told = ", ".join(sorted(held if more is None else missing)[:3])
        raise RunFolderError(
            f"{out} holds a grid of which this command leaves out {told}; name the methods, seeds "
            "and values that it has beside new ones, or give another folder with --out"
        )
    return more, every


def _places(cells: Sequence[Cell], out: Path) -> set[str]:
    return {cell.folder.relative_to(out).as_posix() for cell in cells}


def possible_cells(grid: Grid, out: Path) -> list[Cell]:
    """A cell that a search might draw for each method, to see whether it could be played."""
    held, cells = grid.holding_out(), []
    for method in held.methods():
        point = held.point(method, {sweep.key: sweep.first for sweep in held.reaching(method)})
        cells.append(Cell(seeded(point.recipe, grid.seeds[0]), out, {}))
    return cells


def check_free(cells: Sequence[Cell], out: Path) -> None:
    """Refuse folders that hold runs already, and one with a run or a grid of its own above them."""
    with folders.writing(out):
        for cell in cells:
            if cell.begun and cell.folder != out:
                raise RunFolderError(
                    f"{cell.folder} already holds a run; {_going_on(out)}, or give another "
                    "folder with --out"
                )
            _check_above(cell, out)
            folders.check_free(cell.folder)
        if any(cell.folder != out for cell in cells) and _begun_in(out):
            raise RunFolderError(
                f"{out} already holds a grid; {_going_on(out)}, also with more seeds or values, "
                "or give another folder with --out"
            )


def check_same_grid(cells: Sequence[Cell], out: Path) -> None:
    """Refuse to go on where a cell of that name is of other values, before anything is run."""
    for cell in cells:
        with folders.writing(out):
            _check_above(cell, out)
            begun = cell.begun
        if begun:
            _check_recipe(cell)
            if saved := checkpoint.reached(cell.folder / "checkpoints"):
                played, beside = saved
                ended = beside.get("ended", False)
                check_rounds(cell.folder, cell.recipe.run.rounds, played, ended=ended)


def _going_on(out: Path) -> str:
    return f"continue the grid with --continue or with `fedstill resume {out}`"


def _check_above(cell: Cell, out: Path) -> None:
    """Refuse a cell below a folder that is a run's own."""
    inner = [path for path in cell.folder.parents if path == out or out in path.parents]
    taken = next((path for path in inner if folders.description_in(path)), None)
    if taken is not None:
        raise RunFolderError(f"{taken} holds a single run, not a grid; give another --out")


def _begun_in(out: Path) -> bool:
    """Whether a folder holds a grid of which some run was begun."""
    path = out / GRID_FILE
    if not path.exists():
        return False
    cells = read_recipe(path).get(GRID, {}).get("cells", [])
    return any(folders.description_in(out / cell) for cell in cells)


def write_grid(grid: Grid, cells: Sequence[Cell], out: Path) -> None:
    """What the whole is, so that it can be gone on with, and the order of its cells."""
    tables = grid.as_tables()
    order = [cell.folder.relative_to(out).as_posix() for cell in cells]
    tables[GRID] = {**tables[GRID], "cells": order}
    with folders.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / GRID_FILE, toml_text(tables))


def read_grid(folder: Path, overrides: Sequence[str] = ()) -> Grid:
    """The grid that was begun in a folder."""
    tables = read_recipe(folder / GRID_FILE, overrides)
    checked({name: table for name, table in tables.items() if name != GRID})
    return grid_of(tables)


def play(
    cell: Cell, watch: Watch | None, line: Transport | None, overrides: Sequence[str] = ()
) -> None:
    """Begin a cell or go on with it; raises `folders.Occupied` where another process plays it."""
    with folders.alone(cell.folder):
        if cell.finished and not overrides:
            return
        if cell.begun:
            if not overrides:
                _check_recipe(cell)
            resume_held(cell.folder, [*overrides, *_changes(cell)], watch, line)
        else:
            begin_held(cell.recipe, cell.folder, watch, line)


@dataclass(frozen=True)
class Choice:
    """What was chosen for a method on held-out examples."""

    method: str
    values: Mapping[str, Any]
    score: float
    of: Sequence[Mapping[str, Any]]  # every point with its score


def chosen(grid: Grid, cells: Sequence[Cell]) -> list[Choice]:
    """For each method the point whose mean over seeds is best; the first of equals."""
    assert grid.select is not None
    choices = []
    for method in grid.methods():
        label = label_of(method)
        points: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.recipe.label == label:
                points.setdefault(point_name(cell.values), []).append(cell)
        whole = [each for each in points.values() if all(cell.finished for cell in each)]
        if not whole:
            raise RunFolderError(f"no point of {label} has finished, so none can be chosen")
        means = [(mean_score(each, grid.select), each[0].values) for each in whole]
        scored = [(score, values) for score, values in means if score is not None]
        if not scored:
            raise _without_score(whole[0][0].folder, grid.select)
        sign = -1 if lower_is_better(cells[0].recipe, grid.select) else 1
        best = max(scored, key=lambda pair: sign * pair[0])
        table = [{"values": dict(values), "score": score} for score, values in scored]
        choices.append(Choice(label, best[1], best[0], table))
    return choices


def chosen_cells(grid: Grid, choices: Sequence[Choice], out: Path) -> list[Cell]:
    """The cells that test what was chosen, with all seeds, and the choice written down."""
    tested = grid.testing()
    values = {choice.method: choice.values for choice in choices}
    points = [tested.point(method, values[label_of(method)]) for method in tested.methods()]
    write_json(
        out / CHOICE,
        {
            "by": grid.select,
            "scored on": "training examples that were held out",
            "seeds": list(grid.seeds),
            "methods": [asdict(choice) for choice in choices],
        },
    )
    plain = [Point(point.recipe, {}) for point in points]
    return [
        replace(cell, values=values[cell.recipe.label])
        for cell in cells_of(tested, out / CHOSEN, plain)
    ]


def search(grid: Grid, out: Path, play_all: PlayAll) -> list[Cell]:
    """Draw points of a space with Optuna, play each and tell it the score; the cells played.

    What is drawn depends on the seed and the scores before alone: a search that is gone on with
    draws the same points again and finds them finished.
    """
    optuna = _optuna()
    assert grid.search is not None and grid.select is not None
    held = grid.holding_out()
    played: list[Cell] = []
    for method in held.methods():
        place = out / HELD_OUT
        lower = lower_is_better(held.point(method, {}).recipe, grid.select)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=grid.seeds[0]),
            direction="minimize" if lower else "maximize",
        )
        done: dict[str, list[Cell]] = {}
        for _ in range(grid.search):
            trial = study.ask()
            values = {sweep.key: _drawn(trial, sweep) for sweep in held.reaching(method)}
            name = point_name(values)
            if name not in done:
                point = held.point(method, values)
                label = folders.safe(point.recipe.label)
                above = place / label if len(held.methods()) > 1 else place
                done[name] = cells_of(held, above, [point])
                play_all(done[name])
            score = None
            if all(cell.finished for cell in done[name]):
                score = mean_score(done[name], grid.select)
            if score is None:  # as where training diverged
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
        played += [cell for cells in done.values() for cell in cells]
    return played


def mean_score(cells: Iterable[Cell], name: str) -> float | None:
    """The mean over seeds of a score by which values are chosen; None where one has none."""
    scores = [score_of(cell.folder, name) for cell in cells]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else None


def score_of(folder: Path, name: str) -> float | None:
    """A score of a finished run: an average of the papers, or a metric by its name.

    None where it has none, or no finite one.
    """
    summary = _summary(folder)
    if name in SCORES:
        found = summary.get(name)
    else:
        table = scores_of(summary, name)
        scores = (table.get(key) for key in (SERVER_SCORE, *CLIENT_SCORES))
        found = next((score for score in scores if score is not None), None)
    return float(found) if found is not None and isfinite(found) else None


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _without_score(folder: Path, name: str) -> BadValue:
    summary = _summary(folder)
    known = [key for key in SCORES if summary.get(key) is not None]
    return BadValue(
        f"--select {name}: {folder} has no such score, or none that is finite; it has "
        f"{', '.join([*known, *summary.get('metrics', {})])}"
    )


def check_score(name: str, recipes: Sequence[Recipe]) -> None:
    """Refuse a score that no run would have, before any is run."""
    known = [*SCORES, ACCURACY, "loss", *(name_of(m) for r in recipes for m in r.run.metrics)]
    if name not in known:
        raise RecipeError("--select: " + unknown("score", name, dict.fromkeys(known)))
    without = {r.label: None for r in recipes if not _may_have(r.method, name)}
    if without:
        whose = "clients'" if name in CLIENT_SCORES else "the server's"
        raise RecipeError(
            f"--select {name}: {', '.join(without)} would have no such score, which is of {whose} "
            "models; accuracy is there for every method"
        )


def _may_have(method: Method, name: str) -> bool:
    """Whether a score is of the models that a method scores."""
    if name in CLIENT_SCORES:
        return method.scored is Place.CLIENTS or method.scores_own
    return method.scored is Place.SERVER or name not in (SERVER_SCORE, BEST_SCORE)


def lower_is_better(recipe: Recipe, name: str) -> bool:
    """Whether the best value of a score is the lowest."""
    return name in lowest(recipe.run.metrics)


def _changes(cell: Cell) -> list[str]:
    """What a run that was begun is to have now: where its data lie, and its rounds."""
    begun, wanted = recipe_of(cell.folder), cell.recipe
    changes = []
    if wanted.data.data_dir not in (None, begun.data.data_dir):
        changes.append(f"data.data_dir={json.dumps(wanted.data.data_dir)}")
    if wanted.run.rounds != begun.run.rounds:
        changes.append(f"run.rounds={wanted.run.rounds}")
    return changes


def _check_recipe(cell: Cell) -> None:
    check_same(cell.folder, decisive(recipe_of(cell.folder)), decisive(cell.recipe))


def _folder_name(values: Mapping[str, Any]) -> str:
    """`lr-0.01_mu-1`: a point as the name of a folder."""
    words = [f"{key}-{plain(value)}" for key, value in short_keys(values).items()]
    name = folders.safe("_".join(words))
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}_{sha256(name.encode()).hexdigest()[:8]}"


def _drawn(trial: Any, sweep: Sweep) -> Any:
    """The value that a trial has for a key."""
    span = sweep.span
    if span is None:
        return sweep.values[trial.suggest_categorical(sweep.key, list(range(len(sweep.values))))]
    if span.whole:
        return trial.suggest_int(sweep.key, int(span.low), int(span.high), log=span.log)
    drawn = trial.suggest_float(sweep.key, float(span.low), float(span.high), log=span.log)
    return float(f"{drawn:.4g}")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise FedstillError(
            "--search needs Optuna: pip install 'fedstill[search]'; or list values with --sweep"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
