"""Grids: points and cells, stops at any moment, choices on held-out examples, processes at once."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstill.core.errors import RecipeError
from fedstill.logbook.writer import FolderLog
from fedstill.recipe.grid import Span, Sweep, grid_of, point_name, sweep_of
from fedstill.recipe.toml import toml_text
from fedstill.runs import folder as folders
from fedstill.runs import grid as grids
from small_recipes import fedstill, last_weights, metrics, tables, write_recipe

FEDAVG = {"name": "fedavg", "lr": 0.05, "batch_size": 8}
FEDPROX = {"name": "fedprox", "lr": 0.05, "batch_size": 8}
QUICK = ("run.rounds=1",)


def several(folder: Path, *methods: dict[str, Any]) -> Path:
    """A recipe with these methods."""
    path = folder / "several.toml"
    path.write_text(toml_text({**tables(folder), "method": list(methods)}))
    return path


def runs_in(folder: Path) -> list[str]:
    return sorted(str(p.parent.relative_to(folder)) for p in folder.rglob("recipe.toml"))


def assert_equal(one: Path, other: Path) -> None:
    assert runs_in(one) == runs_in(other)
    for name in runs_in(one):
        assert metrics(one / name) == metrics(other / name)
        assert last_weights(one / name) == last_weights(other / name)


def test_values_of_a_sweep_are_numbers_texts_or_a_range():
    assert sweep_of("method.lr=0.01,0.1") == Sweep("method.lr", (0.01, 0.1))
    assert sweep_of("models.norm=none,instance") == Sweep("models.norm", ("none", "instance"))
    assert sweep_of("models.hidden=[4],[4, 8]") == Sweep("models.hidden", ([4], [4, 8]))
    assert sweep_of("method.lr=0.001..0.1,log").span == Span(0.001, 0.1, True)
    assert sweep_of("method.epochs=1..5").span == Span(1, 5) and Span(1, 5).whole


def test_a_grid_has_every_combination_of_the_values_that_reach_a_method(tmp_path):
    made = {**tables(tmp_path), "method": [FEDAVG, FEDPROX]}
    grid = grid_of(made, seeds=[0, 1], sweeps=["method.lr=0.1,0.2", "method.mu=1,2,3"])
    cells = grids.cells_of(grid, Path("out"))
    assert len(cells) == (2 + 2 * 3) * 2  # FedAvg has no mu
    assert str(cells[0].folder) == "out/fedavg/lr-0.1/seed-0"
    assert str(cells[-1].folder) == "out/fedprox/lr-0.2_mu-3/seed-1"
    assert cells[-1].recipe.method.mu == 3 and cells[-1].title == "fedprox, lr=0.2, mu=3"


def test_a_grid_is_written_and_read_again(tmp_path):
    made = {**tables(tmp_path), "method": [FEDAVG, FEDPROX]}
    sweeps = ["method.mu=1,2", "method.lr=0.01..0.1,log"]
    grid = grid_of(made, seeds=[3, 4], sweeps=sweeps, select="loss", search=5)
    grids.write_grid(grid, [], tmp_path)
    assert grids.read_grid(tmp_path) == grid


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sweeps": ["lr=1,2"]}, "write a key of the recipe and its values"),
        ({"sweeps": ["method.nu=1,2"]}, "no method of this recipe has this key"),
        ({"sweeps": ["method.epoch=1,2"]}, "unknown key 'epoch'; did you mean 'epochs'?"),
        ({"sweeps": ["method.lr=1,1"]}, "a value stands twice"),
        ({"sweeps": ["method.lr=0.1..1"]}, "a range needs --search TRIALS"),
        ({"sweeps": ["method.lr=1..0.1"]}, "the lower first"),
        ({"sweeps": ["run.seed=1,2"]}, "seeds are listed with --seeds"),
        ({"select": "loss"}, "there is nothing to choose from"),
        ({"search": 3, "sweeps": ["method.lr=0.1..1"]}, "say by which score"),
    ],
)
def test_what_is_wrong_with_a_grid_is_said_before_it_runs(tmp_path, options, says):
    with pytest.raises(RecipeError, match=says):
        grid_of(tables(tmp_path), **options)


def test_the_table_grid_of_a_recipe_says_the_same_as_options(tmp_path):
    sweep = {"method.lr": [0.1, 0.2]}
    written = grid_of({**tables(tmp_path), "grid": {"seeds": [0, 1], "sweep": sweep}})
    assert written == grid_of(tables(tmp_path), seeds=[0, 1], sweeps=["method.lr=0.1,0.2"])
    with pytest.raises(RecipeError, match=r"grid\.seed: unknown key"):
        grid_of({**tables(tmp_path), "grid": {"seed": [0]}})


def test_reported_numbers_stay_with_the_recipes_own_values(tmp_path):
    made = {**tables(tmp_path), "reported": {"average": 80.0}}
    grid = grid_of(made, sweeps=["method.lr=0.05,0.1"])
    assert [bool(point.recipe.reported) for point in grid.points()] == [True, False]


def test_a_stopped_grid_goes_on_by_the_same_command_and_by_resume(tmp_path, monkeypatch):
    recipe = several(tmp_path, FEDAVG, FEDPROX)
    command = ("run", recipe, "--seeds", 0, 1, "--sweep", "method.lr=0.1,0.2", "--quiet")
    assert fedstill(*command, "--out", tmp_path / "whole").code == 0
    play, left = grids.play, iter(range(3))

    def stopping(cell, *others):
        if next(left, None) is None:
            raise KeyboardInterrupt
        play(cell, *others)

    out = tmp_path / "broken"
    monkeypatch.setattr(grids, "play", stopping)
    stopped = fedstill(*command, "--out", out)
    assert stopped.code == 130 and f"go on with `fedstill resume {out}`" in stopped.err
    monkeypatch.setattr(grids, "play", play)
    again = fedstill(*command, "--out", out)
    assert again.code == 2 and "--continue" in again.err
    said = fedstill("resume", out)
    assert said.code == 0, said.err
    assert "3 of 8 runs had finished before" in said.err and said.out.count("\n") == 5
    assert "fedprox, lr=0.2 · own · seed 1: accuracy" in said.out and "(8 of 8)" in said.out
    assert_equal(out, tmp_path / "whole")
    done = fedstill(*command, "--out", out, "--continue")
    assert done.code == 0 and done.out == "" and "8 of 8 runs had finished before" in done.err


class Killed(BaseException):
    """What a process that is killed does not survive; the files are as they were."""


def dying(write, last):
    """A function that writes so many events, and no more."""
    count = iter(range(last))

    def written(log, event):
        if next(count, None) is None:
            raise Killed
        write(log, event)

    return written


def test_a_grid_that_dies_at_random_writes_equals_one_that_never_died(tmp_path, monkeypatch):
    recipe = several(tmp_path, FEDAVG, FEDPROX, {**FEDAVG, "label": "third"})
    command = ("run", recipe, "--seeds", 0, 1, "--sweep", "method.lr=0.1,0.2", "run.rounds=2")
    assert fedstill(*command, "--out", tmp_path / "whole").code == 0
    draw = random.Random(0)
    write, out = FolderLog.write, tmp_path / "dying"
    for _ in range(10):
        monkeypatch.setattr(FolderLog, "write", dying(write, draw.randrange(5, 60)))
        try:
            fedstill(*command, "--out", out, "--continue")
        except Killed:
            continue
    monkeypatch.setattr(FolderLog, "write", write)
    said = fedstill(*command, "--out", out, "--continue")
    assert said.code == 0, said.err
    assert_equal(out, tmp_path / "whole")


def test_a_part_of_a_grid_lies_where_it_has_it_and_the_rest_is_not_forgotten(tmp_path):
    recipe, out = several(tmp_path, FEDAVG, FEDPROX), tmp_path / "grid"
    command = ("run", recipe, *QUICK, "--quiet", "--out", out)
    assert fedstill(*command, "--seeds", 0, 1).code == 0
    held = runs_in(out)
    part = fedstill(*command, "--seeds", 0, "--only", "fedavg", "--continue")
    assert part.code == 0 and "1 of 1 runs had finished before" in part.err
    assert runs_in(out) == held
    more = fedstill(*command, "--seeds", 2, "--only", "fedavg", "--continue")
    assert more.code == 0 and runs_in(out) == sorted([*held, "fedavg/seed-2"])
    said = fedstill("resume", out)  # of all methods with all seeds
    assert "5 of 6 runs had finished before" in said.err and said.code == 0
    assert runs_in(out) == sorted([*held, "fedavg/seed-2", "fedprox/seed-2"])


def test_values_that_would_take_the_place_of_a_grid_are_refused(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    command = ("run", recipe, *QUICK, "--quiet", "--out", out)
    assert fedstill(*command, "--seeds", 0, 1).code == 0
    said = fedstill(*command, "--seeds", 0, 1, "--sweep", "method.lr=0.1,0.2", "--continue")
    assert said.code == 2 and "leaves out seed-0, seed-1" in said.err


def test_a_sweep_over_files_of_ones_own_goes_on_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from fedstill import FedAvg\n\nclass One(FedAvg):\n    pass\n\n"
        "class Two(FedAvg):\n    pass\n"
    )
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    monkeypatch.chdir(tmp_path)
    sweep = ("--sweep", "method.name=mine.py:One,mine.py:Two")
    assert fedstill("run", recipe, *QUICK, "--quiet", "--out", out, *sweep).code == 0
    held = runs_in(out)
    assert len(held) == 2 and all("mine.py" in name for name in held)
    shutil.rmtree(out / held[0])
    monkeypatch.chdir(out)
    assert fedstill("resume", out).code == 0
    assert runs_in(out) == held


def test_a_score_that_a_method_cannot_have_is_refused_before_anything_is_run(tmp_path):
    local = {"name": "local", "lr": 0.05, "batch_size": 8}
    recipe, out = several(tmp_path, FEDAVG, local), tmp_path / "grid"
    command = ("run", recipe, *QUICK, "--quiet", "--out", out, "--sweep", "method.lr=0.1,0.2")
    for score, label in (("average_accuracy", "local"), ("averaged_global_accuracy", "fedavg")):
        said = fedstill(*command, "--select", score)
        assert said.code == 2 and not out.exists()
        assert f"--select {score}: {label} would have no such score" in said.err
    assert fedstill(*command, "--select", "accuracy").code == 0


def test_a_point_without_a_score_is_not_chosen(tmp_path, monkeypatch):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    told = grids.score_of
    monkeypatch.setattr(
        grids, "score_of", lambda folder, name: None if "0.2" in str(folder) else told(folder, name)
    )
    command = ("run", recipe, *QUICK, "--quiet", "--select", "loss", "--out", out)
    said = fedstill(*command, "--sweep", "method.lr=0.1,0.2")
    assert said.code == 0 and "chosen method.lr=0.1" in said.err


def test_a_search_goes_on_where_a_trial_diverges(tmp_path):
    pytest.importorskip("optuna")
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    said = fedstill("run", recipe, *QUICK, "--search", 6, "--select", "loss", "--out", out,
                    "--sweep", "method.lr=0.05,1e30", "--quiet")  # fmt: skip
    assert said.code == 0, said.err
    assert "failed: " in said.err and "chosen method.lr=0.05" in said.err


def test_a_cell_of_other_values_is_not_gone_on_with(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    assert fedstill("run", recipe, *QUICK, "--seeds", 0, 1, "--out", out).code == 0
    said = fedstill("run", recipe, "method.lr=0.2", *QUICK, "--seeds", 0, 1, 2, "--out", out,
                    "--continue")  # fmt: skip
    assert said.code == 2 and "method.lr was 0.05, not 0.2" in said.err
    assert runs_in(out) == ["seed-0", "seed-1"]
    more = fedstill("run", recipe, *QUICK, "--seeds", 0, 1, 2, "--out", out, "--continue")
    assert more.code == 0 and runs_in(out) == ["seed-0", "seed-1", "seed-2"]


def test_more_rounds_reach_every_run_of_a_grid(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    fedstill("run", recipe, *QUICK, "--seeds", 0, 1, "--out", out)
    assert fedstill("resume", out, "run.rounds=2").code == 0
    assert rounds_in(out) == [2, 2]


def rounds_in(out: Path) -> list[int]:
    """How many rounds each finished run of a folder has."""
    return [json.loads(path.read_text())["rounds"] for path in out.rglob("summary.json")]


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_the_same_command_with_more_rounds_gives_them_to_what_had_finished(tmp_path, seeds):
    recipe, out, whole = write_recipe(tmp_path), tmp_path / "grid", tmp_path / "whole"
    command = ("run", recipe, "--quiet", "--seeds", *seeds)
    assert fedstill(*command, "run.rounds=1", "--out", out).code == 0
    assert fedstill(*command, "run.rounds=2", "--out", out, "--continue").code == 0
    assert rounds_in(out) == [2] * len(seeds)
    assert fedstill(*command, "run.rounds=2", "--out", whole).code == 0
    assert_equal(out, whole)
    done = fedstill(*command, "run.rounds=2", "--out", out, "--continue")
    assert f"{len(seeds)} of {len(seeds)} runs had finished before" in done.err


def test_a_run_that_was_stopped_ends_after_the_rounds_that_are_asked_for_now(tmp_path, monkeypatch):
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    draw = FolderLog.write
    monkeypatch.setattr(FolderLog, "write", dying(draw, 60))
    with pytest.raises(Killed):
        fedstill("run", recipe, "run.rounds=9", "--out", out)
    monkeypatch.setattr(FolderLog, "write", draw)
    said = fedstill("run", recipe, "run.rounds=8", "--out", out, "--continue")
    assert said.code == 0 and rounds_in(out) == [8]


def test_each_listed_command_runs_its_cell_and_together_they_are_the_grid(tmp_path):
    recipe = write_recipe(tmp_path)
    command = ("run", recipe, *QUICK, "--sweep", "method.lr=0.1,0.2", "--seeds", 0, 1)
    assert fedstill(*command, "--out", tmp_path / "whole").code == 0
    out = tmp_path / "cells"
    listed = fedstill(*command, "--out", out, "--list").out.splitlines()
    assert len(listed) == 4 and not out.exists()
    for line in reversed(listed):  # in any order
        program, *arguments = shlex.split(line)
        assert program == "fedstill" and fedstill(*arguments).code == 0
    assert_equal(out, tmp_path / "whole")
    beyond = fedstill(*command, "--out", out, "--cell", 4)
    assert beyond.code == 2 and "the grid has the cells 0 to 3" in beyond.err


def test_a_listed_command_can_be_pasted_whatever_the_run_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = ("run", write_recipe(tmp_path), *QUICK, "run.name=two words", "--seeds", 0, 1)
    first, _ = fedstill(*named, "--list").out.splitlines()
    assert fedstill(*shlex.split(first)[1:]).code == 0
    assert runs_in(tmp_path / "runs" / "two words") == ["seed-0"]


def test_a_cell_that_was_stopped_is_gone_on_with_alone(tmp_path, monkeypatch):
    def stopped(cell, *others):
        cell.folder.mkdir(parents=True)
        (cell.folder / "recipe.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(grids, "play", stopped)
    out = tmp_path / "grid"
    said = fedstill("run", write_recipe(tmp_path), "--seeds", 0, 1, "--out", out, "--cell", 1)
    assert said.code == 130 and f"go on with `fedstill resume {out / 'seed-1'}`" in said.err


IN_WORKERS = """
import os, sys
from contextlib import suppress
from torch import nn

