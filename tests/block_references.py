"""Blocks of a ConvNet by the framework's operations in double precision.

`pooled` and `first_block` are exact; `rounded_block` and `rounded_first_block` are rounded where
kernels round, for networks of several blocks. How near kernels must come to them is in
`roundings.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from roundings import HALF, SINGLE, both_ways, halved

EPS = 1e-5


def activation(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Instance norm, scaled and shifted, before it is cut."""
    maps, scale, shift = maps.double(), scale.double(), shift.double()
    return F.instance_norm(maps, weight=scale, bias=shift, eps=EPS)


def pooled(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """What a block makes of its maps."""
    return F.avg_pool2d(F.relu(activation(maps, scale, shift)), 2)


def certain(told: Tensor, made: Tensor, off: float | Tensor) -> Tensor:
    """What pooled pixels are told, but for those over a pixel so near to zero that rounding by
    `off` decides whether it is cut."""
    doubts = F.max_pool2d((made.detach().abs() <= off).double(), 2) > 0
    return torch.where(doubts, torch.zeros_like(told), told)


class FirstBlock(NamedTuple):
    """What a first block makes of inputs that half precision has rounded: `first_block`."""

    inputs: list[Tensor]  # images, weights, scale and shift
    made: Tensor  # before it is cut
    sizes: Tensor  # of what is added up for a map, at most
    mean: Tensor  # [image, channel, 1, 1], of maps were the levels of images zero
    factor: Tensor  # [image, channel, 1, 1], their inverse deviation
    padding: int

    @property
    def pooled(self) -> Tensor:
        return F.avg_pool2d(F.relu(self.made), 2)

    @property
    def off(self) -> Tensor:
        """By how much `made` may be off: weights that make it are rounded once more."""
        scale, shift = (one.detach().view(-1, 1, 1) for one in self.inputs[2:])
        stretch = scale * self.factor
        return HALF * (self.sizes * stretch.abs() + (shift - self.mean * stretch).abs())

    @property
    def pooled_off(self) -> Tensor:
        return F.avg_pool2d(self.off, 2)

    def certain(self, told: Tensor) -> Tensor:
        return certain(told, self.made, self.off + SINGLE)

    def slopes(self, told: Tensor) -> tuple[Tensor, ...]:
        """Gradients of all inputs."""
        return torch.autograd.grad(self.pooled, self.inputs, told.double(), retain_graph=True)

    def slopes_of_one(self, told: Tensor, image: int) -> tuple[Tensor, ...]:
        """Gradients of weights, scale and shift, from one image."""
        alone = torch.zeros_like(told)
        alone[image] = told[image]
        return self.slopes(alone)[1:]

    def slopes_off(self, told: Tensor) -> Tensor:
        """By how much the gradient of images may be off.

        Rounded are the weights by which pixels of maps tell it, what they are when it is summed how
        they go along with what they are told, and the matrix by which the norm takes that away.
        """
        _, weight, scale, shift = (one.detach() for one in self.inputs)
        scale, made, pixels = scale.view(-1, 1, 1), self.made.detach(), self.made[0, 0].numel()
        share = F.interpolate(told.double() / 4, scale_factor=2) * (made > 0)
        alone = share.sum((2, 3), keepdim=True) * scale
        along = (share * (made - shift.view(-1, 1, 1))).sum((2, 3), keepdim=True) * self.factor
        normal = (made - shift.view(-1, 1, 1)) / scale
        off = HALF * share.abs() * (scale * self.factor).abs()
        summed = (share.abs() * self.off).sum((2, 3), keepdim=True)
        off = off + normal.abs() * summed * self.factor / pixels
        taken = self.sizes * along.abs() + (alone - self.mean * along).abs()
        off = off + HALF * taken * self.factor / pixels
        return F.conv_transpose2d(off, weight.abs(), padding=self.padding)


def first_block(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *, padding: int
) -> FirstBlock:
    """Images are seen about their colours' levels, and those, differences and weights rounded."""
    images = images.detach()
    levels = images.mean((2, 3), keepdim=True).half()
    light = (images - levels.float()).half().double() + levels.double()
    own = [light, *(one.detach().double() for one in (weight.half(), scale, shift))]
    inputs = [one.requires_grad_() for one in own]
    made = activation(F.conv2d(inputs[0], inputs[1], padding=padding), inputs[2], inputs[3])
    with torch.no_grad():
        about = F.pad(light, (padding,) * 4) - levels.double()  # no light outside
        maps, sizes = F.conv2d(about, inputs[1]), F.conv2d(about.abs(), inputs[1].abs())
        variance, mean = torch.var_mean(maps, (2, 3), correction=0, keepdim=True)
    return FirstBlock(inputs, made, sizes, mean, (variance + EPS).rsqrt(), padding)


def rounded_block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """What a block makes of its input: of inputs and weights in half precision, as are its maps."""
    maps = both_ways(F.conv2d(halved(x), halved(weight), padding=padding))
    return both_ways(pooled(maps, scale, shift))


def rounded_first_block(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int, fixed: bool = False
) -> Tensor:
    """As `rounded_block`, rounded where the kernels of first blocks round.

    An image is rounded about its mean, and weights once more when they are scaled for an image.
    Gradients are those of what is not rounded, but for what the ReLU cuts. `fixed`, they are told
    nothing of what the norm takes away.
    """
    level = halved(x.detach().mean((2, 3), keepdim=True))
    about, taken = halved(F.pad(x, [padding] * 4) - level), halved(weight)
    maps = F.conv2d(about, taken)
    mean = maps.mean((2, 3), keepdim=True)
    factor = ((maps - mean).square().mean((2, 3), keepdim=True) + EPS).rsqrt()
    if fixed:
        mean, factor = mean.detach(), factor.detach()
    stretch = factor * scale[:, None, None]
    offset = shift[:, None, None] - mean * stretch
    pairs = zip(about, stretch, strict=True)
    ready = [F.conv2d(one, halved(taken * each[..., None])) for one, each in pairs]
    made = maps * stretch + offset
    made = made + (torch.stack(ready) + halved(offset) - made).detach()
    return both_ways(F.avg_pool2d(F.relu(made), 2))
