"""What a run chooses by its networks: threads, given back at the end, and an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstill.engines.execution import LIGHT, Execution, work
from fedstill.models import MLP, MODELS, ConvNet
from fedstill.recipe.check import checked
from fedstill.runs import recipes as runs
from small_recipes import tables

CPU = torch.device("cpu")
HEAVY = ConvNet((3, 32, 32), 10)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """What torch has of itself, for these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_work_is_counted_for_one_example() -> None:
    assert work(MLP((1, 4, 4), 3, hidden=(5,))) == 2 * (16 * 5 + 5 * 3)


@pytest.mark.parametrize("name", MODELS)
def test_every_network_can_be_counted(name: str) -> None:
    assert work(MODELS[name]((3, 32, 32), 10)) > 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_light_networks_get_one_thread_and_heavy_ones_what_torch_has() -> None:
    light = MLP((1, 28, 28), 10)
    assert work(light) < LIGHT < work(HEAVY)
    assert Execution(device="cpu").chosen_threads([light]) == 1
    assert Execution(device="cpu").chosen_threads([light, HEAVY]) == 3
    assert Execution(device="cuda").chosen_threads([light, HEAVY]) == 1  # the host hands out work
    assert Execution(device="cpu", threads=2).chosen_threads([light]) == 2


@pytest.mark.usefixtures("gpu")
def test_auto_stacks_slight_networks_on_a_cpu_and_nothing_with_convolutions() -> None:
    slight, wide = MLP((1, 28, 28), 10, hidden=(64,)), MLP((1, 28, 28), 10, hidden=(200, 200))
    narrow, here = ConvNet((1, 8, 8), 2, width=1), Execution(device="cpu")
    assert work(narrow) < work(slight) < work(wide)
    assert here.engine_name([slight]) == "batched"
    assert here.engine_name([slight, wide]) == "in_process"
    assert here.engine_name([narrow]) == "in_process"
    assert Execution(device="cuda").engine_name([slight]) == "streams"
    assert Execution("in_process", "cpu").engine_name([slight]) == "in_process"


@pytest.mark.parametrize(("told", "used"), [({}, 1), ({"threads": 2}, 2)])
def test_a_run_writes_its_threads_down_and_gives_them_back(
    tmp_path: Path, told: dict[str, Any], used: int
) -> None:
    (recipe,) = checked(tables(tmp_path, run={**told, "rounds": 1}))
    folder = runs.begin(recipe, tmp_path / "run")
    assert json.loads((folder / "environment.json").read_text())["threads"] == used
    assert torch.get_num_threads() == 3
    runs.resume(folder, ["run.rounds=2"])
    assert torch.get_num_threads() == 3
