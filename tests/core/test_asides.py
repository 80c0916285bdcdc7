"""Gradients of single examples that lie aside: the same clipped sums as those of the usual way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import Weights, asides, trees
from fedstill.core.asides import Outer, Taken
from fedstill.core.convolutions import by_example
from fedstill.core.mechanism import per_example
from fedstill.core.release import ClippedGradient, Sampled, clipped_sums
from fedstill.core.torch_internals import traced
from fedstill.engines.engine import autograd_gradient
from fedstill.models import MLP

FINE = torch.tensor(2.0**-40, dtype=torch.float64)  # a grid that rounds nothing
X = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0]])  # lengths 5, 0.5 and 10
Loss = Callable[[Tensor, Tensor], Tensor]


class _Told(torch.autograd.Function):
    """What weights are told of each example: the example, aside where that may be."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return told(grad[None], x[None], weight)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        if in_dims[0] is None:
            grad = grad.expand(info.batch_size)
        return told(grad, x, weight), 0


def told(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    found = (grad.unsqueeze(1) * x).half()
    place = asides.wanted(weight)
    return found.float() if place is None else asides.put(place, found, squares(found))


def squares(rows: Tensor) -> Tensor:
    return rows.double().square().sum(1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        with torch.no_grad():
            return None, _Told.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor) -> Any:
        return _Product.forward(x, weight), 0


def product(x: Tensor, weight: Tensor) -> Tensor:
    made: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return made


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def clipped(loss: Loss, *, clip: float = 1.0, x: Tensor = X) -> Weights:
    weights = {"weight": torch.tensor([1.0, 2.0]), "other": torch.zeros(2)}
    noise = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    sample = Sampled(x, torch.ones(len(x)), noise, FINE)

    def loss_on(example: Tensor) -> Any:
        return lambda value: (loss(example[0], value["weight"]) + 0 * value["other"].sum(), {})

    found: Weights = ClippedGradient(clip).gradient(loss_on, weights, sample, autograd_gradient)[0]
    return found


def test_what_lies_aside_is_clipped_by_the_length_of_the_very_numbers_that_are_added() -> None:
    # (0.6, 0.8) of the first and of the third, and the second whole.
    found = clipped(product)["weight"]
    halves = X[1].half().float()
    torch.testing.assert_close(found, torch.tensor([1.2, 1.6]) + halves, rtol=1e-6, atol=0)
    assert clipped(product)["other"].tolist() == [0, 0]


def test_one_beyond_the_reach_of_half_precision_leaves_no_trace() -> None:
    wild = torch.cat([X, torch.tensor([[1e5, 1.0]])])
    assert torch.equal(clipped(product, x=wild)["weight"], clipped(product)["weight"])


@pytest.mark.parametrize(
    "twice",
    [
        lambda made: lambda x, w: made(x, w) + w.square().sum(),
        lambda made: lambda x, w: made(x, w) + made(2 * x, w),
        lambda made: lambda x, w: made(x, w) + made(X[0], w),
        lambda made: lambda x, w: made(X[0], w),
        lambda made: lambda x, w: made(x, 3 * w),
        lambda made: lambda x, w: made(x, w.flip(0)),
        lambda made: lambda x, w: made(x[:1], w[:1]),
    ],
    ids=["a term", "two", "a common one", "that alone", "other weights", "turned", "a part"],
)
def test_weights_that_are_told_otherwise_too_are_told_the_sum(
    twice: Callable[[Loss], Loss],
) -> None:
    # Weights (1, 2) and examples are such that half precision rounds little.
    found, wanted = clipped(twice(product)), clipped(twice(plain))
    torch.testing.assert_close(found["weight"], wanted["weight"], rtol=1e-3, atol=1e-3)


def test_outside_of_a_private_step_nothing_lies_aside() -> None:
    weight = torch.tensor([1.0, 2.0])
    assert asides.wanted(weight) is None
    with asides.kept([weight]) as lying:
        assert asides.wanted(weight) is lying[0]
        assert asides.wanted(weight.clone()) is None
        assert asides.wanted(weight[:1]) is None
    assert asides.wanted(weight) is None
    gradients, _ = per_example(lambda x: lambda w: (product(x[0], w), {}), weight, X)
    assert torch.equal(gradients, X.half().float())


def test_a_linear_layers_gradients_lie_aside_as_two_vectors_each() -> None:
    # The loss of an example is its output's sum of squares over two: the layer is told its output.
    weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    with by_example(), asides.kept([weight]) as lying:
        zeros, _ = per_example(
            lambda x: lambda w: (F.linear(x, w).square().sum() / 2, {}), weight, X
        )
    found = asides.taken(zeros, lying[0]).gradient
    assert isinstance(found, Outer)
    assert found.told.tolist() == (X * torch.tensor([1.0, 2.0])).tolist()
    assert torch.equal(found.seen, X) and torch.count_nonzero(zeros) == 0
    # (3, 8) by (3, 4): 9, 12, 24, 32, of which the squares sum up to 73 · 25.
    assert found.whole()[0].tolist() == [[9, 12], [24, 32]]
    assert float(found.squares()[0]) == pytest.approx(73 * 25)
    # Twice the first, none of the second, and the third, which is the first but twice as long.
    assert found.weighted_sum(torch.tensor([2.0, 0.0, 1.0])).tolist() == [
        [2 * 9 + 36, 2 * 12 + 48],
        [2 * 24 + 96, 2 * 32 + 128],
    ]


def test_vectors_that_are_not_finite_leave_no_trace_where_their_factor_is_0() -> None:
    wild = Outer(torch.tensor([[1.0], [float("inf")]]), torch.tensor([[2.0], [float("nan")]]))
    assert wild.weighted_sum(torch.tensor([1.0, 0.0])).tolist() == [[2.0]]


@pytest.mark.parametrize("twice", [False, True], ids=["one pass", "two passes"])
def test_sums_of_vectors_are_those_of_whole_gradients(twice: bool) -> None:
    model = MLP((2,), 3, hidden=(4,))
    weights, x = model.init(0), torch.cat([X, X.flip(0)])

    def loss_on(x: Tensor) -> Any:
        def loss(weights: Weights) -> tuple[Tensor, Weights]:
            made = model(weights, x).square().sum()
            return made + model(weights, 2 * x).sum() if twice else made, {}

        return loss

    leaves = trees.tensors(weights)
    with by_example(), asides.kept(leaves) as lying:
        made = trees.tensors(per_example(loss_on, weights, x)[0])
    told = [asides.taken(*one) for one in zip(made, lying, strict=True)]
    whole = [Taken(one) for one in trees.tensors(per_example(loss_on, weights, x)[0])]
    assert any(isinstance(one.gradient, Outer) for one in told) is not twice
    found, wanted = (clipped_sums(one, 0.7, torch.ones(6)) for one in (told, whole))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("products", [nullcontext, by_example])
def test_a_step_that_is_traced_keeps_nothing_aside(
    products: Callable[[], AbstractContextManager[None]],
) -> None:
    model = MLP((2,), 3, hidden=(4,))
    weights = model.init(0)

    def loss_on(x: Tensor) -> Any:
        return lambda value: (model(value, x).square().sum(), {})

    def step(x: Tensor, *leaves: Tensor) -> list[Tensor]:
        value = dict(zip(weights, leaves, strict=True))
        sample = Sampled(x, torch.ones(3), value, x.new_full((), 2.0**-40))
        with products():
            return trees.tensors(
                ClippedGradient(0.5).gradient(loss_on, value, sample, autograd_gradient)[0]
            )

    given = [X, *weights.values()]
    torch.testing.assert_close(list(traced(step, given)(*given)), step(*given))
