"""Every recipe that is shipped is sound, and so is its quick variant.

There are hundreds of quick runs, and most differ from another one in numbers alone. So of every
recipe at least one method is run to the end, and every method wherever it stands with options in
which no other run has it. The others are rehearsed: all of their steps are played in the recipe's
own federation, and loops are skipped; once for all that differ in numbers alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.engines.play.rehearsal import Rehearsal
from fedstill.federation.run import rehearsed
from fedstill.logbook.reader import read_run
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.runs.recipes import prepared
from small_recipes import fedstill as command

SHIPPED = (Path(__file__).parents[1] / "recipes", Path(str(fedstill.__file__)).parent / "recipes")
RECIPES = [path for folder in SHIPPED for path in sorted(folder.rglob("*.toml"))]
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECIPES]
WORLD = ("data", "models", "federation", "privacy")  # the tables beside a run's method


@cache
def quick(path: Path) -> tuple[Recipe, ...]:
    return tuple(checked(read_recipe(path, quick=True)))


def kind(value: Any) -> Hashable:
    """A value with its numbers forgotten, but for whether one is zero: that switches things off."""
    if isinstance(value, Mapping):
        return frozenset((name, kind(each)) for name, each in value.items() if name != "label")
    if isinstance(value, (list, tuple)):
        return tuple(kind(each) for each in value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return ("number", value == 0) if is_number else value


@cache
def sorted_out() -> tuple[dict[Path, list[Recipe]], dict[Path, list[Recipe]]]:
    """Of every recipe the quick runs to play to the end, and those to rehearse."""
    methods: set[Hashable] = set()
    played = {path: _new(path, methods, ("method",)) for path in RECIPES}
    played = {path: found or [quick(path)[0]] for path, found in played.items()}
    both = {
        kind(_tables(recipe, ("method", *WORLD))) for some in played.values() for recipe in some
    }
    return played, {path: _new(path, both, ("method", *WORLD)) for path in RECIPES}


def _new(path: Path, known: set[Hashable], names: tuple[str, ...]) -> list[Recipe]:
    """The quick runs of a recipe whose tables of these names are of a kind not known before."""
    found = []
    for recipe in quick(path):
        described = kind(_tables(recipe, names))
        if described not in known:
            known.add(described)
            found.append(recipe)
    return found


def _tables(recipe: Recipe, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: table for name, table in recipe.as_tables().items() if name in names}


def test_there_are_recipes_of_every_paper() -> None:
    assert {path.parent.name for path in RECIPES} >= {
        "desa", "dfrd", "feddm", "fedlgd", "feddualmatch"
    }  # fmt: skip


def test_no_two_recipes_have_the_same_name() -> None:
    names = [read_recipe(path)["run"]["name"] for path in RECIPES]
    assert len({*names}) == len(names)


def printed(table: Mapping[str, Any]) -> Iterator[float]:
    """The numbers of a table and of those below it."""
    for value in table.values():
        if isinstance(value, Mapping):
            yield from printed(value)
        elif not isinstance(value, str):
            yield value


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_is_sound_and_says_where_it_comes_from(path: Path) -> None:
    tables = read_recipe(path)
    recipes = checked(tables)
    assert tables["about"]["source"].strip()
    assert {*tables.get("reported", {})} <= {recipe.label for recipe in recipes}
    for table in tables.get("reported", {}).values():
        assert table["source"].strip()
        assert all(0 < value < 100 for value in printed(table))


def test_quick_runs_of_every_method_and_of_every_recipe_are_played() -> None:
    played, rehearsals = sorted_out()
    everything = {recipe.method.__class__ for path in RECIPES for recipe in quick(path)}
    assert {recipe.method.__class__ for some in played.values() for recipe in some} == everything
    assert all(played.values())
    for path in RECIPES:
        assert not {each.label for each in played[path]} & {each.label for each in rehearsals[path]}


def test_runs_that_differ_in_numbers_alone_are_of_one_kind() -> None:
    tables = {"method": {"name": "fedprox", "label": "a", "mu": 0.1}, "models": {"hidden": [8, 4]}}
    other = {"method": {"name": "fedprox", "label": "b", "mu": 1.0}, "models": {"hidden": [6, 3]}}
    off = {"method": {"name": "fedprox", "label": "a", "mu": 0.0}, "models": {"hidden": [8, 4]}}
    deeper = {**tables, "models": {"hidden": [8, 4, 2]}}
    assert kind(tables) == kind(other)
    assert len({kind(tables), kind(off), kind(deeper)}) == 3


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_its_quick_variant_runs_to_the_end_without_a_data_folder(
    path: Path, tmp_path: Path
) -> None:
    out, cache_dir = tmp_path / "run", tmp_path / "cache"
    played, rehearsals = (some[path] for some in sorted_out())
    only = [word for recipe in played for word in ("--only", recipe.label)]
    places = (f"run.cache_dir={cache_dir}", "--out", out)
    said = command("run", path, "--quick", "run.pictures=false", *places, *only)
    assert said.code == 0, said.err
    for recipe in played:
        run = read_run(out / recipe.label if len(played) > 1 else out)
        assert (run.summary["status"], run.summary["data"]) == ("finished", "digits5")
        assert run.summary["rounds"] <= 3
    for recipe in rehearsals:
        with prepared(replace(recipe, run=replace(recipe.run, cache_dir=str(cache_dir)))) as made:
            rehearsed(Rehearsal(made.experiment, made.execution))
