"""GPU kernels of the first block of a ConvNet in half precision; imported only where Triton is.

Images have few channels, and the maps that a convolution makes of them are most of what a network
makes. Here they are never stored. What maps of an image are on average, and how far from it,
follows from the moments of what a pixel sees, before any map is made; one kernel reads these and
writes for every image the weights that make maps normalised at once. Another makes maps with them,
some pixels of an image at a time, cuts and pools them. For gradients maps are made anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.kernels.half_blocks import _twice
from fedstill.models.pooled_blocks import EPS

LEVELS = 4  # numbers kept of an image's colours, of which there are up to three


class Tiles(NamedTuple):
    """Pooled pixels of an image that a program takes, channels at a time, and its threads.

    With fewer registers for each thread, more programs run at once.
    """

    places: int
    channels: int
    warps: int
    registers: int | None = None


# The choices below were the best of some on an H200.


def moment_tiles(places: int, channels: int) -> Tiles:
    """For the moments of patches, and what follows from them."""
    return Tiles(min(64, _rounded(places)), min(64, _rounded(channels)), 4, 96)


def pooling_tiles(places: int, channels: int) -> Tiles:
    """For the pass forward."""
    return Tiles(min(64, _rounded(places)), min(32, _rounded(channels)), 4, 96)


def telling_tiles(places: int, channels: int) -> Tiles:
    """For what patches are told."""
    return Tiles(min(64, _rounded(places)), min(16, _rounded(channels)), 4, 128)


def folding_tiles(places: int, channels: int) -> Tiles:
    """For what the norm takes away, and what pixels collect."""
    return Tiles(min(64, _rounded(places)), min(32, _rounded(channels)), 4)


def weighing_tiles(places: int, channels: int) -> Tiles:
    """For the gradient of weights."""
    return Tiles(min(64, _rounded(places)), min(64, _rounded(channels)), 4)


def takes(images: Tensor, padding: int) -> bool:
    """Whether `block` can make these: one program holds all patches of an image."""
    inputs, height, width = images.shape[-3:]
    return inputs <= 3 and (height + 2 * padding - 2) * (width + 2 * padding - 2) <= 1024


def block(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int, gain: float = 1.0
) -> Tensor:
    """norm_relu_pool(conv2d(images, weight)) for images in single precision.

    There is a gradient for images, over `gain`, none for the rest.
    """
    with torch.cuda.device_of(images):  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            return _Block.apply(images, weight, scale, shift, padding, gain)  # type: ignore[no-untyped-call,no-any-return]
        block = [one[None] for one in (images, weight, scale, shift)]
        return forward(*block, padding=padding)[0][0]


class _Block(torch.autograd.Function):
    """The first block with the gradient of its images, for which the maps are made anew."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int,
        gain: float,
    ) -> Tensor:  # fmt: skip
        block = [one[None] for one in (images, weight, scale, shift)]
        pooled, *norm = forward(*block, padding=padding)
        ctx.save_for_backward(images, weight, scale, shift, *norm)
        ctx.padding, ctx.gain = padding, gain
        return pooled[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, scale, shift = (one[None] for one in ctx.saved_tensors[:4])
        norm = Norm(*ctx.saved_tensors[4:])
        found = image_slopes(
            grad[None], images, weight, scale, shift, norm, padding=ctx.padding, gain=ctx.gain
        )
        return found[0], None, None, None, None, None


class Norm(NamedTuple):
    """Of every image: its colours' levels, its maps' means, were these levels zero, and inverse
    deviations, and the weights that make maps normalised, scaled and shifted."""

    levels: Tensor  # [member, image, LEVELS]
    mean: Tensor  # [member, image, channel]
    factor: Tensor  # [member, image, channel]
    ready: Tensor  # [member, image, tap, channel], in half precision


def forward(
    images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *, padding: int,
    spread: Tensor | None = None, tiles: Tiles | None = None, moments: Tiles | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The pooled maps of [member, image, input, y, x], by pixel, and a `Norm`.

    Where a `spread` is given, the patches' second moments are written there.
    """
    members, count, inputs, height, width = images.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels, every = weight.shape[1], members * count
    images = in_a_row(images)
    shape = (members, count, high, wide, channels)
    pooled = torch.empty(shape, dtype=torch.float16, device=images.device)
    each = (members, count)
    norm = Norm(
        scale.new_empty(*each, LEVELS), scale.new_empty(*each, channels),
        scale.new_empty(*each, channels), pooled.new_empty(*each, taps(inputs), channels),
    )  # fmt: skip
    shapes = (inputs, height, width, padding, taps(inputs))
    moments = moments or moment_tiles(high * wide, channels)
    with torch.cuda.device_of(images):  # type: ignore[no-untyped-call]
        _moments[(every,)](
            images, weight.contiguous(), scale.contiguous(), shift.contiguous(), *norm,
            norm.mean if spread is None else spread, count, images.stride(0), channels, EPS,
            spread is not None, *shapes, moments.places, moments.channels, num_warps=moments.warps,
            num_stages=1, maxnreg=moments.registers,
        )  # fmt: skip
        tiles = tiles or pooling_tiles(high * wide, channels)
        _pooled[(every * triton.cdiv(high * wide, tiles.places),)](
            images, norm.levels, norm.ready, pooled, count, images.stride(0), channels, *shapes,
            tiles.places, tiles.channels, num_warps=tiles.warps, num_stages=1,
            maxnreg=tiles.registers,
        )  # fmt: skip
    return pooled.permute(0, 1, 4, 2, 3), *norm


def image_slopes(
    grad: Tensor, images: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, norm: Norm, *,
    padding: int, gain: float = 1.0, tiles: Tiles | None = None, folding: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of images over `gain`: what every patch is told, then each pixel's sum."""
    members, count, inputs, height, width = images.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels, every = weight.shape[1], members * count
    images, told = in_a_row(images), grad.permute(0, 1, 3, 4, 2).contiguous()
    norm = Norm(*(one.contiguous() for one in norm))
    tiles = tiles or telling_tiles(high * wide, channels)
    folding = folding or folding_tiles(high * wide, channels)
    pieces = triton.cdiv(high * wide, tiles.places)
    sums = scale.new_empty(every, pieces, 2, channels)
    to_patches = images.new_empty(every, 9 * inputs, 4, high * wide)
    to_images = torch.empty(images.shape, device=images.device)
    shapes = (inputs, height, width, padding, taps(inputs))
    with torch.cuda.device_of(images):  # type: ignore[no-untyped-call]
        _tell_patches[(every * pieces,)](
            images, norm.levels, norm.ready, told, to_patches, sums, count, images.stride(0),
            channels, *shapes, tiles.places, tiles.channels, num_warps=tiles.warps, num_stages=1,
            maxnreg=tiles.registers,
        )  # fmt: skip
        _fold[(every,)](
            images, weight.contiguous(), scale.contiguous(), shift.contiguous(), norm.levels,
            norm.mean, norm.factor, sums, to_patches, to_images, 1 / gain, count, images.stride(0),
            channels, pieces, *shapes, folding.places, folding.channels,
            triton.next_power_of_2(height * width), num_warps=folding.warps, num_stages=1,
            maxnreg=folding.registers,
        )  # fmt: skip
    return to_images


def weight_slopes_by_image(
    grad: Tensor, images: Tensor, weight: Tensor, scale: Tensor, norm: Norm, spread: Tensor, *,
    padding: int, gain: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients over `gain`: [member, image, channel, input and tap], of the weights, and
    [member, image, 2, channel], of scale and shift."""
    members, count, inputs, height, width = images.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels = weight.shape[1]
    images, told = in_a_row(images), grad.permute(0, 1, 3, 4, 2).contiguous()
    tiles = tiles or weighing_tiles(high * wide, channels)
    of_weights = torch.empty((members, count, channels, 9 * inputs), device=images.device)
    of_both = torch.empty((members, count, 2, channels), device=images.device)
    norm = Norm(*(one.contiguous() for one in norm))
    with torch.cuda.device_of(images):  # type: ignore[no-untyped-call]
        _weigh[(members * count * triton.cdiv(channels, tiles.channels),)](
            images, weight.contiguous(), scale.contiguous(), *norm, spread.contiguous(), told,
            of_weights, of_both, 1 / gain, count, images.stride(0), channels, inputs, height, width,
            padding, taps(inputs), tiles.places, tiles.channels, num_warps=tiles.warps,
            num_stages=1, maxnreg=tiles.registers,
        )  # fmt: skip
    return of_weights, of_both


def in_a_row(images: Tensor) -> Tensor:
    """A member's images one after the other; members that share them need no copies."""
    if not images.numel():
        return images
    size = images[0, 0].numel()
    row = images[0, 0].is_contiguous() and (images.stride(1) == size or images.shape[1] == 1)
    return images if row else images.contiguous()


def _rounded(places: int) -> int:
    """Rounded up to what a matrix product takes."""
    return max(16, int(triton.next_power_of_2(places)))


def taps(inputs: int) -> int:
    """Numbers in a patch of up to three channels, rounded up to what a matrix product takes."""
    return 16 if inputs == 1 else 32


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
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _image(images, one, each, apart, size: tl.constexpr):
    """Where an image begins, when after `each` so many, whose firsts lie `apart`, comes the next
    network of a stack."""
    return images + (one // each).to(tl.int64) * apart + (one % each).to(tl.int64) * size


@triton.jit
def _kept_levels(levels, one):
    """The means of up to three colours, as `_levels` found them."""
    kept = levels + one * 4
    return tl.load(kept), tl.load(kept + 1), tl.load(kept + 2)


@triton.jit(do_not_specialize=["each", "apart"])
def _moments(
    images, weight, scale, shift, levels, means, factors, ready, spreads, each, apart, channels,
    eps, KEPT: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """One image: what its maps are on average, and how far from it, told by its patches."""
    one = tl.program_id(0)
    member = one // each
    weight += member * channels * (9 * INPUTS)
    scale, shift = scale + member * channels, shift + member * channels
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    pieces: tl.constexpr = (places + PLACES - 1) // PLACES
    image = _image(images, one, each, apart, INPUTS * HEIGHT * WIDTH)
    found = _levels(image, INPUTS, HEIGHT * WIDTH)
    red, green, blue = found
    tl.store(levels + one * 4, red)
    tl.store(levels + one * 4 + 1, green)
    tl.store(levels + one * 4 + 2, blue)
    spread = tl.zeros([TAPS, TAPS], tl.float32)
    for piece in range(pieces):
        patches = _patches(
            image, found, 0, piece * PLACES, 4, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES
        )  # fmt: skip
        spread = tl.dot(tl.trans(patches), patches, spread)
    spread = spread / (4 * places)
    tap = tl.arange(0, TAPS)
    if KEPT:
        square = spreads + one.to(tl.int64) * (TAPS * TAPS)
        tl.store(square + tap[:, None] * TAPS + tap[None, :], spread)
    means, factors = means + one * channels, factors + one * channels
    ready += one.to(tl.int64) * (TAPS * channels)
    for first in range(0, channels, MANY):
        channel = first + tl.arange(0, MANY)
        known = channel < channels
        taken = _weights(weight, tap[None, :], channel[:, None], channels, INPUTS, TAPS)
        taken = taken.to(tl.float32)
        along = tl.dot(taken, spread, input_precision="tf32x3")
        mean = tl.sum(tl.where(_is_one(tap, TAPS)[None, :], along, 0.0), 1)
        variance = tl.maximum(tl.sum(along * taken, 1) - mean * mean, 0.0)
        factor = 1.0 / tl.sqrt(variance + eps)
        tl.store(means + channel, mean, mask=known)
        tl.store(factors + channel, factor, mask=known)
        grad = factor * tl.load(scale + channel, mask=known, other=0.0)
        offset = tl.load(shift + channel, mask=known, other=0.0) - mean * grad
        taken = tl.where(_is_one(tap, TAPS)[None, :], offset[:, None], taken * grad[:, None])
        where = ready + tap[None, :] * channels + channel[:, None]
        tl.store(where, taken.to(tl.float16), mask=known[:, None])


@triton.jit
def _own_patches(
    images, levels, each, apart, places: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """This program's image, the first of its pooled pixels, and the patches under these."""
    pieces: tl.constexpr = (places + PLACES - 1) // PLACES
    one, start = tl.program_id(0) // pieces, tl.program_id(0) % pieces * PLACES
    image = _image(images, one, each, apart, INPUTS * HEIGHT * WIDTH)
    found = _kept_levels(levels, one)
    patches = _patches(image, found, 0, start, 4, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES)
    return one, start, patches


@triton.jit(do_not_specialize=["each", "apart"])
def _pooled(
    images, levels, ready, pooled, each, apart, channels, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some pooled pixels of an image; a thread has all four pixels under each."""
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    one, start, patches = _own_patches(
        images, levels, each, apart, places, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES
    )
    out, tap = start + tl.arange(0, PLACES), tl.arange(0, TAPS)
    ready += one.to(tl.int64) * (TAPS * channels)
    pooled += one.to(tl.int64) * places * channels
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        where = ready + tap[:, None] * channels + channel[None, :]
        taken = tl.load(where, mask=known[None, :], other=0.0)
        made = _twice(tl.dot(patches, taken))
        total = tl.sum(made.reshape([4, PLACES, GROUP]), 0)
        where = pooled + out[:, None] * channels + channel[None, :]
        here = (out < places)[:, None] & known[None, :]
        tl.store(where, (total * 0.125).to(tl.float16), mask=here)


@triton.jit
def _spoken(grad, start, channel, channels, places, PLACES: tl.constexpr):
    """[1, pooled pixel, channel], what some pooled pixels of an image are told."""
    out = start + tl.arange(0, PLACES)
    where = grad + out[:, None] * channels + channel[None, :]
    here = (out < places)[:, None] & (channel < channels)[None, :]
    return tl.load(where, mask=here, other=0.0).to(tl.float32)[None, :, :]


@triton.jit
def _in_patches(to_patches, start, places, PLACES: tl.constexpr, TAPS: tl.constexpr):
    """[pixel, tap], where patches under some pooled pixels lie; and which taps there are."""
    pixel, number = tl.arange(0, 4 * PLACES), _number(tl.arange(0, TAPS), TAPS)
    out = start + pixel % PLACES
    where = number[None, :] * (4 * places) + (pixel // PLACES * places + out)[:, None]
    return to_patches + where, (out < places)[:, None], number[None, :]


@triton.jit(do_not_specialize=["each", "apart"])
def _tell_patches(
    images, levels, ready, grad, to_patches, sums, each, apart, channels, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some pooled pixels of an image: what the patches under them do to the loss, but for the norm.

    Of every channel also the sums that tell what the norm takes away.
    """
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    one, start, patches = _own_patches(
        images, levels, each, apart, places, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES
    )
    tap = tl.arange(0, TAPS)
    ready += one.to(tl.int64) * (TAPS * channels)
    grad += one.to(tl.int64) * places * channels
    moved = tl.zeros([4 * PLACES, TAPS], tl.float32)
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        where = ready + tap[:, None] * channels + channel[None, :]
        taken = tl.load(where, mask=known[None, :], other=0.0)
        told = _spoken(grad, start, channel, channels, places, PLACES)
        made = tl.dot(patches, taken).reshape([4, PLACES, GROUP])
        share = tl.where(made > 0, told, 0.0)
        alone, along = tl.sum(share, 0), tl.sum(share * made, 0)
        share = share.to(tl.float16).reshape([4 * PLACES, GROUP])
        moved = tl.dot(share, tl.trans(taken), moved)
        alone, along = tl.reduce((alone, along), 0, _add_both)
        both = sums + tl.program_id(0) * (2 * channels) + channel
        tl.store(both, alone, mask=known)
        tl.store(both + channels, along, mask=known)
    to_patches += one.to(tl.int64) * (9 * INPUTS * 4 * places)
    where, there, number = _in_patches(to_patches, start, places, PLACES, TAPS)
    tl.store(where, moved * 0.25, mask=there & (number < 9 * INPUTS))


@triton.jit(do_not_specialize=["each", "apart", "pieces"])
def _fold(
    images, weight, scale, shift, levels, means, factors, sums, to_patches, to_images, gain, each,
    apart, channels, pieces, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """One image: its patches lose what the norm takes away, then pixels collect from patches.

    A map's gradient is what its pixels are told, less its mean and what of it goes along with the
    map. By weights these become gradients of patches, the last two patches times a matrix.
    """
    one = tl.program_id(0)
    member = one // each
    weight += member * channels * (9 * INPUTS)
    scale, shift = scale + member * channels, shift + member * channels
    across: tl.constexpr = WIDTH + 2 * PADDING - 2
    down: tl.constexpr = HEIGHT + 2 * PADDING - 2
    places: tl.constexpr = down * across // 4
    image = _image(images, one, each, apart, INPUTS * HEIGHT * WIDTH)
    found = _kept_levels(levels, one)
    tap = tl.arange(0, TAPS)
    tilt = tl.zeros([TAPS, TAPS], tl.float32)
    for first in range(0, channels, GROUP):
        channel = first + tl.arange(0, GROUP)
        known = channel < channels
        both = sums + one.to(tl.int64) * pieces * (2 * channels) + channel
        alone, along = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP], tl.float32)
        for piece in range(pieces):
            alone += tl.load(both + piece * (2 * channels), mask=known, other=0.0)
            along += tl.load(both + (piece * 2 + 1) * channels, mask=known, other=0.0)
        mean = tl.load(means + one * channels + channel, mask=known, other=0.0)
        factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)
        along = (along - tl.load(shift + channel, mask=known, other=0.0) * alone) * factor
        level = alone * tl.load(scale + channel, mask=known, other=0.0) - mean * along
        taken = _weights(weight, tap[:, None], channel[None, :], channels, INPUTS, TAPS)
        taken = taken.to(tl.float32)
        lost = tl.where(_is_one(tap, TAPS)[:, None], level[None, :], taken * along[None, :])
        back = tl.trans(taken * (factor / (16 * places))[None, :])
        tilt = tl.dot(lost, back, tilt, input_precision="tf32x3")
    size = tl.maximum(tl.max(tl.abs(tilt)), 1e-20)  # so that tilt is in the reach of half precision
    tilt = (tilt / size).to(tl.float16)
    to_patches += one.to(tl.int64) * (9 * INPUTS * 4 * places)
    for start in range(0, places, PLACES):
        patches = _patches(image, found, 0, start, 4, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES)
        where, there, number = _in_patches(to_patches, start, places, PLACES, TAPS)
        here = there & (number < 9 * INPUTS)
        told = tl.load(where, mask=here, other=0.0)
        tl.store(where, told - tl.dot(patches, tilt) * size, mask=here)
    tl.debug_barrier()  # patches are read by other threads than wrote them
    pixel = tl.arange(0, PIXELS)
    fits = pixel < HEIGHT * WIDTH
    to_images += one.to(tl.int64) * (INPUTS * HEIGHT * WIDTH)
    for colour in range(INPUTS):
        total = tl.zeros([PIXELS], tl.float32)
        for corner in tl.static_range(9):
            y, x = pixel // WIDTH + PADDING - corner // 3, pixel % WIDTH + PADDING - corner % 3
            sees = (y >= 0) & (y < down) & (x >= 0) & (x < across) & fits
            quarter, under = y % 2 * 2 + x % 2, y // 2 * (across // 2) + x // 2
            where = to_patches + (colour * 9 + corner) * (4 * places) + quarter * places + under
            total += tl.load(where, mask=sees, other=0.0)
        tl.store(to_images + colour * (HEIGHT * WIDTH) + pixel, total * gain, mask=fits)


@triton.jit(do_not_specialize=["each", "apart"])
def _weigh(
    images, weight, scale, levels, means, factors, ready, spreads, grad, of_weights, of_both, gain,
    each, apart, channels, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what their weights, scale and shift do to the loss."""
    groups = tl.cdiv(channels, GROUP)
    one, first = tl.program_id(0) // groups, tl.program_id(0) % groups * GROUP
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    image = _image(images, one, each, apart, INPUTS * HEIGHT * WIDTH)
    found = _kept_levels(levels, one)
    member = one // each
    means, factors = means + one * channels, factors + one * channels
    tap, channel = tl.arange(0, TAPS), first + tl.arange(0, GROUP)
    known = channel < channels
    where = ready + one.to(tl.int64) * (TAPS * channels)
    where = where + tap[:, None] * channels + channel[None, :]
    taken = tl.load(where, mask=known[None, :], other=0.0)
    grad += one.to(tl.int64) * places * channels
    heard = tl.zeros([GROUP, TAPS], tl.float32)  # of every patch, what it is told
    for start in range(0, places, PLACES):
        patches = _patches(image, found, 0, start, 4, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES)
        told = _spoken(grad, start, channel, channels, places, PLACES)
        made = tl.dot(patches, taken).reshape([4, PLACES, GROUP])
        share = (told * (made > 0)).to(tl.float16).reshape([4 * PLACES, GROUP])
        heard = tl.dot(tl.trans(share), patches, heard)
    heard *= 0.25
    square = spreads + one.to(tl.int64) * (TAPS * TAPS)
    spread = tl.load(square + tap[:, None] * TAPS + tap[None, :])
    level = tl.sum(tl.where(_is_one(tap, TAPS)[:, None], spread, 0.0), 0)[None, :]
    weight += member * channels * (9 * INPUTS)
    raw = _weights(weight, tap[None, :], channel[:, None], channels, INPUTS, TAPS).to(tl.float32)
    mean = tl.load(means + channel, mask=known, other=0.0)
    factor = tl.load(factors + channel, mask=known, other=0.0)
    stretch = tl.load(scale + member * channels + channel, mask=known, other=0.0) * factor
    alone = tl.sum(tl.where(_is_one(tap, TAPS)[None, :], heard, 0.0), 1)
    along = (tl.sum(heard * raw, 1) - mean * alone) * factor
    # What the norm takes away: the mean of what maps are told, and what of it goes along with them.
    normal = tl.dot(raw, spread, input_precision="tf32x3") - mean[:, None] * level
    moved = heard - alone[:, None] * level - (along * factor)[:, None] * normal
    number = _number(tap, TAPS)
    place = of_weights + one.to(tl.int64) * channels * (9 * INPUTS)
    place = place + channel[:, None] * (9 * INPUTS) + number[None, :]
    fits = known[:, None] & (number < 9 * INPUTS)[None, :]
    tl.store(place, moved * (stretch * gain)[:, None], mask=fits)
    both = of_both + one * (2 * channels) + channel
    tl.store(both, along * gain, mask=known)
    tl.store(both + channels, alone * gain, mask=known)
