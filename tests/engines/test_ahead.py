"""Batches for recordings are made for many steps at once, and for many clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.data import Batch, Data, Lazy, Plan, Pool, Rows
from fedstill.core.fetched import Fetched
from fedstill.core.loop import Loop
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.engines.loops import ahead as batches_ahead
from fedstill.engines.loops.ahead import TOGETHER, Ahead
from fedstill.engines.loops.graphs import Replay
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Stream, Streams, StreamSet
from fedstill.federation.population import Party
from fedstill.methods.fedavg import FedAvg
from fedstill.models import MLP
from worlds import CLASSES, World, examples, played

EXAMPLES = torch.arange(50.0)


def plan(count: int, size: int = 2, epochs: int = 1) -> Plan:
    some = EXAMPLES[:count].unsqueeze(1)
    return Data.of(some, torch.arange(count)).batches(size, generator(0), epochs=epochs)


def counted(plan: Plan) -> tuple[Lazy[Batch], list[tuple[int, int]]]:
    asked: list[tuple[int, int]] = []

    def many(step: int, count: int) -> Batch | None:
        asked.append((step, count))
        return plan.ahead(step, count)

    return Lazy(len(plan), plan.__getitem__, many), asked


def test_what_is_handed_out_is_what_the_plan_gives() -> None:
    own = plan(40)  # twenty steps
    ahead = Ahead(own)
    for step in range(0, 20, TOGETHER):
        made, expected = ahead.at(step), own.ahead(step, TOGETHER)
        assert torch.equal(made.x, expected.x) and torch.equal(made.y, expected.y)  # type: ignore


def test_after_the_first_time_batches_are_made_for_as_many_steps_as_bytes_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_ahead, "AT_ONCE", 8 * 24)  # two numbers, two labels
    batches, asked = counted(plan(50))  # twenty-five steps
    ahead = Ahead(batches)
    for step in range(0, 24, TOGETHER):
        assert ahead.at(step) is not None
    assert ahead.at(24) is None  # a single one is left
    assert asked == [(0, 4), (4, 8), (12, 8), (20, 4)]


def test_steps_that_are_not_alike_are_asked_for_in_smaller_numbers() -> None:
    batches, asked = counted(plan(21, epochs=2))  # eleven steps, the last of one example, twice
    ahead = Ahead(batches)
    assert [ahead.at(step) is None for step in (0, 4, 8)] == [False, False, True]
    assert [ahead.at(step) is None for step in (11, 15, 19)] == [False, False, True]
    assert asked[:4] == [(0, 4), (4, 16), (4, 8), (4, 4)]


def test_batches_that_are_not_made_at_once_are_left_to_single_steps() -> None:
    assert Ahead([1, 2, 3, 4, 5]).at(0) is None
    assert Ahead(Lazy(8, lambda step: step)).at(0) is None


METHOD = FedAvg(batch_size=4, lr=0.1)
MODEL = MLP((4,), CLASSES, hidden=(8,))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def of_one_pool(counts: list[int], device: str) -> World:
    """Clients with so many examples, one's rows behind the other's."""
    everything = examples("all", sum(counts), (4,), [0, 1, 2]).all()
    pool, ends = Pool(*everything).to(device), torch.tensor([0, *counts]).cumsum(0).tolist()
    test = examples("test", 9, (4,), [0, 1, 2])
    parties = {}
    for place in range(len(counts)):
        rows = torch.arange(*ends[place : place + 2], device=device)
        parties[f"c{place}"] = Party(Data((Rows(pool, rows),)), test, MODEL)
    return World(parties, MODEL)


class TwoStreams(Streams):
    """Two streams; on a CPU a stand-in. Whether examples of all clients were fetched at once."""

    def __init__(self, experiment: Any, execution: Any, **options: Any):
        super().__init__(experiment, replace(execution, streams=2), **options)
        if self.device.type == "cpu":
            self.beside = StreamSet(lambda: Stream(Recorder(tried_once)), 2)
        assert self.beside is not None
        self.fetched: list[bool] = []
        plain = self.beside._pass

        def watched(loops: list[Loop[Any]], ended: Any) -> None:
            self.fetched += [isinstance(loop.batches, Fetched) for loop in loops]
            plain(loops, ended)

        self.beside._pass = watched  # type: ignore[method-assign,assignment]


def tried_once(step: Callable[[], None]) -> Replay:
    step()
    return step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=NEEDS_GPU)])
def test_clients_whose_examples_are_fetched_at_once_come_to_the_very_same(device: str) -> None:
    counts = [20, 18, 0, 27, 20]
    alone, told = played(METHOD, of_one_pool(counts, device), 2, InProcess, device=device)
    beside, heard = played(METHOD, of_one_pool(counts, device), 2, TwoStreams, device=device)
    assert beside.fetched and all(beside.fetched)
    for name, tensor in alone.states[SERVER].weights.items():
        assert torch.equal(tensor, beside.states[SERVER].weights[name])
    lost, found = (
        [number.value for number in log.metrics if number.name == "loss"] for log in (told, heard)
    )
    assert found == pytest.approx(lost, rel=1e-6)
