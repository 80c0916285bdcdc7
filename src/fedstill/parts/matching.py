"""Distances between gradients and between paths of weights, and images moved by the former."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import SGD, Batch, Lazy, Model, Weights, algebra, minimize, side_by_side
from fedstill.core.ranges import Count, Fraction, Positive

_EPS = 1e-6


def gradient_distance(left: Weights, right: Weights) -> Tensor:
    """Σ over layers and output rows of 1 - cosine; one-dimensional tensors contribute nothing.

    A row of a convolution is [in · kernel · kernel], of a linear layer [in]. The distance does
    not change when a row is scaled, so a difference of weights may stand for a gradient.
    """
    terms = []
    for name, tensor in left.items():
        if tensor.dim() < 2:
            continue
        a, b = tensor.flatten(1), right[name].flatten(1)
        dots = (a * b).sum(1)
        # The norm of a zero row has no slope; a tiny number under the root gives it one.
        lengths = (a.square().sum(1) + 1e-24).sqrt() * (b.square().sum(1) + 1e-24).sqrt()
        terms.append((1 - dots / (lengths + _EPS)).sum())
    return torch.stack(terms).sum()


def squared_distance(left: Weights, right: Weights) -> Tensor:
    """Σ of squared differences over all trainable entries."""
    return algebra.square(algebra.sub(algebra.parameters(left), algebra.parameters(right)))


def grad(loss: Callable[[Weights], Tensor], weights: Weights) -> Weights:
    """The gradient of a loss with respect to trainable weights, itself differentiable."""
    moving = algebra.parameters(weights)
    found: Weights = torch.func.grad(lambda moved: loss({**weights, **moved}))(moving)
    return found


def loss_on(model: Model, examples: Batch) -> Callable[[Weights], Tensor]:
    """The mean cross-entropy on some examples as a function of the weights."""
    return lambda weights: cross_entropy(model(weights, examples.x), examples.y)


def gradient_spread(model: Model, weights: Weights, sets: Sequence[Batch]) -> Tensor:
    """max_k ||∇L(w; S_k) - ∇L(w; S)||, S being all sets together; FedDualMatch, equation 2."""
    whole = grad(loss_on(model, union(sets)), weights)
    ways = [algebra.sub(grad(loss_on(model, one), weights), whole) for one in sets]
    return torch.stack([algebra.square(way) for way in ways]).max().sqrt()


def union(sets: Sequence[Batch]) -> Batch:
    """All sets one behind the other, as a single batch."""
    return Batch(torch.cat([one.x for one in sets]), torch.cat([one.y for one in sets]))


def distance(left: Weights, right: Weights) -> Tensor:
    """How far apart weights are: one norm over all trainable entries."""
    return squared_distance(left, right).sqrt()


def path_distance(reached: Weights, target: Weights, start: Weights) -> Tensor:
    """||reached - target||² / ||start - target||², over trainable entries (trajectory matching)."""
    return squared_distance(reached, target) / (squared_distance(start, target) + 1e-12)


@dataclass(frozen=True)
class GradientMatching:
    """Moves the images of some sets until their gradients point where a given one does."""

    steps: Count
    lr: Positive
    momentum: Fraction

    async def matched(
        self, model: Model, sets: Mapping[str, Batch], weights: Weights, target: Weights
    ) -> dict[str, Batch]:
        """The sets after `steps` steps, all against one target at the same weights.

        The sum of the sets' distances falls fastest where each set's own does, so that each set
        goes its way in a loop of its own.
        """
        each = [self.one_matched(model, examples, weights, target) for examples in sets.values()]
        return dict(zip(sets, await side_by_side(each), strict=True))

    async def one_matched(
        self, model: Model, examples: Batch, weights: Weights, target: Weights
    ) -> Batch:
        """One set after `steps` steps."""
        images = await minimize(
            self.objective, model, examples.x, Lazy(self.steps, lambda _: ()),
            SGD(self.lr, self.momentum), labels=examples.y, weights=weights, target=target,
        )  # fmt: skip
        return Batch(images, examples.y)

    async def towards(
        self, model: Model, examples: Batch, weights: Weights, reached: Weights, lr: float
    ) -> Batch:
        """One set whose gradient is to point from weights to those that steps of a rate reached.

        Several steps' way over one rate: the distance does not change with its length.
        """
        way = algebra.sub(algebra.parameters(weights), algebra.parameters(reached))
        target = algebra.scale(way, 1 / lr)
        return (await self.matched(model, {"one": examples}, weights, target))["one"]

    def objective(
        self, model: Model, images: Tensor, batch: tuple[()], labels: Tensor,
        weights: Weights, target: Weights,
    ) -> Tensor:  # fmt: skip
        """The distance between a set's own gradient and the target."""
        own = grad(loss_on(model.evaluating, Batch(images, labels)), weights)
        return gradient_distance(own, target)


def without_second_derivative(model: Model) -> list[str]:
    """Why gradients cannot be matched under a network, in one line, or nothing."""
    if model.twice:
        return []
    return [
        f"gradients are matched, but torch has no second derivative of a layer of {model.title}"
    ]
