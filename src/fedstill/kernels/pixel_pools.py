"""GPU kernels of bias, ReLU and max-pooling for maps that lie pixel by pixel; only where Triton is.

As separate operations they read and write a map three times, and for the gradient some times more.
Here a map is read once and what comes out of it written, in half or in single precision; for the
gradient both are read once more. Sums are in single precision and of a fixed order. The bias may be
left out, as after a norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients

CHANNELS = 128  # of a program, at most
SHARES = ((32, 4), (32, 2), (32, 1), (16, 1), (8, 1))  # pixels of a program, and how often
PROGRAMS = 256  # keep a large GPU busy; where there would be fewer, each takes fewer pixels
NAN = tl.constexpr(tl.PropagateNan.ALL)  # what is not a number stays so, that it be seen


def activated(maps: Tensor, bias: Tensor | None, *, pooled: bool) -> Tensor:
    """relu(maps + bias) for [image, channel, y, x] by pixel; if so, the largest of each 2x2.

    None adds nothing.
    """
    maps, bias = _by_pixel(maps), None if bias is None else bias.contiguous()
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            return _Activated.apply(maps, bias, pooled)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(maps, bias, pooled)


def unfolded(maps: Tensor, bias: Tensor | None, *, pooled: bool) -> Tensor:
    """The same by the framework's operations."""
    made = F.relu(maps if bias is None else maps + bias[:, None, None])
    return F.max_pool2d(made, 2) if pooled else made


class _Activated(torch.autograd.Function):
    """The operations with their gradient; for a gradient of the gradient they are unfolded."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, bias: Tensor | None, pooled: bool) -> Tensor:
        ctx.pooled = pooled
        ctx.save_for_backward(maps, bias)
        return _forward(maps, bias, pooled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = partial(unfolded, pooled=ctx.pooled)
            return *differentiable_gradients(again, (maps, bias), grad), None
        with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
            if bias is None:
                return _told(maps, None, _by_pixel(grad), ctx.pooled)[0], None, None
            return *_backward(maps, bias, _by_pixel(grad), ctx.pooled), None


def _by_pixel(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def _programs(count: int, channels: int, most: int) -> tuple[tuple[int, int], int, int, int]:
    """Along pixels that come out and along channels; of a program rounds, pixels and channels."""
    group = min(CHANNELS, int(triton.next_power_of_2(channels)))
    across = triton.cdiv(channels, group)
    for pixels, rounds in (share for share in SHARES if share[1] <= most):
        along = triton.cdiv(count, pixels * rounds)
        if along * across >= PROGRAMS:
            break
    return (along, across), rounds, pixels, group


def _forward(maps: Tensor, bias: Tensor | None, pooled: bool) -> Tensor:
    images, channels, height, width = maps.shape
    high, wide = (height // 2, width // 2) if pooled else (height, width)
    made = torch.empty(
        (images, channels, high, wide), dtype=maps.dtype, device=maps.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    count = images * high * wide
    programs, _, pixels, group = _programs(count, channels, 1)
    if count:
        _activate[programs](
            maps, maps if bias is None else bias, made, count, channels, bias is not None, pooled,
            height, width, pixels, group, num_warps=4,
        )  # fmt: skip
    return made


def _backward(
    maps: Tensor, bias: Tensor, grad: Tensor, pooled: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of maps and, times `scale`, of the bias, summed in a fixed order."""
    to_maps, shares = _told(maps, bias, grad, pooled, scale)
    return to_maps, shares.sum(0).to(bias.dtype)


