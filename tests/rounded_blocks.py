"""Blocks of one ConvNet by plain operations in double precision, rounded where kernels round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from roundings import both_ways, halved


def plain_block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """avg_pool2d(relu(instance_norm(conv2d(x, weight)) * scale + shift), 2)."""
    maps = both_ways(F.conv2d(halved(x), halved(weight), padding=padding))
    normal = F.instance_norm(maps, weight=scale.double(), bias=shift.double())
    return both_ways(F.avg_pool2d(F.relu(normal), 2))


def plain_first_block(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int, fixed: bool = False
) -> Tensor:
    """As `plain_block`, rounded where the kernels of first blocks round.

    An image is rounded about its mean, and weights once more when they are scaled for an image.
    Gradients are those of what is not rounded, but for what the ReLU cuts. `fixed`, they are told
    nothing of what the norm takes away.
    """
    level = halved(x.detach().mean((2, 3), keepdim=True))
    about, taken = halved(F.pad(x, [padding] * 4) - level), halved(weight)
    maps = F.conv2d(about, taken)
    mean = maps.mean((2, 3), keepdim=True)
    factor = ((maps - mean).square().mean((2, 3), keepdim=True) + 1e-5).rsqrt()
    if fixed:
        mean, factor = mean.detach(), factor.detach()
    stretch = factor * scale[:, None, None]
    offset = shift[:, None, None] - mean * stretch
    pairs = zip(about, stretch, strict=True)
    ready = [F.conv2d(one, halved(taken * each[..., None])) for one, each in pairs]
    made = maps * stretch + offset
    made = made + (torch.stack(ready) + halved(offset) - made).detach()
    return both_ways(F.avg_pool2d(F.relu(made), 2))
