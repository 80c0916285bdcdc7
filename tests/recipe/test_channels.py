"""Channels in a recipe: read, refused with all faults, written out, played and resumed."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstill.channels import EightBit, TopK
from fedstill.core.errors import RecipeError
from fedstill.recipe.build import experiment_of
from fedstill.recipe.check import checked
from fedstill.recipe.toml import toml_text
from small_recipes import fedstill, last_weights, metrics, tables, write_recipe

ROW: list[dict[str, Any]] = [{"name": "top_k", "share": 0.2, "least": 8}, {"name": "eight_bit"}]


def with_channels(folder: Path, *channels: Any) -> dict[str, Any]:
    return tables(folder, federation={"channel": list(channels)})


def test_channels_are_read_in_order_and_reach_the_experiment(tmp_path: Path) -> None:
    text = """
[[federation.channel]]
name = "top_k"
share = 0.2
least = 8

[[federation.channel]]
name = "eight_bit"
per = "row"
directions = ["up", "peer"]
"""
    made = {**tables(tmp_path), **tomllib.loads(text)}
    (recipe,) = checked(made)
    row = (TopK(share=0.2, least=8), EightBit(per="row", directions=("up", "peer")))
    assert recipe.federation.channel == row
    assert experiment_of(recipe).channels == row


def test_a_recipe_with_channels_is_written_out_and_read_back_to_the_same(tmp_path: Path) -> None:
    (recipe,) = checked(with_channels(tmp_path, *ROW))
    written = toml_text(recipe.as_tables())
    assert checked(tomllib.loads(written)) == [recipe]
    assert tomllib.loads(written)["federation"]["channel"][0]["feedback"] is True


def test_without_channels_nothing_is_written_of_them(tmp_path: Path) -> None:
    (recipe,) = checked(tables(tmp_path))
    assert "channel" not in recipe.as_tables()["federation"]
    assert checked(with_channels(tmp_path))[0].federation == recipe.federation


def test_all_faults_of_channels_are_told_at_once(tmp_path: Path) -> None:
    wrong = with_channels(
        tmp_path,
        {"name": "eigth_bit"},
        {"share": 0.5},
        {"name": "top_k", "share": 2, "sahre": 0.1},
        {"name": "half", "directions": ["upp"]},
        "half",
    )
    wrong["run"]["round"] = 3
    with pytest.raises(RecipeError) as refused:
        checked(wrong)
    lines = refused.value.faults
    assert [line for line in lines if line.startswith("run.round")]
    told = "\n".join(lines)
    for part in (
        "federation.channel[0].name: unknown channel 'eigth_bit'; did you mean 'eight_bit'?",
        "federation.channel[1].name is missing; known: eight_bit, half, low_rank, top_k",
        "federation.channel[2].share = 2.0: must be in (0, 1]",
        "federation.channel[2].sahre: unknown key 'sahre'; did you mean 'share'?",
        "federation.channel[3]: directions: unknown direction 'upp'; did you mean 'up'?",
        "federation.channel[4].name is missing",
    ):
        assert part in told


def test_a_table_in_place_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"headed \[\[federation.channel\]\], not"):
        checked(tables(tmp_path, federation={"channel": {"name": "half"}}))


def test_a_field_that_the_method_does_not_send_is_refused_by_its_key(tmp_path: Path) -> None:
    (recipe,) = checked(with_channels(tmp_path, {"name": "half", "leave": ["image"]}))
    with pytest.raises(RecipeError, match=r"federation\.channel\[0\]\.leave: unknown field"):
        experiment_of(recipe)


def said(folder: Path) -> int:
    with (folder / "messages.csv").open() as file:
        return sum(int(row["bytes"]) for row in csv.DictReader(file))


def test_a_run_with_channels_says_less_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "coded", federation={"channel": ROW})
    plain = write_recipe(tmp_path / "plain")
    for path, out in ((recipe, "straight"), (plain, "whole")):
        assert fedstill("run", path, "--out", tmp_path / out).code == 0
    assert said(tmp_path / "straight") < said(tmp_path / "whole")
    half = fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "resumed")
    assert half.code == 0, half.err
    assert any("channels" in name for name in last_weights(tmp_path / "resumed"))
    again = fedstill("resume", tmp_path / "resumed", "run.rounds=3")
    assert again.code == 0, again.err
    assert last_weights(tmp_path / "resumed") == last_weights(tmp_path / "straight")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "straight")


SIGNS = """
from dataclasses import dataclass
import torch
from fedstill.channels import TensorChannel

@dataclass(frozen=True)
class Signs(TensorChannel):
    scale: float = 1.0

    def encode(self, tensor, rng):
        return {"signs": tensor.sign().to(torch.int8), "size": self.scale * tensor.abs().mean()}

    def decode(self, parts, shape):
        return parts["signs"] * parts["size"]
"""


def test_a_channel_of_ones_own_is_named_by_its_file_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "signs.py").write_text(SIGNS)
    own = {"name": "signs.py:Signs", "scale": 0.5}
    recipe = write_recipe(tmp_path, run={"rounds": 1}, federation={"channel": [own]})
    done = fedstill("run", recipe, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    again = fedstill("resume", tmp_path / "run", "run.rounds=2")
    assert again.code == 0, again.err
    wrong = with_channels(tmp_path, {"name": f"{tmp_path / 'signs.py'}:dataclass"})
    with pytest.raises(RecipeError, match=r"federation\.channel\[0\]\.name: .* not a subclass"):
        checked(wrong)


def test_a_run_does_not_go_on_with_other_channels(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, run={"rounds": 1}, federation={"channel": ROW})
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    changed = 'federation.channel=[{name = "half"}]'
    refused = fedstill("resume", tmp_path / "run", "run.rounds=2", changed)
    assert refused.code != 0 and "federation.channel was" in refused.err
