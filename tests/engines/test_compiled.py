"""Compiled steps: what is compiled, what is left, and what the notes say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import SGD, Adam, Model, Weights, trees
from fedstill.core.loop import Descent, Loop
from fedstill.engines.loops import compiled
from fedstill.engines.loops.compiled import Compiler, Steps
from fedstill.engines.loops.stacks import Stack
from fedstill.models import MLP, ConvNet
from fedstill.parts.matching import grad, gradient_distance

NET = MLP((6,), 3, hidden=(5,), activation="tanh")
Pair = tuple[Tensor, Tensor]


def objective(model: Model, weights: Weights, batch: Pair) -> Tensor:
    return cross_entropy(model(weights, batch[0]), batch[1])


def examples(count: int, shape: tuple[int, ...] = (6,), seed: int = 0) -> Pair:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=rng)
    return torch.randn(count, *shape, generator=rng), labels


def loop_of(*counts: int, body: Any = None, carry: Any = None, **given: Any) -> Loop[Any]:
    body = body or Descent(objective, NET, SGD(0.1, momentum=0.9))
    start = NET.init(0)
    batches = [examples(count, seed=i) for i, count in enumerate(counts)]
    return Loop(body, carry or (start, body.optimizer.start(start)), given, batches)


def run(loop: Loop[Any], compiler: Compiler | None) -> tuple[Any, list[float]]:
    step, carry, losses = Steps(loop, compiler), loop.carry, []
    for batch in loop.batches:
        carry, loss = step(carry, loop.given, batch)
        losses.append(float(loss))
    return carry, losses


def assert_same(loop: Loop[Any], compiler: Compiler) -> None:
    (carry, losses), (other, found) = run(loop, None), run(loop, compiler)
    assert trees.shape(carry) == trees.shape(other)
    for one, two in zip(trees.tensors(carry), trees.tensors(other), strict=True):
        assert torch.allclose(one, two, 1e-4, 1e-5)
    assert found == pytest.approx(losses, rel=1e-4)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Steps as they were traced, one operation after another; every one that is asked for."""
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


def test_a_kind_of_step_is_compiled_once(counted: list[Any]) -> None:
    compiler = Compiler()
    assert_same(loop_of(*[4] * 9), compiler)
    assert_same(loop_of(*[4] * 12), compiler)
    assert len(counted) == 1 and not compiler.notes
    assert_same(loop_of(*[5] * 9), compiler)
    other = Descent(objective, NET, Adam(0.01))
    assert_same(loop_of(*[4] * 9, body=other), compiler)
    assert len(counted) == 3 and not compiler.notes


def test_only_batches_like_the_first_of_a_long_loop_are_compiled(counted: list[Any]) -> None:
    compiler = Compiler()
    assert_same(loop_of(*[4] * 7), compiler)
    assert not counted
    assert_same(loop_of(*[4] * 8, 3, 2), compiler)
    assert len(counted) == 1


def test_the_latest_kinds_are_kept(counted: list[Any]) -> None:
    compiler = Compiler(keep=2)
    for count in (3, 4, 5, 3):
        assert_same(loop_of(*[count] * 8), compiler)
    assert len(compiler.known) == 2 and len(counted) == 4


def test_what_is_given_and_started_from_at_once_stays_two_things(counted: list[Any]) -> None:
    def held(model: Model, weights: Weights, batch: Pair, centre: Weights) -> Tensor:
        far = sum((weights[name] - centre[name]).square().sum() for name in weights)
        return objective(model, weights, batch) + far

    body, start = Descent(held, NET, SGD(0.1)), NET.init(0)
    assert_same(loop_of(*[4] * 8, body=body, carry=(start, ()), centre=start), Compiler())
    assert len(counted) == 1


def test_gradients_of_gradients_are_compiled(counted: list[Any]) -> None:
    def matched(model: Model, images: Weights, batch: Pair, weights: Weights) -> Tensor:
        def slope_on(x: Tensor) -> Weights:
            return grad(lambda moved: objective(model, moved, (x, batch[1])), weights)

        return gradient_distance(slope_on(batch[0]), slope_on(images["x"]))

    start = {"x": examples(4, seed=9)[0]}
    body = Descent(matched, NET, SGD(0.1))
    loop = loop_of(*[4] * 8, body=body, carry=(start, ()), weights=NET.init(1))
    compiler = Compiler()
    assert_same(loop, compiler)
    assert len(counted) == 1 and not compiler.notes


def test_a_step_that_looks_at_numbers_is_run_plainly_and_noted(counted: list[Any]) -> None:
    def looking(model: Model, weights: Weights, batch: Pair) -> Tensor:
        loss = objective(model, weights, batch)
        return 2 * loss if loss > 0 else loss

    compiler = Compiler()
    for _ in range(2):
        assert_same(loop_of(*[4] * 8, body=Descent(looking, NET, SGD(0.1))), compiler)
    assert not counted
    assert len(compiler.notes) == 1 and compiler.notes[0].startswith("a loop is not compiled: ")


def test_a_compiler_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler here\nwith many lines more")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    torch.compiler.reset()
    compiler = Compiler()
    assert_same(loop_of(*[4] * 8), compiler)
    (note,) = compiler.notes
    assert "no C++ compiler here" in note and "\n" not in note


def test_a_fault_of_the_step_is_raised(counted: list[Any]) -> None:
    def wrong(model: Model, weights: Weights, batch: Pair) -> Tensor:
        raise KeyError("nothing here")

    with pytest.raises(KeyError, match="nothing here"):
        run(loop_of(*[4] * 8, body=Descent(wrong, NET, SGD(0.1))), Compiler())


def test_a_whole_stack_is_compiled_as_one(counted: list[Any]) -> None:
    loops = [loop_of(*[4] * length) for length in (12, 10, 9)]
    compiler = Compiler()
    ended = Stack(loops, compiler=compiler).run()
    assert len(counted) == 1 and not compiler.notes  # not for two loops, and not for one
    for loop, (carry, loss) in zip(loops, ended, strict=True):
        expected, losses = run(loop, None)
        assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        for one, two in zip(trees.tensors(expected), trees.tensors(carry), strict=True):
            assert torch.allclose(one, two, 1e-4, 1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for a CPU needs g++")
def test_torch_s_own_compiler_takes_a_convnet() -> None:
    net = ConvNet((1, 8, 8), 3, depth=1, width=4)
    body, start = Descent(objective, net, SGD(0.1, momentum=0.9)), net.init(0)
    batches = [examples(4, (1, 8, 8), seed=i) for i in range(8)]
    torch.compiler.reset()
    compiler = Compiler()
    assert_same(Loop(body, (start, body.optimizer.start(start)), {}, batches), compiler)
    assert len(compiler.known) == 1 and not compiler.notes
