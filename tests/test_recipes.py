"""Every recipe that is shipped is sound, and its quick variant runs to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.logbook.reader import read_run
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from small_recipes import fedstill as command

SHIPPED = (Path(__file__).parents[1] / "recipes", Path(str(fedstill.__file__)).parent / "recipes")
RECIPES = [path for folder in SHIPPED for path in sorted(folder.rglob("*.toml"))]
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECIPES]


def test_there_are_recipes_of_every_paper() -> None:
    assert {path.parent.name for path in RECIPES} >= {
        "desa", "dfrd", "feddm", "fedlgd", "feddualmatch"
    }  # fmt: skip


def test_no_two_recipes_have_the_same_name() -> None:
    names = [checked(read_recipe(path))[0].run.name for path in RECIPES]
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


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_its_quick_variant_runs_to_the_end_without_a_data_folder(
    path: Path, tmp_path: Path
) -> None:
    out, places = tmp_path / "run", f"run.cache_dir={tmp_path / 'cache'}"
    said = command("run", path, "--quick", "run.pictures=false", places, "--out", out)
    assert said.code == 0, said.err
    recipes = checked(read_recipe(path))
    for recipe in recipes:
        run = read_run(out / recipe.label if len(recipes) > 1 else out)
        assert (run.summary["status"], run.summary["data"]) == ("finished", "digits5")
        assert run.summary["rounds"] <= 3
