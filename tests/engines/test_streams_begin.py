"""A loop that goes to a stream begins while the host prepares the next client's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core.node import Inbox
from fedstill.engines.loops.graphs import Replay
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.play import streams
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Stream, Streams, StreamSet
from fedstill.methods.virtual import Virtual
from fedstill.parts.distribution_matching import Matching
from worlds import World, engine_for, pictures

METHOD = Virtual(per_class=1, warm_up_steps=6, start="noise", real_batch=2, augmentation="none")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


class TwoStreams(Streams):
    """Two streams; on a CPU a stand-in. What was done, in its order."""

    def __init__(self, experiment: Any, execution: Any, **options: Any):
        super().__init__(experiment, replace(execution, streams=2), **options)
        self.seen: list[str] = []
        if self.device.type == "cpu":
            self.beside = StreamSet(lambda: Stream(Recorder(self.record)), 2, self.notes)

    def record(self, step: Callable[[], None]) -> Replay:
        step()
        return lambda: (self.seen.append("step"), step())[1]


def warmed(engine: Any, world: World, device: str = "cpu") -> Any:
    """An engine whose clients have distilled their examples."""
    made = engine_for(METHOD, world.on(device), engine, device=device)
    made.play(METHOD.warm_up, 1, {client: Inbox() for client in world.clients})
    return made


def assert_alike(one: Any, other: Any, world: World) -> None:
    for client in world.clients:
        assert torch.equal(one.states[client].images, other.states[client].images)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 2, 6, 64])
def test_loops_begun_early_come_to_the_very_same(
    first: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = pictures()
    plain = warmed(InProcess, world, device)
    monkeypatch.setattr(streams, "FIRST", first)
    assert_alike(plain, warmed(TwoStreams, world, device), world)


def test_the_first_steps_of_a_client_come_before_the_draws_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, drawn = pictures(), Matching.iterations
    made = engine_for(METHOD, world, TwoStreams)

    def watched(*args: Any) -> Any:
        made.seen.append("draws")
        return drawn(*args)

    monkeypatch.setattr(Matching, "iterations", watched)
    monkeypatch.setattr(streams, "FIRST", 2)
    made.play(METHOD.warm_up, 1, {client: Inbox() for client in world.clients})
    assert made.seen[:6] == ["draws", "step", "step", "draws", "step", "step"]
    assert made.seen.count("step") == 6 * len(world.clients)  # none is done twice


def test_loops_begun_early_begin_again_where_memory_runs_out() -> None:
    world = pictures()
    made = engine_for(METHOD, world, TwoStreams)

    def cramped(step: Callable[[], None]) -> Replay:
        if len(made.beside.streams) > 1:
            raise torch.OutOfMemoryError("no memory")
        return made.record(step)

    made.beside = StreamSet(lambda: Stream(Recorder(cramped)), 2, made.notes)
    made.play(METHOD.warm_up, 1, {client: Inbox() for client in world.clients})
    assert_alike(warmed(InProcess, world), made, world)
    assert any("memory did not suffice" in note for note in made.notes)


def test_what_was_begun_before_a_failure_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    world, drawn = pictures(), Matching.iterations
    made, calls = engine_for(METHOD, world, TwoStreams), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no more")
        return drawn(*args)

    inboxes = {client: Inbox[Any]() for client in world.clients}
    monkeypatch.setattr(Matching, "iterations", failing)
    with pytest.raises(Exception, match="no more"):
        made.play(METHOD.warm_up, 1, inboxes)
    assert made.beside.begun
    made.play(METHOD.warm_up, 1, inboxes)
    assert_alike(warmed(InProcess, world), made, world)
