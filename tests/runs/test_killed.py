"""A run killed at any moment and resumed gives what a run gives that was never killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedstill.engines import checkpoint
from fedstill.federation.cache import FolderCache
from fedstill.logbook.writer import FolderLog
from fedstill.recipe.check import checked
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe
from fedstill.runs import folder as folders
from fedstill.runs import recipes as runs
from fedstill.runs import session
from small_recipes import FEDDM, fedstill, images_recipe, last_weights, metrics

KILLS = 10  # of each method
ROUNDS = 15
SCAFFOLD = {"name": "scaffold", "lr": 0.05, "batch_size": 4}
METHODS: dict[str, dict[str, Any]] = {
    # A round takes some tens of milliseconds: kills land in steps, in scores and in writing.
    "scaffold": SCAFFOLD,
    "feddm": {**FEDDM, "steps": 8, "server_epochs": 4},
}


def recipe_from(path: Path) -> Recipe:
    (recipe,) = checked(read_recipe(path))
    return recipe


def equal_runs(one: Path, other: Path) -> bool:
    assert last_weights(one) == last_weights(other)
    assert metrics(one) == metrics(other)
    return True


def opened(folder: Path) -> float:
    """When the run last opened its tables."""
    try:
        return (folder / "notes.csv").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def begun(folder: Path, before: float, alive: Any) -> None:
    """Wait until a process has begun to write to its folder, or has ended."""
    while alive() and opened(folder) == before:
        time.sleep(0.002)


def killed(function: Any, arguments: tuple[Any, ...], folder: Path, seconds: float) -> bool:
    """A process of its own, killed some time after it began; False where it was done before.

    The server it is forked from has imported everything, so that ten kills take seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstill.runs.recipes", "torch._dynamo"])
    before = opened(folder)
    process = context.Process(target=function, args=arguments)
    process.start()
    begun(folder, before, process.is_alive)
    process.join(seconds)
    assert process.pid is not None
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def killed_often(recipe: Recipe, folder: Path, kills: int) -> Path:
    """The folder of a run that was killed at so many random moments, beside one never killed."""
    began = time.perf_counter()
    runs.begin(recipe, folder / "whole")
    lasts = time.perf_counter() - began
    rng, done, number = random.Random(recipe.method_name), 0, 0
    while done < kills:
        cut = folder / f"killed-{number}"
        seconds = rng.uniform(0, 1 / kills) * lasts
        if (cut / "summary.json").exists():  # done before the last kill: begin another one
            assert equal_runs(cut, folder / "whole")
            number += 1
        elif (cut / "recipe.toml").exists():
            done += killed(runs.resume, (cut,), cut, seconds)
        else:
            done += killed(runs.begin, (recipe, cut), cut, seconds)
    if not (cut / "recipe.toml").exists():
        runs.begin(recipe, cut)
    assert fedstill("resume", cut).code == 0
    return cut


@pytest.mark.parametrize("name", METHODS)
def test_a_run_killed_at_ten_random_moments_equals_one_never_killed(tmp_path, name):
    recipe = recipe_from(images_recipe(tmp_path, METHODS[name], rounds=ROUNDS))
    cut = killed_often(recipe, tmp_path, KILLS)
    assert equal_runs(cut, tmp_path / "whole")
    assert not list((cut / "checkpoints").glob("*.partial"))


def test_a_private_run_killed_at_four_random_moments_has_every_row_of_its_ledger_once(tmp_path):
    path = images_recipe(tmp_path, {**METHODS["feddm"], "start": "noise"}, rounds=8)
    budget = "\n[privacy]\nepsilon = 4.0\ndelta = 1e-3\nreleases = 2\n"
    constants = path.read_text().replace("[data]", "[data]\nmean = [0.5]\nstd = [0.5]")
    path.write_text(constants + budget)
    cut = killed_often(recipe_from(path), tmp_path, 4)
    assert equal_runs(cut, tmp_path / "whole")
    ledger = (cut / "privacy.csv").read_text()
    assert ledger == (tmp_path / "whole" / "privacy.csv").read_text()
    assert len(ledger.splitlines()) == 1 + 8 * 3  # a row of each of three clients in each round


def test_the_command_killed_and_resumed_equals_one_never_killed(tmp_path):
    recipe = images_recipe(tmp_path, METHODS["feddm"], rounds=12)
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "fedstill", "run", str(recipe), "--out", str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    begun(folder, 0.0, lambda: process.poll() is None)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "summary.json").exists()
    assert fedstill("resume", folder).code == 0
    assert fedstill("run", recipe, "--out", tmp_path / "whole").code == 0
    assert equal_runs(folder, tmp_path / "whole")


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


def dying(function: Any, call: int) -> Any:
    """The same function, but the program dies at its n-th call."""
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        return function(*arguments, **options)

    return wrapped


PLACES = [
    (checkpoint, "write_through"), (checkpoint, "_publish"), (checkpoint, "_tidy"),
    (FolderLog, "write"), (FolderLog, "flush"), (folders, "write_whole"), (folders, "write_json"),
    (session, "write_summary"), (session, "write_whole"), (folders, "_write_partition"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of two rounds and a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    runs.begin(recipe_from(images_recipe(folder, SCAFFOLD, rounds=2)), folder / "run")
    return folder


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
@pytest.mark.parametrize("call", [1, 3])
def test_dying_at_a_write_and_resuming_equals_never_dying(tmp_path, whole, owner, name, call):
    recipe, folder = whole / "images.toml", tmp_path / "dying"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), call))
        try:
            runs.begin(recipe_from(recipe), folder)
        except Killed:
            assert not (folder / "summary.json").exists()
    if (folder / "recipe.toml").exists():
        assert fedstill("resume", folder).code == 0
    else:  # it never began, and may begin now
        assert fedstill("run", recipe, "--out", folder).code == 0
    assert equal_runs(folder, whole / "run")


@pytest.mark.parametrize("kept", [1, 2])
def test_dying_in_the_middle_of_a_stacked_warm_up_and_resuming_equals_never_dying(tmp_path, kept):
    """The sets of some clients are in the cache then, and those of others are not."""
    path = images_recipe(tmp_path, {"name": "desa", "preset": "small"}, rounds=2)
    changes = ['engine.name="batched"', f'run.cache_dir="{tmp_path / "cache"}"']
    (recipe,) = checked(read_recipe(path, changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderCache, "keep", dying(FolderCache.keep, kept + 1))
        with pytest.raises(Killed):
            runs.begin(recipe, tmp_path / "killed")
    assert len(list((tmp_path / "cache").iterdir())) == kept
    runs.resume(tmp_path / "killed")
    shutil.rmtree(tmp_path / "cache")
    runs.begin(recipe, tmp_path / "whole")
    assert equal_runs(tmp_path / "killed", tmp_path / "whole")


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    recipe = images_recipe(tmp_path, SCAFFOLD)
    folder = tmp_path / "run"
    fedstill("run", recipe, "--out", folder)
    with folders.alone(folder):
        said = fedstill("resume", folder)
    assert said.code == 2
    assert f"another process is writing to {folder}" in said.err
