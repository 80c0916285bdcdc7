"""Loops that are alike to the number are recorded some in a row, once their kind comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.data import Data, Pool, Rows
from fedstill.core.errors import StepError
from fedstill.core.node import SERVER, Inbox
from fedstill.engines.loops.graphs import Replay
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Stream, Streams, StreamSet, in_a_row
from fedstill.federation.population import Party
from fedstill.methods.fedavg import FedAvg
from fedstill.models import MLP
from worlds import CLASSES, World, examples, played

METHOD = FedAvg(batch_size=4, lr=0.1)
MODEL = MLP((4,), CLASSES, hidden=(8,))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def world(counts: list[int], label: int | None = None) -> World:
    """Clients with so many examples of one pool; one of the last client's has another label."""
    everything = examples("all", sum(counts), (4,), [0, 1, 2]).all()
    labels = everything.y.clone()
    if label is not None:
        labels[-1] = label
    pool, ends = Pool(everything.x, labels), torch.tensor([0, *counts]).cumsum(0).tolist()
    test = examples("test", 9, (4,), [0, 1, 2])
    parties = {
        f"c{place}": Party(Data((Rows(pool, torch.arange(*ends[place : place + 2])),)), test, MODEL)
        for place in range(len(counts))
    }
    return World(parties, MODEL)


class TwoStreams(Streams):
    """Two streams; on a CPU a stand-in."""

    def __init__(self, experiment: Any, execution: Any, **options: Any):
        super().__init__(experiment, replace(execution, streams=2), **options)
        if self.device.type == "cpu":
            self.beside = StreamSet(lambda: Stream(Recorder(tried_once)), 2)

    @property
    def rows(self) -> list[int]:
        """How many loops are in each recording."""
        assert self.beside is not None
        return sorted(
            count for stream in self.beside.streams for *_, count in stream.recorder.known
        )


def tried_once(step: Callable[[], None]) -> Replay:
    step()
    return step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", [[20] * 8, [20] * 7 + [24, 24, 24, 24, 24], [18] * 9 + [30]])
def test_rows_give_the_very_same_as_loops_alone(counts: list[int], device: str) -> None:
    plain, told = played(METHOD, world(counts), 3, InProcess, device=device)
    rows, heard = played(METHOD, world(counts), 3, TwoStreams, device=device)
    assert rows.notes == []
    assert max(rows.rows) > 1  # some were in a row
    for name, tensor in plain.states[SERVER].weights.items():
        assert torch.equal(tensor, rows.states[SERVER].weights[name])
    lost, found = (
        [number.value for number in log.metrics if number.name == "loss"] for log in (told, heard)
    )
    assert len(lost) == 3 * 2 * len(counts)  # of training and of scores
    assert found == pytest.approx(lost, rel=1e-6)


def test_a_kind_of_loop_is_recorded_in_a_row_from_the_second_time_on() -> None:
    once, _ = played(METHOD, world([20] * 8), 1, TwoStreams)
    twice, _ = played(METHOD, world([20] * 8), 2, TwoStreams)
    assert once.rows == [1, 1]
    assert twice.rows == [1, 1, 4, 4]


@pytest.mark.parametrize(
    ("count", "streams", "row"),
    [
        (8, 8, 1),  # one each
        (15, 8, 1),
        (16, 8, 2),
        (32, 8, 4),  # four each
        (50, 8, 3),  # two waves, three at a time; the last two alone
        (200, 8, 3),
    ],
)
def test_rows_are_as_long_as_leaves_every_stream_as_much_to_do(
    count: int, streams: int, row: int
) -> None:
    assert in_a_row(count, streams) == row


def test_a_failure_in_a_row_is_told_of_the_client_whose_it_is() -> None:
    engine, _ = played(METHOD, world([20] * 8), 1, TwoStreams)
    engine.population = world([20] * 8, label=CLASSES)
    broadcast, update, _ = METHOD.each_round()
    down = engine.play(broadcast, 2, {SERVER: Inbox()})[SERVER].message
    inboxes = {name: Inbox({SERVER: down}) for name in engine.population.clients}
    with pytest.raises(StepError, match="c7"):
        engine.play(update, 2, inboxes)
