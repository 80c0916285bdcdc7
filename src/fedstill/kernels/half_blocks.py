"""GPU kernels of a ConvNet's block in half precision; imported only where Triton is.

As `blocks`, for maps of two bytes a number that lie in memory pixel by pixel, all channels of a
pixel side by side: so convolutions in half precision read and write them. Sums are in single
precision, and heights and widths are even. Networks here stay as they are; those that are trained,
alone or many, are for `stacked_blocks`. First blocks have kernels with their convolution in
`first_blocks`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.models.pooled_blocks import EPS


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor, *, last: bool = False) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x].

    What comes out has the maps' precision; that of the `last` block is in single precision and lies
    channel by channel. There is a gradient for maps in half precision, none for the rest.
    """
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            return _Block.apply(maps, scale, shift, last)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(_by_pixel(maps), scale, shift, last)[0]


def gained(tensor: Tensor, gain: float) -> Tensor:
    """The same numbers; their gradient is multiplied on its way back."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _Gained.apply(tensor, gain)  # type: ignore[no-untyped-call,no-any-return]


class _Gained(torch.autograd.Function):
    """Gradients are small numbers, which half precision would round to nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.gain, None


class _Block(torch.autograd.Function):
    """The block with its gradient, of which there is no gradient: gains would spoil that."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor, last: bool) -> Tensor:
        maps = _by_pixel(maps)
        pooled, mean, factor = _forward(maps, scale, shift, last)
        ctx.save_for_backward(maps, scale, shift, mean, factor)
        ctx.last = last
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, scale, shift, mean, factor = ctx.saved_tensors
        grad = grad.contiguous() if ctx.last else _by_pixel(grad)
        return _backward(maps, scale, shift, mean, factor, grad, ctx.last), None, None, None


def _by_pixel(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class NormTiles(NamedTuple):
    """How many channels of an image one program takes, each with all its pooled pixels."""

    places: int
    channels: int
    warps: int


def norm_tiles(channels: int, height: int, width: int) -> NormTiles:
    """For maps of a height and a width; the best of some on an H200.

    The groups of an image are made one after another, so that what is fetched for one is still
    there for the next.
    """
    places = triton.next_power_of_2((height // 2) * (width // 2))
    numbers = 8192 if places >= 256 else 4096  # of a program
    together = min(triton.next_power_of_2(channels), max(1, numbers // places))
    return NormTiles(places, together, 8 if places * together > 4096 else 4)


def pooling_tiles(channels: int, height: int, width: int) -> NormTiles:
    """For the pass forward of a network that stays: small maps go to programs of one warp."""
    tiles = norm_tiles(channels, height, width)
    if tiles.places > 16:
        return tiles
    return NormTiles(tiles.places, min(triton.next_power_of_2(channels), 32), 1)


def _forward(
    maps: Tensor, scale: Tensor, shift: Tensor, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled maps, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    shape = (images, channels, height // 2, width // 2)
    pooled = scale.new_empty(shape) if last else _empty_by_pixel(shape, maps, maps.dtype)
    mean, factor = scale.new_empty(images, channels), scale.new_empty(images, channels)
    places, group, warps = pooling_tiles(channels, height, width)
    _norm_relu_pool[(images * triton.cdiv(channels, group),)](
        maps, scale.contiguous(), shift.contiguous(), pooled, mean, factor, images, channels, EPS,
        last, height, width, places, group, num_warps=warps,
    )  # fmt: skip
    return pooled, mean, factor


def _backward(
    maps: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor, grad: Tensor,
    last: bool,
) -> Tensor:  # fmt: skip
    """The gradient of maps."""
    images, channels, height, width = maps.shape
    to_maps = torch.empty_like(maps)
    places, group, warps = norm_tiles(channels, height, width)
    _slopes[(images * triton.cdiv(channels, group),)](
        maps, scale.contiguous(), shift.contiguous(), mean, factor, grad, to_maps, mean, 1.0,
        images, channels, last, False, height, width, places, group, num_warps=warps,
    )  # fmt: skip
    return to_maps


def _empty_by_pixel(
    shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float16
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


@triton.jit
def _under(out, channel, channels, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    """[pooled pixel, channel], where one of the four pixels under each pooled one lies."""
    wide: tl.constexpr = WIDTH // 2
    pixel = (out // wide * 2 + NUMBER // 2) * WIDTH + out % wide * 2 + NUMBER % 2
    return pixel[:, None] * channels + channel[None, :]


@triton.jit
def _places(out, channel, channels, pixels, BY_CHANNEL: tl.constexpr):
    """[pixel, channel], where pixels lie in an image stored channel by channel, or by pixel."""
    if BY_CHANNEL:
        return channel[None, :] * pixels + out[:, None]
    else:
        return out[:, None] * channels + channel[None, :]


@triton.jit
def _twice(value):
    """Twice what is above zero; a GPU adds faster than it compares."""
    return value + tl.abs(value)


@triton.jit(do_not_specialize=["images"])
def _norm_relu_pool(
    maps, scale, shift, pooled, means, factors, images, channels, eps, LAST: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image; the four pixels of a pooled one lie in four tiles.

    After every so many `images` comes another scale and shift, of the next network of a stack.
    """
    groups = tl.cdiv(channels, GROUP)
    one = tl.program_id(0) // groups
    channel = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
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
    a, b, c, d = a - mean[None, :], b - mean[None, :], c - mean[None, :], d - mean[None, :]
    if pixels != PLACES * 4:
        a, b = tl.where(fits, a, 0.0), tl.where(fits, b, 0.0)
        c, d = tl.where(fits, c, 0.0), tl.where(fits, d, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / pixels + eps)
    tl.store(means + one * channels + channel, mean, mask=known)
    tl.store(factors + one * channels + channel, factor, mask=known)
    own = one // images * channels + channel
    grad = (tl.load(scale + own, mask=known, other=0.0) * factor)[None, :]
    offset = tl.load(shift + own, mask=known, other=0.0)[None, :]
    total = _twice(a * grad + offset) + _twice(b * grad + offset)
    total += _twice(c * grad + offset) + _twice(d * grad + offset)
    where = pooled + one.to(tl.int64) * (pixels // 4) * channels
    where = where + _places(out, channel, channels, pixels // 4, LAST)
    tl.store(where, (total * 0.125).to(pooled.dtype.element_ty), mask=fits)


@triton.jit
def _share(value, told, mean, factor, stretch, offset):
    """Pixels normalised, and what the pooled ones over them tell: nothing where they were cut."""
    normal = (value.to(tl.float32) - mean) * factor
    return normal, tl.where(normal * stretch + offset > 0, told, 0.0)


@triton.jit
def _tell(maps, to_maps, at, fits, told, mean, factor, stretch, offset, level, tilt):
    """Write what pixels do to the loss: their share, less what the norm takes away."""
    value = tl.load(maps + at, mask=fits, other=0.0, cache_modifier=".ca")
    normal, share = _share(value, told, mean, factor, stretch, offset)
    moved = stretch * factor * (share - level - normal * tilt)
    tl.store(to_maps + at, moved.to(to_maps.dtype.element_ty), mask=fits)


@triton.jit(do_not_specialize=["images"])
def _slopes(
    maps, scale, shift, means, factors, grad, to_maps, to_both, gain, images, channels,
    LAST: tl.constexpr, SUMS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what pixels do to the loss and, if asked for, scale and shift.

    After every so many `images` comes another scale and shift, of the next network of a stack.
    """
    groups = tl.cdiv(channels, GROUP)
    one = tl.program_id(0) // groups
    channel = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    out = tl.arange(0, PLACES)
    fits = (out < pixels // 4)[:, None] & known[None, :]
    start = one.to(tl.int64) * pixels * channels
    quarter = grad + one.to(tl.int64) * (pixels // 4) * channels
    quarter = quarter + _places(out, channel, channels, pixels // 4, LAST)
    told = tl.load(quarter, mask=fits, other=0.0).to(tl.float32) * 0.25
    mean = tl.load(means + one * channels + channel, mask=known, other=0.0)[None, :]
    factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)[None, :]
    own = one // images * channels + channel
    stretch = tl.load(scale + own, mask=known, other=0.0)[None, :]
    offset = tl.load(shift + own, mask=known, other=0.0)[None, :]
    at_a, at_b = _under(out, channel, channels, 0, WIDTH), _under(out, channel, channels, 1, WIDTH)
    at_c, at_d = _under(out, channel, channels, 2, WIDTH), _under(out, channel, channels, 3, WIDTH)
    maps, to_maps = maps + start, to_maps + start
    a, b = tl.load(maps + at_a, mask=fits, other=0.0), tl.load(maps + at_b, mask=fits, other=0.0)
    c, d = tl.load(maps + at_c, mask=fits, other=0.0), tl.load(maps + at_d, mask=fits, other=0.0)
    normal, share = _share(a, told, mean, factor, stretch, offset)
    alone, along = share, share * normal
    normal, share = _share(b, told, mean, factor, stretch, offset)
    alone, along = alone + share, along + share * normal
    normal, share = _share(c, told, mean, factor, stretch, offset)
    alone, along = alone + share, along + share * normal
    normal, share = _share(d, told, mean, factor, stretch, offset)
    alone, along = tl.sum(alone + share, 0), tl.sum(along + share * normal, 0)
    if SUMS:
        both = to_both + one * (2 * channels) + channel
        tl.store(both, along * gain, mask=known)
        tl.store(both + channels, alone * gain, mask=known)
    level, tilt = (alone / pixels)[None, :], (along / pixels)[None, :]
    # Pixels are read anew: there are not registers for all that was made of them before.
    _tell(maps, to_maps, at_a, fits, told, mean, factor, stretch, offset, level, tilt)
    _tell(maps, to_maps, at_b, fits, told, mean, factor, stretch, offset, level, tilt)
    _tell(maps, to_maps, at_c, fits, told, mean, factor, stretch, offset, level, tilt)
    _tell(maps, to_maps, at_d, fits, told, mean, factor, stretch, offset, level, tilt)
