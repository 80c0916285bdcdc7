"""`fedstill privacy`: what a run has spent, and what a recipe would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedstill.recipe.toml import toml_text
from small_recipes import fedstill, tables

FEDDM = {"name": "feddm", "preset": "small", "start": "noise"}
BUDGET = {"epsilon": 4.0, "delta": 1e-3, "releases": 2}
CONSTANTS = {"mean": [0.5], "std": [0.5]}


def write(folder: Path, method: dict[str, Any] | None = None, **changes: dict[str, Any]) -> Path:
    """A small recipe as a file; a method stands in place of the one that it has otherwise."""
    made = tables(folder, **changes)
    if method is not None:
        made["method"] = method
    path = folder / "recipe.toml"
    path.write_text(toml_text(made))
    return path


def test_what_a_recipe_tells_beforehand_is_what_its_run_then_spends(tmp_path: Path) -> None:
    recipe = write(tmp_path, FEDDM, privacy=BUDGET, run={"rounds": 2}, data=CONSTANTS)
    said = fedstill("privacy", recipe)
    assert said.code == 0, said.err
    assert "feddm: would spend, of a budget of epsilon = 4 at delta = 0.001" in said.out
    assert "4 of class sums, noise" in said.out
    assert "noise is simulated" in said.out
    assert max(map(len, said.out.splitlines())) <= 80  # as wide as a terminal without a width
    before = json.loads(fedstill("privacy", recipe, "--format", "json").out)
    out = tmp_path / "run"
    assert fedstill("run", recipe, "--out", out, "--quiet").code == 0
    after = json.loads(fedstill("privacy", out, "--format", "json").out)
    assert after["clients"] == before["clients"]
    assert [row["epsilon"] for row in after["clients"]] == ["4", "4", "4"]
    ledger = (out / "privacy.csv").read_text().splitlines()
    assert ledger[0] == "round,step,node,mechanism,sigma,rate,releases"
    assert len(ledger) == 1 + 2 * 3
    summary = json.loads((out / "summary.json").read_text())
    assert summary["privacy"]["epsilon_spent"] == pytest.approx(4.0)
    assert summary["data_digest"] is None


def test_any_method_runs_on_private_virtual_data(tmp_path: Path) -> None:
    virtual = {"per_class": 2, "warm_up_steps": 3, "start": "noise"}
    data = {**CONSTANTS, "virtual": virtual}
    recipe = write(tmp_path, privacy=BUDGET, run={"rounds": 1}, data=data)
    out = tmp_path / "run"
    said = fedstill("run", recipe, "--out", out, "--quiet", f"run.cache_dir={tmp_path / 'cache'}")
    assert said.code == 0, said.err
    rows = (out / "privacy.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:4] for row in rows] == [
        ["0", "warm_up", client, "class sums"] for client in ("east", "north", "west")
    ]
    told = json.loads(fedstill("privacy", out, "--format", "json").out)
    assert [row["epsilon"] for row in told["clients"]] == ["4", "4", "4"]


def test_without_a_table_nothing_is_promised_and_that_is_said(tmp_path: Path) -> None:
    recipe = write(tmp_path, run={"rounds": 1})
    said = fedstill("privacy", recipe)
    assert said.code == 2 and "privacy is missing" in said.err
    fedstill("run", recipe, "--out", tmp_path / "run", "--quiet")
    assert not (tmp_path / "run" / "privacy.csv").exists()
    said = fedstill("privacy", tmp_path / "run")
    assert said.code == 2 and "keeps nothing private" in said.err


def test_an_empty_table_is_no_budget_and_nothing_runs_without_one(tmp_path: Path) -> None:
    recipe = write(tmp_path, FEDDM, run={"rounds": 1}, data=CONSTANTS)
    recipe.write_text(recipe.read_text() + "\n[privacy]\n# epsilon = 4.0\n")
    found = fedstill("run", recipe, "--out", tmp_path / "run", "--quiet")
    assert found.code == 2 and "privacy.epsilon is missing" in found.err
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["privacy.epsilon=0"], "privacy.epsilon = 0.0: must be in (0, 1000]"),
        (["privacy.delta=0.5"], "privacy.delta = 0.5: must be below one over the records"),
        (["privacy.clip=0"], "privacy.clip = 0.0: must be above 0"),
        (["privacy.epsilonn=1"], "did you mean 'epsilon'?"),
        (["method.start=real"], 'start = "real" shows private examples as they are'),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    tmp_path: Path, changes: list[str], said: str
) -> None:
    recipe = write(tmp_path, FEDDM, privacy=BUDGET, data=CONSTANTS)
    found = fedstill("run", recipe, *changes, "--out", tmp_path / "run", "--quiet")
    assert found.code == 2
    assert said in " ".join(found.err.split())
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_records_that_would_be_handed_over_or_normalise_themselves_are_refused(
    tmp_path: Path,
) -> None:
    recipe = write(tmp_path, {"name": "centralised"}, privacy=BUDGET, data=CONSTANTS)
    assert "its step hand_over" in " ".join(fedstill("privacy", recipe).err.split())
    recipe = write(tmp_path, FEDDM, privacy=BUDGET)
    said = " ".join(fedstill("privacy", recipe).err.split())
    assert "data.mean = [0.5] and data.std = [0.5]" in said
