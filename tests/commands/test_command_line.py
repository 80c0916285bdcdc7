"""The command line itself: version, help, wrong options, pictures, poor terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fedstill as package
from fedstill.core import source
from fedstill.core.errors import BadValue
from fedstill.report import canvas
from small_recipes import fedstill, write_recipe


def test_the_version_is_printed_with_the_code() -> None:
    said = fedstill("--version")
    code = source.own_digest()[: source.SHORT]
    assert (said.code, said.out) == (0, f"fedstill {package.__version__} (code {code})\n")


def test_a_version_that_nobody_installed_is_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where fedstill is run from its source."""

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.delitem(vars(package), "__version__", raising=False)
    said = fedstill("--version")
    monkeypatch.delitem(vars(package), "__version__", raising=False)
    assert said.code == 0 and said.out.startswith("fedstill 0 (code ")


@pytest.mark.parametrize("words", [(), ("run",), ("data",)])
def test_h_is_help(words: tuple[str, ...]) -> None:
    short, long = fedstill(*words, "-h"), fedstill(*words, "--help")
    assert short.code == 0
    assert short.out == long.out and short.out.startswith("Usage: fedstill")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rounds", 3), "run has no option --rounds; .* without dashes: run.rounds=3"),
        (("--rounds=3",), "without dashes: run.rounds=3"),
        (("--lr", 0.1, "--quiet"), "without dashes: method.lr=0.1"),
        (("--batch-size", 8), "without dashes: method.batch_size=8"),
        (("--stack_at_most",), "without dashes: engine.stack_at_most=…"),
    ],
)
def test_a_value_of_a_recipe_written_as_an_option_is_explained(
    options: tuple[object, ...], says: str, tmp_path: Path
) -> None:
    said = fedstill("run", write_recipe(tmp_path), "--out", tmp_path / "run", *options)
    assert said.code == 2
    assert re.search(says, said.err)
    assert not (tmp_path / "run").exists()


def test_another_wrong_option_is_refused_as_ever(tmp_path: Path) -> None:
    said = fedstill("run", write_recipe(tmp_path), "--bogus")
    assert said.code == 2 and "No such option: --bogus" in said.err
    assert "No such option: --rounds" in fedstill("compare", tmp_path, "--rounds", 3).err


def test_a_picture_of_an_unknown_format_is_refused_before_the_work(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    for name, came in (("out.xyz", "has '.xyz'"), ("out", "has none")):
        said = fedstill("data", recipe, "--picture", tmp_path / name)
        assert (said.code, said.out) == (2, "")
        assert f"{name} {came}; use one of .png, .pdf, .svg" in said.err
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("suffix", canvas.FORMATS)
def test_every_format_that_is_named_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    drawn = canvas.save(canvas.figure(1, 1), tmp_path / f"picture.{suffix}")
    assert drawn.stat().st_size > 0
    with pytest.raises(BadValue, match="use one of"):
        canvas.save(canvas.figure(1, 1), tmp_path / "picture.bmpx")


def test_a_terminal_without_some_characters_ends_no_run(tmp_path: Path) -> None:
    encoding = "latin-1"
    command = [sys.executable, "-m", "fedstill", "run", str(write_recipe(tmp_path)), "run.rounds=1"]
    done = subprocess.run(
        [*command, "--seeds", "0", "1", "--out", str(tmp_path / "run")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode(encoding).splitlines()
    assert len(lines) == 2  # both seeds were run; their arrows are question marks
    assert all("accuracy" in line and " ? " in line for line in lines)


DETACHED = """
from dataclasses import dataclass
from fedstill import FedAvg

@dataclass(frozen=True)
class Detached(FedAvg):
    \"\"\"FedAvg whose loss is detached by mistake.\"\"\"

    def objective(self, *given, **more):
        return super().objective(*given, **more).detach()
"""


def test_a_warning_of_ours_is_a_sentence_without_a_place_in_our_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DETACHED)
    recipe = write_recipe(tmp_path, method={"name": f"{tmp_path / 'mine.py'}:Detached"})
    code = "import sys; from fedstill.commands.cli import main; main()"
    words = ["run", str(recipe), "run.rounds=1", "--out", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = "fedstill: warning: Detached.objective gave a loss that does not depend on what is"
    assert [line.startswith(told) for line in done.stderr.splitlines()] == [True]


@pytest.mark.parametrize("command", ["resume", "compare", "report"])
def test_a_file_that_cannot_be_used_is_one_message(command: str, tmp_path: Path) -> None:
    code = "import sys; from fedstill.commands.cli import main; main()"
    path = str(tmp_path / ("a" * 300))
    words = [sys.executable, "-c", code, command, path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    said, where = done.stderr.splitlines()
    assert said.startswith(f"fedstill: {path}") and said.endswith(": File name too long")
    assert where == "for the traceback, run the same command with fedstill --verbose"
    words.insert(-2, "--verbose")
    told = subprocess.run(words, capture_output=True, text=True).stderr.splitlines()
    assert told[0].startswith("Traceback") and told[-1] == said


def test_show_tells_where_recipes_and_their_values_belong() -> None:
    said = fedstill("show", "recipes/feddm/mnist.toml")
    assert said.code == 2 and "fedstill data recipes/feddm/mnist.toml" in said.err
    assert "method.per_class=20" in fedstill("show", "feddm", "--per-class", 20).err
    strange = fedstill("show", "feddm", "--data-dir", "x")
    assert strange.code == 2 and "No such option" in strange.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [("methods",), ("methods", "--format", "json"), ("--help",)])
def test_a_disk_that_is_full_where_the_output_goes_is_a_message(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fedstill", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("fedstill: cannot write the output: ")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", [("methods", "--format", "json"), ("--version",)])
def test_whoever_reads_the_output_may_stop_reading(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedstill", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
