"""Public data by a recipe: `data.public` fills what everybody holds, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstill.core.errors import DataError, FedstillError, RecipeError
from fedstill.core.node import SERVER
from fedstill.logbook.reader import read_run
from fedstill.recipe.check import checked
from fedstill.recipe.toml import toml_text
from fedstill.runs import recipes as runs
from small_recipes import (
    CLIENTS,
    Ready,
    fedstill,
    last_weights,
    metrics,
    ready,
    tables,
    write_client,
)

FEDDF: dict[str, Any] = {"name": "feddf", "lr": 0.05, "distil_steps": 3, "distil_batch": 10}
FCCL: dict[str, Any] = {"name": "fccl", "lr": 0.01, "pretrain_epochs": 2, "public_batch": 10}
METHODS = {"feddf": FEDDF, "fccl": FCCL}
DIGITS = {"name": "digits5", "count": 30}
MIXED = {"name": "mlp", "hidden": [6], "clients": {"west": {"hidden": [4, 4]}}}


def recipe_tables(
    folder: Path, method: dict[str, Any], public: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    made = {**tables(folder), "method": method}
    wanted = {"public": DIGITS if public is None else public}
    made["data"] = {**made["data"], **wanted, **data}
    return made


def built(folder: Path, *args: Any, **data: Any) -> Ready:
    (recipe,) = checked(recipe_tables(folder, *args, **data))
    return ready(recipe)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_mixed_networks_goes_to_its_end_and_says_what_is_public(
    tmp_path: Path, name: str
) -> None:
    made = {**recipe_tables(tmp_path, METHODS[name]), "models": MIXED}
    path = tmp_path / "public.toml"
    path.write_text(toml_text(made))
    said = fedstill("run", path, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    found = read_run(tmp_path / "run")
    assert found.summary["averaged_global_accuracy"] > 0
    notes = (tmp_path / "run" / "notes.csv").read_text()
    assert "public: 30 of 1500 images of digits5 as 1x8x8, without labels" in notes


def test_every_party_holds_the_same_images_in_the_clients_shape_without_labels(
    tmp_path: Path,
) -> None:
    made = built(tmp_path, FEDDF)
    nodes = [made.engine.node(name, 1, "look") for name in (SERVER, *CLIENTS)]
    for node in nodes:
        assert node.public is nodes[0].public
        assert node.public.all().x.shape[1:] == (1, 8, 8)
        assert node.public.labels.tolist() == list(range(30))
    x = nodes[0].public.all().x
    assert float(x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x.std(unbiased=False)) == pytest.approx(1, abs=1e-5)


def test_methods_that_need_no_public_data_run_beside_those_that_do(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path, FEDDF)
    plain = built(tmp_path, {"name": "fedavg"})
    assert len(plain.experiment.population.public) == 30
    without = {**made, "data": {k: v for k, v in made["data"].items() if k != "public"}}
    with pytest.raises(RecipeError, match=r"data.public is missing: feddf needs images"):
        checked(without)
    both = [{"name": "fedavg"}, FEDDF, FCCL]
    with pytest.raises(RecipeError) as refused:
        checked({**without, "method": both})
    assert len(refused.value.faults) == 2


def test_the_seed_of_the_split_chooses_the_images(tmp_path: Path) -> None:
    one = built(tmp_path, FEDDF, seed=3)
    digests = {one.experiment.population.public.digest()}
    for changes in ({"seed": 3}, {"seed": 4}, {}):
        digests.add(built(tmp_path, FEDDF, **changes).experiment.population.public.digest())
    assert len(digests) == 3  # 3, 4, and the run's own 0


def test_public_images_may_be_ones_own_and_lie_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    write_client(tmp_path / "elsewhere" / "commons.npz", 9)
    public = {"name": "own", "options": {"clients": {"all": "commons.npz"}},
              "data_dir": str(tmp_path / "elsewhere")}  # fmt: skip
    made = built(tmp_path, FEDDF, public)
    assert len(made.experiment.population.public) == 24
    same = "public: own is also what the clients hold, so images may be their own"
    assert same in made.experiment.population.notes


def test_more_images_than_there_are_and_missing_files_are_refused_by_the_table(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataError, match=r"^data.public: count is 9999, but digits5 has 1500"):
        built(tmp_path, FEDDF, {"name": "digits5", "count": 9999})
    with pytest.raises(DataError, match=r"^data.public: fashion-mnist is read from files, but"):
        built(tmp_path, FEDDF, {"name": "fashion-mnist"})


def test_a_broken_run_goes_on_exactly(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path / "in", FCCL)
    (whole,) = checked(made)
    runs.begin(whole, tmp_path / "whole")
    (short,) = checked({**made, "run": {**made["run"], "rounds": 2}})
    runs.begin(short, tmp_path / "broken")
    runs.resume(tmp_path / "broken", ["run.rounds=3"])
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    assert last_weights(tmp_path / "whole") == last_weights(tmp_path / "broken")


def test_other_public_data_cannot_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    commons = tmp_path / "commons.npz"
    write_client(commons, 9)
    public = {"name": "own", "options": {"clients": {"all": str(commons)}}}
    (recipe,) = checked(recipe_tables(tmp_path / "in", FEDDF, public))
    runs.begin(recipe, tmp_path / "run")
    with pytest.raises(FedstillError, match=r"data.public.count was unset, not 5"):
        runs.resume(tmp_path / "run", ["data.public.count=5", "run.rounds=4"])
    runs.resume(tmp_path / "run", [f"data.public.data_dir={tmp_path}", "run.rounds=4"])
    arrays = dict(np.load(commons))
    arrays["train_images"] = arrays["train_images"][::-1]
    np.savez(commons, **arrays)
    with pytest.raises(FedstillError, match="another experiment"):
        runs.resume(tmp_path / "run", ["run.rounds=5"])


def test_labels_of_the_public_set_change_nothing(tmp_path: Path) -> None:
    commons, weights = tmp_path / "commons.npz", []
    public = {"name": "own", "options": {"clients": {"all": str(commons)}}}
    for turned in (False, True):
        write_client(commons, 9)
        if turned:
            arrays = dict(np.load(commons))
            arrays["train_labels"] = arrays["train_labels"][::-1]
            np.savez(commons, **arrays)
        (recipe,) = checked(recipe_tables(tmp_path / "in", FCCL, public))
        runs.begin(recipe, tmp_path / f"run {turned}")
        weights.append(last_weights(tmp_path / f"run {turned}"))
    assert weights[0] == weights[1]


def test_a_previewed_recipe_says_what_is_public(tmp_path: Path) -> None:
    path = tmp_path / "public.toml"
    path.write_text(toml_text(recipe_tables(tmp_path, FEDDF)))
    said = fedstill("data", path)
    assert "note: public: 30 of 1500 images of digits5 as 1x8x8" in said.err
    refused = fedstill("data", path, "data.public.count=2000")
    assert refused.code == 2
    assert "data.public: count is 2000" in refused.err


def test_both_engines_agree_from_a_recipe(tmp_path: Path) -> None:
    made = recipe_tables(tmp_path, FEDDF)
    for name in ("in_process", "batched"):
        (recipe,) = checked({**made, "engine": {"name": name}})
        runs.begin(recipe, tmp_path / name)
    losses = [
        [float(row.rsplit(",", 1)[1]) for row in metrics(tmp_path / n) if ",loss," in row]
        for n in ("in_process", "batched")
    ]
    assert torch.allclose(*map(torch.tensor, losses), atol=1e-3)
