"""The table `data` is read once into objects and written back as it was."""

import tomllib
from pathlib import Path

import pytest

from fedstill.core.errors import DataError, RecipeError
from fedstill.data import Dirichlet, FromFile
from fedstill.methods.virtual import Virtual
from fedstill.recipe import checked, read_recipe
from fedstill.recipe.build import load_data
from fedstill.recipe.tables import PublicTable
from fedstill.recipe.toml import toml_text
from fedstill.runs.digest import decisive

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))
TABLES = {
    "data": {
        "name": "mnist",
        "data_dir": "somewhere",
        "partition": {"kind": "dirichlet", "alpha": 1, "clients": 10, "min_size": 10},
        "virtual": {"per_class": 3, "warm_up_steps": 7},
        "public": {"name": "usps", "count": 5, "data_dir": "elsewhere"},
        "hold_out": 0.1,
    },
    "method": {"name": "fedavg"},
}


def test_the_inner_tables_of_data_are_objects_once_a_recipe_is_checked():
    (recipe,) = checked(TABLES)
    assert recipe.data.partition == Dirichlet(clients=10, alpha=1.0, min_size=10)
    assert recipe.data.virtual == Virtual(per_class=3, warm_up_steps=7)
    assert recipe.data.public == PublicTable("usps", data_dir="elsewhere", count=5)


def test_they_are_written_back_as_they_were_with_whole_numbers_and_defaults():
    (recipe,) = checked(TABLES)
    assert toml_text({"data": recipe.as_tables()["data"]}) == (
        '[data]\nname = "mnist"\ndata_dir = "somewhere"\nhold_out = 0.1\n\n'
        '[data.partition]\nkind = "dirichlet"\nalpha = 1\nclients = 10\nmin_size = 10\n\n'
        "[data.virtual]\nper_class = 3\nwarm_up_steps = 7\n\n"
        '[data.public]\nname = "usps"\ncount = 5\ndata_dir = "elsewhere"\n'
    )


def test_a_checkpoints_digest_counts_them_as_they_were_written():
    (recipe,) = checked(TABLES)
    assert decisive(recipe)["data"] == {
        "name": "mnist",
        "partition": {"kind": "dirichlet", "alpha": 1, "clients": 10, "min_size": 10},
        "virtual": {"per_class": 3, "warm_up_steps": 7},
        "public": {"name": "usps", "count": 5},
        "hold_out": 0.1,
    }


def test_a_virtual_table_without_values_is_not_lost():
    (recipe,) = checked({**TABLES, "data": {"name": "digits5", "virtual": {}}})
    again = tomllib.loads(toml_text(recipe.as_tables()))
    assert checked(again)[0].data.virtual == Virtual()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_inner_tables_of_every_recipe_are_written_back(path):
    tables = read_recipe(path)
    inner = {k: v for k, v in tables["data"].items() if isinstance(v, dict)}
    for recipe in checked(tables):
        again = tomllib.loads(toml_text(recipe.as_tables()))["data"]
        assert {k: again[k] for k in inner} == inner
        assert checked({**tables, "data": again})[0].data == recipe.data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"partition": 3}, "data.partition must be a table, not 3"),
        ({"partition": {"clients": 3}}, "data.partition.kind is missing; known: classes-per-cl"),
        ({"partition": {"kind": "iid"}}, "data.partition.clients is missing"),
        ({"partition": {"kind": "iid", "clients": 0}}, "data.partition.clients = 0: must be at"),
        ({"partition": {"kind": "iid", "clients": 2, "alpha": 1}}, "data.partition.alpha: unkno"),
        ({"partition": {"kind": ["iid"]}}, "data.partition.kind: "),
        ({"virtual": "yes"}, "data.virtual must be a table, not 'yes'"),
        ({"virtual": {"per_class": 0}}, "data.virtual.per_class = 0: must be at least 1"),
        ({"public": {}}, "data.public.name is missing"),
        ({"public": {"name": "unsps"}}, "data.public.name: unknown data set 'unsps'"),
        ({"written": {}}, "data.written: unknown key 'written'"),
    ],
)
def test_what_is_wrong_with_an_inner_table_is_said_with_its_key(data, message):
    with pytest.raises(RecipeError) as refusal:
        checked({"data": {"name": "mnist", **data}, "method": {"name": "fedavg"}})
    assert any(fault.startswith(message) for fault in refusal.value.faults), refusal.value.faults


def test_a_recipe_may_name_a_file_of_the_partition():
    data = {"name": "mnist", "partition": {"kind": "file", "path": "split.json"}}
    (recipe,) = checked({**TABLES, "data": data})
    assert recipe.data.partition == FromFile("split.json")


def test_a_recipe_normalises_by_numbers_of_its_own():
    data = {"name": "digits5", "mean": [0], "std": [0.5]}
    (recipe,) = checked({**TABLES, "data": data})
    assert {(s.mean, s.std) for s in load_data(recipe).sites} == {((0.0,) * 3, (0.5,) * 3)}
    assert recipe.as_tables()["data"] == data


def test_a_mean_without_a_std_is_refused():
    with pytest.raises(RecipeError, match=r"data.mean and data.std stand together"):
        checked({**TABLES, "data": {"name": "digits5", "mean": [0.5]}})


def test_a_std_of_zero_is_refused():
    (recipe,) = checked({**TABLES, "data": {"name": "digits5", "mean": [0.5], "std": [0.0]}})
    with pytest.raises(DataError, match=r"data: .* std above 0"):
        load_data(recipe)