HERE = os.path.dirname(__file__)

def fall():
    for name in os.listdir(HERE):
        with suppress(FileNotFoundError):  # another process took it
            if name.startswith("mark"):
                os.unlink(os.path.join(HERE, name))
                os.kill(os.getpid(), 9)

def net():
    if "fedstill.runs.worker" in sys.orig_argv:
        {does}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
"""


def doing(folder: Path, does: str) -> Path:
    """A recipe whose network does something where a process builds it beside others."""
    (folder / "mine.py").write_text(IN_WORKERS.format(does=does))
    path = folder / "doing.toml"
    models = {"name": f"{folder / 'mine.py'}:net"}
    path.write_text(toml_text({**tables(folder), "models": models}))
    return path


def test_after_a_process_was_killed_another_plays_what_is_left(tmp_path):
    for number in (0, 1):
        (tmp_path / f"mark-{number}").touch()
    recipe, out = doing(tmp_path, "fall()"), tmp_path / "run"
    command = ("run", recipe, *QUICK, "--seeds", 0, 1, 2, 3, "--out", out)
    said = fedstill(*command, "--parallel", 2)
    assert said.code == 2 and "2 of 4 runs failed; the others are kept" in said.err
    assert said.err.count("ended by signal 9, as happens where memory runs out") == 2
    assert len([*out.rglob("summary.json")]) == 2
    assert fedstill(*command, "--continue").code == 0
    assert len([*out.rglob("summary.json")]) == 4


def test_what_a_library_prints_beside_python_is_no_answer_of_a_process(tmp_path):
    recipe = doing(tmp_path, "os.write(1, b'hello from a library')")
    command = ("run", recipe, *QUICK, "--seeds", 0, 1, "--parallel", 2, "--out", tmp_path / "run")
    assert fedstill(*command).code == 0


def test_a_cell_that_another_process_plays_is_passed_over(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    with folders.alone(out / "seed-0"):
        said = fedstill("run", recipe, *QUICK, "--seeds", 0, 1, "--out", out, "--continue")
    assert said.code == 0 and "seed-0 is played by another process" in said.err
    assert runs_in(out) == ["seed-1"]


def test_folders_are_held_by_a_file_where_the_system_locks_files_alone(tmp_path, monkeypatch):
    flock = folders.fcntl.flock

    def as_nfs(handle, how):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(9, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(folders.fcntl, "flock", as_nfs)
    with (
        folders.alone(tmp_path / "run"),
        pytest.raises(folders.Occupied, match="another process"),
        folders.alone(tmp_path / "run"),
    ):
        pass
    folders.check_free(tmp_path / "run")


def test_a_failed_run_does_not_keep_the_others_from_running(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    said = fedstill("run", recipe, "--sweep", "method.lr=1e30,0.1", "--out", out)
    assert said.code == 2 and "1 of 2 runs failed; the others are kept" in said.err
    assert (out / "lr-0.1" / "summary.json").exists()


def test_the_best_value_on_held_out_examples_is_tested_with_all_seeds(tmp_path):
    recipe, out = several(tmp_path, FEDAVG, FEDPROX), tmp_path / "grid"
    command = ("run", recipe, "--seeds", 0, 1, "--sweep", "method.lr=0.0001,0.2", "--out", out)
    said = fedstill(*command, "--select", "average_accuracy")
    assert said.code == 0, said.err
    choice = json.loads((out / "choice.json").read_text())
    for method in choice["methods"]:
        scores = {each["values"]["method.lr"]: each["score"] for each in method["of"]}
        held = [
            json.loads((out / "held-out" / method["method"] / f"lr-{lr}" / f"seed-{seed}"
                        / "summary.json").read_text())
            for lr in scores for seed in (0, 1)
        ]  # fmt: skip
        assert all(summary["held_out"] > 0 for summary in held)
        means = [(held[i]["average_accuracy"] + held[i + 1]["average_accuracy"]) / 2
                 for i in (0, 2)]  # fmt: skip
        assert list(scores.values()) == pytest.approx(means)
        assert method["values"] == {"method.lr": max(scores, key=lambda lr: scores[lr])}
    for label in ("fedavg", "fedprox"):
        for seed in (0, 1):
            tested = out / "chosen" / label / f"seed-{seed}"
            written = tomllib.loads((tested / "recipe.toml").read_text())
            assert written["method"]["lr"] == 0.2 and "hold_out" not in written["data"]
            assert "held_out" not in json.loads((tested / "summary.json").read_text())
    assert "held-out accuracy" in said.out and "chosen method.lr=0.2" in said.err
    page = fedstill("compare", out, "--format", "markdown").out
    assert page.count("held-out scores") == 1 and "for choosing values" in page


def test_a_point_that_fails_is_not_chosen_and_keeps_none_from_being_chosen(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    said = fedstill("run", recipe, "--sweep", "method.lr=1e30,0.1", "--select", "accuracy",
                    "--out", out)  # fmt: skip
    assert said.code == 0 and "lr-1e+30 failed" in said.err
    (choice,) = json.loads((out / "choice.json").read_text())["methods"]
    assert choice["values"] == {"method.lr": 0.1} and len(choice["of"]) == 1
    assert (out / "chosen" / "summary.json").exists()


def test_nothing_is_chosen_while_another_process_plays(tmp_path):
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    command = ("run", recipe, *QUICK, "--sweep", "method.lr=0.1,0.2", "--select", "accuracy")
    with folders.alone(out / "held-out" / "lr-0.1"):
        said = fedstill(*command, "--out", out, "--continue")
    assert said.code == 0 and "values are chosen when all have ended" in said.err
    assert not (out / "choice.json").exists()


def test_data_that_moved_are_found_when_a_grid_goes_on(tmp_path):
    made = tables(tmp_path, run={"rounds": 1})
    names = ("east.npz", "north.npz", "west.npz")
    made["data"]["options"]["clients"] = {name.removesuffix(".npz"): name for name in names}
    made["data"]["data_dir"] = str(tmp_path)
    recipe, out = tmp_path / "relative.toml", tmp_path / "grid"
    recipe.write_text(toml_text(made))
    assert fedstill("run", recipe, "--seeds", 0, 1, "--out", out).code == 0
    (out / "seed-1" / "summary.json").unlink()  # as if it had stopped before its end
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in names:
        (tmp_path / name).rename(elsewhere / name)
    assert fedstill("resume", out).code == 2
    said = fedstill("resume", out, "--data-dir", elsewhere)
    assert said.code == 0 and said.out.count("\n") == 1, said.err


def test_a_search_draws_the_same_points_again(tmp_path):
    pytest.importorskip("optuna")
    recipe, out = write_recipe(tmp_path), tmp_path / "grid"
    command = ("run", recipe, *QUICK, "--search", 3, "--select", "loss", "--out", out,
               "--sweep", "method.lr=0.001..0.5,log", "--sweep", "method.epochs=1,2")  # fmt: skip
    assert fedstill(*command).code == 0
    first = runs_in(out)
    assert len(first) == 3 + 1
    again = fedstill(*command, "--continue")
    assert (again.code, again.out, runs_in(out)) == (0, "", first)
    choice = json.loads((out / "choice.json").read_text())["methods"][0]
    assert choice["score"] == min(each["score"] for each in choice["of"])


def test_runs_beside_each_other_equal_runs_alone(tmp_path):
    recipe = write_recipe(tmp_path)
    command = ("run", recipe, *QUICK, "--seeds", 0, 1, 2)
    assert fedstill(*command, "--out", tmp_path / "alone").code == 0
    said = fedstill(*command, "--out", tmp_path / "beside", "--parallel", 2)
    assert said.code == 0, said.err
    assert sorted(line.split(": ")[0] for line in said.out.splitlines()) == [
        f"fedavg · own · seed {seed}" for seed in (0, 1, 2)
    ]
    assert_equal(tmp_path / "beside", tmp_path / "alone")


def test_names_of_points_have_whole_keys_where_words_are_the_same():
    assert point_name({"method.lr": 0.1, "method.views": True}) == "lr=0.1, views=true"
    assert point_name({"method.mu": 1.0}) == "mu=1"
    whole = {"method.name.lr": 1, "method.other.lr": 2}
    assert point_name(whole) == "method.name.lr=1, method.other.lr=2"
