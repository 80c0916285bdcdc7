"""Virtual data by a recipe: `data.virtual` for methods that train on what clients distil first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import RecipeError
from fedstill.core.node import SERVER
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.recipe.check import checked
from fedstill.recipe.tables import Recipe
from fedstill.recipe.toml import toml_text
from fedstill.runs import recipes as runs
from small_recipes import (
    CLASSES,
    CLIENTS,
    CONVNET,
    Ready,
    fedstill,
    last_weights,
    metrics,
    ready,
    tables,
)

VIRTUAL: dict[str, Any] = {"per_class": 2, "warm_up_steps": 2, "real_batch": 8}
LOCAL: dict[str, Any] = {"lr": 0.05, "batch_size": 4}
WEIGHT_METHODS = ["fedavg", "fedprox", "fednova", "scaffold", "local", "centralised"]


def recipe_tables(folder: Path, method: dict[str, Any], **virtual: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    made = {**tables(folder), "models": dict(CONVNET), "method": method}
    made["run"] = {**made["run"], "rounds": 2, "cache_dir": str(folder / "cache")}
    made["data"] = {**made["data"], "virtual": {**VIRTUAL, **virtual}}
    return made


def recipe(folder: Path, method: dict[str, Any], **virtual: Any) -> Recipe:
    (made,) = checked(recipe_tables(folder, method, **virtual))
    return made


def written(folder: Path, made: dict[str, Any]) -> Path:
    path = folder / "virtual.toml"
    path.write_text(toml_text(made))
    return path


def labels_of(built: Ready, client: str) -> list[int]:
    labels: list[int] = built.experiment.population.party(client).data.labels.tolist()
    return labels


def played(built: Ready) -> Any:
    run(built.engine, MemoryLog())
    return built.engine.states[SERVER]


@pytest.mark.parametrize("name", WEIGHT_METHODS)
def test_every_weight_method_runs_on_virtual_data(tmp_path: Path, name: str) -> None:
    assert not METHODS[name].distils
    folder = runs.begin(recipe(tmp_path, {"name": name, **LOCAL}), tmp_path / "run")
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_clients_learn_from_their_sets_and_are_tested_on_real_examples(tmp_path: Path) -> None:
    built = ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}))
    for client in CLIENTS:
        party = built.experiment.population.party(client)
        assert party.data.labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert len(party.test) == 12


def test_the_second_method_finds_the_sets_that_the_first_one_made(tmp_path: Path) -> None:
    first = ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}))
    second = ready(recipe(tmp_path, {"name": "scaffold", **LOCAL}))
    assert (first.cache.made, first.cache.found) == (3, 0)
    assert (second.cache.made, second.cache.found) == (0, 3)
    assert any("3 sets made, 0 found" in note for note in first.notes)
    assert any("0 sets made, 3 found" in note for note in second.notes)
    for client in CLIENTS:
        one, other = (b.experiment.population.party(client).data.all().x for b in (first, second))
        assert torch.equal(one, other)


def test_a_method_that_distils_itself_finds_the_same_sets(tmp_path: Path) -> None:
    # A whole number in one place is the same as its float in the other.
    ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}, pixel_lr=1))
    ours = ready(recipe(tmp_path, {"name": "fedlgd", **LOCAL, "refine_every": 0}, pixel_lr=1))
    played(ours)
    assert (ours.cache.made, ours.cache.found) == (0, 3)


def test_other_values_make_other_sets(tmp_path: Path) -> None:
    ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}))
    other = ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}, warm_up_steps=3))
    assert (other.cache.made, other.cache.found) == (3, 0)


def test_sets_matched_under_convnets_serve_clients_of_every_architecture(tmp_path: Path) -> None:
    def built(models: dict[str, Any], **virtual: Any) -> Ready:
        made = recipe_tables(tmp_path, {"name": "local", **LOCAL}, **virtual)
        made["run"]["threads"] = 1  # which are else chosen by the networks, as the engine is
        made |= {"models": models, "engine": {"name": "in_process"}}
        return ready(checked(made)[0])

    first = built(dict(CONVNET), warm_up_network="convnet")
    mixed = built({"name": "mlp"}, warm_up_network="convnet")
    own = built({"name": "mlp"})
    assert [(b.cache.made, b.cache.found) for b in (first, mixed, own)] == [(3, 0), (0, 3), (3, 0)]


def test_fedlgd_finds_the_sets_that_were_matched_under_convnets(tmp_path: Path) -> None:
    ready(recipe(tmp_path, {"name": "fedavg", **LOCAL}, warm_up_network="convnet"))
    values = {"name": "fedlgd", **LOCAL, "refine_every": 0}
    ours = ready(recipe(tmp_path, values, warm_up_network="convnet"))
    played(ours)
    assert (ours.cache.made, ours.cache.found) == (0, 3)


def test_fedlgd_without_refinement_is_uniform_fedavg_on_virtual_data(tmp_path: Path) -> None:
    values = {**LOCAL, "refine_every": 0, "weight": 0.0}
    ours = played(ready(recipe(tmp_path, {"name": "fedlgd", **values})))
    theirs = played(ready(recipe(tmp_path, {"name": "fedavg", **LOCAL, "weighting": "uniform"})))
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        assert torch.equal(tensor, theirs.weights[name]), name


def test_a_run_whose_sets_were_found_equals_one_that_made_them(tmp_path: Path) -> None:
    made = recipe(tmp_path, {"name": "fedavg", **LOCAL})
    one, two = (runs.begin(made, tmp_path / name) for name in ("one", "two"))
    assert last_weights(one) == last_weights(two)
    assert metrics(one) == metrics(two)
    (tables,) = checked(recipe_tables(tmp_path / "elsewhere", {"name": "fedavg", **LOCAL}))
    three = runs.begin(tables, tmp_path / "three")
    assert last_weights(three) == last_weights(one)


def test_a_resumed_run_learns_from_the_same_sets(tmp_path: Path) -> None:
    made = recipe(tmp_path, {"name": "fedavg", **LOCAL})
    half = runs.begin(made, tmp_path / "half")
    for file in (tmp_path / "cache").iterdir():  # even when they have to be made again
        file.unlink()
    runs.resume(half, ["run.rounds=4"])
    more = recipe_tables(tmp_path, {"name": "fedavg", **LOCAL})
    more["run"]["rounds"] = 4
    whole = runs.begin(checked(more)[0], tmp_path / "whole")
    assert last_weights(half) == last_weights(whole)


# Small and missing classes


def test_a_start_from_real_examples_has_no_more_images_than_examples_and_none_twice(
    tmp_path: Path,
) -> None:
    # Each client has eight examples of each class.
    built = ready(recipe(tmp_path, {"name": "fedavg"}, start="real", per_class=20))
    for client in CLIENTS:
        assert labels_of(built, client) == [0] * 8 + [1] * 8 + [2] * 8
        images = built.experiment.population.party(client).data.all().x.flatten(1)
        assert len({tuple(image) for image in images.tolist()}) == 24


def test_other_starts_have_as_many_images_as_asked_for(tmp_path: Path) -> None:
    built = ready(recipe(tmp_path, {"name": "fedavg"}, start="noise", per_class=20))
    assert labels_of(built, "east") == [0] * 20 + [1] * 20 + [2] * 20


def without(folder: Path, client: str, label: int) -> None:
    """Take a class from a client's examples."""
    path = folder / f"{client}.npz"
    arrays = dict(np.load(path))
    keep = arrays["train_labels"] != label
    arrays["train_images"] = arrays["train_images"][keep]
    arrays["train_labels"] = arrays["train_labels"][keep]
    np.savez(path, **arrays)


