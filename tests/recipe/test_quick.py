"""The quick variant of a recipe: which values change, for whom, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RecipeError
from fedstill.data import Dirichlet, Iid
from fedstill.recipe.check import checked
from fedstill.recipe.read import overridden, quickened, read_recipe

BASE: dict[str, Any] = {
    "run": {"name": "long", "rounds": 20},
    "data": {"name": "mnist", "partition": {"kind": "dirichlet", "clients": 10, "alpha": 0.1}},
    "method": [
        {"name": "fedavg", "epochs": 10},
        {"name": "feddm", "steps": 300},
        {"name": "feddm", "label": "feddm-0.1", "steps": 300, "radius": 3.0},
    ],
    "reported": {"fedavg": {"average": 90.0}},
}


def quick(**changes: Any) -> dict[str, Any]:
    """The tables of the variant with these changes; a dot is written as two underscores."""
    return quickened({**BASE, "quick": {k.replace("__", "."): v for k, v in changes.items()}})


def refused(tables: dict[str, Any], *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        checked(overridden(quickened(tables) if "quick" in tables else tables, overrides))
    return error.value.faults


def test_values_change_in_the_variant_alone_and_no_fault_is_left():
    made = quick(run__rounds=1, data__name="digits5", data__partition__clients=3)
    (first, *_) = checked(made)
    assert (first.run.rounds, first.data.name) == (1, "digits5")
    assert first.data.partition == Dirichlet(clients=3, alpha=0.1)
    assert BASE["run"]["rounds"] == 20 and BASE["data"]["partition"]["clients"] == 10


def test_without_asking_the_table_changes_nothing_and_is_not_written_down():
    with_table = checked({**BASE, "quick": {"run.rounds": 1}})
    assert with_table == checked(BASE)
    assert "quick" not in with_table[0].as_tables()


def test_the_variant_has_its_own_name_and_no_reported_numbers():
    (first, *_) = checked(quick(run__rounds=1))
    assert first.run.name == "long-quick" and first.reported == {}
    assert checked(quick(run__name="tiny"))[0].run.name == "tiny"
    nameless = {k: v for k, v in BASE.items() if k != "run"} | {"quick": {"run.rounds": 1}}
    assert checked(quickened(nameless))[0].run.name == "run-quick"


def test_a_key_of_method_reaches_those_that_have_it():
    made = quick(method__steps=2, method__epochs=1)
    assert made["method"] == [
        {"name": "fedavg", "epochs": 1},
        {"name": "feddm", "steps": 2},
        {"name": "feddm", "label": "feddm-0.1", "steps": 2, "radius": 3.0},
    ]


def test_a_key_that_none_of_them_has_is_passed_over_if_another_method_has_it():
    assert quick(method__samplings=1)["method"] == BASE["method"]


def test_a_label_addresses_one_method_even_with_dots_in_it():
    changes = {"method.feddm.steps": 2, "method.feddm-0.1.steps": 3}
    made = quickened({**BASE, "quick": changes})["method"]
    assert [table.get("steps") for table in made] == [None, 2, 3]


def test_unset_takes_a_key_away_and_is_no_fault_where_there_is_none():
    made = quick(data__partition="unset", data__options="unset", data__name="digits5")
    assert made["data"] == {"name": "digits5"}
    assert "radius" not in quick(method__radius="unset")["method"][2]


def test_keys_without_quotes_are_the_same(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        'data.name = "mnist"\ndata.partition = {kind = "iid", clients = 9}\n'
        'method.name = "fedavg"\n[quick]\nrun.rounds = 2\ndata.partition.clients = 3\n'
        '"data.name" = "digits5"\n'
    )
    (recipe,) = checked(read_recipe(path, quick=True))
    assert (recipe.run.rounds, recipe.data.name) == (2, "digits5")
    assert recipe.data.partition == Iid(clients=3)
    assert checked(read_recipe(path))[0].run.rounds == 10


def test_overrides_come_after_the_quick_table(tmp_path: Path):
    path = tmp_path / "small.toml"
    path.write_text('data.name = "digits5"\nmethod.name = "fedavg"\n[quick]\n"run.rounds" = 2\n')
    assert checked(read_recipe(path, ["run.rounds=4"], quick=True))[0].run.rounds == 4


FAULTS = [
    ("run.ronds", 1, "quick: run.ronds: unknown key 'ronds'; did you mean 'rounds'?"),
    ("run.rounds", 0, "quick: run.rounds = 0: must be at least 1"),
    ("runs.rounds", 1, "quick: unknown table 'runs'; did you mean 'run'?"),
    ("rounds", 1, "quick: rounds: say which table, e.g. run.rounds=…"),
    ("run.name.more", 1, "quick: run.name.more: run.name.more is not a table"),
    ("quick.run.rounds", 1, "quick: quick.run.rounds: what stands in [quick] is not changed"),
    ("data.name", "digit5", "quick: data.name: unknown data set 'digit5'; did you mean 'digits5'?"),
    ("data.name", "unset", "quick: data.name is missing"),
    ("method.setps", 1, "quick: method.setps: unknown key 'setps'; did you mean 'steps'?"),
    ("method.steps", -1, "quick: method[1].steps = -1: must be at least 0"),
    ("method.fedavgg.lr", 1, "unknown label 'fedavgg'; did you mean 'fedavg'?"),
    ("method.fedavg.steps", 1, "quick: method[0].steps: unknown key 'steps'"),
]


@pytest.mark.parametrize(("key", "value", "says"), FAULTS)
def test_a_fault_of_the_table_is_named_with_the_nearest_word(key, value, says):
    faults = refused({**BASE, "quick": {key: value}})
    assert any(says in line for line in faults), faults


def test_faults_of_the_recipe_itself_are_reported_beside_those_of_the_table():
    faults = refused({**BASE, "run": {"ronds": 3}, "quick": {"run.seed": -1}})
    assert len(faults) == 2
    assert faults[0].startswith("run.ronds") and faults[1].startswith("quick: run.seed")


@pytest.mark.parametrize("table", [None, 3])
def test_a_recipe_without_the_table_has_no_quick_variant(table):
    with pytest.raises(RecipeError, match=r"no table \[quick\]"):
        quickened(BASE if table is None else {**BASE, "quick": table})


def test_an_override_reaches_the_methods_that_have_the_key_or_is_a_fault():
    made = overridden(BASE, ["method.steps=7", "method.feddm-0.1.radius=9", "method.lr=0.5"])
    assert [table.get("steps") for table in made["method"]] == [None, 7, 7]
    assert [table.get("radius") for table in made["method"]] == [None, None, 9]
    assert [table.get("lr") for table in made["method"]] == [0.5, None, None]
    faults = refused(BASE, "method.samplings=1")
    assert len(faults) == 3 and all("unknown key 'samplings'" in line for line in faults)
    assert (
        "unknown label 'fedmd'; did you mean 'feddm'?" in refused(BASE, "method.fedmd.steps=1")[0]
    )


def test_an_override_does_not_reach_into_the_quick_table():
    (fault,) = refused(BASE, "quick.run.rounds=1")
    assert "change the key it names" in fault
