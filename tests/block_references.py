"""Blocks of a ConvNet by the framework's operations in double precision, and how near is near."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = 2.0**-11  # by which rounding to half precision moves a number, over its size
LEAST = 2.0**-25  # by which it moves the smallest ones
SINGLE = 1e-5  # what sums in single precision may be off, over the largest number
EPS = 1e-5


def activation(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Instance norm, scaled and shifted, before it is cut."""
    maps, scale, shift = maps.double(), scale.double(), shift.double()
    return F.instance_norm(maps, weight=scale, bias=shift, eps=EPS)


def pooled(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """What a block makes of its maps."""
    return F.avg_pool2d(F.relu(activation(maps, scale, shift)), 2)


def near(found: Tensor, wanted: Tensor, *, roundings: float = 0, also: float = 0) -> bool:
    """Whether numbers are those wanted but for sums in single precision.

    Half precision may have rounded each so many times, on its way or at the end; `also` is what
    every one of them may be off besides.
    """
    assert found.shape == wanted.shape
    most = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    slack = SINGLE * most + also + (LEAST if roundings else 0)
    away = (found.double() - wanted).abs()
    return bool((away <= roundings * HALF * wanted.abs() + slack).all())


def certain(told: Tensor, made: Tensor, off: float | Tensor) -> Tensor:
    """What pooled pixels are told, but for those over a pixel so near to zero that rounding by
    `off` decides whether it is cut."""
    doubts = F.max_pool2d((made.detach().abs() <= off).double(), 2) > 0
    return torch.where(doubts, torch.zeros_like(told), told)