@pytest.mark.parametrize("clients", [CLIENTS[:1], CLIENTS])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg", **LOCAL},
        {"name": "fedlgd", **LOCAL, "local_steps": 1, "global_steps": 1, "refine_every": 1,
         "global_per_class": 2, "global_start": "averaged_statistics"},
    ],
    ids=["fedavg", "fedlgd"],
)  # fmt: skip
def test_a_class_that_some_or_all_clients_lack_has_no_images_there(
    tmp_path: Path, clients: tuple[str, ...], method: dict[str, Any]
) -> None:
    (made,) = checked(recipe_tables(tmp_path, method))
    for client in clients:
        without(tmp_path, client, CLASSES - 1)
    built = ready(made)
    state = played(built)
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())
    if method["name"] == "fedavg":
        assert labels_of(built, "east") == [0, 0, 1, 1]
        expected = [0, 0, 1, 1] if "west" in clients else [0, 0, 1, 1, 2, 2]
        assert labels_of(built, "west") == expected
    else:
        assert built.engine.states["east"].classes.tolist() == [0, 1]
        assert torch.isfinite(state.anchors).all()


# Refusals, through the command line


def refused(folder: Path, made: dict[str, Any]) -> str:
    said = fedstill("run", written(folder, made), "--out", folder / "run")
    assert said.code == 2, said
    assert not (folder / "run").exists()
    return said.err


def test_an_unknown_key_is_told_with_a_hint_and_together_with_other_faults(
    tmp_path: Path,
) -> None:
    made = recipe_tables(tmp_path, {"name": "fedavg", "lr": -1.0}, per_clas=3)
    error = refused(tmp_path, made)
    assert "data.virtual.per_clas" in error and "did you mean 'per_class'" in error
    assert "method.lr = -1.0" in error


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"per_class": 0}, "data.virtual.per_class = 0: must be at least 1"),
        ({"start": "zeros"}, "data.virtual.start = 'zeros'"),
        ({"augmentation": "flop"}, "did you mean 'flip'"),
    ],
)
def test_a_wrong_value_is_told_with_its_key(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    assert words in " ".join(
        refused(tmp_path, recipe_tables(tmp_path, {"name": "fedavg"}, **values)).split()
    )


def test_images_that_the_network_cannot_pool_are_refused_with_their_size(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path, {"name": "fedavg"})
    made["models"]["depth"] = 4
    error = " ".join(refused(tmp_path, made).split())
    assert "an image of 8x8 cannot be pooled 4 times" in error
    assert "use a smaller depth" in error and "Traceback" not in error


def test_a_cache_that_cannot_be_written_is_refused_before_the_warm_up(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path, {"name": "fedavg"}, warm_up_steps=10**9)
    (tmp_path / "file").write_text("in the way")
    made["run"]["cache_dir"] = str(tmp_path / "file")
    said = fedstill("run", written(tmp_path, made), "--out", tmp_path / "run")
    assert said.code != 0
    assert "run.cache_dir" in said.err and "Traceback" not in said.err


def test_a_broken_set_in_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path, {"name": "fedavg"})
    ready(checked(made)[0])
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 3
    files[0].write_bytes(b"broken")
    said = fedstill("run", written(tmp_path, made), "--out", tmp_path / "run")
    assert said.code != 0
    assert files[0].name in said.err.replace("\n", "") and "Traceback" not in said.err
    assert files[0].read_bytes() == b"broken"


def test_a_fault_in_the_virtual_table_is_reported_once_even_if_the_method_distils() -> None:
    tables = {
        "data": {"name": "digits5", "virtual": {"per_clas": 3}},
        "method": {"name": "fedlgd"},
    }
    with pytest.raises(RecipeError) as refused:
        checked(tables)
    (fault,) = refused.value.faults
    assert "data.virtual.per_clas" in fault and "did you mean 'per_class'" in fault
