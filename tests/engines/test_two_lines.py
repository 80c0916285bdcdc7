"""What steps need whatever their value is made in a line of its own, while steps before are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import SGD, Lazy, minimize
from fedstill.core.loop import Descent, Loop
from fedstill.core.node import Inbox
from fedstill.engines.engine import autograd_gradient
from fedstill.engines.loops.graphs import CudaGraphs, Lines, Replay, Unrecordable
from fedstill.engines.loops.prepared import DEPTH, Preparing
from fedstill.engines.loops.recorded import Recorder
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.feddm import FedDM
from fedstill.methods.feddualmatch import FedDualMatch
from fedstill.methods.virtual import Virtual
from fedstill.models import MLP
from worlds import engine_for, pictures

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


class StandIn(Lines):
    """Two lines on a CPU, where all is done at once; what was done, in its order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.marks = 0
        self.early, self.steps = self.recording("early"), self.recording("step")  # type: ignore[assignment]

    def recording(self, name: str) -> Callable[[Callable[[], None]], Replay]:
        def record(step: Callable[[], None]) -> Replay:
            self.seen.append(f"record {name}")
            step()
            return lambda: (self.seen.append(name), step())[1]

        return record

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        yield

    def making(self) -> AbstractContextManager[Any]:
        return self._inside()

    def stepping(self) -> AbstractContextManager[Any]:
        return self._inside()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        self.seen.append(f"wait {mark}")


class InLines(InProcess):
    """Loops that prepare run in two lines, on a CPU in a stand-in."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.lines = StandIn() if self.device.type == "cpu" else Lines(self.device)
        record = at_once if self.device.type == "cpu" else CudaGraphs(self.device)
        self.recorder = Recorder(record, notes=self.notes, lines=self.lines)


class InOneLine(InProcess):
    """The same without lines."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        record = at_once if self.device.type == "cpu" else CudaGraphs(self.device)
        self.recorder = Recorder(record, notes=self.notes)


def at_once(step: Callable[[], None]) -> Replay:
    step()
    return step


