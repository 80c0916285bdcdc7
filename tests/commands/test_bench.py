"""fedstill bench: the table, the raw numbers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedstill.commands import bench
from fedstill.commands.bench import BENCHMARKS, Case, Crowd, Sizes
from fedstill.core.node import SERVER
from small_recipes import fedstill

CPU = torch.device("cpu")
TINY = {
    "matching": Sizes(clients=2, width=4, batch=2, steps=2, per_class=1),
    "local-step": Sizes(clients=2, width=4, batch=2, steps=2),
    "small-step": Sizes(clients=3, width=4, batch=2, steps=2),
}


@pytest.fixture
def tiny(monkeypatch):
    for name, sizes in TINY.items():
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], small=sizes))


def test_all_benchmarks_are_measured_printed_and_written(tiny, tmp_path):
    said = fedstill("bench", "--device", "cpu", "--repeat", 2, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert str(tmp_path / "out") in said.out
    for name, sizes in TINY.items():
        assert f" {name} " in said.out
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert found["settings"] | {"repeat": 2, "size": "small"} == found["settings"]
        assert found["settings"]["width"] == sizes.width
        assert {"torch", "python", "cpu", "load", "threads"} <= set(found["machine"])
        assert [case["engine"] for case in found["cases"]] == ["in_process", "batched"]
        for case in found["cases"]:
            times = case["milliseconds"]
            assert len(case["seconds"]) == 2 and case["first_seconds"] > 0
            assert times["lowest"] <= times["median"] <= times["highest"]
            each = [1000 * s / (sizes.steps * case["clients"]) for s in case["seconds"]]
            assert times["median"] == pytest.approx(sum(each) / 2)


def test_one_benchmark_alone_and_as_json(tiny, tmp_path):
    said = fedstill("bench", "small-step", "--repeat", 1, "--out", tmp_path, "--format", "json")
    (found,) = json.loads(said.out)
    assert found["benchmark"] == "small-step"
    assert [path.name for path in (tmp_path.parent / f"{tmp_path.name}-2").iterdir()] == [
        "small-step.json"  # the folder was there, so the next free one is taken
    ]


def test_an_unknown_benchmark_is_refused_with_the_nearest_name(tmp_path):
    said = fedstill("bench", "machting", "--out", tmp_path / "out")
    assert said.code == 2
    assert "unknown benchmark 'machting'; did you mean 'matching'?" in said.err
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_not_there_is_refused(tmp_path):
    assert fedstill("bench", "--device", "gpu7", "--out", tmp_path / "out").code == 2
    assert fedstill("bench", "--repeat", 0, "--out", tmp_path / "out").code == 2


def test_a_case_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def failing(self, *args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr("fedstill.engines.loops.stacks.Stack.run", failing)
    found = bench.measured("small-step", CPU, sizes=TINY["small-step"], repeat=1)
    alone, stacked = found["cases"]
    assert alone["failed"] is None and alone["milliseconds"]
    assert "no memory" in stacked["failed"] and not stacked["milliseconds"]
    assert [row["note"] for row in bench.rows([found])] == [None, stacked["failed"]]


def test_recording_is_a_case_of_its_own_on_a_gpu():
    sizes = BENCHMARKS["matching"].full
    kinds = bench.cases(BENCHMARKS["matching"], sizes, torch.device("cuda"))
    assert Case("in_process", False, 1) in kinds and Case("in_process", True, 1) in kinds
    assert Case("streams", True, 4) in kinds and Case("batched", True, 4, "half") in kinds
    assert len({case.title for case in kinds}) == len(kinds)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_cases_are_there_where_asked_for(device):
    sizes, where = BENCHMARKS["small-step"].full, torch.device(device)
    plain = bench.cases(BENCHMARKS["small-step"], sizes, where)
    more = bench.cases(BENCHMARKS["small-step"], sizes, where, compile=True)
    added = [case for case in more if case not in plain]
    assert added and all(case.compile and "compiled" in case.title for case in added)
    assert [case for case in more if not case.compile] == plain
    assert Case("in_process", False, 1, compile=True).execution(CPU).compile


def test_full_sizes_are_those_of_the_page():
    matching, local, small = (BENCHMARKS[name].full for name in TINY)
    assert (matching.batch, matching.per_class, matching.width) == (256, 50, 128)
    assert (local.clients, local.batch, local.width) == (50, 32, 128)
    assert (small.clients, small.batch, small.width) == (200, 10, 32)
    assert min(matching.steps, local.steps, small.steps) >= 8  # so that loops are recorded


def test_everybody_in_the_crowd_has_two_batches_of_each_class():
    crowd = Crowd.of(TINY["matching"], CPU)
    assert crowd.party("client-000").data.counts(10).tolist() == [4] * 10
    assert len(crowd.party(SERVER).data) == 0
