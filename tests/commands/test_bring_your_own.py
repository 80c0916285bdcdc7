"""Methods, networks, data sets and metrics of a user's file or an installed package, from the
command line; the file and the recipe are those of docs/bring-your-own.md."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from small_recipes import fedstill, write_recipe

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own.md"
SOURCE = Path(__file__).parents[2] / "src"


def block(language: str, holding: str = "") -> str:
    """The first block of a language on the page that holds some words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(text for text in blocks if holding in text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(block("python"))
    (tmp_path / "recipe.toml").write_text(block("toml"))
    return tmp_path


def test_all_of_one_file_runs_and_resumes_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    said = fedstill("run", folder / "recipe.toml", "--out", folder / "out")
    assert said.code == 0, said.err
    assert "Pulled · mine.py:stripes · seed 0: " in said.out
    table = fedstill("compare", folder / "out", "--format", "latex").out
    assert "mine.py:stripes (data " in table and str(folder) not in table
    runs = sorted(path for path in (folder / "out").iterdir() if path.is_dir())
    assert [run.name for run in runs] == ["Pulled", "fedavg"]
    rows = list(csv.DictReader((runs[0] / "metrics.csv").read_text().splitlines()))
    sure = [float(row["value"]) for row in rows if row["name"] == "confidence"]
    assert sure and all(1 / 3 <= value <= 1 for value in sure)
    right = [float(row["value"]) for row in rows if row["name"] == "accuracy"]
    assert right[-1] > 0.9  # the three kinds of stripes are told apart
    written = tomllib.loads((runs[0] / "recipe.toml").read_text())
    assert written["models"]["name"] == f"{folder / 'mine.py'}:Net"
    assert written["method"]["pull"] == 0.01
    monkeypatch.chdir("/")
    more = fedstill("resume", runs[0], "run.rounds=3")
    assert more.code == 0, more.err
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert summary["rounds"] == 3 and set(summary["networks"].values()) == {"Net"}


def test_optimisers_of_ones_own_train(folder: Path) -> None:
    (folder / "optimisers.py").write_text(block("python", "class WithAdam"))
    for name in ("WithAdam", "Cosine"):
        said = fedstill(
            "run", write_recipe(folder), f"method.name={folder}/optimisers.py:{name}",
            "method.lr=0.05", "run.rounds=3", "--out", folder / name,
        )  # fmt: skip
        assert said.code == 0, said.err
        summary = json.loads((folder / name / "summary.json").read_text())
        assert summary["average_accuracy"] > 1 / 3


def test_a_method_of_a_file_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said = fedstill("show", "mine.py:Pulled", "pull=0.5", "--format", "json")
    assert said.code == 0, said.err
    shown = json.loads(said.out)
    assert shown["hyper_parameters"]["pull"] == 0.5
    assert [step["name"] for step in shown["steps"]] == ["broadcast", "update", "aggregate"]


def test_faults_of_own_code_are_listed_with_all_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    changes = ("method.Pulled.pulll=3", "models.name=none.py:Net", "run.metrics=['mine.py:con']",
               "data.options.clientele=3")  # fmt: skip
    said = fedstill("run", folder / "recipe.toml", *changes)
    assert said.code == 2
    for part in ("method[0].pulll", "no file", "unknown name 'con'", "clientele"):
        assert part in said.err or part in said.out


PACKAGE = {
    "own_pack/__init__.py": "",
    "own_pack/mine.py": block("python"),
    "own_pack-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-pack\nVersion: 0.3\n",
    "own_pack-0.3.dist-info/entry_points.txt": """
[fedstill.methods]
pulled = own_pack.mine:Pulled
broken = own_pack.none:Nothing

[fedstill.models]
their_net = own_pack.mine:Net

[fedstill.datasets]
stripes = own_pack.mine:stripes

[fedstill.metrics]
confidence = own_pack.mine:confidence
""",
}


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in whose packages the plug-in lies, as pip leaves it."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    places = [str(SOURCE), str(tmp_path / "site")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "200"}


def called(environment: dict[str, str], *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fedstill", *map(str, args)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_package_is_listed_beside_ours_and_runs(
    tmp_path: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    rows = json.loads(fedstill("methods", "--format", "json").out)
    listed = {row["method"]: row for row in rows}
    assert listed["pulled"]["from"] == "own-pack" and listed["fedavg"]["from"] == "fedstill"
    assert "cannot be used: plug-in 'broken' of own-pack" in listed["broken"]["purpose"]
    assert "stripes" in fedstill("data").out
    recipe = block("toml").replace("mine.py:Pulled", "pulled").replace("mine.py:Net", "their_net")
    recipe = recipe.replace("mine.py:stripes", "stripes").replace(
        "mine.py:confidence", "confidence"
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    called(installed, "run", tmp_path / "recipe.toml", "run.rounds=1", "--out", tmp_path / "out")
    metrics = (tmp_path / "out" / "pulled" / "metrics.csv").read_text()
    assert "confidence" in metrics


def test_without_plug_ins_the_list_of_methods_has_no_column_for_them() -> None:
    rows = json.loads(fedstill("methods", "--format", "json").out)
    assert "from" not in rows[0]


def test_a_partition_of_ones_own_splits_the_data(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(
        "from dataclasses import dataclass\nimport numpy as np\n"
        "from fedstill.data import Partition\n"
        "@dataclass(frozen=True)\nclass Halves(Partition):\n"
        "    parts: int = 2\n"
        "    def split(self, labels, seed):\n"
        "        return np.array_split(np.arange(len(labels)), self.parts)\n"
    )
    recipe = write_recipe(tmp_path, run={"rounds": 1})
    out = tmp_path / "run"
    partition = f"data.partition={{kind='{tmp_path}/halves.py:Halves', parts=2}}"
    said = fedstill("run", recipe, partition, "--out", out)
    assert said.code == 0, said.err
    assert "client-01" in (out / "partition.csv").read_text()
    wrong = fedstill("run", recipe, f"data.partition={{kind='{tmp_path}/halves.py:np'}}")
    assert wrong.code == 2 and "not a subclass of fedstill.data" in wrong.err + wrong.out