METHODS = {
    "features": Virtual(per_class=1, warm_up_steps=9, start="noise", real_batch=2),
    "unlike classes": FedDM(per_class=2, steps=6, real_batch=4, server_epochs=1),
    "every stage": FedDualMatch(per_class=1, steps=6, real_batch=2, samplings=1, tune_epochs=1),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", METHODS)
def test_sets_matched_in_two_lines_are_the_very_same(name: str, device: str) -> None:
    found = [clients_after_a_round(METHODS[name], kind, device) for kind in (InOneLine, InLines)]
    assert found[0] and len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def clients_after_a_round(method: Any, kind: Any, device: str) -> list[Tensor]:
    """The images that clients have matched, by their memory or their message."""
    world = pictures()
    engine = engine_for(method, world.on(device), kind, device=device)
    if isinstance(method, Virtual):
        engine.play(method.warm_up, 1, {client: Inbox() for client in world.clients})
        found = [engine.states[client].images for client in world.clients]
    else:
        down = engine.play(method.each_round()[0], 1, {"server": Inbox()})["server"].message
        heard = {client: Inbox({"server": down}) for client in world.clients}
        told = engine.play(method.each_round()[1], 1, heard)
        found = [told[client].message.images for client in world.clients]
    assert not engine.notes
    if kind is InLines and device == "cpu":
        assert "early" in engine.lines.seen and "step" in engine.lines.seen
    return found


@dataclass(frozen=True)
class Pulled:
    """A number is drawn to twice what each batch holds."""

    def twice(self, model: Any, batch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()
        return 2 * batch, batch

    def distance(
        self, model: Any, value: Tensor, batch: tuple[Tensor, Tensor], weight: Tensor
    ) -> Tensor:
        doubled, plain = batch
        return weight * (value - doubled).square().sum() / 2 + 0 * plain.sum()


def pulled(numbers: Sequence[float]) -> Loop[Any]:
    """A loop that goes half of the way to twice each number."""
    batches = Lazy(len(numbers), lambda step: torch.tensor([numbers[step]]))
    network, pull = MLP((1,), 2, ()), Pulled()
    body = Descent(pull.distance, network, SGD(0.5), prepare=pull.twice)
    return Loop(body, (torch.zeros(1), ()), {"weight": torch.tensor(1.0)}, batches)


def test_the_objective_gets_what_was_prepared_without_gradients() -> None:
    loop = pulled([1.0, 3.0])
    carry = loop.carry
    for batch in loop.batches:
        carry, _ = loop.body(carry, loop.given, batch, autograd_gradient)
    assert carry[0].tolist() == [3.5]  # half of the way from 0 to 2, then from 1 to 6


def test_what_a_step_needs_is_kept_while_more_is_prepared() -> None:
    lines = StandIn()
    ended = Recorder(at_once, lines=lines).run(pulled([1.0, 3.0, 0.0, 0.0]))
    assert ended is not None
    assert ended[0][0].tolist() == [0.875]  # 1, 3.5, 1.75, 0.875
    assert lines.seen.count("early") == lines.seen.count("step") == 4
    assert lines.seen[0] == "begin" and lines.seen[-1] == "end"


def test_what_the_next_batch_is_written_over_is_kept_as_it_was() -> None:
    def kept(model: Any, batch: Tensor) -> Tensor:
        return batch

    preparing = Preparing(
        Descent(Pulled().distance, MLP((1,), 2, ()), SGD(0.5), prepare=kept), {}, at_once, CPU
    )
    first = preparing.made(torch.tensor([1.0])).batch
    (place,) = preparing.buffers.places
    place.fill_(2.0)  # a batch that was made where it is wanted
    second = preparing.made(place).batch
    preparing.made(torch.tensor([3.0]))
    assert (first.tolist(), second.tolist()) == ([1.0], [2.0])


def test_no_more_is_prepared_than_may_wait_for_its_step() -> None:
    lines = StandIn()
    Recorder(at_once, lines=lines).run(pulled([1.0] * (DEPTH + 2)))
    waits = [entry for entry in lines.seen if entry.startswith("wait")]
    # Each step has two marks: 1, 3, 5, … when it was prepared, 2, 4, 6, … when it was made.
    assert waits[:DEPTH] == [f"wait {2 * step + 1}" for step in range(DEPTH)]
    assert waits[DEPTH:] == ["wait 2", "wait 9", "wait 4", "wait 11"]


def test_both_lines_are_waited_for_when_a_step_fails() -> None:
    def failing(step: Callable[[], None]) -> Replay:
        raise Unrecordable("no")

    lines = StandIn()
    lines.steps = failing  # type: ignore[assignment]
    recorder = Recorder(at_once, lines=lines)
    assert recorder.run(pulled([1.0] * 4)) is None
    assert recorder.notes == ["a loop is not recorded: no"]
    assert lines.seen[-1] == "end"


def test_a_stack_prepares_as_its_members_do_alone() -> None:
    method, world = METHODS["features"], pictures()
    alone, stack = (engine_for(method, world, kind) for kind in (InProcess, Batched))
    for engine in (alone, stack):
        engine.play(method.warm_up, 1, {client: Inbox() for client in world.clients})
    for client in world.clients:
        assert torch.allclose(alone.states[client].images, stack.states[client].images, atol=1e-4)


@pytest.mark.parametrize("lines", [None, StandIn()], ids=["one line", "two lines"])
def test_statistics_are_those_of_the_objective_not_of_what_is_prepared(lines: Any) -> None:
    def prepared(model: Any, batch: Tensor) -> Tensor:
        model.notes["running_mean"] = batch + 100
        return batch

    def noting(model: Any, value: dict[str, Tensor], batch: Tensor) -> Tensor:
        model.notes["running_var"] = batch + 1
        return value["w"] * batch

    body = Descent(noting, MLP((1,), 2, ()), SGD(0.5), prepare=prepared)
    names = ("w", "running_mean", "running_var")
    start = {name: torch.tensor(0.0) for name in names}
    loop = Loop(body, (start, ()), {}, [torch.tensor(float(n)) for n in (1, 2, 3, 4)])
    ended = Recorder(at_once, lines=lines).run(loop)
    assert ended is not None
    value = ended[0][0]
    assert [float(value[name]) for name in names] == [-5.0, 0.0, 5.0]  # -(1 + 2 + 3 + 4) / 2


def test_a_projection_may_hand_on_what_stood_elsewhere_in_the_value() -> None:
    """Two values change places after every step, so each is moved in every other one."""

    def pull(model: Any, value: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (value["now"] - batch).square().sum() / 2 + 0 * value["older"].sum()

    def exchanged(value: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"older": value["now"], "now": value["older"]}

    body = Descent(pull, MLP((1,), 2, ()), SGD(0.5), project=exchanged)
    start = {"now": torch.tensor([0.0]), "older": torch.tensor([4.0])}
    ended = Recorder(at_once).run(Loop(body, (start, ()), {}, [torch.tensor([8.0])] * 4))
    assert ended is not None
    # In turn each goes half of the way to 8: from 0 to 4 to 6, from 4 to 6 to 7.
    found = {name: tensor.tolist() for name, tensor in ended[0][0].items()}
    assert found == {"now": [6.0], "older": [7.0]}


def test_minimize_hands_over_how_batches_are_prepared() -> None:
    pull = Pulled()
    waiting = minimize(
        pull.distance, MLP((1,), 2, ()), torch.zeros(1), [], SGD(0.5), prepare=pull.twice,
        weight=torch.tensor(1.0),
    )  # fmt: skip
    loop = waiting.send(None)
    assert loop.body.prepares
    with pytest.raises(StopIteration):
        waiting.send(loop.carry)
