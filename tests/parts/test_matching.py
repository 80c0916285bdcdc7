"""Gradients as functions, distances between them, and images moved by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Weights, algebra
from fedstill.core.seeds import generator
from fedstill.models import MLP, ConvNet
from fedstill.parts.matching import (
    GradientMatching,
    grad,
    gradient_distance,
    loss_on,
    path_distance,
    squared_distance,
)
from worlds import finished

TINY = ConvNet((1, 8, 8), 3, depth=1, width=2)  # with instance norm


def double(weights: Weights) -> Weights:
    return {name: tensor.double() for name, tensor in weights.items()}


def examples(count: int = 4, name: str = "images") -> Batch:
    x = torch.randn(count, 1, 8, 8, generator=generator(0, name), dtype=torch.float64)
    return Batch(x, torch.arange(count) % 3)


# The distance


def test_rows_that_are_next_to_nothing_point_nowhere() -> None:
    # The reference adds 1e-6 to the product of lengths, here 1e-4 · 1e-2: the cosine counts half.
    left, right = torch.tensor([[1e-4, 0.0]]), torch.tensor([[1e-2, 0.0]])
    assert float(gradient_distance({"w": left}, {"w": right})) == pytest.approx(1 - 1 / 2, abs=1e-4)


def test_gradients_that_differ_by_a_positive_factor_in_each_row_are_at_no_distance() -> None:
    left = {"w": torch.randn(3, 2, 2, 2, generator=generator(0)).double()}
    factors = torch.tensor([0.5, 2.0, 100.0]).double().reshape(3, 1, 1, 1)
    assert float(gradient_distance(left, {"w": left["w"] * factors})) == pytest.approx(0, abs=1e-5)


def test_every_opposite_row_counts_two_and_every_orthogonal_one() -> None:
    left = {"w": torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])}
    right = {"w": torch.tensor([[-4.0, 0.0], [5.0, 0.0], [1.0, 1.0]])}
    assert float(gradient_distance(left, right)) == pytest.approx(2 + 1 + 0, abs=1e-5)
    both = gradient_distance({**left, "v": left["w"]}, {**right, "v": -left["w"]})
    assert float(both) == pytest.approx(3 + 3 * 2, abs=1e-5)  # a sum over layers too


def test_tensors_of_one_dimension_are_skipped() -> None:
    left = {"w": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([1.0])}
    right = {"w": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([-1.0])}
    assert float(gradient_distance(left, right)) == pytest.approx(0, abs=1e-5)


def test_a_row_of_zeros_counts_one_and_has_a_finite_slope() -> None:
    left, right = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert float(gradient_distance({"w": left}, {"w": right})) == pytest.approx(2)
    found = torch.func.grad(lambda w: gradient_distance({"w": w}, {"w": right}))(left)
    assert torch.isfinite(found).all()


def test_squared_and_path_distance_by_hand() -> None:
    start = {"w": torch.tensor([0.0, 0.0]), "norm.running_mean": torch.tensor([9.0])}
    target = {"w": torch.tensor([3.0, 4.0]), "norm.running_mean": torch.tensor([1.0])}
    reached = {"w": torch.tensor([3.0, 1.0]), "norm.running_mean": torch.tensor([5.0])}
    assert float(squared_distance(start, target)) == 25  # statistics are not on the path
    assert float(path_distance(reached, target, start)) == pytest.approx(9 / 25)
    assert float(path_distance(start, target, start)) == pytest.approx(1)
    assert float(path_distance(target, target, target)) == 0  # a path that stands still


# Gradients


def test_a_slope_is_what_autograd_finds_and_skips_statistics() -> None:
    model = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch")
    weights, (x, y) = model.init(3), examples()
    found = grad(loss_on(model, Batch(x.float(), y)), weights)
    names = [name for name in weights if "running" not in name]
    assert list(found) == names
    leaves = {name: weights[name].clone().requires_grad_() for name in names}
    loss = cross_entropy(model({**weights, **leaves}, x.float()), y)
    expected = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(names, expected, strict=True):
        assert torch.allclose(found[name], gradient, atol=1e-7)


def test_a_slope_of_a_linear_softmax_model_is_known() -> None:
    model = MLP((2,), 2, hidden=())
    weights = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    x, y = torch.tensor([[1.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 1])
    found = grad(loss_on(model, Batch(x, y)), weights)
    # The mean over examples of (softmax - one-hot) ⊗ x, softmax being a half.
    assert found["head.weight"].tolist() == [[-0.25, 1.0], [0.25, -1.0]]
    assert found["head.bias"].tolist() == [0, 0]


def apart(x: Tensor, y: Tensor, weights: Weights, target: Weights) -> Tensor:
    return gradient_distance(grad(loss_on(TINY, Batch(x, y)), weights), target)


def test_the_second_derivative_on_images_agrees_with_finite_differences() -> None:
    weights, (x, y) = double(TINY.init(1)), examples(3)
    target = grad(loss_on(TINY, examples(5, "others")), weights)
    found = torch.func.grad(lambda images: apart(images, y, weights, target))(x)
    leaf = x.clone().requires_grad_()
    (same,) = torch.autograd.grad(apart(leaf, y, weights, target), leaf)
    assert torch.allclose(found, same, atol=1e-10)
    step = 1e-6
    for at in torch.randperm(x.numel(), generator=generator(0, "places"))[:40].tolist():
        nudge = torch.zeros(x.numel(), dtype=torch.float64)
        nudge[at] = step
        ahead, back = (apart(x + s * nudge.view_as(x), y, weights, target) for s in (1, -1))
        expected = float(ahead - back) / (2 * step)
        assert float(found.flatten()[at]) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert float(found.norm()) > 1e-3  # there is something to compare


# Matching


def test_gradients_are_matched_in_evaluation_mode_whatever_a_loop_asks_for() -> None:
    model = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch")
    (x, y), other = examples(), examples(name="others")
    weights = double({**model.init(0), "norm0.running_mean": torch.tensor([0.5, -1.0])})
    target = grad(loss_on(model.evaluating, other), weights)
    own = grad(loss_on(model.evaluating, Batch(x, y)), weights)
    notes: Weights = {}
    matching = GradientMatching(1, 0.1, 0.0)
    found = matching.objective(model.train(notes), x, (), y, weights, target)
    assert torch.equal(found, gradient_distance(own, target)) and notes == {}


def test_one_step_of_gradient_matching_goes_down_the_distance() -> None:
    weights, ours = double(TINY.init(1)), examples(3)
    target = grad(loss_on(TINY, examples(5, "others")), weights)
    sets = {"a": ours, "b": Batch(ours.x + 1, ours.y)}
    made = finished(GradientMatching(1, 0.3, 0.5).matched(TINY, sets, weights, target))
    for name, (x, y) in sets.items():
        way = torch.func.grad(lambda images, y=y: apart(images, y, weights, target))(x)
        assert torch.allclose(made[name].x, x - 0.3 * way, atol=1e-10)
        assert torch.equal(made[name].y, y)


def test_gradient_matching_brings_gradients_nearer_and_does_not_mind_their_length() -> None:
    weights, ours = double(TINY.init(1)), {"only": examples(3)}
    target = grad(loss_on(TINY, examples(5, "others")), weights)
    matching = GradientMatching(20, 1.0, 0.5)
    (x, y) = finished(matching.matched(TINY, ours, weights, target))["only"]
    before = apart(*ours["only"], weights, target)
    assert float(apart(x, y, weights, target)) < 0.7 * float(before)
    longer = algebra.scale(target, 100.0)
    again = finished(matching.matched(TINY, ours, weights, longer))["only"].x
    assert torch.allclose(again, x, atol=1e-2)
