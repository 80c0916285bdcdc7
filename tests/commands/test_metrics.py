"""Metrics of a recipe, from its file to tables, curves and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_recipes import fedstill, metrics, write_recipe

NAMED = ["macro_f1", "auroc", "recall", "calibration_error"]


def test_metrics_of_a_recipe_stand_in_every_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe = write_recipe(tmp_path, run={"metrics": NAMED})
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 0 and "%, macro_f1 0." in said.out
    rows = [line.split(",") for line in metrics(tmp_path / "run")[1:]]
    names = {name for _, step, _, name, _, _ in rows if step == "evaluate"}
    classes = {f"recall.{number}" for number in range(3)}
    assert names == {"accuracy", "loss", "macro_f1", "auroc", "calibration_error", *classes}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["metrics"]) == names - {"accuracy"}
    assert 0 < summary["metrics"]["auroc"]["average"] <= 1
    assert summary["metrics"]["loss"]["by_client"].keys() == {"east", "north", "west"}

    table = fedstill("compare", tmp_path / "run", "--format", "markdown").out
    assert "| macro_f1 | auroc |" in table and "| loss |" not in table
    picture = tmp_path / "bars.png"
    of = ("compare", tmp_path / "run", "--metric", "auroc", "--format", "markdown")
    table = fedstill(*of, "--picture", picture).out
    assert f"{summary['metrics']['auroc']['average']:.4f}" in table and picture.exists()
    assert fedstill("compare", tmp_path / "run", "--metric", "auc").err.count(
        "did you mean 'auroc'"
    )

    lines = tmp_path / "curves.png"
    of = ("curves", tmp_path / "run", "--of", "accuracy", "--of", "recall.1", "--format", "json")
    found = json.loads(fedstill(*of, "--picture", lines).out)
    assert [row["round"] for row in found] == [1, 2, 3] and lines.exists()
    assert found[-1]["accuracy"] == pytest.approx(summary["average_accuracy"])


def test_metrics_change_nothing_of_accuracy_and_loss(tmp_path: Path) -> None:
    plain = write_recipe(tmp_path / "plain")
    more = write_recipe(tmp_path / "more", run={"metrics": ["auroc", "recall"]})
    fedstill("run", plain, "--out", tmp_path / "a")
    fedstill("run", more, "--out", tmp_path / "b")
    left, right = metrics(tmp_path / "a"), metrics(tmp_path / "b")
    assert left == [line for line in right if ",auroc," not in line and ",recall." not in line]


def test_a_class_that_nobody_is_tested_on_leaves_an_empty_cell_and_one_note(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, run={"metrics": ["auroc"]})
    from numpy import load, savez

    arrays = dict(load(tmp_path / "west.npz"))
    arrays["test_labels"] = arrays["test_labels"] * 0
    savez(tmp_path / "west.npz", **arrays)
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    rows = metrics(tmp_path / "run")
    assert "1,evaluate,server,auroc,west," in rows
    notes = (tmp_path / "run" / "notes.csv").read_text()
    assert notes.count("auroc is not a number on 1 test sets, first server on west") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["auroc"]
    assert summary["by_client"]["west"] is None
    others = [summary["by_client"][name] for name in ("east", "north")]
    assert summary["average"] == pytest.approx(sum(others) / 2)


def test_a_metric_that_is_unknown_or_none_at_all_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    said = fedstill("run", recipe, 'run.metrics=["aurocc"]', "--out", tmp_path / "run")
    assert said.code == 2 and "run.metrics: unknown metric 'aurocc'; did you mean" in said.err
    said = fedstill("run", recipe, "run.metrics=[]", "--out", tmp_path / "run")
    assert said.code == 2 and "run.metrics is empty; name at least one" in said.err


def test_a_run_may_get_more_metrics_when_it_goes_on(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    fedstill("run", recipe, "--out", tmp_path / "run")
    said = fedstill("resume", tmp_path / "run", "run.rounds=4", 'run.metrics=["auroc"]')
    assert said.code == 0, said.err
    found = fedstill("curves", tmp_path / "run", "--of", "auroc", "--format", "json")
    assert [row["round"] for row in json.loads(found.out)] == [4]


def test_a_metric_of_a_file_is_shown_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def wrong(labels, logits):\n"
        '    """How many answers are wrong."""\n'
        "    return int((logits.argmax(1) != labels).sum())\n"
        "wrong.lower_is_better = True\n"
    )
    recipe = write_recipe(tmp_path, run={"metrics": ["mine.py:wrong"]})
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    errors = summary["metrics"]["wrong"]
    assert f", wrong {errors['average']:.4f} →" in said.out
    assert errors["average"] == pytest.approx(12 * (1 - summary["average_accuracy"]))
    by_round = fedstill("curves", tmp_path / "run", "--of", "wrong", "--format", "json").out
    values = [row["wrong"] for row in json.loads(by_round)]
    assert errors["best_average"] == min(values)
