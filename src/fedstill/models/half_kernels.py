"""GPU kernels of a ConvNet's block in half precision; imported only where Triton is.

As `kernels`, for maps of two bytes a number that lie in memory pixel by pixel, all channels of a
pixel side by side: so convolutions in half precision read and write them. Sums are in single
precision, and heights and widths are even. The first block, whose images have few channels, is a
kernel with its convolution: the maps before pooling, most of what a network makes, are not stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.models.kernels import EPS


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor, *, last: bool = False) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x].

    What comes out of the `last` block is in single precision and lies channel by channel.
    """
    with torch.cuda.device(maps.device):
        if torch.is_grad_enabled():
            return _Block.apply(maps, scale, shift, last)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(_by_pixel(maps), scale, shift, last)[0]


def takes_first(images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> bool:
    """Whether `first_block` can make these: one program holds all patches of an image."""
    inputs, height, width = images.shape[1:]
    pixels = (height + 2 * padding - 2) * (width + 2 * padding - 2)
    moving = torch.is_grad_enabled() and any(t.requires_grad for t in (weight, scale, shift))
    return inputs <= 3 and pixels <= 1024 and not moving


def first_block(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """norm_relu_pool(conv2d(images, weight)) for images in single precision.

    There is a gradient for images, none for the rest.
    """
    with torch.cuda.device(images.device):
        if torch.is_grad_enabled():
            return _FirstBlock.apply(images, weight, scale, shift, padding)  # type: ignore[no-untyped-call,no-any-return]
        return _first_forward(images.contiguous(), weight.contiguous(), scale, shift, padding)[0]


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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope * ctx.gain, None


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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        maps, scale, shift, mean, factor = ctx.saved_tensors
        slope = slope.contiguous() if ctx.last else _by_pixel(slope)
        sums = any(ctx.needs_input_grad[1:])
        found = _backward(maps, scale, shift, mean, factor, slope, last=ctx.last, sums=sums)
        return *found, None


class _FirstBlock(torch.autograd.Function):
    """The first block with the gradient of its images, for which the maps are made anew."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
    ) -> Tensor:
        images, weight = images.contiguous(), weight.contiguous()
        pooled, factor = _first_forward(images, weight, scale, shift, padding)
        ctx.save_for_backward(images, weight, scale, shift, factor)
        ctx.padding = padding
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, scale, shift, factor = ctx.saved_tensors
        slope = _by_pixel(slope)
        found = _first_backward(images, weight, scale, shift, factor, slope, ctx.padding)
        return found, None, None, None, None


def _by_pixel(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def _tiles(maps: Tensor) -> tuple[tuple[int], int, int]:
    """Programs for images and groups of channels; pooled pixels and channels of one program.

    32 channels are 64 bytes of a pixel, the least that memory is read well by. The groups of an
    image are made one after another, so that what is fetched for one is still there for the next.
    """
    images, channels, height, width = maps.shape
    places = triton.next_power_of_2((height // 2) * (width // 2))
    group = max(4096 // places, min(32, 8192 // places), 1)
    group = min(group, triton.next_power_of_2(channels))
    return (images * triton.cdiv(channels, group),), places, group


def _forward(
    maps: Tensor, scale: Tensor, shift: Tensor, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled maps, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    shape = (images, channels, height // 2, width // 2)
    pooled = scale.new_empty(shape) if last else _empty_by_pixel(shape, maps)
    mean, factor = scale.new_empty(images, channels), scale.new_empty(images, channels)
    programs, places, group = _tiles(maps)
    _norm_relu_pool[programs](
        maps, scale, shift, pooled, mean, factor, images, channels, EPS, last, height, width,
        places, group, num_warps=_warps(4 * places * group),
    )  # fmt: skip
    return pooled, mean, factor


def _backward(
    maps: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor, slope: Tensor,
    *, last: bool, sums: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of maps and, if asked for, of scale and shift, summed in a fixed order."""
    channels, height, width = maps.shape[1:]
    to_maps = torch.empty_like(maps)
    to_both = mean.new_empty(len(maps), 2, channels) if sums else mean
    programs, places, group = _tiles(maps)
    _slopes[programs](
        maps, scale, shift, mean, factor, slope, to_maps, to_both, channels, last, sums,
        height, width, places, group, num_warps=_warps(8 * places * group),
    )  # fmt: skip
    return to_maps, *(to_both.sum(0) if sums else (None, None))


def _warps(numbers: int) -> int:
    """For a program that holds so many numbers in single precision: about 64 to a thread."""
    return max(4, min(16, numbers // 2048))


def _first_forward(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, Tensor]:
    """The pooled maps, and each map's inverse deviation."""
    count, inputs, height, width = images.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels = len(weight)
    pooled = _empty_by_pixel((count, channels, high, wide), images)
    factor = scale.new_empty(count, channels)
    places = max(16, triton.next_power_of_2(high * wide))
    _first_block[(count,)](
        images, weight, scale, shift, pooled, factor, channels, EPS, inputs, height, width,
        padding, _taps(inputs), places, 16, num_warps=8 if places > 64 else 4, num_stages=1,
        maxnreg=128,
    )  # fmt: skip
    return pooled, factor


def _first_backward(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, factor: Tensor, slope: Tensor,
    padding: int,
) -> Tensor:  # fmt: skip
    """The gradient of images: that of every patch the convolution sees, then each pixel's sum."""
    count, inputs, height, width = images.shape
    pixels = (height + 2 * padding - 2) * (width + 2 * padding - 2)
    to_patches = images.new_empty(count, 9 * inputs, pixels)
    places = max(16, triton.next_power_of_2(pixels))
    _first_slopes[(count,)](
        images, weight, scale, shift, factor, slope, to_patches, len(weight), inputs, height,
        width, padding, _taps(inputs), places, 16, num_warps=16 if places > 256 else 4,
        num_stages=1,
    )  # fmt: skip
    return F.fold(to_patches, (height, width), 3, padding=padding)


def _empty_by_pixel(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(
        shape, dtype=torch.float16, device=like.device, memory_format=torch.channels_last
    )


def _taps(inputs: int) -> int:
    """Numbers in a patch of up to three channels, rounded up to what a matrix product takes."""
    return 16 if inputs == 1 else 32


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
    a = tl.where(fits, a - mean[None, :], 0.0)
    b = tl.where(fits, b - mean[None, :], 0.0)
    c = tl.where(fits, c - mean[None, :], 0.0)
    d = tl.where(fits, d - mean[None, :], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / pixels + eps)
    tl.store(means + one * channels + channel, mean, mask=known)
    tl.store(factors + one * channels + channel, factor, mask=known)
    own = one // images * channels + channel
    slope = (tl.load(scale + own, mask=known, other=0.0) * factor)[None, :]
    offset = tl.load(shift + own, mask=known, other=0.0)[None, :]
    total = tl.maximum(a * slope + offset, 0.0) + tl.maximum(b * slope + offset, 0.0)
    total += tl.maximum(c * slope + offset, 0.0) + tl.maximum(d * slope + offset, 0.0)
    where = pooled + one.to(tl.int64) * (pixels // 4) * channels
    where = where + _places(out, channel, channels, pixels // 4, LAST)
    tl.store(where, (total * 0.25).to(pooled.dtype.element_ty), mask=fits)


@triton.jit
def _share(value, told, mean, factor, stretch, offset):
    """Pixels normalised, and what the pooled ones over them tell: nothing where they were cut."""
    normal = (value.to(tl.float32) - mean) * factor
    return normal, tl.where(normal * stretch + offset > 0, told, 0.0)


@triton.jit
def _slopes(
    maps, scale, shift, means, factors, slope, to_maps, to_both, channels, LAST: tl.constexpr,
    SUMS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what pixels, scale and shift do to the loss."""
    groups = tl.cdiv(channels, GROUP)
    one = tl.program_id(0) // groups
    channel = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    pixels: tl.constexpr = HEIGHT * WIDTH
    out = tl.arange(0, PLACES)
    fits = (out < pixels // 4)[:, None] & known[None, :]
    start = one.to(tl.int64) * pixels * channels
    quarter = slope + one.to(tl.int64) * (pixels // 4) * channels
    quarter = quarter + _places(out, channel, channels, pixels // 4, LAST)
    told = tl.load(quarter, mask=fits, other=0.0).to(tl.float32) * 0.25
    mean = tl.load(means + one * channels + channel, mask=known, other=0.0)[None, :]
    factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)[None, :]
    stretch = tl.load(scale + channel, mask=known, other=0.0)[None, :]
    offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
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
        tl.store(both, along, mask=known)
        tl.store(both + channels, alone, mask=known)
    level, tilt = (alone / pixels)[None, :], (along / pixels)[None, :]
    kind = to_maps.dtype.element_ty
    normal, share = _share(a, told, mean, factor, stretch, offset)
    moved = stretch * factor * (share - level - normal * tilt)
    tl.store(to_maps + at_a, moved.to(kind), mask=fits)
    normal, share = _share(b, told, mean, factor, stretch, offset)
    moved = stretch * factor * (share - level - normal * tilt)
    tl.store(to_maps + at_b, moved.to(kind), mask=fits)
    normal, share = _share(c, told, mean, factor, stretch, offset)
    moved = stretch * factor * (share - level - normal * tilt)
    tl.store(to_maps + at_c, moved.to(kind), mask=fits)
    normal, share = _share(d, told, mean, factor, stretch, offset)
    moved = stretch * factor * (share - level - normal * tilt)
    tl.store(to_maps + at_d, moved.to(kind), mask=fits)


@triton.jit
def _patches(
    image, row, column, fits, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """[tap, pixel], what the convolution sees around pixels of its map, in half precision."""
    tap = tl.arange(0, TAPS)[:, None]
    row = row[None, :] + tap // 3 % 3 - PADDING
    column = column[None, :] + tap % 3 - PADDING
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    inside &= (tap < 9 * INPUTS) & fits[None, :]
    where = image + (tap // 9 * HEIGHT + row) * WIDTH + column
    return tl.load(where, mask=inside, other=0.0).to(tl.float16)


@triton.jit
def _centred(patches, mean, fits):
    """Patches about their mean; zero where there is no pixel."""
    away = tl.where(fits[None, :], patches.to(tl.float32) - mean[:, None], 0.0)
    return away.to(tl.float16)


@triton.jit
def _weights(weight, channel, channels, INPUTS: tl.constexpr, TAPS: tl.constexpr):
    """[tap, channel], in half precision."""
    tap = tl.arange(0, TAPS)[:, None]
    known = (tap < 9 * INPUTS) & (channel < channels)[None, :]
    where = weight + channel[None, :] * (9 * INPUTS) + tap
    return tl.load(where, mask=known, other=0.0).to(tl.float16)


@triton.jit
def _first_block(
    images, weight, scale, shift, pooled, factors, channels, eps, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One image. Patches are taken about their mean, and so are then the maps."""
    one = tl.program_id(0)
    wide: tl.constexpr = WIDTH // 2 + PADDING - 1
    places: tl.constexpr = wide * (HEIGHT // 2 + PADDING - 1)
    image = images + one.to(tl.int64) * (INPUTS * HEIGHT * WIDTH)
    out = tl.arange(0, PLACES)
    fits = out < places
    row, column = out // wide * 2, out % wide * 2
    a = _patches(image, row, column, fits, INPUTS, HEIGHT, WIDTH, PADDING, TAPS)
    b = _patches(image, row, column + 1, fits, INPUTS, HEIGHT, WIDTH, PADDING, TAPS)
    c = _patches(image, row + 1, column, fits, INPUTS, HEIGHT, WIDTH, PADDING, TAPS)
    d = _patches(image, row + 1, column + 1, fits, INPUTS, HEIGHT, WIDTH, PADDING, TAPS)
    mean = tl.sum(a.to(tl.float32) + b.to(tl.float32) + c.to(tl.float32) + d.to(tl.float32), 1)
    mean /= 4 * places
    a, b = _centred(a, mean, fits), _centred(b, mean, fits)
    c, d = _centred(c, mean, fits), _centred(d, mean, fits)
    start = pooled + one.to(tl.int64) * places * channels
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        taken = _weights(weight, channel, channels, INPUTS, TAPS)
        map_a, map_b = tl.dot(tl.trans(a), taken), tl.dot(tl.trans(b), taken)
        map_c, map_d = tl.dot(tl.trans(c), taken), tl.dot(tl.trans(d), taken)
        squares = map_a * map_a + map_b * map_b + map_c * map_c + map_d * map_d
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / (4 * places) + eps)
        tl.store(factors + one * channels + channel, factor, mask=known)
        slope = (tl.load(scale + channel, mask=known, other=0.0) * factor)[None, :]
        offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
        total = tl.maximum(map_a * slope + offset, 0.0) + tl.maximum(map_b * slope + offset, 0.0)
        total += tl.maximum(map_c * slope + offset, 0.0) + tl.maximum(map_d * slope + offset, 0.0)
        where = start + out[:, None] * channels + channel[None, :]
        tl.store(where, (total * 0.25).to(tl.float16), mask=fits[:, None] & known[None, :])


@triton.jit
def _first_slopes(
    images, weight, scale, shift, factors, slope, to_patches, channels, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One image: what the patches do to the loss, pixels in their own order.

    A map's gradient is what its pixels are told, less its mean and what of it goes along with the
    map. Weights turn these three into gradients of patches one by one, the last two for all
    pixels at once: `level` and `tilt`.
    """
    one = tl.program_id(0)
    across: tl.constexpr = WIDTH + 2 * PADDING - 2
    wide: tl.constexpr = across // 2
    pixels: tl.constexpr = across * (HEIGHT + 2 * PADDING - 2)
    image = images + one.to(tl.int64) * (INPUTS * HEIGHT * WIDTH)
    pixel = tl.arange(0, PLACES)
    fits = pixel < pixels
    row, column = pixel // across, pixel % across
    seen = _patches(image, row, column, fits, INPUTS, HEIGHT, WIDTH, PADDING, TAPS)
    patches = tl.trans(_centred(seen, tl.sum(seen.to(tl.float32), 1) / pixels, fits))
    over = (row // 2 * wide + column // 2)[:, None] * channels
    start = slope + one.to(tl.int64) * (pixels // 4) * channels
    moved = tl.zeros([PLACES, TAPS], tl.float32)
    level = tl.zeros([TAPS], tl.float32)
    tilt = tl.zeros([TAPS, TAPS], tl.float32)
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        taken = _weights(weight, channel, channels, INPUTS, TAPS)
        exact = taken.to(tl.float32)
        factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)
        stretch = tl.load(scale + channel, mask=known, other=0.0) * factor
        offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
        where = start + over + channel[None, :]
        told = tl.load(where, mask=fits[:, None] & known[None, :], other=0.0)
        maps = tl.dot(patches, taken)
        told = tl.where(maps * stretch[None, :] + offset > 0, told, 0.0)
        back = (exact * (stretch * 0.25)[None, :]).to(tl.float16)
        moved = tl.dot(told.to(tl.float16), tl.trans(back), moved)
        told = told.to(tl.float32)
        alone = tl.sum(told, 0) / pixels
        along = tl.sum(told * maps, 0) / pixels * factor * factor
        level += tl.sum(back.to(tl.float32) * alone[None, :], 1)
        bent = back.to(tl.float32) * along[None, :]
        tilt = tl.dot(exact, tl.trans(bent), tilt, input_precision="ieee")
    size = tl.maximum(tl.max(tl.abs(tilt)), 1e-20)  # so that tilt is in the reach of half precision
    moved = tl.dot(patches, (-tilt / size).to(tl.float16), (moved - level[None, :]) / size) * size
    tap = tl.arange(0, TAPS)
    where = to_patches + one.to(tl.int64) * (9 * INPUTS * pixels)
    where = where + tap[None, :] * pixels + pixel[:, None]
    tl.store(where, moved, mask=fits[:, None] & (tap < 9 * INPUTS)[None, :])
