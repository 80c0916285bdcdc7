"""Run folders: what is in them, and what does and does not change the numbers."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.core import Inbox, Node, Step, at_server
from fedstill.methods import METHODS
from fedstill.methods.fedavg import FedAvg, Global
from fedstill.recipe.build import experiment_of
from fedstill.recipe.check import checked
from fedstill.recipe.grid import grid_of
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.runs import digest as digests
from fedstill.runs import pictures
from fedstill.runs import recipes as runs
from fedstill.runs.grid import cells_of
from fedstill.runs.session import Session
from small_recipes import (
    CLIENTS,
    FEDDM,
    contents,
    fedstill,
    images_recipe,
    last_weights,
    metrics,
    tables,
    write_recipe,
)


def recipe_from(path: Path, *overrides: str) -> Recipe:
    (recipe,) = checked(read_recipe(path, overrides))
    return recipe


def test_a_graph_that_was_chosen_or_drawn_stands_in_the_folder(tmp_path):
    recipe = write_recipe(tmp_path, run={"rounds": 1})
    ring = runs.begin(recipe_from(recipe, "federation.topology=ring"), tmp_path / "ring")
    edges = (ring / "graph.csv").read_text().splitlines()
    assert edges == ["client,other", "east,north", "east,west", "north,west"]
    star = runs.begin(recipe_from(recipe), tmp_path / "star")
    assert not (star / "graph.csv").exists()


def test_a_folder_is_readable_without_this_library(tmp_path):
    folder = runs.begin(
        recipe_from(images_recipe(tmp_path, FEDDM, pictures=True)), tmp_path / "run"
    )
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    assert recipe["method"]["radius"] == 5.0  # a default, written out
    assert recipe["run"]["rounds"] == 3
    with (folder / "metrics.csv").open(newline="") as file:
        scores = [row for row in csv.DictReader(file) if row["name"] == "accuracy"]
    assert {row["target"] for row in scores} == {*CLIENTS}
    summary = json.loads((folder / "summary.json").read_text())
    last = [float(row["value"]) for row in scores if row["round"] == "3"]
    assert summary["average_accuracy"] == pytest.approx(sum(last) / 3)
    assert summary["status"] == "finished"
    environment = json.loads((folder / "environment.json").read_text())
    assert {"fedstill", "python", "torch", "numpy", "device"} <= set(environment)
    assert (folder / "partition.csv").read_text().splitlines()[1] == "east,8,8,8,24"
    with (folder / "messages.csv").open(newline="") as file:
        sent = list(csv.DictReader(file))
    ups = [int(row["floats"]) for row in sent if row["field"] == "images"]
    assert ups == [3 * 2 * 64] * 9  # three classes, two images of 8x8; three clients, three rounds
    pictures = {path.stem for path in (folder / "pictures").glob("*.png")}
    assert pictures == {
        "accuracy-by-round", "accuracy-by-bytes", "partition", *(f"synthetic-{c}" for c in CLIENTS),
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "round-00002", "round-00003",
    }  # fmt: skip


def test_clients_with_models_get_a_matrix_of_accuracies(tmp_path):
    path = write_recipe(tmp_path, method={"name": "local"}, run={"pictures": True})
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    assert (folder / "pictures" / "accuracy-matrix.png").exists()
    matrix = json.loads((folder / "summary.json").read_text())["accuracy_matrix"]
    assert matrix["models"] == matrix["test_sets"] == [*CLIENTS]


def test_two_runs_with_one_seed_are_equal_bit_for_bit(tmp_path):
    path = images_recipe(tmp_path, FEDDM)
    changes = ("run.name=other", "method.label=mine", "run.device=auto", "run.keep_checkpoints=5")
    one = runs.begin(recipe_from(path), tmp_path / "one")
    two = runs.begin(recipe_from(path, *changes), tmp_path / "deep" / "two")
    if not torch.cuda.is_available():
        assert last_weights(one) == last_weights(two)
        assert metrics(one) == metrics(two)
    three = runs.begin(recipe_from(path, "run.seed=1"), tmp_path / "three")
    assert last_weights(three) != last_weights(one)


def test_no_global_generator_decides_anything(tmp_path):
    path = write_recipe(tmp_path)
    torch.manual_seed(1)
    one = runs.begin(recipe_from(path), tmp_path / "one")
    torch.manual_seed(2)
    two = runs.begin(recipe_from(path), tmp_path / "two")
    assert last_weights(one) == last_weights(two)


@pytest.mark.parametrize("method", [{"name": "scaffold", "lr": 0.05}, FEDDM, {"name": "local"}])
def test_more_rounds_later_equal_more_rounds_at_once(tmp_path, method):
    path = images_recipe(tmp_path, method)
    half = runs.begin(recipe_from(path), tmp_path / "half")
    runs.resume(half, ["run.rounds=6"])
    whole = runs.begin(recipe_from(path, "run.rounds=6"), tmp_path / "whole")
    assert last_weights(half) == last_weights(whole)
    assert metrics(half) == metrics(whole)
    assert tomllib.loads((half / "recipe.toml").read_text())["run"]["rounds"] == 6
    assert json.loads((half / "summary.json").read_text())["rounds"] == 6


def test_a_run_that_gets_more_rounds_is_unfinished_until_they_are_played(tmp_path, monkeypatch):
    half = runs.begin(recipe_from(write_recipe(tmp_path)), tmp_path / "half")

    def stop(progress: Any) -> None:
        if progress.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.resume(half, ["run.rounds=6"], stop)
    assert "the run is not finished" in fedstill("compare", half).err
    assert "cannot end after run.rounds = 4" in fedstill("resume", half, "run.rounds=4").err
    runs.resume(half)
    assert json.loads((half / "summary.json").read_text())["rounds"] == 6


@dataclass(frozen=True)
class Sealed(FedAvg):
    """FedAvg that halves its weights at the end."""

    def after(self) -> Sequence[Step]:
        return [self.seal]

    @at_server
    def seal(self, server: Node[Global], inbox: Inbox[Any]) -> None:
        """Halve the weights."""
        server.state = Global({k: v / 2 for k, v in server.state.weights.items()})


def test_steps_after_the_last_round_cannot_be_undone_for_more_rounds(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "sealed", Sealed)
    path = write_recipe(tmp_path, method={"name": "sealed"})
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    before = contents(folder)
    said = fedstill("resume", folder, "run.rounds=6")
    assert said.code == 2
    assert "sealed has played its steps after the last one" in said.err
    assert contents(folder) == before


def test_checkpoints_are_written_as_often_as_asked_and_at_the_end(tmp_path):
    path = write_recipe(tmp_path, run={"rounds": 5, "checkpoint_every": 2, "keep_checkpoints": 9})
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["round-00000", "round-00002", "round-00004", "round-00005"]


def test_traffic_said_so_far_is_known_after_a_resume(tmp_path):
    """Also what was said before the first round, which centralised training does."""
    path = write_recipe(tmp_path, method={"name": "centralised"})
    seen: list[Any] = []

    def stop(progress: Any) -> None:
        seen.append(progress)
        if progress.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.begin(recipe_from(path), tmp_path / "run", stop)
    runs.resume(tmp_path / "run", (), seen.append)
    assert len({progress.bytes for progress in seen}) == 1
    assert seen[0].bytes > 3 * 24 * 64  # three clients' images
    assert [progress.round for progress in seen] == [0, 1, 0, 1, 2, 3]


def test_pictures_of_synthetic_images_survive_a_kill_after_the_last_round(tmp_path, monkeypatch):
    path = images_recipe(tmp_path, FEDDM, pictures=True, rounds=1)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            runs.begin(recipe_from(path), tmp_path / "run")
    runs.resume(tmp_path / "run")
    names = {path.stem for path in (tmp_path / "run" / "pictures").iterdir()}
    assert {"accuracy-by-round", "synthetic-east"} <= names


def test_folders_are_named_by_method_and_seed_only_where_there_are_several(tmp_path):
    method = tables(tmp_path)["method"]
    one = grid_of(tables(tmp_path), seeds=[3])
    assert [cell.folder for cell in cells_of(one, Path("out"))] == [Path("out")]
    two = {**tables(tmp_path), "method": [method, {**method, "label": "mild/one"}]}
    many = cells_of(grid_of(two, seeds=[0, 1]), Path("out"))
    assert [str(cell.folder) for cell in many] == [
        "out/fedavg/seed-0", "out/fedavg/seed-1", "out/mild_one/seed-0", "out/mild_one/seed-1",
    ]  # fmt: skip
    assert [cell.recipe.run.seed for cell in many] == [0, 1, 0, 1]


def test_the_grid_of_synthetic_images_has_a_row_for_each_class():
    images = torch.arange(3 * 4, dtype=torch.float32).reshape(3, 1, 2, 2)
    made = pictures.grid(images, torch.tensor([0, 2, 2]), 3)
    assert made.shape == (3, 2, 1, 2, 2)
    assert (made[2, 1] == images[2].numpy()).all()
    assert torch.isnan(torch.from_numpy(made[1])).all()


def test_the_anchors_that_peers_share_are_drawn(tmp_path: Path) -> None:
    desa = {"name": "desa", "per_class": 2, "steps": 1, "real_batch": 4, "synthesis_width": 2}
    cache = str(tmp_path / "cache")
    path = images_recipe(tmp_path, desa, pictures=True, rounds=1, cache_dir=cache)
    folder = runs.begin(recipe_from(path), tmp_path / "run")
    drawn = {path.stem for path in (folder / "pictures").iterdir()}
    assert {f"synthetic-{client}" for client in CLIENTS} <= drawn


def begun_before(folder: Path, key: str, *, digest_too: bool) -> None:
    """Make a run folder what a fedstill would have written that had no such key yet."""
    path = folder / "recipe.toml"
    lines = path.read_text().splitlines(keepends=True)
    assert sum(line.startswith(f"{key} =") for line in lines) == 1
    path.write_text("".join(line for line in lines if not line.startswith(f"{key} =")))
    kept = digests.decisive_in(tomllib.loads(path.read_text()))
    older = digests.digest(kept, experiment_of(runs.recipe_of(folder)).population)
    for index in folder.glob("checkpoints/*/checkpoint.json"):
        listed = json.loads(index.read_text())
        assert listed["digest"] != older
        if digest_too:
            index.write_text(json.dumps({**listed, "digest": older}))


@pytest.mark.parametrize("digest_too", [True, False])
def test_a_run_begun_when_a_method_had_fewer_values_goes_on(tmp_path, digest_too):
    # Without the older digest: killed after the checkpoint was taken over, before the recipe was.
    recipe, folder = write_recipe(tmp_path), tmp_path / "before"
    fedstill("run", recipe, "run.rounds=2", "--out", folder)
    begun_before(folder, "views", digest_too=digest_too)
    said = fedstill("resume", folder, "run.rounds=3")
    assert said.code == 0, said.err
    fedstill("run", recipe, "run.rounds=3", "--out", tmp_path / "whole")
    assert last_weights(folder) == last_weights(tmp_path / "whole") != {}
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert (folder / "recipe.toml").read_text() == (tmp_path / "whole" / "recipe.toml").read_text()
    assert fedstill("resume", folder, "run.rounds=4").code == 0
