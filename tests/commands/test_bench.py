"""fedstill bench: the table, the raw numbers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fedstill.commands import bench
from fedstill.commands.bench import Case
from fedstill.commands.bench_work import BENCHMARKS, Crowd, Sizes, holdings
from fedstill.core.node import SERVER
from fedstill.models import ConvNet
from small_recipes import fedstill

CPU = torch.device("cpu")
TINY = {
    "matching": Sizes(clients=2, width=4, batch=2, steps=2, per_class=1),
    "local-step": Sizes(clients=2, width=4, batch=2, steps=2),
    "small-step": Sizes(clients=3, width=4, batch=2, steps=2),
    "lessons": Sizes(clients=2, width=2, batch=2, steps=1),
}


@pytest.fixture
def tiny(monkeypatch):
    for name, sizes in TINY.items():
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], small=sizes))


def test_the_usual_benchmarks_are_measured_printed_and_written(tiny, tmp_path):
    said = fedstill("bench", "--device", "cpu", "--repeat", 2, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert str(tmp_path / "out") in said.out
    for name, sizes in TINY.items():
        assert f" {name} " in said.out
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert found["settings"] | {"repeat": 2, "size": "small"} == found["settings"]
        assert found["settings"]["width"] == sizes.width
        assert {"torch", "python", "cpu", "load", "threads"} <= set(found["machine"])
        at_server = BENCHMARKS[name].unit == "server"
        ways = ["in_process"] if at_server else ["in_process", "batched"]
        assert [case["engine"] for case in found["cases"]] == ways
        for case in found["cases"]:
            times = case["milliseconds"]
            assert len(case["seconds"]) == 2 and case["first_seconds"] > 0
            assert times["lowest"] <= times["median"] <= times["highest"]
            parts = 1 if at_server else sizes.steps * case["clients"]
            each = [1000 * s / parts for s in case["seconds"]]
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


def test_only_the_engines_and_precisions_asked_for_are_measured(tiny, tmp_path):
    wanted = bench.Wanted(engines=("streams", "batched"), precisions=("half",))
    sizes = BENCHMARKS["small-step"].full
    kinds = wanted.cases("small-step", sizes, torch.device("cuda"))
    assert [case.title for case in kinds] == ["streams, recorded, half", "batched, recorded, half"]
    said = fedstill(
        "bench", "small-step", "--engine", "batched", "--device", "cpu", "--repeat", 1,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert said.code == 0
    (written,) = [json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()]
    assert [case["engine"] for case in written["cases"]] == ["batched"]


def test_a_case_that_no_benchmark_has_is_refused_before_anything_is_measured(tmp_path):
    said = fedstill(
        "bench", "small-step", "--device", "cpu", "--precision", "half", "--out", tmp_path / "out"
    )
    assert said.code == 2 and not (tmp_path / "out").exists()
    assert "benchmark 'small-step' has no case with precision 'half' on cpu" in said.err
    assert "in_process (tf32); batched (tf32)" in said.err


def test_cases_are_handed_out_one_by_one_so_that_a_stopped_benchmark_keeps_them():
    found = bench.as_measured("small-step", CPU, sizes=TINY["small-step"], repeat=1)
    assert [case["engine"] for case in next(found)["cases"]] == ["in_process"]
    assert [case["engine"] for case in next(found)["cases"]] == ["in_process", "batched"]
    assert next(found, None) is None


def test_recording_is_a_case_of_its_own_on_a_gpu():
    sizes = BENCHMARKS["matching"].full
    kinds = bench.cases(BENCHMARKS["matching"], sizes, torch.device("cuda"))
    assert Case("in_process", False, 1) in kinds and Case("in_process", True, 1) in kinds
    assert Case("streams", True, 4) in kinds and Case("batched", True, 4, "half") in kinds
    assert len({case.title for case in kinds}) == len(kinds)


def test_a_servers_round_is_measured_whole_plain_recorded_and_in_half_precision():
    kinds = bench.cases(BENCHMARKS["lessons"], BENCHMARKS["lessons"].full, torch.device("cuda"))
    assert [case.title for case in kinds] == [
        "in_process", "in_process, recorded", "in_process, recorded, half"
    ]  # fmt: skip
    found = bench.measured("lessons", CPU, sizes=TINY["lessons"], repeat=1)
    assert found["settings"]["network"] == "conv4" and "1 turns in a row" in bench.explained(found)


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
    matching, local, small, lessons = (BENCHMARKS[name].full for name in TINY)
    assert (matching.batch, matching.per_class, matching.width) == (256, 50, 128)
    assert (local.clients, local.batch, local.width) == (50, 32, 128)
    assert (small.clients, small.batch, small.width) == (200, 10, 32)
    assert (lessons.clients, lessons.batch, lessons.steps) == (10, 64, 10)
    assert BENCHMARKS["lessons"].network(lessons).widths == (64, 128, 256, 512)
    assert min(matching.steps, local.steps, small.steps) >= 8  # so that loops are recorded


def test_everybody_in_the_crowd_has_two_batches_of_each_class():
    crowd = Crowd.of(TINY["matching"], CPU, ConvNet((3, 32, 32), 10, width=4))
    assert crowd.party("client-000").data.counts(10).tolist() == [4] * 10
    assert len(crowd.party(SERVER).data) == 0


@pytest.mark.parametrize("name", ["average", "images", "sets", "peers", "scores", "module-step"])
def test_whole_rounds_and_other_networks_are_measured(name):
    benchmark = BENCHMARKS[name]
    tiny = replace(benchmark.small, batch=2, steps=2)
    found = bench.measured(name, CPU, sizes=tiny, repeat=1)
    assert [case["engine"] for case in found["cases"]] == ["in_process", "batched"]
    assert not any(case["failed"] for case in found["cases"])
    parts = tiny.steps * tiny.clients if benchmark.unit == "step" else 1
    for case in found["cases"]:
        assert case["milliseconds"]["median"] == pytest.approx(1000 * case["seconds"][0] / parts)


def test_all_stands_for_every_benchmark_and_no_name_for_the_usual_ones():
    assert bench.chosen(["all", "matching"]) == list(BENCHMARKS)
    assert bench.chosen([]) == list(TINY)


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_benchmark_has_clients_at_both_sizes(name):
    benchmark = BENCHMARKS[name]
    for sizes in (benchmark.full, benchmark.small):
        assert benchmark.network(sizes).initial()
    crowd = benchmark.crowd(benchmark.small, CPU)
    assert len(crowd.clients) == benchmark.small.clients
    assert all(len(crowd.party(name).data) for name in crowd.clients)
    kinds = bench.cases(benchmark, benchmark.full, torch.device("cuda"))
    assert any(case.record and case.precision == "half" for case in kinds)


def test_clients_of_few_classes_hold_one_to_three_in_turn():
    assert holdings(10) == [(0, 10)]
    assert holdings(3)[:4] == [(0, 1), (1, 2), (2, 3), (3, 1)]
    crowd = BENCHMARKS["sets"].crowd(BENCHMARKS["sets"].small, CPU)
    holders = [crowd.party(name).data for name in crowd.clients]
    held = [data.counts(10).nonzero().flatten().tolist() for data in holders]
    assert held == [[0], [1, 2], [2, 3, 4]]
