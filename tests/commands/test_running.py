"""run and resume: seeds, folders, what is printed, and the bar on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedstill import recipe as config
from fedstill.commands import grids, progress
from fedstill.commands.cli import joined_seeds
from fedstill.commands.progress import Watched, status_line
from fedstill.core.errors import DataError, RecipeError
from fedstill.core.pulse import Part, Pulse
from fedstill.federation.run import Progress
from fedstill.recipe import build
from fedstill.recipe.toml import toml_text
from fedstill.runs import grid as of_runs
from small_recipes import FEDDM, fedstill, images_recipe, tables, write_recipe


def test_a_run_prints_its_result_and_nothing_else(tmp_path):
    said = fedstill("run", write_recipe(tmp_path), "--out", tmp_path / "run")
    score = json.loads((tmp_path / "run" / "summary.json").read_text())["average_accuracy"]
    line = f"fedavg · own · seed 0: accuracy {100 * score:.2f} % → {tmp_path / 'run'}\n"
    assert (said.code, said.out, said.err) == (0, line, "")


def test_overrides_reach_the_run_and_are_written_down(tmp_path):
    changes = ("run.rounds=2", "method.lr=0.1", "data.partition.kind=dirichlet",
               "data.partition.clients=2", "data.partition.alpha=5")  # fmt: skip
    said = fedstill("run", write_recipe(tmp_path), *changes, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert (recipe["run"]["rounds"], recipe["method"]["lr"]) == (2, 0.1)
    assert recipe["data"]["partition"] == {"kind": "dirichlet", "clients": 2, "alpha": 5}
    assert (tmp_path / "run" / "partition.csv").read_text().count("client-0") == 2


@pytest.mark.parametrize("place", ["before", "after", "equals"])
def test_several_seeds_run_in_one_call(tmp_path, place):
    recipe, out = write_recipe(tmp_path), ("--out", tmp_path / "run")
    commands = {
        "before": ("run", "--seeds", 0, 3, recipe, "run.rounds=1", *out),
        "after": ("run", recipe, "run.rounds=1", *out, "--seeds", 0, 3),
        "equals": ("run", recipe, "run.rounds=1", "--seeds=0", 3, *out),
    }
    said = fedstill(*commands[place])
    assert said.code == 0, said.err
    assert said.out.count("\n") == 2 and "seed 3" in said.out
    seeds = [tomllib.loads(path.read_text())["run"]["seed"]
             for path in sorted((tmp_path / "run").glob("seed-*/recipe.toml"))]  # fmt: skip
    assert seeds == [0, 3]


def that_do_not_fit(tmp_path: Path) -> Path:
    """A recipe of four methods of which the second and the fourth cannot use the network."""
    given = tables(tmp_path)
    own = tmp_path / "mine.py"
    own.write_text("from torch import nn\ndef net():\n"
                   "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n")  # fmt: skip
    given["models"] = {"name": f"{own}:net"}
    given["method"] = [{"name": name} for name in ("fedavg", "heterofl", "local", "fedrolex")]
    recipe = tmp_path / "several.toml"
    recipe.write_text(toml_text(given))
    return recipe


def test_methods_that_do_not_fit_are_refused_before_another_is_played(tmp_path):
    recipe = that_do_not_fit(tmp_path)
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    beside = fedstill("run", recipe, "--out", tmp_path / "run", "--parallel", 2)
    assert said == beside
    assert said.code == 2 and not (tmp_path / "run").exists()
    assert "2 faults" in said.err
    assert "heterofl: models: HeteroFL: net cannot be narrowed" in said.err
    assert "the others alone are run by --only fedavg --only local" in said.err
    only = ("--only", "fedavg", "--only", "local", "run.rounds=1")
    assert fedstill("run", recipe, *only, "--out", tmp_path / "run").code == 0
    # Going on tells them together too, of the methods that are left.
    for name in ("fedavg", "local"):
        (tmp_path / "run" / name / "summary.json").unlink()
    going_on = ("run", recipe, "run.rounds=1", "--continue", "--out", tmp_path / "run")
    said = fedstill(*going_on)
    assert said.code == 2 and "2 faults" in said.err and said.out == ""
    assert "heterofl: models: HeteroFL: net" in said.err and "fedrolex: models: Fed" in said.err
    assert "`fedstill run` with --continue --only fedavg --only local" in said.err
    assert fedstill(*going_on, *only[:4]).code == 0
    # One alone has another folder than in a grid; what was begun there goes on there.
    (tmp_path / "run" / "fedavg" / "summary.json").unlink()
    said = fedstill(*going_on)
    begun = tmp_path / "run" / "fedavg"
    assert f"what was begun of fedavg goes on by `fedstill resume {begun}`" in said.err
    assert fedstill("resume", begun).code == 0
    shutil.rmtree(begun)
    said = fedstill(*going_on)
    assert "fedavg alone is run by --only fedavg and a folder of its own after --out" in said.err
    alone = ("--only", "fedavg", "--out", tmp_path / "alone")
    assert fedstill("run", recipe, "run.rounds=1", *alone).code == 0


@pytest.mark.parametrize("parallel", [1, 2])
def test_swept_values_that_do_not_fit_are_refused_before_another_is_played(tmp_path, parallel):
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    command = ("run", recipe, "--out", out, "--parallel", parallel)
    sweep = ("--sweep", "federation.sample=2,9", "--sweep", "method.lr=0.01,0.02,0.05,0.1")
    said = fedstill(*command, *sweep)
    assert said.code == 2 and said.out == "" and not out.exists()
    points = " and ".join(f"fedavg, sample=9, lr={lr}" for lr in (0.01, 0.02, 0.05))
    assert said.err == (
        f"fedstill: {points} and 1 more: federation.sample = 9, but there are 3 clients; ask for "
        "at most 3. Nothing was played; leave these values out of the sweep\n"
    )
    # What is wrong with all is said once, and of no point.
    said = fedstill(*command, "--sweep", "method.lr=0.01,0.02", "federation.sample=9")
    assert said.err.startswith("fedstill: federation.sample = 9, but") and said.code == 2
    # Data that cannot be had are told as networks are.
    split = ("data.partition.kind=iid", "data.partition.clients=2")
    said = fedstill(*command, *split, "--sweep", "data.partition.clients=2,1000")
    assert said.code == 2 and said.out == "" and not out.exists()
    assert said.err.startswith("fedstill: fedavg, clients=1000: data: ")


def test_a_method_that_does_not_fit_is_refused_before_another_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(of_runs, "search", lambda *given: pytest.fail("a search began"))
    recipe, out = that_do_not_fit(tmp_path), tmp_path / "run"
    given = ("--sweep", "method.lr=0.01..0.1", "--search", 2, "--select", "accuracy")
    said = fedstill("run", recipe, "--out", out, *given)
    assert said.code == 2 and "2 faults" in said.err and not out.exists()
    assert "heterofl: models: HeteroFL: net cannot be narrowed" in said.err


def test_a_run_that_is_refused_before_its_first_round_does_not_keep_the_others_from_running(
    tmp_path,
):
    """Not even the data of this seed can be had."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    made = build.population_of

    def of_some(recipe):
        if recipe.run.seed == 1:
            raise DataError("no such split")
        return made(recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "population_of", of_some)
        said = fedstill("run", recipe, "run.rounds=1", "--seeds", 0, 1, 2, "--out", out)
    assert said.code == 2
    assert f"{out / 'seed-1'} failed: no such split" in said.err and "1 of 3 runs" in said.err
    assert (out / "seed-2" / "summary.json").exists()


