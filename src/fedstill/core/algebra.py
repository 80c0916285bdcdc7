"""Arithmetic on weights and other trees; no model knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.records import Weights, is_buffer

T = TypeVar("T")


def mean(items: Sequence[T], weights: Sequence[float] | None = None) -> T:
    """The weighted mean, tensor by tensor; integer tensors are taken from the first item.

    Shares are normalised in double precision and applied in the order given.
    """
    shares = [1.0] * len(items) if weights is None else [float(w) for w in weights]
    total = sum(shares)
    if not items or total <= 0:
        raise ValueError(f"a mean needs items and a positive total weight, got {shares}")

    def combine(*rows: Tensor) -> Tensor:
        if not rows[0].is_floating_point():
            return rows[0]
        out = rows[0] * (shares[0] / total)
        for row, share in zip(rows[1:], shares[1:], strict=True):
            out = out + row * (share / total)
        return out

    return trees.map_tensors(combine, items[0], *items[1:])


def add(left: T, right: T, scale: float = 1.0) -> T:
    """left + scale · right; integer tensors keep their left value."""
    return trees.map_tensors(
        lambda a, b: a + scale * b if a.is_floating_point() else a, left, right
    )


def sub(left: T, right: T) -> T:
    """left - right; integer tensors keep their left value."""
    return trees.map_tensors(lambda a, b: a - b if a.is_floating_point() else a, left, right)


def scale(tree: T, factor: float | Tensor) -> T:
    """factor · tree; integer tensors stay."""
    return trees.map_tensors(lambda a: a * factor if a.is_floating_point() else a, tree)


def moving_average(average: T, latest: T, keep: float) -> T:
    """keep · average + (1 - keep) · latest; integer tensors are the latest."""
    return trees.map_tensors(
        lambda a, b: keep * a + (1 - keep) * b if b.is_floating_point() else b, average, latest
    )


def zeros(tree: T) -> T:
    """Zeros of the same shapes."""
    return trees.map_tensors(torch.zeros_like, tree)


def dot(left: T, right: T) -> Tensor:
    """The inner product over all floating entries."""
    pairs = zip(trees.tensors(left), trees.tensors(right), strict=True)
    terms = [(a * b).sum() for a, b in pairs if a.is_floating_point()]
    return torch.stack(terms).sum()


def square(tree: T) -> Tensor:
    """The squared norm over all floating entries."""
    terms = [a.square().sum() for a in trees.tensors(tree) if a.is_floating_point()]
    return torch.stack(terms).sum()


def parameters(weights: Weights) -> Weights:
    """The trainable part of a state dict."""
    return {name: tensor for name, tensor in weights.items() if not is_buffer(name)}
