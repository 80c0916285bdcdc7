"""GPU kernels of a ConvNet's block; imported only where Triton is.

Instance norm, activation and pooling as separate operations read and write every map many times,
which takes most of the time of a step. Here a map is read once and its pooled quarter written; for
the gradient both are read once more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients
from fedstill.models.pooled_blocks import EPS, unfolded

NAN = tl.constexpr(tl.PropagateNan.ALL)  # what is not a number stays so, that it be seen


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x]."""
    maps = maps.contiguous()  # here, where gradients of gradients find the way back
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            return _Block.apply(maps, scale, shift)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(maps, scale, shift)[0]


class _Block(torch.autograd.Function):
    """The block with its gradient; for a gradient of the gradient it is unfolded again."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        pooled, mean, factor = _forward(maps, scale, shift)
        ctx.save_for_backward(maps, scale, shift, mean, factor)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, scale, shift, mean, factor = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(differentiable_gradients(unfolded, (maps, scale, shift), grad))
        return _backward(maps, scale, shift, mean, factor, grad.contiguous())


def _forward(maps: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled maps, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    pooled = maps.new_empty(images, channels, height // 2, width // 2)
    mean, factor = maps.new_empty(images, channels), maps.new_empty(images, channels)
    places = triton.next_power_of_2(height * width)
    _norm_relu_pool[(images * channels,)](
        maps, scale.contiguous(), shift.contiguous(), pooled, mean, factor, channels, EPS, height,
        width, places, triton.next_power_of_2((height // 2) * (width // 2)),
        num_warps=_warps(places),
    )  # fmt: skip
    return pooled, mean, factor


def _backward(
    maps: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor, grad: Tensor,
    *, summed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of maps, scale and shift; the last two are summed over images in a fixed order.

    Without `summed` each image has its own of those.
    """
    images, channels, height, width = maps.shape
    to_maps = torch.empty_like(maps)
    to_scale, to_shift = torch.empty_like(mean), torch.empty_like(mean)
    places = triton.next_power_of_2(height * width)
    _slopes[(images * channels,)](
        maps, scale.contiguous(), shift.contiguous(), mean, factor, grad, to_maps, to_scale,
        to_shift, channels, height, width, places, num_warps=_warps(places),
    )  # fmt: skip
    return (to_maps, to_scale.sum(0), to_shift.sum(0)) if summed else (to_maps, to_scale, to_shift)


def _warps(places: int) -> int:
    return max(1, min(8, places // 256))


@triton.jit
def _norm_relu_pool(
    maps, scale, shift, pooled, means, factors, channels, eps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, POOLED_PLACES: tl.constexpr,
):  # fmt: skip
    """One map of one image: its mean and deviation over all pixels, then the pooled pixels."""
    one = tl.program_id(0)
    channel = one % channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    high: tl.constexpr = HEIGHT // 2
    wide: tl.constexpr = WIDTH // 2
    start = maps + one.to(tl.int64) * pixels
    place = tl.arange(0, PLACES)
    value = tl.load(start + place, mask=place < pixels, other=0.0)
    mean = tl.sum(value, 0) / pixels
    away = tl.where(place < pixels, value - mean, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(away * away, 0) / pixels + eps)
    tl.store(means + one, mean)
    tl.store(factors + one, factor)
    grad = tl.load(scale + channel) * factor
    offset = tl.load(shift + channel) - mean * grad
    out = tl.arange(0, POOLED_PLACES)
    there = out < high * wide
    corner = start + (out // wide) * (2 * WIDTH) + (out % wide) * 2
    total = tl.zeros([POOLED_PLACES], tl.float32)
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            seen = tl.load(corner + down * WIDTH + right, mask=there, other=0.0)
            total += tl.maximum(seen * grad + offset, 0.0, NAN)
    tl.store(pooled + one.to(tl.int64) * (high * wide) + out, total * 0.25, mask=there)


@triton.jit
def _slopes(
    maps, scale, shift, means, factors, grad, to_maps, to_scale, to_shift, channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One map of one image: what its pixels, its scale and its shift do to the loss."""
    one = tl.program_id(0)
    channel = one % channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    high: tl.constexpr = HEIGHT // 2
    wide: tl.constexpr = WIDTH // 2
    start = one.to(tl.int64) * pixels
    place = tl.arange(0, PLACES)
    factor = tl.load(factors + one)
    stretch = tl.load(scale + channel)
    value = tl.load(maps + start + place, mask=place < pixels, other=0.0)
    normal = (value - tl.load(means + one)) * factor
    row = place // WIDTH // 2
    column = place % WIDTH // 2
    counts = (row < high) & (column < wide) & (normal * stretch + tl.load(shift + channel) > 0)
    fetched = grad + one.to(tl.int64) * (high * wide) + row * wide + column
    share = tl.load(fetched, mask=counts & (place < pixels), other=0.0) * 0.25
    normal = tl.where(place < pixels, normal, 0.0)
    alone = tl.sum(share, 0)
    along = tl.sum(share * normal, 0)
    moved = stretch * factor * (share - alone / pixels - normal * (along / pixels))
    tl.store(to_maps + start + place, moved, mask=place < pixels)
    tl.store(to_scale + one, along)
    tl.store(to_shift + one, alone)