def test_a_grid_that_is_stopped_before_it_began_is_not_to_be_resumed(tmp_path, monkeypatch):
    def stopped(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(grids, "_check_fit", stopped)
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    said = fedstill("run", recipe, "--seeds", 0, 1, "--out", out)
    assert said.code == 130 and "stopped; nothing was begun" in said.err
    monkeypatch.undo()
    assert fedstill("run", recipe, "run.rounds=1", "--seeds", 0, 1, "--out", out).code == 0
    monkeypatch.setattr(grids, "_check_fit", stopped)
    said = fedstill("run", recipe, "run.rounds=1", "--seeds", 0, 1, "--out", out, "--continue")
    assert f"stopped; go on with `fedstill resume {out}`" in said.err


def test_seeds_are_joined_up_to_the_next_word():
    assert joined_seeds(["run", "--seeds", "0", "1", "r.toml", "2"]) == [
        "run", "--seeds", "0,1", "r.toml", "2",
    ]  # fmt: skip
    assert joined_seeds(["--seeds=0", "1", "x=1"]) == ["--seeds=0,1", "x=1"]


def test_several_methods_get_a_folder_each_named_by_label(tmp_path):
    made = tables(tmp_path)
    methods = (
        '\n[[method]]\nname = "fedavg"\n\n[[method]]\nname = "fedavg"\nlabel = "slow"\nlr = 0.001\n'
    )
    del made["method"]
    recipe = tmp_path / "two.toml"
    recipe.write_text(toml_text(made) + methods)
    said = fedstill("run", recipe, "run.rounds=1", "--out", tmp_path / "runs")
    assert said.code == 0, said.err
    assert [line.split(" · ")[0] for line in said.out.splitlines()] == ["fedavg", "slow"]
    slow = tomllib.loads((tmp_path / "runs" / "slow" / "recipe.toml").read_text())
    assert slow["method"]["lr"] == 0.001
    assert fedstill("compare", tmp_path / "runs").code == 0


def test_some_methods_of_a_recipe_can_be_picked_by_label(tmp_path):
    made = tables(tmp_path)
    del made["method"]
    recipe = tmp_path / "two.toml"
    each = '\n[[method]]\nname = "fedavg"\nlabel = "{}"\n'
    recipe.write_text(toml_text(made) + each.format("one") + each.format("two"))
    said = fedstill("run", recipe, "run.rounds=1", "--only", "two", "--out", tmp_path / "run")
    assert said.code == 0 and said.out.startswith("two · "), said.err
    said = fedstill("run", recipe, "--only", "tow", "--out", tmp_path / "none")
    assert said.code != 0 and "did you mean 'two'?" in said.err
    assert not (tmp_path / "none").exists()


def test_changes_are_for_the_methods_picked(tmp_path):
    recipe = tmp_path / "two.toml"
    each = '[[method]]\nname = "desa"\nlabel = "{}"\nanchors = "{}"\n'
    data = 'data.name = "digits5"\nmodels.width = 4\n'
    recipe.write_text(data + each.format("a", "generator") + each.format("b", "synthesised"))
    change = ["method.quantize_anchors=true"]  # refused with anchors of a generator
    first, second = config.checked(config.read_recipe(recipe, change, only=["b"]))
    assert not first.method.quantize_anchors and second.method.quantize_anchors
    with pytest.raises(RecipeError, match="anchors of a generator"):
        config.checked(config.read_recipe(recipe, change))


def test_a_run_goes_below_runs_under_its_name_unless_told(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert fedstill("run", recipe, "run.rounds=1").out.endswith("→ runs/small\n")


def test_a_quick_run_is_the_small_variant_below_a_name_of_its_own(tmp_path, monkeypatch):
    quick = {"run.rounds": 1, "method.batch_size": 24}
    recipe = write_recipe(tmp_path, quick=quick)
    monkeypatch.chdir(tmp_path)
    said = fedstill("run", recipe, "--quick", "method.lr=0.1")
    assert said.code == 0 and said.out.endswith("→ runs/small-quick\n")
    written = tomllib.loads((tmp_path / "runs" / "small-quick" / "recipe.toml").read_text())
    assert written["run"]["rounds"] == 1 and "quick" not in written
    assert (written["method"]["batch_size"], written["method"]["lr"]) == (24, 0.1)
    assert fedstill("run", recipe).out.endswith("→ runs/small\n")


def test_the_data_of_the_quick_variant_can_be_looked_at(tmp_path):
    recipe = write_recipe(tmp_path, quick={"data.partition": {"kind": "iid", "clients": 2}})
    assert "client-01" not in fedstill("data", recipe).out
    assert "client-01" in fedstill("data", recipe, "--quick").out
    said = fedstill("data", write_recipe(tmp_path), "--quick")
    assert said.code == 2 and "the recipe has no table [quick]" in said.err


def test_a_finished_run_may_be_resumed_and_says_its_result_again(tmp_path):
    first = fedstill("run", write_recipe(tmp_path), "--quiet", "--out", tmp_path / "run")
    again = fedstill("resume", tmp_path / "run")
    assert (again.code, again.out) == (0, first.out)
    more = fedstill("resume", tmp_path / "run", "run.rounds=4")
    assert more.code == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 4


def test_moved_data_are_found_by_a_new_data_dir_when_resuming(tmp_path):
    made = tables(tmp_path)
    made["data"]["options"]["clients"] = {"east": "east.npz", "west": "west.npz"}
    made["data"]["data_dir"] = str(tmp_path)
    recipe = tmp_path / "relative.toml"
    recipe.write_text(toml_text(made))
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("east.npz", "west.npz"):
        (tmp_path / name).rename(elsewhere / name)
    said = fedstill("resume", tmp_path / "run", "run.rounds=4")
    assert said.code == 2 and "there is nothing at" in said.err
    assert fedstill("resume", tmp_path / "run", "run.rounds=4", "--data-dir", elsewhere).code == 0


def test_the_bar_says_round_accuracy_traffic_and_time_left():
    nothing = Progress(0, 10, None, 0, 0.0)
    assert status_line(nothing, []) == "round 0/10 · 0 B sent"
    some = Progress(4, 10, 0.5213, 1_250_000, 2.0)
    assert (
        status_line(some, [1.0, 3.0]) == "round 4/10 · accuracy 52.1 % · 1.25 MB sent · 0:12 left"
    )
    other = Progress(4, 10, 0.5213, 0, 2.0, "auroc")
    assert status_line(other, []) == "round 4/10 · auroc 0.5213 · 0 B sent"
    long = Progress(1, 3601, 0.5, 0, 2.0)
    assert status_line(long, [2.0]).endswith(" · 2:00:00 left")


def test_the_bar_says_what_is_being_done_in_a_round_that_takes_long(monkeypatch):
    beat = Pulse(2, "synthesize", (Part("", 1, 5), Part("iteration", 13, 300)))
    watched = Watched()
    watched.line(Progress(1, 3, 0.5, 0, 60.0))
    assert watched.on_the_way(beat) is None  # so soon after the last line
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert watched.on_the_way(beat) == "round 2/3 · synthesize 1/5, iteration 13/300 · 2:00 left"
    assert Watched().on_the_way(beat) == "round 2 · synthesize 1/5, iteration 13/300"


def at(monkeypatch, seconds):
    """Let so many seconds have passed since the beginning of time."""
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(seconds))


def test_lines_without_a_terminal_come_seldom_and_ever_more_seldom(monkeypatch, capsys):
    at(monkeypatch, 0)
    lines = progress.Lines()
    said = []
    for second in range(1, 24 * 3600, 5):
        at(monkeypatch, second)
        lines.tell("fedavg seed 0", "round 1/10")
        if capsys.readouterr().err:
            said.append(second)
    assert said[:3] == [31, 61, 91]
    assert 600 <= said[-1] - said[-2] <= 605 and len(said) < 200


def test_a_run_in_a_batch_system_says_how_far_it_is_on_stderr(tmp_path, monkeypatch):
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    silent = fedstill("run", recipe, "--out", out)
    assert silent.err == ""  # it is soon over
    monkeypatch.setattr(progress, "LINES_APART_AT_MOST", 0.0)
    said = fedstill("run", recipe, "--out", tmp_path / "again")
    lines = said.err.splitlines()
    assert said.out.replace("again", "run") == silent.out
    assert lines[0].startswith("fedstill: fedavg seed 0: round 0/")
    assert re.fullmatch(
        r"fedstill: .*: round 1/\d+ · accuracy .* % · .* sent · 0:\d\d left", lines[1]
    )
    assert fedstill("run", recipe, "--quiet", "--out", tmp_path / "quiet").err == ""
    assert fedstill("--quiet", "run", recipe, "--out", tmp_path / "silent").err == ""


def test_in_a_round_that_takes_long_a_batch_system_is_told_the_step(tmp_path, monkeypatch):
    for name in ("LINES_APART_AT_MOST", "PATIENCE"):
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr("fedstill.core.pulse.APART", 0.0)
    said = fedstill("run", write_recipe(tmp_path), "run.rounds=1", "--out", tmp_path / "run")
    assert re.search(r"seed 0: round 1/1 · update iteration \d/\d", said.err)


def test_runs_beside_each_other_say_how_far_they_are_by_their_titles(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "LINES_APART_AT_MOST", 0.0)
    command = ("run", write_recipe(tmp_path), "run.rounds=1", "--seeds", 0, 1, "--parallel", 2)
    said = fedstill(*command, "--out", tmp_path / "run")
    assert said.code == 0 and said.out.count("\n") == 2
    for seed in (0, 1):
        assert f"fedstill: fedavg seed {seed}: round 1/1 · accuracy" in said.err
    assert fedstill(*command, "--quiet", "--out", tmp_path / "quiet").err == ""


def test_shares_of_work_are_told_in_lines_with_the_time_left(monkeypatch, capsys):
    at(monkeypatch, 0)
    shares = progress.Shares()
    shares.watch("fedavg", 0.0)
    shares.watch("fedavg", 0.5)  # kept from an audit that was stopped
    at(monkeypatch, 60)
    shares.watch("fedavg", 0.6)
    at(monkeypatch, 100)
    shares.beat()
    shares.beat()
    at(monkeypatch, 140)
    shares.watch("feddm", 0.0)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "fedstill: fedavg: 60 %, 4:00 left", "fedstill: fedavg: 60 %, 6:40 left",
        "fedstill: feddm: 0 %",
    ]  # fmt: skip


