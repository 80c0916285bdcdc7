"""Runs of many clients: in seconds, with memories on disk, and resumed from there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RecipeError
from fedstill.engines import checkpoint
from fedstill.logbook.reader import read_run
from fedstill.recipe.check import checked
from fedstill.recipe.tables import Recipe
from fedstill.report.tables import comparison
from fedstill.runs import recipes as runs
from small_recipes import fedstill, last_weights, metrics, tables, write_client, write_recipe

METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"name": "scaffold", "lr": 0.05, "batch_size": 4},
    "local": {"name": "local", "lr": 0.05, "batch_size": 4},
    "moon": {"name": "moon", "lr": 0.05, "batch_size": 4, "projection": 4},
}


def recipe(folder: Path, clients: int, method: dict[str, Any], **changes: Any) -> Recipe:
    """A set of made-up images split over clients, some of them awake in a round."""
    path = write_client(folder / "all.npz", 0, train=4 * clients)
    made = {**tables(folder), "method": method}
    made["data"] = {
        "name": "own",
        "options": {"clients": {"all": str(path)}},
        "partition": {"kind": "iid", "clients": clients},
    }
    for name, table in changes.items():
        made[name] = {**made.get(name, {}), **table}
    (found,) = checked(made)
    return found


def sampled(folder: Path, name: str, **engine: Any) -> Recipe:
    return recipe(
        folder, 40, METHODS[name], run={"rounds": 6}, federation={"sample": 5}, engine=engine
    )


def equal_runs(one: Path, other: Path) -> bool:
    assert last_weights(one) == last_weights(other)
    assert metrics(one) == metrics(other)
    return True


def test_fifty_of_ten_thousand_clients_run_in_seconds(tmp_path: Path) -> None:
    method = {"name": "fedavg", "lr": 0.05, "batch_size": 4}
    federation = {"sample": 50}
    built = recipe(tmp_path, 10_000, method, federation=federation)
    began = time.perf_counter()
    folder = runs.begin(built, tmp_path / "run")
    assert time.perf_counter() - began < 60
    run = read_run(folder)
    assert len(run.metrics) == 3 * (50 + 2 + 1)
    assert run.summary["accuracy_by_client"].keys() == {"everyone"}
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    assert [path.name for path in newest.glob("*.safetensors")] == ["server.safetensors"]
    assert "everyone" in comparison([folder]).as_markdown()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("limit", [0, 3000])
def test_memories_on_disk_change_nothing(tmp_path: Path, name: str, limit: int) -> None:
    whole = runs.begin(sampled(tmp_path, name), tmp_path / "whole")
    tight = runs.begin(sampled(tmp_path, name, memory_limit=limit), tmp_path / "tight")
    assert equal_runs(whole, tight)
    assert not (tight / "asleep").exists()


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


@pytest.mark.parametrize("name", ["scaffold", "local"])
@pytest.mark.parametrize("limits", [(0, 0), (None, 0), (2000, None)])
def test_a_run_goes_on_with_memories_on_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limits: tuple[int | None, int | None],
) -> None:
    whole = runs.begin(sampled(tmp_path, name), tmp_path / "whole")
    first = {} if limits[0] is None else {"memory_limit": limits[0]}
    real = checkpoint._publish

    def dying(draft: Path, target: Path) -> None:
        if target.name == "round-00004":
            raise Killed
        real(draft, target)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_publish", dying)
        with pytest.raises(Killed):
            runs.begin(sampled(tmp_path, name, **first), folder)
    (folder / "asleep").mkdir()  # as a kill leaves it
    (folder / "asleep" / "0.safetensors").write_bytes(b"of a round that never was")
    overrides = [] if limits[1] is None else [f"engine.memory_limit={limits[1]}"]
    runs.resume(folder, overrides)
    assert equal_runs(whole, folder)
    assert not (folder / "asleep").exists()
    runs.resume(folder, ["run.rounds=8"])
    longer = recipe(tmp_path, 40, METHODS[name], run={"rounds": 8}, federation={"sample": 5})
    assert equal_runs(runs.begin(longer, tmp_path / "longer"), folder)


def test_a_sleeping_client_is_not_written_again(tmp_path: Path) -> None:
    folder = runs.begin(sampled(tmp_path, "scaffold", memory_limit=0), tmp_path / "run")
    before, after = sorted((folder / "checkpoints").iterdir())
    files = {path.name for path in before.glob("*.safetensors")}
    same = {name for name in files if (before / name).samefile(after / name)}
    assert "server.safetensors" not in same
    assert len(files) - 6 <= len(same) < len(files)  # five clients were awake, and the server
    lines = json.loads((after / "checkpoint.json").read_text())["nodes"]
    assert {line["file"] for line in lines.values()} == {p.name for p in after.glob("*.safet*")}


def test_many_models_scored_at_home_leave_no_empty_matrix(tmp_path: Path) -> None:
    wanted = recipe(
        tmp_path, 40, METHODS["local"], run={"rounds": 1, "pictures": True}, federation={}
    )
    folder = runs.begin(wanted, tmp_path / "run")
    summary = read_run(folder).summary
    assert "accuracy_matrix" not in summary
    assert len(summary["local_accuracy_by_client"]) == 40
    assert summary["averaged_global_accuracy"] is None
    assert not (folder / "pictures" / "accuracy-matrix.png").exists()
    score = 100 * summary["averaged_local_accuracy"]
    assert f"{score:.2f}" in comparison([folder]).as_markdown()


@pytest.mark.parametrize("value", ["-1", "1.5", "lots", "true"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(tmp_path: Path, value: str) -> None:
    said = fedstill("run", write_recipe(tmp_path), f"engine.memory_limit={value}")
    assert said.code == 2
    assert "engine.memory_limit" in said.err
    with pytest.raises(RecipeError, match=r"engine.memory_limit = -1: must be at least 0"):
        sampled(tmp_path, "local", memory_limit=-1)
