"""Pixels: normalised images back to the range from 0 to 1, by the statistics a data set has."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core.data import Data, Pool
from fedstill.core.errors import BadValue


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


def _pool(data: Data) -> Pool:
    pool = data.parts[0].pool if data.parts else None
    if pool is None or (pool.mean is None and pool.stored.dtype != torch.uint8):
        raise BadValue(
            "pixels need examples that are stored with their mean and deviation; these are held "
            "normalised (distilled sets are), so what their pixels were is not known"
        )
    return pool