# As a shell would start it; a test runner in the background may have told it to ignore Ctrl-C.
MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedstill.commands.cli import main; main()"
)


def on_a_terminal(
    *arguments: object,
    interrupt_after: bytes = b"",
    by: signal.Signals = signal.SIGINT,
    piped: bool = True,
) -> tuple[int, str, str]:
    """Exit code, standard output and what a terminal showed, of the real command.

    Unless it is `piped`, standard output goes to the terminal too.
    """
    master, slave = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=slave, stdout=subprocess.PIPE if piped else slave, stderr=slave,
        env=environment,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
        if interrupt_after and re.search(interrupt_after, shown):
            process.send_signal(by)
            interrupt_after = b""
    os.close(master)
    out, _ = process.communicate()
    return process.returncode, (out or b"").decode(), shown.decode()


def test_a_terminal_sees_a_bar_and_a_pipe_only_the_result(tmp_path):
    recipe = images_recipe(tmp_path, {**FEDDM, "steps": 5}, rounds=4)
    code, out, shown = on_a_terminal("run", recipe, "--out", tmp_path / "run")
    assert code == 0
    assert out.count("\n") == 1 and out.startswith("feddm · own · seed 0: accuracy ")
    assert "feddm seed 0" in shown
    for words in ("round 4/4", "accuracy ", " kB sent", " left"):
        assert words in shown


