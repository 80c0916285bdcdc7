"""GPU kernels of augmentation; imported only where Triton is.

As separate operations, augmentation reads and writes every image many times, and launches hundreds
of kernels for a few images. Here one kernel does colour, crop, cutout, flip and scale, another the
rotation: each reads an image and writes it. So do their gradients, in which every pixel collects
what was fetched from it in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.parts.augment import Draws

MOST_CHANNELS = 4
MOST_PIXELS = 4096  # of one channel; a program holds an image

Map = Callable[[Tensor], Tensor]


def takes(images: Tensor) -> bool:
    """Whether `apply` can change these: one program holds an image, and there is one."""
    if images.dim() != 5 or images.numel() == 0:
        return False
    channels, height, width = images.shape[2:]
    return channels <= MOST_CHANNELS and height * width <= MOST_PIXELS


def apply(images: Tensor, draws: Draws, may: set[str]) -> Tensor:
    """Images [set, image, channel, height, width] after the operations that may have been drawn.

    The parameters are [set, parameter]. There is a gradient for images, none for parameters.
    """
    of_image = [parameters.contiguous() for parameters in draws[1:]]
    color, cut, scaled = "color" in may, "cutout" in may, "scale" in may
    moved = scaled or bool(may & {"crop", "flip"})

    def changed(x: Tensor) -> Tensor:
        return _launched(_change, x, *of_image[:5], False, color, cut, moved, scaled)

    def without_brightness(x: Tensor) -> Tensor:
        return _launched(_change, x, *of_image[:5], True, color, cut, moved, scaled)

    def changed_back(x: Tensor) -> Tensor:
        return _launched(_change_back, x, *of_image[:5], color, cut, moved, scaled)

    def turned(x: Tensor) -> Tensor:
        return _launched(_turn, x, of_image[5])

    def turned_back(x: Tensor) -> Tensor:
        return _launched(_turn_back, x, of_image[5])

    def shifted(x: Tensor) -> Tensor:
        return _launched(_move, x, *of_image[1:5], cut, scaled)

    def shifted_back(x: Tensor) -> Tensor:
        return _launched(_move_back, x, *of_image[1:5], cut, scaled)

    if moved and not color:
        images = _mapped(images, shifted, shifted, shifted_back)
    elif color or cut:
        images = _mapped(images, changed, without_brightness, changed_back)
    if "rotate" in may:
        images = _mapped(images, turned, turned, turned_back)
    return images


def _mapped(x: Tensor, there: Map, linear: Map, back: Map) -> Tensor:
    """there(x); `linear` is that map without its constant, `back` the transpose of `linear`."""
    x = x.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _Mapped.apply(x, there, linear, back)  # type: ignore[no-untyped-call,no-any-return]
    return there(x)


class _Mapped(torch.autograd.Function):
    """A map whose gradient is a map again, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, linear: Map, back: Map) -> Tensor:
        ctx.linear, ctx.back = linear, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _mapped(grad, ctx.back, ctx.back, ctx.linear), None, None, None


