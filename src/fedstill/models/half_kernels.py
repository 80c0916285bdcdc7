"""GPU kernels of a ConvNet's block in half precision; imported only where Triton is.

As `kernels`, for maps of two bytes a number that lie in memory pixel by pixel, all channels of a
pixel side by side: so convolutions in half precision read and write them. Sums are in single
precision, and heights and widths are even.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedstill.models.kernels import EPS


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x]."""
    with torch.cuda.device(maps.device):
        if torch.is_grad_enabled():
            return _Block.apply(maps, scale, shift)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(_by_pixel(maps), scale, shift)[0]


def gained(tensor: Tensor, gain: float) -> Tensor:
    """The same numbers; their gradient is multiplied on its way back."""
    if not torch.is_grad_enabled():
        return tensor
    return _Gained.apply(tensor, gain)  # type: ignore[no-untyped-call,no-any-return]


class _Gained(torch.autograd.Function):
    """Gradients are small numbers, which half precision would round to nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope * ctx.gain, None


class _Block(torch.autograd.Function):
    """The block with its gradient; for a gradient of the gradient it is unfolded again."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        maps = _by_pixel(maps)
        pooled, mean, factor = _forward(maps, scale, shift)
        ctx.save_for_backward(maps, scale, shift, mean, factor)
        return pooled

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        maps, scale, shift, mean, factor = ctx.saved_tensors
        if torch.is_grad_enabled():
            norm = F.group_norm(maps.float(), maps.shape[1], scale, shift, EPS)
            pooled = F.avg_pool2d(F.relu(norm), 2).to(maps.dtype)
            return torch.autograd.grad(pooled, (maps, scale, shift), slope, create_graph=True)
        return _backward(maps, scale, shift, mean, factor, _by_pixel(slope))


def _by_pixel(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def _tiles(maps: Tensor) -> tuple[tuple[int, int], int, int]:
    """Programs for images and groups of channels; pooled pixels and channels of one program."""
    images, channels, height, width = maps.shape
    places = triton.next_power_of_2((height // 2) * (width // 2))
    group = max(1, min(triton.next_power_of_2(channels), 4096 // places))
    return (images, triton.cdiv(channels, group)), places, group


def _forward(maps: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled maps, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    pooled = torch.empty(
        (images, channels, height // 2, width // 2), dtype=maps.dtype, device=maps.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    mean, factor = scale.new_empty(images, channels), scale.new_empty(images, channels)
    programs, places, group = _tiles(maps)
    _norm_relu_pool[programs](
        maps, scale, shift, pooled, mean, factor, channels, EPS, height, width, places, group,
        num_warps=8,
    )  # fmt: skip
    return pooled, mean, factor


def _backward(
    maps: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of maps, scale and shift; the last two are summed over images in a fixed order."""
    channels, height, width = maps.shape[1:]
    to_maps = torch.empty_like(maps)
    to_scale, to_shift = torch.empty_like(mean), torch.empty_like(mean)
    programs, places, group = _tiles(maps)
    _slopes[programs](
        maps, scale, shift, mean, factor, slope, to_maps, to_scale, to_shift, channels,
        height, width, places, group, num_warps=8,
    )  # fmt: skip
    return to_maps, to_scale.sum(0), to_shift.sum(0)


@triton.jit
def _under(out, channel, channels, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    """[pooled pixel, channel], where one of the four pixels under each pooled one lies."""
    wide: tl.constexpr = WIDTH // 2
    pixel = (out // wide * 2 + NUMBER // 2) * WIDTH + out % wide * 2 + NUMBER % 2
    return pixel[:, None] * channels + channel[None, :]


@triton.jit
def _norm_relu_pool(
    maps, scale, shift, pooled, means, factors, channels, eps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image; the four pixels of a pooled one lie in four tiles."""
    one = tl.program_id(0)
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    out = tl.arange(0, PLACES)
    fits = (out < pixels // 4)[:, None] & known[None, :]
    start = maps + one.to(tl.int64) * pixels * channels
    a = tl.load(start + _under(out, channel, channels, 0, WIDTH), mask=fits, other=0.0)
    b = tl.load(start + _under(out, channel, channels, 1, WIDTH), mask=fits, other=0.0)
    c = tl.load(start + _under(out, channel, channels, 2, WIDTH), mask=fits, other=0.0)
    d = tl.load(start + _under(out, channel, channels, 3, WIDTH), mask=fits, other=0.0)
    a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    mean = tl.sum(a + b + c + d, 0) / pixels
    a = tl.where(fits, a - mean[None, :], 0.0)
    b = tl.where(fits, b - mean[None, :], 0.0)
    c = tl.where(fits, c - mean[None, :], 0.0)
    d = tl.where(fits, d - mean[None, :], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / pixels + eps)
    tl.store(means + one * channels + channel, mean, mask=known)
    tl.store(factors + one * channels + channel, factor, mask=known)
    slope = (tl.load(scale + channel, mask=known, other=0.0) * factor)[None, :]
    offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
    total = tl.maximum(a * slope + offset, 0.0) + tl.maximum(b * slope + offset, 0.0)
    total += tl.maximum(c * slope + offset, 0.0) + tl.maximum(d * slope + offset, 0.0)
    where = pooled + one.to(tl.int64) * (pixels // 4) * channels + channel[None, :]
    where = where + out[:, None] * channels
    tl.store(where, (total * 0.25).to(pooled.dtype.element_ty), mask=fits)


@triton.jit
def _slopes(
    maps, scale, shift, means, factors, slope, to_maps, to_scale, to_shift, channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what pixels, scale and shift do to the loss."""
    one = tl.program_id(0)
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    out = tl.arange(0, PLACES)
    fits = (out < pixels // 4)[:, None] & known[None, :]
    first = one.to(tl.int64) * pixels * channels
    quarter = one.to(tl.int64) * (pixels // 4) * channels + channel[None, :]
    quarter = quarter + out[:, None] * channels
    told = tl.load(slope + quarter, mask=fits, other=0.0).to(tl.float32) * 0.25
    mean = tl.load(means + one * channels + channel, mask=known, other=0.0)[None, :]
    factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)[None, :]
    stretch = tl.load(scale + channel, mask=known, other=0.0)[None, :]
    offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
    alone = tl.zeros([GROUP], tl.float32)
    along = tl.zeros([GROUP], tl.float32)
    for number in tl.static_range(4):
        where = first + _under(out, channel, channels, number, WIDTH)
        value = tl.load(maps + where, mask=fits, other=0.0).to(tl.float32)
        normal = tl.where(fits, (value - mean) * factor, 0.0)
        share = tl.where(normal * stretch + offset > 0, told, 0.0)
        alone += tl.sum(share, 0)
        along += tl.sum(share * normal, 0)
    tl.store(to_scale + one * channels + channel, along, mask=known)
    tl.store(to_shift + one * channels + channel, alone, mask=known)
    level = (alone / pixels)[None, :]
    tilt = (along / pixels)[None, :]
    for number in tl.static_range(4):  # a second look at what was just read
        where = first + _under(out, channel, channels, number, WIDTH)
        value = tl.load(maps + where, mask=fits, other=0.0).to(tl.float32)
        normal = (value - mean) * factor
        share = tl.where(normal * stretch + offset > 0, told, 0.0)
        moved = stretch * factor * (share - level - normal * tilt)
        tl.store(to_maps + where, moved.to(to_maps.dtype.element_ty), mask=fits)
