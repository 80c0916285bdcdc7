"""Balls around weights: points on the sphere, projection onto the ball (FedDM, appendix G.4).

Distances are one Euclidean norm over all trainable parameters; statistics of norm layers are
neither measured nor moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from fedstill.core import algebra
from fedstill.core.node import Node
from fedstill.core.records import Weights
from fedstill.parts import random_networks


def on_sphere(centre: Weights, directions: Tensor, radius: float | Tensor) -> list[Weights]:
    """centre + δ·min(1, radius/‖δ‖) for each row δ of [network, number]; buffers are the centre's.

    A normal δ of many entries is always longer than the radius, so the law of the papers
    ("truncated Gaussian") is uniform on the sphere; only tiny models stay inside.
    """
    _, factor = _shrinking(directions.square().sum(1, keepdim=True), radius)
    return _all_folded(_laid_out(centre, centre) + factor * directions, centre)


def networks(node: Node[Any], centre: Weights, radius: float) -> Callable[[int], Weights]:
    """For each step a network on the sphere around the centre, in a normal direction.

    Drawn where the node computes: hundreds of thousands of numbers a step.
    """
    numbers = sum(tensor.numel() for tensor in algebra.parameters(centre).values())

    def drawn(rng: Generator, count: int) -> list[Weights]:
        directions = torch.randn(count, numbers, generator=rng, device=rng.device)
        return on_sphere(centre, directions, radius)

    return random_networks.networks(node.draw("networks"), drawn, numbers, node.device)


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


def _all_folded(rows: Tensor, like: Weights) -> list[Weights]:
    """The long vectors [network, number] in the shapes of weights; buffers are theirs."""
    moving = algebra.parameters(like)
    parts = torch.split(rows, [tensor.numel() for tensor in moving.values()], dim=1)
    each = {
        name: part.view(len(rows), *tensor.shape).unbind()
        for (name, tensor), part in zip(moving.items(), parts, strict=True)
    }
    return [{**like, **{name: own[i] for name, own in each.items()}} for i in range(len(rows))]


def _shrinking(squared: Tensor, radius: float | Tensor) -> tuple[Tensor, Tensor]:
    """Whether a squared length exceeds the radius, and the factor that brings it back."""
    outside = squared > radius**2
    # The root is taken of 1 where it is not needed: its slope at zero would make gradients NaN.
    length = torch.where(outside, squared, 1.0).sqrt()
    return outside, torch.where(outside, radius / length, 1.0)


def always(network: Weights) -> Callable[[int], Weights]:
    """The same network at every step."""
    return lambda _: network
