"""Recipes: overrides, defaults written out, and what decides the numbers."""

from __future__ import annotations

import datetime
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import RecipeError
from fedstill.methods import METHODS
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedprox import FedProx
from fedstill.methods.moon import Moon
from fedstill.recipe.build import experiment_of
from fedstill.recipe.check import checked
from fedstill.recipe.read import overridden, read_recipe
from fedstill.recipe.toml import toml_text
from fedstill.runs import digest as digests
from fedstill.runs.digest import decisive, differences
from small_recipes import tables, write_recipe

BASE: dict[str, Any] = {"data": {"name": "digits5"}, "method": {"name": "fedavg"}}


def test_an_override_is_toml_or_plain_text():
    changes = ["run.rounds=5", "method.lr=1e-2", "method.name=feddm", "run.pictures=false",
               "data.partition.alpha=0.1", 'run.name="5"', "models.hidden=[8, 4]"]  # fmt: skip
    made = overridden(BASE, changes)
    assert made["run"] == {"rounds": 5, "pictures": False, "name": "5"}
    assert made["method"] == {"name": "feddm", "lr": 0.01}
    assert made["data"] == {"name": "digits5", "partition": {"alpha": 0.1}}
    assert made["models"] == {"hidden": [8, 4]}
    assert BASE["method"] == {"name": "fedavg"}, "what is given stays as it was"


def test_an_override_of_method_reaches_every_method():
    two = {**BASE, "method": [{"name": "fedavg"}, {"name": "fedprox"}]}
    recipes = checked(overridden(two, ["method.lr=0.5"]))
    assert [(recipe.label, recipe.method.lr) for recipe in recipes] == [
        ("fedavg", 0.5), ("fedprox", 0.5),
    ]  # fmt: skip


def test_all_faults_of_all_overrides_are_reported_at_once():
    with pytest.raises(RecipeError) as error:
        overridden(BASE, ["rounds=3", "x", "data.name.x=1"])
    assert len(error.value.faults) == 3


def test_defaults_are_written_out_and_read_back_to_the_same_recipe():
    text = {"about": {"day": datetime.date(2024, 2, 29), "été": 'a "b" \\ \x7f \t'}}
    (recipe,) = checked({**BASE, **text, "models": {"name": "convnet", "cycle": [{"width": 8}]}})
    again = checked(tomllib.loads(toml_text(recipe.as_tables())))
    assert again == [recipe]
    assert recipe.as_tables()["method"]["weighting"] == "examples"


values = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_tables_written_as_toml_are_read_back(table):
    # A lone surrogate cannot be written to a file; nothing else is left out.
    text = toml_text({"table": table})
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert tomllib.loads(text) == {"table": table}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_small_values_for_a_quick_look(name):
    data = {"name": "digits5", "public": {"name": "fashion-mnist"}}
    (recipe,) = checked({"data": data, "method": {"name": name, "preset": "small"}})
    kind = METHODS[name]
    assert recipe.method == kind(**kind.presets["small"]) != kind()


def test_a_preset_is_taken_first_and_values_after_it():
    (recipe,) = checked({**BASE, "method": {"name": "feddm", "preset": "paper", "steps": 7}})
    assert (recipe.method.steps, recipe.method.pixel_lr) == (7, 1.0)
    assert "preset" not in recipe.as_tables()["method"]


DFRD: dict[str, Any] = {"name": "dfrd", "iterations": 1}


@pytest.mark.parametrize(
    ("base", "overrides", "made"),
    [
        (None, [], FedAvg()),
        ("fedprox", [], FedProx()),
        ({"name": "fedprox", "mu": 0.5}, [], FedProx(mu=0.5)),
        ({"lr": 0.5}, [], FedAvg(lr=0.5)),
        ("fedprox", ["method.base.mu=0.5"], FedProx(mu=0.5)),
        (None, ["method.base.lr=1"], FedAvg(lr=1.0)),
        (None, ["method.base=fedprox", "method.base.mu=0.5"], FedProx(mu=0.5)),
        ({"lr": 0.5}, ["method.base=fedprox"], FedProx()),
        (
            {"name": "moon", "preset": "cifar10", "mu": 2},
            [],
            Moon(mu=2.0, epochs=10, batch_size=64),
        ),
    ],
)
def test_a_base_method_is_a_name_or_a_table_and_is_written_out(base, overrides, made):
    method = DFRD if base is None else {**DFRD, "base": base}
    (recipe,) = checked(overridden({**BASE, "method": method}, overrides))
    assert recipe.method.base == made
    tables = recipe.as_tables()
    assert tables["method"]["base"]["lr"] == made.lr
    assert checked(tomllib.loads(toml_text(tables))) == [recipe]


