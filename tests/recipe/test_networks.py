"""The networks of a recipe: read once, by name or reference, for the data they meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RecipeError
from fedstill.models import ConvNet, Module
from fedstill.recipe import checked, read_recipe
from fedstill.recipe.networks import read_networks

NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, classes, width=4, sides=(8, 8)):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], width))
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.body(x).relu())

def wide(channels, classes):
    return Net(channels, classes, width=9)

seven = 7
"""
SHAPE = (1, 8, 8)


@pytest.fixture
def nets(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(NETS)
    return str(tmp_path / "nets.py")


def read(table: Any) -> Any:
    faults: list[str] = []
    networks = read_networks(table, faults)
    if faults:
        raise RecipeError(faults)
    return networks


def test_a_module_is_built_from_the_recipes_arguments_and_what_the_data_say(nets: str) -> None:
    table = {"name": f"{nets}:Net", "channels": "{channels}", "classes": "{classes}", "width": 6,
             "sides": ["{height}", "{width}"]}  # fmt: skip
    model = read(table).common.model(SHAPE, 3)
    assert isinstance(model, Module) and model.title == "Net"
    assert model.initial()["body.1.weight"].shape == (6, 64)
    assert model.initial()["fc.weight"].shape == (3, 6)
    assert model == read(table).common.model(SHAPE, 3)


def test_a_function_may_build_the_module_and_options_of_the_wrapping_stand_apart(nets: str) -> None:
    table = {"name": f"{nets}:wide", "channels": 1, "classes": 5,
             "module": {"fresh_head": True, "head_layer": "fc"}}  # fmt: skip
    model = read(table).common.model(SHAPE, 3)
    assert model.initial()["fc.weight"].shape == (3, 9)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"name": "none.py:Net"}, r"models\.name: no file .*none\.py"),
        ({"name": "{nets}:Nett"}, r"models\.name: .*unknown name 'Nett'; did you mean 'Net'"),
        ({"name": "{nets}:seven"}, r"seven is a int, not a torch\.nn\.Module class"),
        ({"name": "convent"}, r"models\.name: unknown model 'convent'; did you mean 'convnet'"),
        ({"widht": 5}, r"models\.widht: unknown argument 'widht'; did you mean 'width'"),
        ({"channels": None}, r"models\.channels is missing.*\{classes\}, \{channels\}"),
        ({"module": {"head": "fc"}}, r"models\.module\.head: unknown key"),
        ({"module": {"start": "old"}}, r"models\.module\.start = 'old'"),
    ],
)
def test_faults_are_those_of_a_recipe(nets: str, change: dict[str, Any], fault: str) -> None:
    table = {"name": f"{nets}:Net", "channels": 1, "classes": 3, **change}
    table = {k: v.replace("{nets}", nets) if k == "name" else v for k, v in table.items()}
    with pytest.raises(RecipeError, match=fault):
        read({k: v for k, v in table.items() if v is not None})


def test_what_only_shows_when_it_is_built_names_the_table(nets: str) -> None:
    with pytest.raises(RecipeError, match=r"^models: .*Net: gives 4 logits for 3 classes"):
        read({"name": f"{nets}:Net", "channels": 1, "classes": 4}).common.model(SHAPE, 3)
    table = {"name": f"{nets}:Net", "channels": "{height}", "classes": 3}
    with pytest.raises(RecipeError, match="stands for the second side, but examples are 4"):
        read(table).common.model((4,), 3)


def test_tables_of_clients_change_those_before_them(nets: str) -> None:
    networks = read({
        "name": "convnet", "width": 8, "depth": 1,
        "cycle": [{}, {"name": f"{nets}:Net", "channels": 1, "classes": 3}],
        "clients": {"c": {"depth": 2}, "d": {"width": 7}},
    })  # fmt: skip
    models = networks.models(["a", "b", "c", "d"], SHAPE, 3)
    assert models["a"] == ConvNet(SHAPE, 3, 1, 8) and models["c"] == ConvNet(SHAPE, 3, 2, 8)
    assert models["b"].options()["channels"] == 1
    assert networks.common.model(SHAPE, 3) == models["a"]
    with pytest.raises(RecipeError, match="unknown client 'c'"):
        networks.models(["a"], SHAPE, 3)


RECIPE = """
[data]
name = "digits5"
[models]
name = "nets.py:Net"
channels = 3
classes = 10
[[method]]
name = "methods/mine.py:Mine"
[about]
text = "nets.py:Net stays here as it is written"
[quick]
"models.name" = "nets.py:wide"
"""


def test_files_of_a_recipe_are_found_beside_it_and_written_down_for_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "methods" / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom fedstill.methods.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    'Mine.'\n    gain: float = 2.0\n"
    )
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir("/")
    (recipe,) = checked(read_recipe(tmp_path / "recipe.toml", ["method.gain=3.0"]))
    assert recipe.label == "Mine" and recipe.method.gain == 3.0  # type: ignore[attr-defined]
    tables = recipe.as_tables()
    assert tables["models"]["name"] == f"{tmp_path / 'nets.py'}:Net"
    assert tables["method"]["name"] == f"{tmp_path / 'methods' / 'mine.py'}:Mine"
    assert tables["about"]["text"].startswith("nets.py:Net")
    (again,) = checked(tables)
    assert type(again.method) is type(recipe.method) and again.method == recipe.method
    quick = read_recipe(tmp_path / "recipe.toml", quick=True)
    assert quick["models"]["name"] == f"{tmp_path / 'nets.py'}:wide"


def test_a_file_named_on_the_command_line_lies_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "recipe.toml").write_text('[data]\nname = "digits5"\n[method]\nname = "fedavg"\n')
    monkeypatch.chdir(tmp_path / "inner")
    tables = read_recipe(tmp_path / "recipe.toml", ["models.name=nets.py:Net"])
    assert tables["models"]["name"] == f"{tmp_path / 'inner' / 'nets.py'}:Net"
