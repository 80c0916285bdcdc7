"""GPU kernels of a ConvNet's block in half precision; imported only where Triton is.

As `kernels`, for maps of two bytes a number that lie in memory pixel by pixel, all channels of a
pixel side by side: so convolutions in half precision read and write them. Sums are in single
precision, and heights and widths are even. The first block, whose images have few channels, is a
kernel with its convolution: the maps before pooling, most of what a network makes, are not stored.
Networks here stay as they are; those that are trained, alone or many, are for `stacked_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.kernels.blocks import EPS

FIRST_GROUP = 32  # channels that the first block makes at a time; the best of some on an H200
TILT_GROUP = 32  # channels of a program that sums over an image for the first block's gradient


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor, *, last: bool = False) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x].

    What comes out has the maps' precision; that of the `last` block is in single precision and lies
    channel by channel. There is a gradient for maps in half precision, none for the rest.
    """
    with torch.cuda.device(maps.device):
        if torch.is_grad_enabled():
            return _Block.apply(maps, scale, shift, last)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(_by_pixel(maps), scale, shift, last)[0]


def takes_first(images: Tensor, padding: int) -> bool:
    """Whether `first_block` can make these: one program holds all patches of an image."""
    inputs, height, width = images.shape[1:]
    return inputs <= 3 and (height + 2 * padding - 2) * (width + 2 * padding - 2) <= 1024