def test_a_table_without_a_name_changes_the_base_of_the_preset():
    method = {"name": "fedftg", "preset": "paper", "base": {"epochs": 2}}
    (recipe,) = checked({**BASE, "method": method})
    assert recipe.method.base == FedAvg(
        lr=0.1, epochs=2, batch_size=50, weight_decay=1e-3, rate_decay=0.998, clip=10.0
    )


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("fedavgg", "method.base.name: unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("local", "method: base = Local: its server keeps no model that could be taught"),
        ({"lrr": 1}, "method.base.lrr: unknown key 'lrr'; did you mean 'lr'?"),
        ({"nam": 1}, "method.base.nam: unknown key 'nam'; did you mean 'name'?"),
        ({"name": "fedprox", "mu": -1}, "method.base.mu = -1.0: must be at least 0"),
        ({"label": "x"}, "method.base.label: unknown key 'label'"),
        (3, "method.base must be the name of a method or its table, not 3"),
        (["fedavg"], "method.base must be the name of a method or its table"),
    ],
)
def test_a_wrong_base_is_refused_by_its_key(base, said):
    with pytest.raises(RecipeError) as error:
        checked({**BASE, "method": {**DFRD, "base": base}})
    (line,) = error.value.faults
    assert line.startswith(said)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "", " "])
def test_the_name_of_a_run_leads_to_no_folder_but_under_runs(name):
    with pytest.raises(RecipeError) as error:
        checked({**BASE, "run": {"name": name}})
    (line,) = error.value.faults
    assert line.startswith(f"run.name = {name!r}: the name of a folder under runs")
    assert checked({**BASE, "run": {"name": "tables/one..two"}})[0].run.name == "tables/one..two"


def test_a_part_of_the_grid_that_stands_alone_is_told_where_it_belongs():
    with pytest.raises(RecipeError) as error:
        checked({**BASE, "sweep": {"method.lr": [0.1, 0.2]}})
    assert error.value.faults == [
        "unknown table 'sweep': it belongs to the grid; its name is grid.sweep"
    ]


def test_the_values_of_a_base_decide_the_numbers():
    one, other = (checked({**BASE, "method": {**DFRD, "base": {"lr": lr}}})[0] for lr in (0.1, 0.2))
    assert differences(decisive(one), decisive(other)) == ["method.base.lr was 0.1, not 0.2"]


def test_whole_numbers_stand_for_floats_and_lists_for_tuples():
    (recipe,) = checked({**BASE, "method": {"name": "fedavg", "lr": 1}})
    assert recipe.method.lr == 1.0 and isinstance(recipe.method.lr, float)
    (recipe,) = checked({**BASE, "models": {"name": "mlp", "hidden": [3, 4]}})
    assert recipe.models.common.options["hidden"] == (3, 4)


def test_reported_numbers_belong_to_all_methods_or_to_those_named():
    (recipe,) = checked({**BASE, "reported": {"average": 0.9}})
    assert recipe.reported == {"average": 0.9}
    methods = [{"name": "fedavg"}, {"name": "fedprox"}]
    two = checked({**BASE, "method": methods, "reported": {"fedprox": {"average": 0.8}}})
    assert [recipe.reported for recipe in two] == [{}, {"average": 0.8}]


def test_reported_scores_by_client_are_no_method_of_that_name():
    own = {"inter_accuracy_by_client": {"a": 51.0}}
    (recipe,) = checked({**BASE, "reported": own})
    assert recipe.reported == own
    (again,) = checked(recipe.as_tables())
    assert again.reported == own
    (named,) = checked({**BASE, "reported": {recipe.label: own}})
    assert named.reported == own


