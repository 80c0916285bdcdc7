"""Mechanisms: who makes the gradient of a loop's step, and gradients of single examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fedstill.core import trees

Scored = Callable[[Any], tuple[Tensor, Any]]  # of a value: its loss, and what it notes on the way
LossOn = Callable[[Any], Scored]  # of a batch: the function to be minimised there


class Gradient(Protocol):
    """An engine's gradient operator: of a scalar function, with what it notes on the way."""

    def __call__(self, function: Scored, value: Any) -> tuple[Any, Tensor, Any]:
        """Gradient, value of the function, and its notes."""


class Mechanism(Protocol):
    """Makes the gradient of a step in its own way, e.g. clipped example by example.

    It is given to a loop by `minimize(…, mechanism=…)`. `loss_on(batch)` is the function that the
    loop minimises on a batch, so the mechanism may ask for any part of what it was handed: a
    single example, or the examples inside a batch that carries noise as well. What it draws must
    lie in the batch, made beforehand from a node's seed; then loops with a mechanism are stacked,
    recorded and compiled as others are. It must be frozen and hashable: two loops whose
    mechanisms are equal do the same. Numbers that differ between clients belong into the batch.
    """

    def gradient(
        self, loss_on: LossOn, value: Any, batch: Any, gradient: Gradient
    ) -> tuple[Any, Tensor, Any]:
        """The gradient with respect to `value`, a loss for the logbook, and new statistics.

        `gradient` is the engine's operator, for whole batches; `per_example` gives single ones.
        """


def per_example(
    loss_on: LossOn, value: Any, examples: Any, *, chunk_size: int | None = None
) -> tuple[Any, Tensor]:
    """The gradient of every example alone, along a first axis, and [example], their losses.

    `examples` is a tree whose tensors have the example as their first axis. Statistics that a
    network notes of a single example are left out. With `chunk_size` so many gradients are made
    at a time, which takes less memory.

        gradients, losses = per_example(loss_on, weights, batch)
        gradients["head.weight"]  # [example, class, feature]
    """

    def loss_of(leaves: list[Tensor], example: list[Tensor]) -> Tensor:
        alone = trees.with_tensors(examples, [tensor.unsqueeze(0) for tensor in example])
        return loss_on(alone)(trees.with_tensors(value, leaves))[0]

    each = torch.func.vmap(
        torch.func.grad_and_value(loss_of), in_dims=(None, 0), chunk_size=chunk_size
    )
    gradients, losses = each(trees.tensors(value), trees.tensors(examples))
    return trees.with_tensors(value, gradients), losses
