"""Statistics of static norm layers, measured again before a network is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fedstill.core import Data, Model, Weights, algebra
from fedstill.core.content import Kind, Layout
from fedstill.core.records import is_buffer


@lru_cache(maxsize=64)
@torch.no_grad()
def layout(model: Model) -> Layout:
    """Names, shapes and types of what is measured of a network."""
    host = model.on("cpu")
    found = measured(host, host.init(0), Data.of(torch.zeros(2, *model.shape), torch.zeros(2)), 2)
    return {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}


@torch.no_grad()
def measured(model: Model, weights: Weights, data: Data, size: int) -> Weights:
    """The mean and variance that each static norm layer sees, over all batches of some data."""
    found: list[Weights] = []
    counts: list[float] = []
    plain = {name: tensor for name, tensor in weights.items() if not is_buffer(name)}
    for x, _ in data.chunks(size):
        notes: Weights = {}
        model.recording(notes)(plain, x)
        found.append(notes)
        counts.append(float(len(x)))
    return pooled(found, counts)


def pooled(statistics: Sequence[Weights], counts: Sequence[float]) -> Weights:
    """Statistics of several sets as those of their union: variances within and between them."""
    mean = algebra.mean(list(statistics), counts)
    away = [
        {
            name.replace("running_mean", "running_var"): (each[name] - mean[name]).square()
            for name in mean
            if name.endswith("running_mean")
        }
        for each in statistics
    ]
    between = algebra.mean(away, counts)
    return {name: t + between[name] if name in between else t for name, t in mean.items()}