def screen(shown: str) -> list[str]:
    """The lines that stand on a terminal in the end: bars move up and erase what they wrote."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", shown):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.startswith("\x1b["):
            if piece[-1] == "A":
                row -= int(piece[2:-1])
            elif piece[-1] == "K":
                lines[row] = ""
        elif piece != "\r":
            lines[row] += piece
    return [line for line in lines if line]


def test_results_of_runs_beside_each_other_stay_on_the_screen(tmp_path):
    command = ("run", write_recipe(tmp_path), "run.rounds=1", "--out", tmp_path / "run")
    code, _, shown = on_a_terminal(*command, "--seeds", 0, 1, "--parallel", 2, piped=False)
    assert code == 0, shown
    lines = screen(shown)
    assert len(lines) == 2 and all(line.startswith("fedavg · own · seed ") for line in lines)


@pytest.mark.parametrize(
    ("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "scheduler"]
)
def test_a_stopped_run_says_how_to_go_on(tmp_path, by, code):
    recipe = write_recipe(tmp_path)
    folder = tmp_path / "run"
    ended, out, shown = on_a_terminal(
        "run", recipe, "run.rounds=500", "--out", folder, interrupt_after=rb"round [1-9]", by=by
    )
    assert (ended, out) == (code, "")
    assert f"stopped; go on with `fedstill resume {folder}`" in " ".join(shown.split())
    assert "Traceback" not in shown
    assert (folder / "checkpoints").is_dir() and not (folder / "summary.json").exists()
