"""How precisions round, and how far off what kernels make may be.

What they should make is in `block_references.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedstill.models.by_pixel import GAIN

HALF = 2.0**-11  # a number in half precision is off by at most this share of it
LEAST = 2.0**-25  # and the smallest ones by so much
STEP = 2.0**-24  # a number in single precision is off by at most this share of it
FEW = 16  # numbers that are summed up as one: of those, tensor cores keep four bits fewer
SINGLE = 1e-5  # what sums in single precision may be off, over the largest number


def halved(tensor: Tensor) -> Tensor:
    """Rounded to half precision, in double precision; gradients go through as they are."""
    exact = tensor.double()
    return exact + (exact.detach().half().double() - exact.detach())


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.half().double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * GAIN).half().double() / GAIN


def both_ways(tensor: Tensor) -> Tensor:
    """As `halved`, and so are gradients, of which blocks make `GAIN` times as much."""
    rounded: Tensor = _BothWays.apply(tensor)
    return rounded


def within(found: Tensor, exact: Tensor, sums: Tensor | float, terms: int) -> bool:
    """Whether numbers are exact but for single precision, and a rounding to half if they are that.

    Number by number; `sums` are those of the absolute values of the `terms` that make up each.
    """
    half = found.dtype == torch.float16
    lost = max(FEW, terms) * STEP * sums
    allowed = (exact.abs() + lost) * (HALF if half else STEP) + (LEAST if half else 0) + lost
    return found.shape == exact.shape and bool(((found.double() - exact).abs() <= allowed).all())


def near(found: Tensor, exact: Tensor, *, roundings: int = 0, also: float | Tensor = 0) -> bool:
    """Whether numbers are exact but for sums in single precision, whose terms are not known.

    Number by number; half precision may have rounded each so many times, and `also` is what they
    may be off besides.
    """
    exact = exact.detach()
    most = float(exact.abs().max()) if exact.numel() else 0.0
    slack = SINGLE * most + (LEAST if roundings else 0)
    allowed = roundings * HALF * exact.abs() + slack + also
    off = (found.detach().double() - exact).abs() if found.shape == exact.shape else None
    return off is not None and bool((off <= allowed).all())


def near_on_the_whole(found: Tensor, exact: Tensor, *, roundings: float) -> bool:
    """Whether numbers are together as far off as so many roundings to half precision make them.

    For what went through several blocks, where single numbers may be off by much more.
    """
    off, size = (found - exact).detach().norm(), exact.detach().norm()
    return found.shape == exact.shape and bool(off <= roundings * HALF * size)
