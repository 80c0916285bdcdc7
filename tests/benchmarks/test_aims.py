"""Aims on a GPU: every one has a case of `fedstill bench`, and the table says how far it is."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import aims
import page
from fedstill.commands import bench


def found(benchmark, **milliseconds):
    """What bench writes, of cases by title."""
    cases = [
        {"title": title, "failed": None,
         "milliseconds": {"median": median, "lowest": median, "highest": median}}
        for title, median in milliseconds.items()
    ]  # fmt: skip
    machine = {"gpu": {"name": "a GPU"}, "cpu": "a CPU", "torch": "2.13"}
    return {"benchmark": benchmark, "machine": machine, "cases": cases, "steps": None}


@pytest.mark.parametrize("aim", aims.AIMS, ids=lambda aim: aim.work)
def test_every_aim_is_a_case_that_a_gpu_has(aim):
    benchmark = bench.BENCHMARKS[aim.benchmark]
    offered = bench.cases(benchmark, benchmark.full, torch.device("cuda"))
    assert aim.case in offered
    assert (aim.most is None) != (aim.gain is None)
    if aim.gain:
        assert offered[0].title == "in_process"  # what the gain is against


def test_the_table_says_what_is_reached():
    lessons = found("lessons", **{"in_process, recorded, half": 330.0})
    step = found("module-step", **{"in_process": 3.0, "streams, recorded, half": 0.5})
    table = page.aims(aims.as_table([lessons, step], 3))
    assert "| 330 ms | 330 – 330 | 300 ms | no, 1.10 × target |" in table
    assert "| 0.5 ms, 6.0 times | 0.5 – 0.5 | 2 times | yes |" in table
    assert page.aims(None) == "Not measured yet."


def test_a_case_that_failed_is_told():
    lessons = found("lessons", **{"in_process, recorded, half": 330.0})
    lessons["cases"][0]["failed"] = "no memory"
    assert "failed: no memory" in page.aims(aims.as_table([lessons], 3))


def test_a_gain_needs_clients_in_turn():
    with pytest.raises(SystemExit, match="no case 'in_process' was measured"):
        aims.as_table([found("module-step", **{"streams, recorded, half": 0.5})], 3)


def test_a_small_run_writes_table_and_raw_numbers(tmp_path, monkeypatch, capsys):
    words = ["aims.py", "module-step", "--small", "--repeat", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    aims.main()
    (row,) = json.loads((tmp_path / "aims.json").read_text())["rows"]
    assert row["times"] == 1.0 and row["case"] == "in_process"  # nothing is recorded on a CPU
    assert (tmp_path / "aims" / "module-step.json").is_file()
    assert "a module of one's own" in capsys.readouterr().out


def test_a_strange_name_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["aims.py", "matchin"])
    with pytest.raises(SystemExit, match="matching"):
        aims.main()
