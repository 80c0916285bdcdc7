"""`fedstill ledger` on runs of one's own, and the ledger that is shipped."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from fedstill import Experiment, FedAvg, Population, run, split
from fedstill.commands.ledger import changes
from fedstill.report.groups import BY_CLIENT
from fedstill.report.ledger import ledger_of
from fedstill.report.ledger_page import page
from small_recipes import fedstill, write_recipe

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "docs" / "ledger"
PAPER = """
paper = "Paper"
title = "Somebody, 2020"

[[table]]
name = "table 1"
column = "stripes"
data = "own"
recipes = ["small"]
score = "average_accuracy"
[table.cells]
fedavg = 50.0
"""


def test_runs_are_set_beside_a_paper_and_kept_with_what_was_changed(tmp_path: Path) -> None:
    papers, recipes = tmp_path / "ledger", tmp_path / "recipes"
    (papers / "papers").mkdir(parents=True)
    (papers / "papers" / "paper.toml").write_text(PAPER)
    recipe = write_recipe(recipes, run={"rounds": 1})
    assert fedstill("run", recipe, "--out", tmp_path / "a").code == 0
    assert fedstill("run", recipe, "method.lr=0.1", "--out", tmp_path / "b").code == 0
    common = ("--papers", papers, "--recipes", recipes)

    said = fedstill("ledger", tmp_path / "a", tmp_path / "b", *common, "--add")
    assert said.code == 0 and "kept: " in said.err
    entries = json.loads((papers / "runs" / "small.json").read_text())
    assert [entry["changes"] for entry in entries] == [[], ["method.lr=0.1"]]
    if not torch.cuda.is_available():
        assert {entry["origin"] for entry in entries} == {"cpu, single precision"}

    (cell,) = json.loads(fedstill("ledger", *common, "--format", "json").out)["cells"]
    scored = json.loads((tmp_path / "a" / "summary.json").read_text())["average_accuracy"]
    assert cell["ours"] == pytest.approx(100 * scored, abs=1e-3)
    assert cell["difference"] == pytest.approx(100 * scored - 50, abs=1e-3)
    (papers / "runs" / "small.json").unlink()
    assert fedstill("ledger", tmp_path / "a", *common, "--add", "--claims-only").code == 0
    assert json.loads((papers / "runs" / "small.json").read_text())[0]["claims_only"] is True
    assert json.loads(fedstill("ledger", *common, "--format", "json").out)["cells"] == []
    assert fedstill("ledger", tmp_path / "a", *common, "--add").code == 0  # kept as a whole run
    out = tmp_path / "ledger.md"
    assert fedstill("ledger", *common, "--write", out).code == 0
    assert "| table 1 | stripes | fedavg | average | 50.00 |" in out.read_text()

    said = fedstill("ledger", *common, "--missing", "2")
    command = f"fedstill run {recipe.as_posix()} --only fedavg --seeds 1"
    assert said.out.splitlines() == ["# 1 cell, own", command]
    (gap,) = json.loads(fedstill("ledger", *common, "--missing", "2", "--format", "json").out)
    assert gap["command"] == command and gap["seeds"] == [1]
    assert "nothing is missing" in fedstill("ledger", *common, "--missing", "1").out
    assert fedstill("ledger", *common, "--missing", "0").code == 2


def test_what_a_run_has_and_its_recipe_lacks_is_kept_as_changed() -> None:
    shipped = {"models": {"name": "mlp"}, "method": {"lr": 0.1}, "data": {"name": "digits"}}
    played = {
        "models": {"name": "mlp", "clients": {"a": {"name": "convnet"}}},
        "method": {"lr": 0.1, "of_a_later_version": 1},
        "data": {"name": "digits", "data_dir": "here", "options": {"split_seed": 1}},
        "privacy": {"epsilon": 4.0},
    }
    assert [*changes(shipped, played)] == [
        "data.options.split_seed=1",
        'models.clients.a.name="convnet"',
        "privacy.epsilon=4.0",
    ]


def test_a_run_of_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, run={"rounds": 1})
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    (tmp_path / "none").mkdir()
    said = fedstill("ledger", tmp_path / "run", "--recipes", tmp_path / "none")
    assert said.code == 2 and "no recipe below" in said.err


def test_a_run_that_was_begun_from_python_is_refused(tmp_path: Path) -> None:
    data = split(torch.randn(8, 4), torch.arange(8) % 2)
    experiment = Experiment(FedAvg(), Population(data, nn.Linear(4, 2)), rounds=1)
    run(experiment, folder=tmp_path / "run", pictures=False)
    said = fedstill("ledger", tmp_path / "run")
    assert said.code == 2 and "begun from Python; the ledger is of runs of recipes" in said.err


def test_the_page_of_the_ledger_is_made_of_what_lies_beside_it() -> None:
    assert (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8") == page(ledger_of(SHIPPED))


def test_printed_cells_are_those_that_recipes_report() -> None:
    """A number that stands in a recipe and in the ledger is one number."""
    compared = 0
    for cell in ledger_of(SHIPPED).cells:
        path = ROOT / "recipes" / f"{cell.recipes[0]}.toml"
        reported = tomllib.loads(path.read_text(encoding="utf-8"))["reported"][cell.label]
        if cell.target is None:
            known = reported.get(cell.score, reported.get("average"))
        else:
            table = reported.get(cell.score, {}) if cell.score in BY_CLIENT.values() else reported
            known = table[cell.target]
        assert known == pytest.approx(cell.value), cell
        compared += 1
    assert compared > 500


def test_the_shipped_ledger_covers_the_five_papers() -> None:
    ledger = ledger_of(SHIPPED)
    assert {row.cell.paper for row in ledger.rows} == {
        "DeSA", "DFRD", "FedDM", "FedDualMatch", "FedLGD"
    }  # fmt: skip
