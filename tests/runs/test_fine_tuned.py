"""Fine-tuning by a recipe: the base in its own table, pictures of the server's images, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstill.logbook.reader import read_run
from fedstill.recipe.toml import toml_text
from fedstill.runs import recipes as runs
from small_recipes import CONVNET, fedstill, images_recipe, last_weights, tables

LITTLE: dict[str, Any] = {
    "base": {"name": "fedprox", "lr": 0.05, "batch_size": 8}, "iterations": 2,
    "generator_steps": 2, "generator_batch": 8, "generator_width": 4, "latent": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", ["dfrd", "dense", "fedftg"])
def test_a_run_goes_to_its_end_and_logs_a_curve_of_the_generator(tmp_path: Path, name: str) -> None:
    recipe = images_recipe(tmp_path, {"name": name, **LITTLE}, rounds=2, pictures=True)
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    found = read_run(tmp_path / "run")
    assert len(found.series("generator_loss", node="server", step="aggregate")) == 2
    assert '[method.base]\nname = "fedprox"' in (tmp_path / "run" / "recipe.toml").read_text()
    drawn = {path.name for path in (tmp_path / "run" / "pictures").glob("synthetic-server*")}
    at_the_end, on_the_way = "synthetic-server.png", "synthetic-server-round-001.png"
    assert drawn == (set() if name == "dense" else {at_the_end, on_the_way})  # it keeps none


def test_the_generators_loss_and_its_terms_are_drawn_over_rounds(tmp_path: Path) -> None:
    recipe = images_recipe(tmp_path, {"name": "dfrd", **LITTLE}, rounds=2)
    fedstill("run", recipe, "--out", tmp_path / "run")
    names = ["generator_loss", "distil_loss", "fidelity", "transferability", "diversity"]
    asked = [word for name in names for word in ("--of", name)]
    picture = tmp_path / "losses.png"
    said = fedstill(
        "curves", tmp_path / "run", *asked, "--picture", picture, "--format", "json"
    )  # fmt: skip
    assert said.code == 0, said.err
    rows = json.loads(said.out)
    assert [row["round"] for row in rows] == [1, 2]
    series = read_run(tmp_path / "run").series("fidelity", step="aggregate")
    assert [row["fidelity"] for row in rows] == [series[1], series[2]]
    assert picture.stat().st_size > 10_000
    assert "unknown number 'fidelty'" in fedstill("curves", tmp_path / "run", "--of", "fidelty").err


def test_a_killed_run_goes_on_with_its_generators(tmp_path: Path) -> None:
    recipe = images_recipe(tmp_path, {"name": "dfrd", **LITTLE}, rounds=3)
    fedstill("run", recipe, "--out", tmp_path / "whole")
    fedstill("run", recipe, "run.rounds=2", "--out", tmp_path / "parts")
    runs.resume(tmp_path / "parts", ["run.rounds=3"])
    whole, parts = (last_weights(tmp_path / folder) for folder in ("whole", "parts"))
    assert whole == parts and whole


def test_another_base_cannot_go_on_with_a_run(tmp_path: Path) -> None:
    recipe = images_recipe(tmp_path, {"name": "dfrd", **LITTLE}, rounds=1)
    fedstill("run", recipe, "--out", tmp_path / "run")
    said = fedstill("resume", tmp_path / "run", "run.rounds=2", "method.base.mu=3")
    assert said.code == 2
    assert "method.base.mu was 0.01, not 3.0" in said.err


@pytest.mark.parametrize("name", ["dfrd", "dense", "fedftg"])
def test_show_counts_the_messages_of_the_base(name: str) -> None:
    said = fedstill("show", name, "base=scaffold", "generator_width=4", "--shape", "1x8x8")
    assert said.code == 0, said.err
    assert "control" in said.out
    assert ("label_counts" in said.out) == (name != "dense")


WEAK: list[Any] = [
    (
        {"budgets": [1.0, 1e-9, 0.5]},
        {},
        "north: convnet: rate = 1e-09 leaves block0, block1 without units",
    ),
    (
        {"budgets": [1.0, 0.25, 0.5]},
        {"norm": "group"},
        "north: convnet: norm = 'group' has four groups, and 1 of 4 channels cannot be divided",
    ),
    ({"budgets": [1.0, 0.5]}, {}, "budgets are 2 for 3 clients; give one for each of east, north"),
    ({"budgets": [1.0, 0.0, 1.0]}, {}, "budgets = [1.0, 0.0, 1.0]: each must be in (0, 1]"),
    ({}, {"name": "alexnet"}, "alexnet cannot be narrowed; use one of"),
    ({}, {"name": "conv4", "widths": [4, 4]}, "widths = [4, 4]: must be four whole numbers"),
]


@pytest.mark.parametrize("tuned", [True, False], ids=["dfrd", "alone"])
@pytest.mark.parametrize("kind", ["heterofl", "feddropout", "fedrolex"])
@pytest.mark.parametrize(("values", "network", "says"), WEAK)
def test_what_weak_clients_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, tuned: bool, kind: str, values: Any, network: Any, says: str
) -> None:
    base = {"name": kind, "batch_size": 8, **values}
    method = {"name": "dfrd", **LITTLE, "base": base} if tuned else base
    models = network if "name" in network else {**CONVNET, **network}
    made = {**tables(tmp_path), "models": models, "method": method}
    path = tmp_path / "weak.toml"
    path.write_text(toml_text(made))
    said = fedstill("run", path, "--out", tmp_path / "run")
    assert said.code == 2
    assert says in " ".join(said.err.split())
    assert not (tmp_path / "run").exists()
