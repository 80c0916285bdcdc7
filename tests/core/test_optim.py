"""Optimisers: the framework's own, step for step, and the first steps by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedstill.core import trees
from fedstill.core.optim import SGD, Adam, Clipped, Optimizer, Scheduled, rated, scheduled
from fedstill.core.records import Weights
from fedstill.core.seeds import generator

CURVATURE = torch.tensor([[1.0, 3.0], [0.2, 5.0]])


def start() -> Weights:
    rng = generator(0, "optim")
    return {"a": torch.randn(2, 2, generator=rng), "b": torch.randn(2, generator=rng)}


def grad(value: Weights) -> Weights:
    """Gradient of ½ Σ curvature · a² + Σ b³/3."""
    return {"a": CURVATURE * value["a"], "b": value["b"] ** 2}


def ours(optimizer: Optimizer, steps: int = 5) -> Weights:
    value = start()
    memory = optimizer.start(value)
    for _ in range(steps):
        value, memory = optimizer.step(value, grad(value), memory)
    return value


def theirs(kind: type[torch.optim.Optimizer], steps: int = 5, **options: object) -> Weights:
    value = {name: torch.nn.Parameter(tensor) for name, tensor in start().items()}
    optimizer = kind(value.values(), **options)  # type: ignore[call-arg]
    for _ in range(steps):
        for name, gradient in grad({n: p.detach() for n, p in value.items()}).items():
            value[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in value.items()}


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_goes_where_the_frameworks_goes(momentum: float, weight_decay: float) -> None:
    expected = theirs(torch.optim.SGD, lr=0.1, momentum=momentum, weight_decay=weight_decay)
    made = ours(SGD(0.1, momentum, weight_decay))
    assert all(torch.allclose(made[n], expected[n], rtol=1e-6, atol=1e-7) for n in expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_adam_goes_where_the_frameworks_goes(
    betas: tuple[float, float], weight_decay: float
) -> None:
    expected = theirs(torch.optim.Adam, lr=0.05, betas=betas, eps=1e-4, weight_decay=weight_decay)
    made = ours(Adam(0.05, betas, 1e-4, weight_decay))
    assert all(torch.allclose(made[n], expected[n], rtol=1e-5, atol=1e-6) for n in expected)


def test_two_steps_of_momentum_by_hand() -> None:
    optimizer, value = SGD(0.1, momentum=0.5), torch.tensor(1.0)
    value, memory = optimizer.step(value, torch.tensor(2.0), optimizer.start(value))
    value, _ = optimizer.step(value, torch.tensor(4.0), memory)
    assert float(value) == pytest.approx(1 - 0.1 * 2 - 0.1 * (0.5 * 2 + 4))


def test_the_first_step_of_adam_is_the_rate_whatever_the_gradient() -> None:
    for gradient in (0.001, 1000.0):
        optimizer, value = Adam(0.1, eps=0.0), torch.tensor(1.0)
        value, _ = optimizer.step(value, torch.tensor(gradient), optimizer.start(value))
        assert float(value) == pytest.approx(1 - 0.1)


def test_plain_sgd_remembers_nothing() -> None:
    assert SGD(0.1).start(start()) == ()


def test_optimisers_of_equal_values_are_equal() -> None:
    assert {SGD(0.1), SGD(0.1), Adam(), Adam()} == {SGD(0.1), Adam()}
    assert SGD(0.1) != SGD(0.1, 0.9)


def test_neither_value_nor_memory_is_written_into() -> None:
    for optimizer in (SGD(0.1, 0.9, 0.1), Adam(0.1, weight_decay=0.1)):
        value = start()
        memory = optimizer.start(value)
        _, memory = optimizer.step(value, grad(value), memory)
        kept = repr(memory)
        optimizer.step(value, grad(value), memory)
        assert repr(memory) == kept
        assert all(torch.equal(value[n], start()[n]) for n in value)


def test_a_rate_that_falls_halfway_is_a_tenth_from_there() -> None:
    ours = scheduled(SGD(1.0), 5, "halfway")
    value, memory = torch.zeros(()), ours.start(torch.zeros(()))
    moves = []
    for _ in range(5):
        moved, memory = ours.step(value, torch.tensor(-1.0), memory)
        moves.append(round(float(moved - value), 4))
        value = moved
    assert moves == [1.0, 1.0, 1.0, 0.1, 0.1]
    assert scheduled(SGD(1.0), 5, "constant") == SGD(1.0)


@pytest.mark.parametrize(
    ("made", "kind", "options"),
    [
        (Adam(0.05, weight_decay=0.1), torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}),
        (SGD(0.1, 0.9), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_a_falling_rate_goes_where_the_frameworks_goes(made, kind, options) -> None:  # type: ignore[no-untyped-def]
    value = {name: torch.nn.Parameter(tensor) for name, tensor in start().items()}
    optimizer = kind(value.values(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for _ in range(6):
        for name, gradient in grad({n: p.detach() for n, p in value.items()}).items():
            value[name].grad = gradient
        optimizer.step()
        schedule.step()
    found = ours(Scheduled(made, 6), steps=6)
    assert all(torch.allclose(found[n], value[n], rtol=1e-5, atol=1e-6) for n in value)


def test_after_its_last_step_a_falling_rate_stands_still() -> None:
    optimizer = Scheduled(SGD(0.1), 3)
    assert all(torch.equal(ours(optimizer, 3)[n], ours(optimizer, 7)[n]) for n in start())
    half, _ = optimizer.step(torch.tensor(1.0), torch.tensor(2.0), {
        "base": (), "count": torch.tensor(1.5), "steps": torch.tensor(3.0),
    })  # fmt: skip
    assert float(half) == pytest.approx(1 - 0.1 * 2 / 2)


def test_falling_rates_of_different_lengths_can_be_stacked() -> None:
    values, lengths = torch.tensor([1.0, -2.0, 3.0]), (3, 4, 9)
    optimizers = [Scheduled(Adam(0.1), steps) for steps in lengths]
    assert len({*optimizers}) == 1
    memories = [optimizer.start(value) for optimizer, value in zip(optimizers, values, strict=True)]

    def walked(value: torch.Tensor, memory: Any) -> torch.Tensor:
        for _ in range(3):
            value, memory = optimizers[0].step(value, value**3, memory)
        return value

    alone = [walked(value, memory) for value, memory in zip(values, memories, strict=True)]
    together = torch.func.vmap(walked)(values, trees.stack(memories))
    assert torch.allclose(together, torch.stack(alone))
    assert len({round(abs(float(a - v)), 4) for a, v in zip(alone, values, strict=True)}) == 3


@pytest.mark.parametrize("base", [SGD(0.3), SGD(0.3, 0.9, 0.1), Adam(0.3, weight_decay=0.1)])
def test_a_rate_that_lies_in_the_memory_gives_the_same_steps_bit_for_bit(base: Any) -> None:
    kept = rated(base)
    assert kept == rated(replace(base, lr=0.7)) and hash(kept) == hash(rated(replace(base, lr=2.0)))
    rng = torch.Generator().manual_seed(0)
    value = {"a": torch.randn(50, generator=rng), "b": torch.randn(3, 4, generator=rng)}
    plain, other = value, value
    memory, held = base.start(value), kept.start(value)
    for _ in range(4):
        grads = {name: torch.randn(t.shape, generator=rng) for name, t in value.items()}
        plain, memory = base.step(plain, grads, memory)
        other, held = kept.step(other, grads, held)
        assert all(torch.equal(plain[name], other[name]) for name in value)


def test_gradients_longer_than_allowed_are_shortened_to_that_length() -> None:
    value = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}  # of length 5
    moved, _ = Clipped(SGD(1.0), 1.0).step(value, gradient, ())
    assert moved["a"].tolist() == pytest.approx([1 - 0.6])
    assert moved["b"].tolist() == pytest.approx([2 - 0.8])
    same, _ = Clipped(SGD(1.0), 5.5).step(value, gradient, ())
    assert same["a"].tolist() == [-2.0] and same["b"].tolist() == [-2.0]


def test_lengths_of_stacked_gradients_are_those_of_each() -> None:
    gradients = torch.tensor([[3.0, 4.0], [0.3, 0.4]])

    def moved(gradient: torch.Tensor) -> torch.Tensor:
        return Clipped(SGD(1.0), 1.0).step(torch.zeros(2), gradient, ())[0]

    together = torch.func.vmap(moved)(gradients)
    assert torch.allclose(together, torch.tensor([[-0.6, -0.8], [-0.3, -0.4]]))


def test_adam_moves_many_tensors_together_as_each_alone_bit_for_bit() -> None:
    # By the formula, one tensor at a time: m / (1 - b1^t) over the root of v / (1 - b2^t).
    adam, rng = Adam(0.01, weight_decay=0.1), generator(0)
    value = {"w": torch.randn(5, 3, generator=rng), "b": torch.randn(4, generator=rng)}
    memory = adam.start(value)
    alone = {name: (w, torch.zeros_like(w), torch.zeros_like(w)) for name, w in value.items()}
    for count in range(1, 6):
        slope = {name: torch.randn(w.shape, generator=rng) for name, w in value.items()}
        value, memory = adam.step(value, slope, memory)
        t = torch.tensor(float(count))
        for name, (w, m, v) in alone.items():
            g = slope[name] + 0.1 * w
            m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
            w = w - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            alone[name] = (w, m, v)
            assert torch.equal(value[name], w) and torch.equal(memory["second"][name], v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("optimizer", [SGD(0.3), SGD(0.3, 0.9, 0.1)])
@pytest.mark.parametrize("size", [8, 2**17])
def test_a_step_over_the_value_on_a_gpu_is_the_same_and_lies_where_the_value_was(
    optimizer: SGD, stacked: bool, size: int
) -> None:
    value, slope = torch.randn(2, 3, size, generator=generator(0, "over")).cuda()
    expected, _ = optimizer.step(value.clone(), slope, optimizer.start(value))

    def step(value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return optimizer.step(value, slope, optimizer.start(value), over=True)[0]

    moved = torch.func.vmap(step)(value, slope) if stacked else step(value, slope)
    assert torch.equal(moved, expected)
    assert torch.equal(value, expected) and moved.data_ptr() == value.data_ptr()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9, 0.01), SGD(0.3, 0.5)])
def test_a_step_written_over_the_value_has_the_same_bits(optimizer: SGD, stacked: bool) -> None:
    def steps(value: Weights, over: bool) -> Weights:
        memory = optimizer.start(value)
        for _ in range(3):
            value, memory = optimizer.step(value, grad(value), memory, over=over)
        return value

    value, played = start(), steps
    if stacked:
        value = trees.map_tensors(lambda one: torch.stack([one, 2 * one]), value)
        played = torch.func.vmap(steps, in_dims=(0, None))
    plain, moved = played(value, False), played(value, True)
    for name in value:
        assert torch.equal(moved[name], plain[name])
        assert moved[name].data_ptr() == value[name].data_ptr()
