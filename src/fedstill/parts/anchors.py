"""Anchors: sets of several makers made one, and batches drawn from them beside other data."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from fedstill.core.records import Weights


def spread(images: Tensor, classes: Tensor, known: int) -> Weights:
    """A set laid out over all classes, zero where it has none, and which classes it has.

    Sums or means of these over makers, mixed in whatever way, give the mean over holders.
    """
    wide = images.new_zeros(known, *images.shape[1:])  # [class, image, ...]
    return {
        "images": wide.index_copy(0, classes, images),
        "held": images.new_zeros(known).index_fill(0, classes, 1.0),  # [class]
    }


def over_holders(sums: Weights, least: float) -> tuple[Tensor, Tensor]:
    """The mean over the holders of each class; classes held less than `least` are left out."""
    classes = torch.nonzero(sums["held"] > least).flatten()
    held = sums["held"][classes].reshape(-1, *[1] * (sums["images"].dim() - 1))
    return sums["images"][classes] / held, classes


def stream(count: int, size: int, steps: int, rng: Generator) -> Tensor:
    """[step, place], batches cut from one fresh order of `count` things after another."""
    orders = -(-steps * size // count) if count else 0
    cut = [torch.randperm(count, generator=rng) for _ in range(orders)]
    return torch.cat([torch.zeros(0, dtype=torch.long), *cut])[: steps * size].reshape(steps, size)