def _launched(kernel: Any, x: Tensor, *arguments: Tensor | bool) -> Tensor:
    """What a kernel makes of images, one program for each."""
    out = torch.empty_like(x)
    sets, images, channels, height, width = x.shape
    pixels = triton.next_power_of_2(height * width)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel[(sets * images,)](
            x, out, images, *arguments, channels, height, width, pixels,
            num_warps=max(1, pixels // 256),
        )  # fmt: skip
    return out


@triton.jit
def _tile(
    PLAIN: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """[1, pixel], rows and columns of an image; [channel, pixel], where they lie, and if they do.

    Unless all is `plain`, the compiler is not to see that pixels lie in a row. It would give a
    thread four at once, and what a warp fetches would be far apart.
    """
    channel, pixel = tl.arange(0, triton.next_power_of_2(CHANNELS))[:, None], tl.arange(0, PIXELS)
    y, x = (pixel // WIDTH).to(tl.float32)[None, :], (pixel % WIDTH).to(tl.float32)[None, :]
    known = (channel < CHANNELS) & (pixel < HEIGHT * WIDTH)[None, :]
    if PLAIN:
        return y, x, channel * (HEIGHT * WIDTH) + pixel[None, :], known
    else:
        return y, x, _where(y, x, CHANNELS, HEIGHT, WIDTH), known


@triton.jit
def _where(y, x, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """[channel, pixel], where whole places lie in an image."""
    channel = tl.arange(0, triton.next_power_of_2(CHANNELS))[:, None]
    return channel * (HEIGHT * WIDTH) + (y * WIDTH + x).to(tl.int32)


@triton.jit
def _inside(y, x, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    return (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)


@triton.jit
def _fetched(
    image, y, x, share, known, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """[channel, pixel], a share of what an image has at whole places; nothing for no share."""
    where = _where(y, x, CHANNELS, HEIGHT, WIDTH)
    return share * tl.load(image + where, mask=known & (share > 0), other=0.0)


@triton.jit
def _share(place, pixel):
    """How much of a pixel is fetched for a place, along one axis."""
    return tl.maximum(1 - tl.abs(place - pixel), 0.0)


@triton.jit
def _scaled(pixel, factor, SIZE: tl.constexpr):
    """A place at so many times the distance from the centre."""
    centre: tl.constexpr = (SIZE - 1) / 2
    return centre + factor * (pixel - centre)


@triton.jit
def _turned(y, x, sine, cosine, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A place turned about the centre."""
    middle: tl.constexpr = (HEIGHT - 1) / 2
    centre: tl.constexpr = (WIDTH - 1) / 2
    down, right = y - middle, x - centre
    return middle + (sine * right + cosine * down), centre + (cosine * right - sine * down)


@triton.jit
def _kept(y, x, cutout, which, down, right):
    """Whether whole places are not cut out; the hole moves along with the crop, still to come."""
    top, bottom = tl.load(cutout + which * 4) + down, tl.load(cutout + which * 4 + 1) + down
    left, past = tl.load(cutout + which * 4 + 2) + right, tl.load(cutout + which * 4 + 3) + right
    return (y < top) | (y >= bottom) | (x < left) | (x >= past)


@triton.jit
def _source(
    y, x, below, beside, down, right, cutout, which, CUT: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of the four whole places about a place one, before the crop, and its share."""
    row, column = tl.floor(y) + below, tl.floor(x) + beside
    there = _inside(row, column, HEIGHT, WIDTH)
    share = _share(y, row) * _share(x, column)
    row, column = row + down, column + right
    there = there & _inside(row, column, HEIGHT, WIDTH)
    if CUT:
        there = there & _kept(row, column, cutout, which, down, right)
    return row, column, tl.where(there, share, 0.0)


@triton.jit
def _reader(
    y, x, near_y, near_x, neighbour, vertical, horizontal, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of the nine pixels about where a pixel goes one, and its share of that pixel."""
    row, column = near_y + (neighbour // 3 - 1), near_x + (neighbour % 3 - 1)
    share = _share(_scaled(row, vertical, HEIGHT), y)
    share *= _share(_scaled(column, horizontal, WIDTH), x)
    return row, column, tl.where(_inside(row, column, HEIGHT, WIDTH), share, 0.0)


@triton.jit
def _colored(light, whole, mean, brightness, saturation, contrast, CHANNELS: tl.constexpr):
    """Brightness, saturation about the pixel's mean, contrast about the image's mean.

    All this can come after resampling: what is constant then counts as much as a pixel is `whole`.
    """
    bright = brightness * whole
    grey = tl.sum(light, 0)[None, :] * (1.0 / CHANNELS) + bright
    light += bright
    light += (saturation - 1) * (light - grey)
    return light + (contrast - 1) * (light - (mean * whole + bright))


@triton.jit(do_not_specialize=["images", "color", "crop", "cutout", "flip", "scale"])
def _change(
    light, changed, images, color, crop, cutout, flip, scale, LINEAR: tl.constexpr,
    COLOR: tl.constexpr, CUT: tl.constexpr, MOVED: tl.constexpr, SCALED: tl.constexpr,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One image, of a set of so many `images`: colour, cutout, crop, scale and flip.

    Unless it is scaled, every pixel is fetched from one other.
    """
    which = tl.program_id(0) // images
    light += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    changed += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _tile(not MOVED, CHANNELS, HEIGHT, WIDTH, PIXELS)
    down, right = tl.load(crop + which * 2), tl.load(crop + which * 2 + 1)
    if MOVED:
        y = _scaled(y, tl.load(scale + which * 2), HEIGHT)
        x = _scaled(x, tl.load(scale + which * 2 + 1) * tl.load(flip + which), WIDTH)
        whole = tl.zeros_like(y)
        value = tl.zeros(own.shape, tl.float32)
        for below in tl.static_range(2 if SCALED else 1):
            for beside in tl.static_range(2 if SCALED else 1):
                row, column, share = _source(
                    y, x, below, beside, down, right, cutout, which, CUT, HEIGHT, WIDTH
                )
                value += _fetched(light, row, column, share, known, CHANNELS, HEIGHT, WIDTH)
                whole += share
    else:
        value = tl.load(light + own, mask=known, other=0.0)
        whole = 1.0
        if CUT:
            there = _kept(y, x, cutout, which, down, right)
            value, whole = tl.where(there, value, 0.0), tl.where(there, 1.0, 0.0)
    if COLOR:
        mean = tl.sum(tl.load(light + own, mask=known, other=0.0)) / (CHANNELS * HEIGHT * WIDTH)
        brightness = 0.0 if LINEAR else tl.load(color + which * 3)
        saturation, contrast = tl.load(color + which * 3 + 1), tl.load(color + which * 3 + 2)
        value = _colored(value, whole, mean, brightness, saturation, contrast, CHANNELS)
    tl.store(changed + own, value, mask=known)


@triton.jit(do_not_specialize=["images", "color", "crop", "cutout", "flip", "scale"])
def _change_back(
    grad, told, images, color, crop, cutout, flip, scale, COLOR: tl.constexpr, CUT: tl.constexpr,
    MOVED: tl.constexpr, SCALED: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The transpose of `_change`; that of colour, without brightness, is colour again."""
    which = tl.program_id(0) // images
    grad += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    told += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _tile(not MOVED, CHANNELS, HEIGHT, WIDTH, PIXELS)
    down, right = tl.load(crop + which * 2), tl.load(crop + which * 2 + 1)
    there = known
    if CUT:
        there = there & _kept(y, x, cutout, which, down, right)
    if MOVED:
        vertical = tl.load(scale + which * 2)
        horizontal = tl.load(scale + which * 2 + 1) * tl.load(flip + which)
        y, x = y - down, x - right
        there = there & _inside(y, x, HEIGHT, WIDTH)
        # With factors of 2/3 or more, pixels that fetch from this one are nearer than 3/2 to the
        # place where it goes: the pixel nearest to that and its eight neighbours are all.
        near_y = tl.floor(_scaled(y, 1.0 / vertical, HEIGHT) + 0.5)
        near_x = tl.floor(_scaled(x, 1.0 / horizontal, WIDTH) + 0.5)
        value = tl.zeros(own.shape, tl.float32)
        for neighbour in range(0 if SCALED else 4, 9 if SCALED else 5):
            row, column, share = _reader(
                y, x, near_y, near_x, neighbour, vertical, horizontal, HEIGHT, WIDTH
            )
            value += _fetched(grad, row, column, share, there, CHANNELS, HEIGHT, WIDTH)
    else:
        value = tl.where(there, tl.load(grad + own, mask=known, other=0.0), 0.0)
    if COLOR:
        mean = tl.sum(value) / (CHANNELS * HEIGHT * WIDTH)
        saturation, contrast = tl.load(color + which * 3 + 1), tl.load(color + which * 3 + 2)
        value = _colored(value, 1.0, mean, 0.0, saturation, contrast, CHANNELS)
    tl.store(told + own, value, mask=known)


@triton.jit
def _plane(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr):
    """[pixel], rows and columns of one channel, where they lie, and if they do; as in `_tile`."""
    pixel = tl.arange(0, PIXELS)
    y, x = (pixel // WIDTH).to(tl.float32), (pixel % WIDTH).to(tl.float32)
    return y, x, (y * WIDTH + x).to(tl.int32), pixel < HEIGHT * WIDTH


@triton.jit
def _from(light, row, column, share, known, WIDTH: tl.constexpr):
    """[pixel], a share of what a channel has at whole places; nothing for no share."""
    where = light + (row * WIDTH + column).to(tl.int32)
    return share * tl.load(where, mask=known & (share > 0), other=0.0)


@triton.jit(do_not_specialize=["images", "crop", "cutout", "flip", "scale"])
def _move(
    light, changed, images, crop, cutout, flip, scale, CUT: tl.constexpr, SCALED: tl.constexpr,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """As `_change`, of images whose colours stay: where pixels come from is found once for all.

    It is written for each channel, and the compiler finds that it is the same.
    """
    which = tl.program_id(0) // images
    light += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    changed += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _plane(HEIGHT, WIDTH, PIXELS)
    down, right = tl.load(crop + which * 2), tl.load(crop + which * 2 + 1)
    y = _scaled(y, tl.load(scale + which * 2), HEIGHT)
    x = _scaled(x, tl.load(scale + which * 2 + 1) * tl.load(flip + which), WIDTH)
    for _ in tl.static_range(CHANNELS):
        value = tl.zeros([PIXELS], tl.float32)
        for below in tl.static_range(2 if SCALED else 1):
            for beside in tl.static_range(2 if SCALED else 1):
                row, column, share = _source(
                    y, x, below, beside, down, right, cutout, which, CUT, HEIGHT, WIDTH
                )
                value += _from(light, row, column, share, known, WIDTH)
        tl.store(changed + own, value, mask=known)
        light, changed = light + HEIGHT * WIDTH, changed + HEIGHT * WIDTH


@triton.jit(do_not_specialize=["images", "crop", "cutout", "flip", "scale"])
def _move_back(
    grad, told, images, crop, cutout, flip, scale, CUT: tl.constexpr, SCALED: tl.constexpr,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The transpose of `_move`; see `_change_back`."""
    which = tl.program_id(0) // images
    grad += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    told += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _plane(HEIGHT, WIDTH, PIXELS)
    down, right = tl.load(crop + which * 2), tl.load(crop + which * 2 + 1)
    there = known
    if CUT:
        there = there & _kept(y, x, cutout, which, down, right)
    vertical = tl.load(scale + which * 2)
    horizontal = tl.load(scale + which * 2 + 1) * tl.load(flip + which)
    y, x = y - down, x - right
    there = there & _inside(y, x, HEIGHT, WIDTH)
    near_y = tl.floor(_scaled(y, 1.0 / vertical, HEIGHT) + 0.5)
    near_x = tl.floor(_scaled(x, 1.0 / horizontal, WIDTH) + 0.5)
    for _ in tl.static_range(CHANNELS):
        value = tl.zeros([PIXELS], tl.float32)
        for neighbour in tl.static_range(0 if SCALED else 4, 9 if SCALED else 5):
            row, column, share = _reader(
                y, x, near_y, near_x, neighbour, vertical, horizontal, HEIGHT, WIDTH
            )
            value += _from(grad, row, column, share, there, WIDTH)
        tl.store(told + own, value, mask=known)
        grad, told = grad + HEIGHT * WIDTH, told + HEIGHT * WIDTH


@triton.jit(do_not_specialize=["images", "rotate"])
def _turn(
    light, turned, images, rotate, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One image, each pixel fetched from its place turned about the centre; zero outside."""
    angle = tl.load(rotate + tl.program_id(0) // images)
    light += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    turned += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _plane(HEIGHT, WIDTH, PIXELS)
    y, x = _turned(y, x, tl.sin(angle), tl.cos(angle), HEIGHT, WIDTH)
    for _ in tl.static_range(CHANNELS):
        value = tl.zeros([PIXELS], tl.float32)
        for below in tl.static_range(2):
            for beside in tl.static_range(2):
                row, column = tl.floor(y) + below, tl.floor(x) + beside
                share = _share(y, row) * _share(x, column)
                share = tl.where(_inside(row, column, HEIGHT, WIDTH), share, 0.0)
                value += _from(light, row, column, share, known, WIDTH)
        tl.store(turned + own, value, mask=known)
        light, turned = light + HEIGHT * WIDTH, turned + HEIGHT * WIDTH


@triton.jit(do_not_specialize=["images", "rotate"])
def _turn_back(
    grad, told, images, rotate, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The transpose of `_turn`: each pixel sums over those that were fetched from it."""
    angle = tl.load(rotate + tl.program_id(0) // images)
    sine, cosine = tl.sin(angle), tl.cos(angle)
    grad += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    told += tl.program_id(0).to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    y, x, own, known = _plane(HEIGHT, WIDTH, PIXELS)
    # Those are nearer than the square root of two, along each axis, to this one's place turned
    # back: the pixel nearest to that and its eight neighbours are all.
    near_y, near_x = _turned(y, x, -sine, cosine, HEIGHT, WIDTH)
    near_y, near_x = tl.floor(near_y + 0.5), tl.floor(near_x + 0.5)
    for _ in tl.static_range(CHANNELS):
        value = tl.zeros([PIXELS], tl.float32)
        for neighbour in tl.static_range(9):
            row, column = near_y + (neighbour // 3 - 1), near_x + (neighbour % 3 - 1)
            from_y, from_x = _turned(row, column, sine, cosine, HEIGHT, WIDTH)
            share = _share(from_y, y) * _share(from_x, x)
            share = tl.where(_inside(row, column, HEIGHT, WIDTH), share, 0.0)
            value += _from(grad, row, column, share, known, WIDTH)
        tl.store(told + own, value, mask=known)
        grad, told = grad + HEIGHT * WIDTH, told + HEIGHT * WIDTH
