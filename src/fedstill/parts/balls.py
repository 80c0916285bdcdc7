"""Balls around weights: points on the sphere, projection onto the ball (FedDM, appendix G.4).

Distances are one Euclidean norm over all trainable parameters; statistics of norm layers are
neither measured nor moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from fedstill.core import algebra, seeds
from fedstill.core.node import Node
from fedstill.core.records import Weights, is_buffer


def direction(rng: Generator, like: Weights) -> Weights:
    """A standard normal draw for every trainable parameter, on the generator's device."""
    return {
        name: torch.randn(tensor.shape, generator=rng, device=rng.device, dtype=tensor.dtype)
        for name, tensor in algebra.parameters(like).items()
    }


def on_sphere(centre: Weights, direction: Weights, radius: float | Tensor) -> Weights:
    """centre + δ·min(1, radius/‖δ‖); buffers are the centre's.

    A normal δ of many entries is always longer than the radius, so the law of the papers
    ("truncated Gaussian") is uniform on the sphere; only tiny models stay inside.
    """
    _, factor = _shrinking(algebra.square(algebra.parameters(direction)), radius)
    return {
        name: start if is_buffer(name) else start + factor * direction[name]
        for name, start in centre.items()
    }


def sphere(centre: Weights, radius: float) -> Callable[[Generator], Weights]:
    """Draws like `on_sphere` of `direction`, as one long vector: a few large operations a draw."""
    flat = _laid_out(centre, centre)

    def drawn(rng: Generator) -> Weights:
        step = torch.randn(flat.shape, generator=rng, device=rng.device, dtype=flat.dtype)
        _, factor = _shrinking(step.square().sum(), radius)
        return _folded(flat + factor * step, centre)

    return drawn


def networks(node: Node[Any], centre: Weights, radius: float) -> Callable[[int], Weights]:
    """For each step a network on the sphere around the centre.

    Drawn where the node computes: hundreds of thousands of numbers a step.
    """
    seed, draw = node.draw("networks"), sphere(centre, radius)
    return lambda step: draw(seeds.generator(seed, step, device=node.device))


def projected(weights: Weights, centre: Weights, radius: float | Tensor) -> Weights:
    """centre + (w - centre)·min(1, radius/‖w - centre‖); weights inside come back unchanged."""
    here, middle = _laid_out(weights, weights), _laid_out(centre, weights)
    step = here - middle
    outside, factor = _shrinking(step.square().sum(), radius)
    return _folded(torch.where(outside, middle + factor * step, here), weights)


def _laid_out(weights: Weights, like: Weights) -> Tensor:
    """Trainable parameters as one long vector, in the order of another's."""
    return torch.cat([weights[name].flatten() for name in algebra.parameters(like)])


def _folded(flat: Tensor, like: Weights) -> Weights:
    """The long vector in the shapes of weights; buffers are theirs."""
    moving = algebra.parameters(like)
    parts = torch.split(flat, [tensor.numel() for tensor in moving.values()])
    moved = zip(moving.items(), parts, strict=True)
    return {**like, **{name: part.view(tensor.shape) for (name, tensor), part in moved}}


def _shrinking(squared: Tensor, radius: float | Tensor) -> tuple[Tensor, Tensor]:
    """Whether a squared length exceeds the radius, and the factor that brings it back."""
    outside = squared > radius**2
    # The root is taken of 1 where it is not needed: its slope at zero would make gradients NaN.
    length = torch.where(outside, squared, 1.0).sqrt()
    return outside, torch.where(outside, radius / length, 1.0)