def _told(
    maps: Tensor, bias: Tensor | None, grad: Tensor, pooled: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of maps, and what to sum for that of the bias, [program, channel], if any."""
    images, channels, height, width = maps.shape
    high, wide = grad.shape[2:]
    # Pooling leaves out the last row and column of an odd side; nothing is told to those.
    whole = not pooled or (height % 2 == 0 and width % 2 == 0)
    to_maps = torch.empty_like(maps) if whole else torch.zeros_like(maps)
    count = images * high * wide
    # Rounds make fewer shares to sum; without a bias there are none.
    programs, rounds, pixels, group = _programs(count, channels, 1 if bias is None else 4)
    shares = torch.empty((0 if bias is None else programs[0], channels), device=maps.device)
    if count:
        _slopes[programs](
            maps, maps if bias is None else bias, grad, to_maps, shares, scale, count, channels,
            bias is not None, pooled, height, width, rounds, pixels, group, num_warps=4,
        )  # fmt: skip
    return to_maps, shares


@triton.jit
def _corner(pixel, POOLED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The number of the pixel that is the first of those under each one that comes out."""
    if POOLED:
        high: tl.constexpr = HEIGHT // 2
        wide: tl.constexpr = WIDTH // 2
        image, row, column = pixel // (high * wide), pixel // wide % high, pixel % wide
        return (image.to(tl.int64) * HEIGHT + row * 2) * WIDTH + column * 2
    else:
        return pixel.to(tl.int64)


@triton.jit(do_not_specialize=["count"])
def _activate(
    maps, bias, made, count, channels, BIASED: tl.constexpr, POOLED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some pixels that come out, some channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    fits = (pixel < count)[:, None] & (channel < channels)[None, :]
    at = _corner(pixel, POOLED, HEIGHT, WIDTH)[:, None] * channels + channel[None, :]
    value = tl.load(maps + at, mask=fits, other=0.0)
    if POOLED:
        below = at + WIDTH * channels
        b = tl.load(maps + at + channels, mask=fits, other=0.0)
        c = tl.load(maps + below, mask=fits, other=0.0)
        d = tl.load(maps + below + channels, mask=fits, other=0.0)
        value = tl.maximum(tl.maximum(value, b, NAN), tl.maximum(c, d, NAN), NAN)
    value = value.to(tl.float32)
    if BIASED:
        offset = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        value += offset[None, :]
    value = tl.maximum(value, 0.0, NAN)
    place = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(made + place, value.to(made.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["count"])
def _slopes(
    maps, bias, grad, to_maps, shares, scale, count, channels, BIASED: tl.constexpr,
    POOLED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some pixels that came out, some channels: the first largest below each hears of it.

    Of pixels with one that is not a number, which none equals, the last hears.
    """
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    if BIASED:
        offset = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    else:
        offset = 0.0
    total = tl.zeros([GROUP], tl.float32)
    for turn in range(ROUNDS):
        pixel = (tl.program_id(0) * ROUNDS + turn) * PIXELS + tl.arange(0, PIXELS)
        fits = (pixel < count)[:, None] & known[None, :]
        at = _corner(pixel, POOLED, HEIGHT, WIDTH)[:, None] * channels + channel[None, :]
        place = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
        told = tl.load(grad + place, mask=fits, other=0.0)
        a = tl.load(maps + at, mask=fits, other=0.0)
        if POOLED:
            below = at + WIDTH * channels
            b = tl.load(maps + at + channels, mask=fits, other=0.0)
            c = tl.load(maps + below, mask=fits, other=0.0)
            d = tl.load(maps + below + channels, mask=fits, other=0.0)
            most = tl.maximum(tl.maximum(a, b, NAN), tl.maximum(c, d, NAN), NAN)
            told = tl.where(most.to(tl.float32) + offset <= 0, 0.0, told)
            first, second, third = a == most, b == most, c == most
            tl.store(to_maps + at, tl.where(first, told, 0.0), mask=fits)
            second = second & (first == 0)
            tl.store(to_maps + at + channels, tl.where(second, told, 0.0), mask=fits)
            third = third & (first == 0) & (second == 0)
            tl.store(to_maps + below, tl.where(third, told, 0.0), mask=fits)
            last = (first == 0) & (second == 0) & (third == 0)
            tl.store(to_maps + below + channels, tl.where(last, told, 0.0), mask=fits)
        else:
            told = tl.where(a.to(tl.float32) + offset <= 0, 0.0, told)
            tl.store(to_maps + at, told, mask=fits)
        if BIASED:
            total += tl.sum(told.to(tl.float32), 0)
    if BIASED:
        tl.store(shares + tl.program_id(0) * channels + channel, total * scale, mask=known)
