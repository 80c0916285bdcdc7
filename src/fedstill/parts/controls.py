"""SCAFFOLD's controls, option II: what corrects a client's drift and how it is renewed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedstill.core import algebra
from fedstill.core.records import Weights


def fresh(weights: Weights) -> Weights:
    """A control starts at zero and covers trainable parameters only."""
    return algebra.zeros(algebra.parameters(weights))


def correction(drift: Weights, weights: Weights) -> Tensor:
    """(c - c_i) · w, whose gradient added to a loss's makes the step w - lr · (g - c_i + c)."""
    return algebra.dot(drift, algebra.parameters(weights))


def change(common: Weights, start: Weights, reached: Weights, steps: int, lr: float) -> Weights:
    """(c_i - c + (start - reached) / (steps · lr)) - c_i; nothing where no step led anywhere."""
    if steps * lr < torch.finfo(torch.float32).tiny:  # also of a rate that has decayed to nothing
        return algebra.zeros(common)
    way = {name: start[name] - reached[name] for name in common}
    return algebra.sub(algebra.scale(way, 1 / (steps * lr)), common)


def renewed(
    common: Weights,
    changes: Sequence[Weights],
    clients: int,
    joined: Callable[[Sequence[Weights]], Weights] = algebra.mean,
) -> Weights:
    """c + (1/N) Σ of the changes, N counting all clients and not only those who took part.

    In place of their mean may stand what a robust rule makes of them.
    """
    return algebra.add(common, joined(changes), len(changes) / clients)
