"""Pixels: normalised images back to the range from 0 to 1, by the statistics a data set has.

Parties who normalise differently may share images as each has them, or as pixels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedstill.core.data import Data, Pool
from fedstill.core.errors import BadValue

Space = Literal["normalised", "pixel"]  # in which images are shared


def to_pixels(data: Data, images: Tensor) -> Tensor:
    """Images normalised as `data` are, as pixels; made-up images may lie outside of 0 and 1."""
    pool = _pool(data)
    return images if pool.mean is None or pool.std is None else images * pool.std + pool.mean


def normalised(data: Data, pixels: Tensor) -> Tensor:
    """Pixels normalised as `data` are."""
    return _pool(data).normalised(pixels)


def quantised(pixels: Tensor) -> Tensor:
    """What is left of pixels in a file of eight bits: clipped to 0 and 1, in 256 levels."""
    return (pixels.clamp(0, 1) * 255).round() / 255


def given_away(data: Data, images: Tensor, space: Space, *, eight_bits: bool) -> Tensor:
    """Images normalised as `data` are, in the space that all share; rounded where asked."""
    if space == "normalised" and not eight_bits:
        return images
    shown = to_pixels(data, images)
    shown = quantised(shown) if eight_bits else shown
    return shown if space == "pixel" else normalised(data, shown)


def received(data: Data, images: Tensor, space: Space) -> Tensor:
    """Images that were shared in a space, for one whose examples are `data`."""
    return images if space == "normalised" else normalised(data, images)


def _pool(data: Data) -> Pool:
    pool = data.normalisation
    if pool is None or (pool.mean is None and pool.stored.dtype != torch.uint8):
        raise BadValue(
            "pixels need examples that are stored with their mean and deviation; these are held "
            "normalised (distilled sets are), so what their pixels were is not known"
        )
    return pool