def first_block(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """norm_relu_pool(conv2d(images, weight)) for images in single precision.

    There is a gradient for images, none for the rest.
    """
    with torch.cuda.device(images.device):
        if torch.is_grad_enabled():
            return _FirstBlock.apply(images, weight, scale, shift, padding)  # type: ignore[no-untyped-call,no-any-return]
        images, weight = images.contiguous(), weight.contiguous()
        return _first_forward(images, weight, scale, shift, padding, counted=False)[0]


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


class _FirstBlock(torch.autograd.Function):
    """The first block with the gradient of its images, for which the maps are made anew."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
    ) -> Tensor:
        images, weight = images.contiguous(), weight.contiguous()
        found = _first_forward(images, weight, scale, shift, padding, counted=True)
        ctx.save_for_backward(images, weight, scale, shift, *found)
        ctx.padding = padding
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _first_backward(_by_pixel(grad), *ctx.saved_tensors, padding=ctx.padding)
        return found, None, None, None, None


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


def _forward(
    maps: Tensor, scale: Tensor, shift: Tensor, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled maps, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    shape = (images, channels, height // 2, width // 2)
    pooled = scale.new_empty(shape) if last else _empty_by_pixel(shape, maps, maps.dtype)
    mean, factor = scale.new_empty(images, channels), scale.new_empty(images, channels)
    places, group, warps = norm_tiles(channels, height, width)
    _norm_relu_pool[(images * triton.cdiv(channels, group),)](
        maps, scale, shift, pooled, mean, factor, images, channels, EPS, last, height, width,
        places, group, num_warps=warps,
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
        maps, scale, shift, mean, factor, grad, to_maps, mean, 1.0, images, channels, last,
        False, height, width, places, group, num_warps=warps,
    )  # fmt: skip
    return to_maps


def _first_forward(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int, *, counted: bool
) -> tuple[Tensor, ...]:
    """The pooled maps; each map's mean, were its colours' levels zero, and inverse deviation.

    If asked for, also how many of the four pixels under each pooled one were not cut.
    """
    count, inputs, height, width = images.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels = len(weight)
    pooled = _empty_by_pixel((count, channels, high, wide), images)
    counts = torch.empty_like(pooled, dtype=torch.int8) if counted else pooled
    mean, factor = scale.new_empty(count, channels), scale.new_empty(count, channels)
    places = _first_places(high * wide)
    _first_block[(count,)](
        images, weight, scale, shift, pooled, mean, factor, counts, mean, count, 0, channels, EPS,
        counted, False, inputs, height, width, padding, _taps(inputs), places, FIRST_GROUP, 128,
        num_warps=8 if places > 64 else 4, num_stages=1, maxnreg=128,
    )  # fmt: skip
    return pooled, mean, factor, counts


def _first_backward(
    grad: Tensor, images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, pooled: Tensor,
    mean: Tensor, factor: Tensor, counts: Tensor, *, padding: int,
) -> Tensor:  # fmt: skip
    """The gradient of images: that of every patch the convolution sees, then each pixel's sum."""
    count, inputs, height, width = images.shape
    places, channels, taps = pooled[0, 0].numel(), len(weight), _taps(inputs)
    tile = _first_places(places)
    groups = triton.cdiv(channels, TILT_GROUP)
    tilt = mean.new_empty(count, groups, taps, taps)
    _first_tilt[(count * groups,)](
        weight, scale, shift, pooled, mean, factor, counts, grad, tilt, channels, places, inputs,
        taps, tile, TILT_GROUP, num_warps=4, num_stages=1,
    )  # fmt: skip
    to_patches = images.new_empty(count, 9 * inputs, 4, places)
    _first_slopes[(4 * count,)](
        images, weight, scale, shift, mean, factor, grad, tilt, to_patches, groups, channels,
        inputs, height, width, padding, taps, tile, 16, num_warps=4, num_stages=1, maxnreg=168,
    )  # fmt: skip
    to_images = torch.empty_like(images)
    _fold[(count * inputs,)](
        to_patches, to_images, height, width, padding, triton.next_power_of_2(height * width)
    )
    return to_images


def _empty_by_pixel(
    shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float16
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _first_places(places: int) -> int:
    """Pooled pixels of a program: of an image, rounded up to what a matrix product takes."""
    return max(16, int(triton.next_power_of_2(places)))


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
    a = tl.where(fits, a - mean[None, :], 0.0)
    b = tl.where(fits, b - mean[None, :], 0.0)
    c = tl.where(fits, c - mean[None, :], 0.0)
    d = tl.where(fits, d - mean[None, :], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(a * a + b * b + c * c + d * d, 0) / pixels + eps)
    tl.store(means + one * channels + channel, mean, mask=known)
    tl.store(factors + one * channels + channel, factor, mask=known)
    own = one // images * channels + channel
    grad = (tl.load(scale + own, mask=known, other=0.0) * factor)[None, :]
    offset = tl.load(shift + own, mask=known, other=0.0)[None, :]
    total = tl.maximum(a * grad + offset, 0.0) + tl.maximum(b * grad + offset, 0.0)
    total += tl.maximum(c * grad + offset, 0.0) + tl.maximum(d * grad + offset, 0.0)
    where = pooled + one.to(tl.int64) * (pixels // 4) * channels
    where = where + _places(out, channel, channels, pixels // 4, LAST)
    tl.store(where, (total * 0.25).to(pooled.dtype.element_ty), mask=fits)


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


@triton.jit
def _level(image, COLOUR: tl.constexpr, INPUTS: tl.constexpr, PIXELS: tl.constexpr):
    """The mean of a colour, if there is such a colour, as half precision can say it."""
    pixel = tl.arange(0, triton.next_power_of_2(PIXELS))
    known = (pixel < PIXELS) & (COLOUR < INPUTS)
    light = tl.load(image + COLOUR * PIXELS + pixel, mask=known, other=0.0)
    return (tl.sum(light) / PIXELS).to(tl.float16).to(tl.float32)


@triton.jit
def _seen(
    image, y, x, fits, level, COLOUR: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A colour about its level at (y, x), in half precision; no light outside of the image."""
    inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & fits & (COLOUR < INPUTS)
    light = tl.load(image + (COLOUR * HEIGHT + y) * WIDTH + x, mask=inside, other=0.0)
    return tl.where(fits, light - level, 0.0).to(tl.float16)


@triton.jit
def _side_by_side(a, b, c, d, e, f, g, h):
    """[pixel, 8] of eight numbers for every pixel."""
    both = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return both.reshape([a.shape[0], 8])


@triton.jit
def _eight(
    image, y, x, fits, level, COLOUR: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """[pixel, 8], a colour of a patch but for its last corner."""
    return _side_by_side(
        _seen(image, y, x, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y, x + 1, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y, x + 2, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y + 1, x, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y + 1, x + 1, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y + 1, x + 2, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y + 2, x, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
        _seen(image, y + 2, x + 1, fits, level, COLOUR, INPUTS, HEIGHT, WIDTH),
    )


@triton.jit
def _levels(image, INPUTS: tl.constexpr, PIXELS: tl.constexpr):
    """The means of up to three colours; none where there is no such colour."""
    red, green = _level(image, 0, INPUTS, PIXELS), _level(image, 1, INPUTS, PIXELS)
    return red, green, _level(image, 2, INPUTS, PIXELS)


@triton.jit
def _patches(
    image, levels, first, start, QUARTERS: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """[pixel, tap], what the convolution sees, each colour about its level.

    Pixels go by quarters, from the first asked for, and in each from the one to start with: a
    thread has all under a pooled one. Taps go by eights, one for each colour and one for the last
    corners, a one and zeros; the first of each eight come first. So a thread has whole patches, and
    writes them at once.
    """
    wide: tl.constexpr = WIDTH // 2 + PADDING - 1
    pixel = tl.arange(0, QUARTERS * PLACES)
    quarter, under = first + pixel // PLACES, start + pixel % PLACES
    fits = under < wide * (HEIGHT // 2 + PADDING - 1)
    y = under // wide * 2 + quarter // 2 - PADDING
    x = under % wide * 2 + quarter % 2 - PADDING
    red, green, blue = levels
    reds = _eight(image, y, x, fits, red, 0, INPUTS, HEIGHT, WIDTH)
    a = _seen(image, y + 2, x + 2, fits, red, 0, INPUTS, HEIGHT, WIDTH)
    one = tl.where(fits, 1.0, 0.0).to(tl.float16)
    none = tl.zeros_like(one)
    if INPUTS == 1:
        corners = _side_by_side(a, one, none, none, none, none, none, none)
        taps = tl.join(reds, corners)
    else:
        greens = _eight(image, y, x, fits, green, 1, INPUTS, HEIGHT, WIDTH)
        b = _seen(image, y + 2, x + 2, fits, green, 1, INPUTS, HEIGHT, WIDTH)
        blues = _eight(image, y, x, fits, blue, 2, INPUTS, HEIGHT, WIDTH)
        c = _seen(image, y + 2, x + 2, fits, blue, 2, INPUTS, HEIGHT, WIDTH)
        corners = _side_by_side(a, b, c, one, none, none, none, none)
        taps = tl.join(tl.join(reds, blues), tl.join(greens, corners))
    return taps.reshape([a.shape[0], TAPS])


@triton.jit
def _is_one(tap, TAPS: tl.constexpr):
    """Which tap is the one of every patch."""
    return tap == (3 if TAPS == 16 else 15)


@triton.jit
def _number(tap, TAPS: tl.constexpr):
    """Where a tap lies among the weights of a channel."""
    eights: tl.constexpr = TAPS // 8
    return tl.where(
        tap % eights < eights - 1, tap % eights * 9 + tap // eights, tap // eights * 9 + 8
    )


@triton.jit
def _weights(weight, tap, channel, channels, INPUTS: tl.constexpr, TAPS: tl.constexpr):
    """The weights of taps for channels, in half precision."""
    number = _number(tap, TAPS)
    known = (number < 9 * INPUTS) & (channel < channels)
    return tl.load(weight + channel * (9 * INPUTS) + number, mask=known, other=0.0).to(tl.float16)


@triton.jit
def _normalising(
    weight, scale, shift, means, factors, first, channels, INPUTS: tl.constexpr,
    TAPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[tap, channel], weights that make maps normalised, scaled and shifted."""
    tap = tl.arange(0, TAPS)
    channel = first + tl.arange(0, GROUP)
    known = channel < channels
    taken = _weights(weight, tap[:, None], channel[None, :], channels, INPUTS, TAPS)
    grad = tl.load(factors + channel, mask=known, other=0.0)
    grad *= tl.load(scale + channel, mask=known, other=0.0)
    offset = tl.load(shift + channel, mask=known, other=0.0)
    offset -= tl.load(means + channel, mask=known, other=0.0) * grad
    taken *= grad[None, :]
    return tl.where(_is_one(tap, TAPS)[:, None], offset[None, :], taken).to(tl.float16)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["each", "apart"])
def _first_block(
    images, weight, scale, shift, pooled, means, factors, counts, spreads, each, apart, channels,
    eps, COUNTED: tl.constexpr, KEPT: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr,
    GROUP: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """One image. What maps are on average, and how far from it, patches tell before any map.

    After `each` so many images, whose firsts lie `apart`, comes the next network of a stack.
    """
    one = tl.program_id(0)
    member = one // each
    weight += member * channels * (9 * INPUTS)
    scale, shift = scale + member * channels, shift + member * channels
    wide: tl.constexpr = WIDTH // 2 + PADDING - 1
    places: tl.constexpr = wide * (HEIGHT // 2 + PADDING - 1)
    image = images + member.to(tl.int64) * apart + one % each * (INPUTS * HEIGHT * WIDTH)
    levels = _levels(image, INPUTS, HEIGHT * WIDTH)
    upper = _patches(image, levels, 0, 0, 2, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES)
    lower = _patches(image, levels, 2, 0, 2, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES)
    spread = tl.dot(tl.trans(upper), upper) / (4 * places)
    if channels > 0:  # always so; on a path of its own the compiler shares the product out better
        spread += tl.dot(tl.trans(lower), lower) / (4 * places)
    means, factors = means + one * channels, factors + one * channels
    tap = tl.arange(0, TAPS)
    if KEPT:
        square = spreads + one.to(tl.int64) * (TAPS * TAPS)
        tl.store(square + tap[:, None] * TAPS + tap[None, :], spread)
    for first in range(0, channels, MANY):
        channel = first + tl.arange(0, MANY)
        known = channel < channels
        taken = _weights(weight, tap[None, :], channel[:, None], channels, INPUTS, TAPS)
        taken = taken.to(tl.float32)
        along = tl.dot(taken, spread, input_precision="tf32x3")
        mean = tl.sum(tl.where(_is_one(tap, TAPS)[None, :], along, 0.0), 1)
        variance = tl.maximum(tl.sum(along * taken, 1) - mean * mean, 0.0)
        tl.store(means + channel, mean, mask=known)
        tl.store(factors + channel, 1.0 / tl.sqrt(variance + eps), mask=known)
    tl.debug_barrier()  # means and factors are read by other threads than wrote them
    start = one.to(tl.int64) * places * channels
    out = tl.arange(0, PLACES)
    fits = out < places
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        taken = _normalising(
            weight, scale, shift, means, factors, first, channels, INPUTS, TAPS, GROUP
        )
        above = tl.maximum(tl.dot(upper, taken), 0.0).reshape([2, PLACES, GROUP])
        below = tl.maximum(tl.dot(lower, taken), 0.0).reshape([2, PLACES, GROUP])
        where = start + out[:, None] * channels + channel[None, :]
        here = fits[:, None] & known[None, :]
        total = tl.sum(above, 0) + tl.sum(below, 0)
        tl.store(pooled + where, (total * 0.25).to(tl.float16), mask=here)
        if COUNTED:
            count = tl.sum(tl.where(above > 0, 1.0, 0.0), 0)
            count += tl.sum(tl.where(below > 0, 1.0, 0.0), 0)
            tl.store(counts + where, count.to(tl.int8), mask=here)


@triton.jit
def _first_tilt(
    weight, scale, shift, pooled, means, factors, counts, grad, tilts, channels, places,
    INPUTS: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what its patches' gradients lose because maps are normalised.

    A map's gradient is what its pixels are told, less its mean and what of it goes along with the
    map. By weights these become gradients of patches, the last two patches times a matrix. What
    is cut is told nothing, so that the pooled maps stand for the maps.
    """
    groups = tl.cdiv(channels, GROUP)
    one, first = tl.program_id(0) // groups, tl.program_id(0) % groups * GROUP
    out, tap = tl.arange(0, PLACES), tl.arange(0, TAPS)
    channel = first + tl.arange(0, GROUP)
    known = channel < channels
    where = one.to(tl.int64) * places * channels + out[:, None] * channels + channel[None, :]
    here = (out < places)[:, None] & known[None, :]
    told = tl.load(grad + where, mask=here, other=0.0).to(tl.float32)
    count = tl.load(counts + where, mask=here, other=0).to(tl.float32)
    light = tl.load(pooled + where, mask=here, other=0.0).to(tl.float32) * 4
    alone, along = tl.reduce((told * count, told * light), 0, _add_both)
    mean = tl.load(means + one * channels + channel, mask=known, other=0.0)
    factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)
    along = (along - tl.load(shift + channel, mask=known, other=0.0) * alone) * factor
    level = alone * tl.load(scale + channel, mask=known, other=0.0) - mean * along
    taken = _weights(weight, tap[:, None], channel[None, :], channels, INPUTS, TAPS)
    taken = taken.to(tl.float32)
    lost = tl.where(_is_one(tap, TAPS)[:, None], level[None, :], taken * along[None, :])
    back = tl.trans(taken * (factor / (16 * places))[None, :])
    tilt = tl.dot(lost, back, input_precision="tf32x3")
    square = tilts + tl.program_id(0).to(tl.int64) * (TAPS * TAPS)
    tl.store(square + tap[:, None] * TAPS + tap[None, :], tilt)


@triton.jit
def _first_slopes(
    images, weight, scale, shift, means, factors, grad, tilts, to_patches, groups, channels,
    INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    TAPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A quarter of an image: what the patches do to the loss."""
    one, quarter = tl.program_id(0) // 4, tl.program_id(0) % 4
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    image = images + one.to(tl.int64) * (INPUTS * HEIGHT * WIDTH)
    levels = _levels(image, INPUTS, HEIGHT * WIDTH)
    patches = _patches(
        image, levels, quarter, 0, 1, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES
    )  # fmt: skip
    tap = tl.arange(0, TAPS)
    tilt = tl.zeros([TAPS, TAPS], tl.float32)
    for group in range(groups):  # the sum over all channels
        square = tilts + (one * groups + group).to(tl.int64) * (TAPS * TAPS)
        tilt += tl.load(square + tap[:, None] * TAPS + tap[None, :])
    size = tl.maximum(tl.max(tl.abs(tilt)), 1e-20)  # so that tilt is in the reach of half precision
    moved = tl.dot(patches, (tilt / size).to(tl.float16)) * -size
    out = tl.arange(0, PLACES)
    start = grad + one.to(tl.int64) * places * channels
    means, factors = means + one * channels, factors + one * channels
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        taken = _normalising(
            weight, scale, shift, means, factors, first, channels, INPUTS, TAPS, GROUP
        )
        where = start + out[:, None] * channels + channel[None, :]
        told = tl.load(where, mask=(out < places)[:, None] & known[None, :], other=0.0)
        told = tl.where(tl.dot(patches, taken) > 0, told, 0.0).to(tl.float16)
        moved = tl.dot(told, tl.trans((taken * 0.25).to(tl.float16)), moved)
    number = _number(tap, TAPS)
    where = to_patches + one.to(tl.int64) * (9 * INPUTS * 4 * places) + quarter * places
    where = where + number[None, :] * (4 * places) + out[:, None]
    tl.store(where, moved, mask=(out < places)[:, None] & (number < 9 * INPUTS)[None, :])


@triton.jit
def _fold(
    to_patches, to_images, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """One colour of an image: each pixel's sum over the nine patches that see it."""
    one = tl.program_id(0).to(tl.int64)
    across: tl.constexpr = WIDTH + 2 * PADDING - 2
    down: tl.constexpr = HEIGHT + 2 * PADDING - 2
    places: tl.constexpr = down * across // 4
    pixel = tl.arange(0, PIXELS)
    fits = pixel < HEIGHT * WIDTH
    total = tl.zeros([PIXELS], tl.float32)
    for tap in tl.static_range(9):
        y, x = pixel // WIDTH + PADDING - tap // 3, pixel % WIDTH + PADDING - tap % 3
        sees = (y >= 0) & (y < down) & (x >= 0) & (x < across) & fits
        quarter, under = y % 2 * 2 + x % 2, y // 2 * (across // 2) + x // 2
        where = to_patches + (one * 9 + tap) * (down * across) + quarter * places + under
        total += tl.load(where, mask=sees, other=0.0)
    tl.store(to_images + one * (HEIGHT * WIDTH) + pixel, total, mask=fits)