def test_a_mistyped_score_by_client_is_named():
    wrong = {"fedavg": {"inter_acuracy_by_client": {"a": 51.0}}}
    with pytest.raises(
        RecipeError, match=r"reported\.fedavg\.inter_acuracy.*did you mean 'inter_a"
    ):
        checked({**BASE, "reported": wrong})


def test_the_digest_knows_what_decides_the_numbers(tmp_path):
    path = write_recipe(tmp_path)

    def digest(*changes: str) -> str:
        (recipe,) = checked(read_recipe(path, changes))
        return digests.digest(decisive(recipe), experiment_of(recipe).population)

    same = ["run.rounds=9", "run.name=x", "run.device=auto", "run.evaluate_every=2",
            "method.label=x", "engine.name=batched", "about.note=x"]  # fmt: skip
    assert {digest(change) for change in same} == {digest()}
    other = ["run.seed=1", "method.lr=0.1", "models.hidden=[7]", "federation.sample=2",
             "data.size=10"]  # fmt: skip
    assert len({digest(change) for change in other} | {digest()}) == len(other) + 1


def test_differences_name_each_value_that_changed():
    before, now = {"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 1, "y": 4}, "c": 5}
    assert differences(before, now) == [
        "a.y was 2, not 4", "b was 3, not unset", "c was unset, not 5",
    ]  # fmt: skip
    (recipe,) = checked(BASE)
    assert differences(decisive(recipe), decisive(recipe)) == []


def models_of(recipe: Any) -> Any:
    return experiment_of(recipe).population.models


def test_networks_go_by_name_else_in_turn_else_the_common_one(tmp_path):
    made = tables(tmp_path, method={"name": "local"})
    made["models"] = {
        "name": "mlp", "hidden": [6], "cycle": [{}, {"hidden": [5]}],
        "clients": {"west": {"name": "convnet", "width": 4, "depth": 1, "hidden": [6]}},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"models.clients.west.hidden: unknown key"):
        checked(made)
    made["models"]["clients"] = {"west": {"hidden": [4]}}
    del made["method"]["lr"]
    (recipe,) = checked(made)
    widths = {name: model.describe()["hidden"] for name, model in models_of(recipe).items()}
    assert widths == {"east": (6,), "north": (5,), "west": (4,)}


def test_options_of_one_network_are_not_given_to_another(tmp_path):
    made = tables(tmp_path)
    made["method"] = {"name": "local"}
    small = {"name": "convnet", "width": 4, "depth": 1}
    made["models"] = {"name": "mlp", "hidden": [6], "clients": {"west": small}}
    (recipe,) = checked(made)
    names = {name: model.describe()["name"] for name, model in models_of(recipe).items()}
    assert names == {"east": "mlp", "north": "mlp", "west": "convnet"}
    made["models"] = {"name": "mlp", "cycle": [small], "clients": {"west": {"hidden": [6]}}}
    with pytest.raises(RecipeError, match="models: a convnet has no key 'hidden'"):
        experiment_of(checked(made)[0])


@pytest.mark.parametrize(("clients", "crosswise"), [(30, True), (31, False)])
def test_beyond_thirty_clients_each_model_is_scored_on_its_own(clients: int, crosswise: bool):
    split = {"name": "digits5", "partition": {"kind": "iid", "clients": clients}}
    (recipe,) = checked({**BASE, "data": split})
    assert experiment_of(recipe).scores_crosswise == crosswise
    (recipe,) = checked({**BASE, "data": split, "run": {"scores": "own"}})
    assert not experiment_of(recipe).scores_crosswise


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"name": "lanes", "lanes": 4}, {"name": "streams", "streams": 4}),
        ({"lanes": 2}, {"streams": 2}),
    ],
)
def test_older_words_for_an_engine_mean_todays(old: dict[str, Any], new: dict[str, Any]):
    (before,), (now,) = (checked({**BASE, "engine": table}) for table in (old, new))
    assert before == now
    assert "lanes" not in toml_text(before.as_tables())
    with pytest.raises(RecipeError, match=r"engine.lanes is the older word for engine.streams"):
        checked({**BASE, "engine": {**old, **new}})
