"""Mechanisms: a loop's gradient made example by example, the same in every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import worlds
from clipped import Clipped, ClippedFedAvg, Noised, noised
from fedstill.core import SGD, Batch, Model, algebra, minimize, trees
from fedstill.core.loop import Descent
from fedstill.core.mechanism import per_example
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Streams
from fedstill.methods.fedavg import FedAvg
from fedstill.models import MLP, ConvNet
from worlds import finished

MODEL = MLP((1,), 2, hidden=())


def distances(model: Model, value: Tensor, batch: Batch) -> Tensor:
    """The mean of ½ (value - x)², whose gradient at one example is value - x."""
    return (value - batch.x).square().mean() / 2


def at(*points: float) -> Batch:
    return Batch(torch.tensor(points), torch.zeros(len(points), dtype=torch.long))


def still(batch: Batch) -> Noised:
    return Noised(batch, torch.tensor(0.0))


def test_gradients_come_example_by_example() -> None:
    gradients, losses = per_example(
        lambda batch: lambda value: (distances(MODEL, value, batch), {}),
        torch.tensor(1.0),
        at(0.0, 3.0, -5.0),
    )
    assert gradients.tolist() == [1 - 0, 1 - 3, 1 + 5]
    assert losses.tolist() == [1 / 2, 4 / 2, 36 / 2]


def test_gradients_in_chunks_are_the_same() -> None:
    def loss_on(batch: Batch) -> Any:
        return lambda value: (distances(MODEL, value["w"], batch), {})

    value = {"w": torch.tensor(1.0)}
    whole, _ = per_example(loss_on, value, at(*range(5)))
    parts, _ = per_example(loss_on, value, at(*range(5)), chunk_size=2)
    assert torch.equal(whole["w"], parts["w"])


def test_each_example_is_clipped_before_the_mean() -> None:
    # Gradients 4 and -1 become 2 and -1; the mean's own, 1.5, would not have been clipped.
    steps = minimize(
        distances, MODEL, torch.tensor(0.0), [still(at(-4.0, 1.0))], SGD(1.0),
        mechanism=Clipped(2.0),
    )  # fmt: skip
    assert float(finished(steps)) == -(2 - 1) / 2


def test_noise_is_what_lies_in_the_batch() -> None:
    batches = [Noised(at(-4.0, 1.0), torch.tensor(10.0))]
    steps = minimize(distances, MODEL, torch.tensor(0.0), batches, SGD(1.0), mechanism=Clipped(2.0))
    assert float(finished(steps)) == -(1 / 2 + 10)


def test_loops_with_other_mechanisms_are_other_loops() -> None:
    def described(mechanism: Clipped | None) -> Descent:
        return Descent(distances, MODEL, SGD(0.1), mechanism=mechanism)

    assert described(Clipped(1.0)) == described(Clipped(1.0))
    assert hash(described(Clipped(1.0))) == hash(described(Clipped(1.0)))
    assert described(Clipped(1.0)) not in (described(Clipped(2.0)), described(None))


def test_the_statistics_of_single_examples_are_left_out() -> None:
    model = ConvNet((1, 4, 4), 2, depth=1, width=2, norm="batch")
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([0, 1, 0]))
    start = model.init(0)
    batches = noised([batch], start, 0.0, 0)
    reached = finished(
        minimize(picture_loss, model, start, batches, SGD(0.1), mechanism=Clipped(1e9))
    )
    assert torch.equal(reached["norm0.running_mean"], start["norm0.running_mean"])
    assert not torch.equal(reached["head.weight"], start["head.weight"])


def picture_loss(model: Model, weights: Any, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(model(weights, batch.x), batch.y)


@pytest.mark.parametrize("engine", [Batched, Streams])
@pytest.mark.parametrize("world", [worlds.vectors(), worlds.pictures()], ids=["vectors", "images"])
def test_engines_agree_on_clipped_gradients(world: worlds.World, engine: Any) -> None:
    method = ClippedFedAvg(batch_size=8, lr=0.1)
    before = torch.random.get_rng_state()
    alone, _ = worlds.played(method, world, rounds=3)
    together, _ = worlds.played(method, world, rounds=3, engine=engine)
    assert torch.equal(before, torch.random.get_rng_state())
    assert gap(alone, together) <= 1e-6
    plain, _ = worlds.played(FedAvg(batch_size=8, lr=0.1), world, rounds=3)
    assert gap(alone, plain) > 1e-3  # the clip and the noise are felt


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_a_wide_clip_without_noise_is_the_plain_run(engine: Any) -> None:
    wide = ClippedFedAvg(batch_size=8, lr=0.1, clip=1e9, spread=0.0)
    clipped, _ = worlds.played(wide, worlds.vectors(), rounds=3, engine=engine)
    plain, _ = worlds.played(
        FedAvg(batch_size=8, lr=0.1), worlds.vectors(), rounds=3, engine=engine
    )
    assert gap(clipped, plain) <= 1e-6


def test_clients_with_noise_of_different_sizes_are_one_stack() -> None:
    method = ClippedFedAvg(batch_size=8, lr=0.1)
    sizes: list[int] = []

    class Watched(Batched):
        def _run_together(self, step: Any, round: int, stackable: Any) -> None:
            sizes.append(len(stackable))
            super()._run_together(step, round, stackable)

    worlds.played(method, worlds.vectors(), rounds=1, engine=Watched)
    assert sizes == [4]


def gap(one: Any, other: Any) -> float:
    """The largest difference between two servers' weights."""
    ours, theirs = (engine.states["server"].weights for engine in (one, other))
    return max(float(t.abs().max()) for t in trees.tensors(algebra.sub(ours, theirs)))
