"""GPU kernels of networks without norm, as AlexNet, in half precision; only where Triton is.

A row of convolutions, each with bias and ReLU and some max-pooled. The maps that the first makes of
images of few channels are most of what such a network makes: here they are never stored, only what
is left of them when they are pooled, and which of four pixels that was. Weights go into half
precision, and their gradients out of it, in one launch for many. Examples that pass no gradient on
go through with the others. Of the other convolutions those with large kernels are one of ours, the
rest are the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients
from fedstill.kernels import pixel_pools
from fedstill.models.by_pixel import GAIN

MOST_TAPS = 80  # numbers under a kernel of the first convolution, of which `takes` accepts so many
MOST_NUMBERS = 2**31  # of maps, whose places are counted in 32 bits
MANY = 4  # tensors that one launch turns round
NAN = tl.constexpr(tl.PropagateNan.ALL)
DEAD = tl.constexpr(4)  # in place of a pixel's number among four: the ReLU lets nothing through


class Form(NamedTuple):
    """A convolution and what comes after it; its kernel is square."""

    padding: int
    pooled: bool


class Tiles(NamedTuple):
    """Pooled pixels of a program, at most so many channels, how often; its warps and registers."""

    pixels: int
    channels: int
    rounds: int
    warps: int
    registers: int | None = None


# The choices below were the best of some on an H200.
FORWARD = Tiles(64, 128, 1, 4)
BACKWARD = Tiles(64, 128, 3, 8, 168)

LARGE = 5  # the side of kernels whose convolutions are ours; smaller ones the library makes as fast
DEPTH = 64  # channels that a program of them takes at a time


class ProductTiles(NamedTuple):
    """Pixels and channels that a program makes; its warps, and loads that are under way."""

    pixels: int
    channels: int
    warps: int
    stages: int


def product_tiles(outputs: int) -> ProductTiles:
    """For a convolution to so many channels."""
    return ProductTiles(128, 128, 8, 4) if outputs % 128 == 0 else ProductTiles(128, 64, 4, 3)


def takes(x: Tensor, weight: Tensor, padding: int, pooled: bool) -> bool:
    """Whether the first convolution can be one kernel with its bias, ReLU and pooling."""
    outputs, inputs, side = weight.shape[:3]
    high, wide = (length + 2 * padding - side + 1 for length in x.shape[2:])
    even = high % 2 == 0 and wide % 2 == 0
    few = len(x) * outputs * high * wide < MOST_NUMBERS
    return pooled and even and few and inputs * side * side <= MOST_TAPS


def features(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    forms: Sequence[tuple[int, bool]], resting: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[image, feature] of images in single precision, and of the last ones, which are at rest.

    A form is a convolution's padding, and whether its maps are pooled. Gradients are those of
    weights and biases, from the images that are not at rest.
    """
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rows, biases = tuple(Form(*form) for form in forms), [bias.contiguous() for bias in biases]
        moving = any(tensor.requires_grad for tensor in (*weights, *biases))
        if torch.is_grad_enabled() and moving:
            return _Row.apply(x, rows, resting, *weights, *biases)  # type: ignore[no-untyped-call,no-any-return]
        (maps,) = _forward(x, weights, biases, rows, 0)
        return _both(maps, resting)


def unfolded(x: Tensor, *tensors: Tensor, forms: Sequence[Form]) -> Tensor:
    """The same by the framework's operations, in single precision."""
    count = len(forms)
    for weight, bias, form in zip(tensors[:count], tensors[count:], forms, strict=True):
        x = F.relu(F.conv2d(x, weight, bias, padding=form.padding))
        x = F.max_pool2d(x, 2) if form.pooled else x
    return x.flatten(1)


class _Row(torch.autograd.Function):
    """The row with its gradient; for a gradient of the gradient it is unfolded."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forms: tuple[Form, ...], resting: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.forms, count = forms, len(forms)
        kept = len(x) - resting
        maps, *held = _forward(x, tensors[:count], tensors[count:], forms, kept)
        ctx.save_for_backward(x[:kept], *tensors, *held)
        found, still = _both(maps, resting)
        ctx.shape = maps.shape[1:]
        ctx.mark_non_differentiable(still)
        return found, still

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        forms, count = ctx.forms, len(ctx.forms)
        (x,), tensors, held = _cut(ctx.saved_tensors, 1, 2 * count)
        if torch.is_grad_enabled():
            again = partial(unfolded, x, forms=forms)
            return None, None, None, *differentiable_gradients(again, tensors, grad)
        if not len(x):  # nobody tells them anything
            return None, None, None, *map(torch.zeros_like, tensors)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            grad = grad.reshape(len(grad), *ctx.shape)
            return None, None, None, *_backward(grad, tensors, held, forms)


def _cut(tensors: Sequence[Tensor], *lengths: int) -> list[Sequence[Tensor]]:
    """Pieces of these lengths, and what is left."""
    pieces, at = [], 0
    for length in (*lengths, len(tensors)):
        pieces.append(tensors[at : at + length])
        at += length
    return pieces


def _both(maps: Tensor, resting: int) -> tuple[Tensor, Tensor]:
    """Features of maps, and of the last ones."""
    found, still = turned(torch.split(maps, [len(maps) - resting, resting]), torch.float32)
    return found.flatten(1), still.flatten(1)


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], forms: Sequence[Form], kept: int
) -> list[Tensor]:
    """The last maps; then, for the gradient of the first `kept` images, if any: these, which pixel
    was the largest in the first block, and of each other block its weights, what it saw, and its
    maps."""
    images = padded(x, forms[0].padding)
    maps, corners = first_block(images, weights[0], biases[0], kept)
    held = [images[:kept], corners]
    laid = turned(weights[1:], torch.float16)
    for weight, bias, form in zip(laid, biases[1:], forms[1:], strict=True):
        made = convolved(maps, weight, form.padding)
        if kept:
            held += [weight, maps[:kept], made[:kept]]
        maps = pixel_pools._forward(made, bias, form.pooled)
    return [maps, *held] if kept else [maps]


def _backward(
    grad: Tensor, tensors: Sequence[Tensor], held: Sequence[Tensor], forms: Sequence[Form]
) -> list[Tensor]:
    """Gradients of weights, then of biases, from what was held; `grad` is that of the last maps."""
    count = len(forms)
    images, corners, *blocks = held
    to_weights: list[Tensor] = []
    to_biases: list[Tensor] = []
    (told,) = turned([grad], torch.float16, GAIN)
    for place in reversed(range(1, count)):
        weight, seen, made = blocks[3 * place - 3 : 3 * place]
        bias = tensors[count + place]
        to_made, to_bias = pixel_pools._backward(
            made, bias, told.contiguous(memory_format=torch.channels_last),
            forms[place].pooled, 1 / GAIN,
        )  # fmt: skip
        told, to_weight = _convolution_slopes(to_made, seen, weight, forms[place].padding)
        to_weights.append(to_weight)
        to_biases.append(to_bias)
    first, first_bias = first_slopes(told, images, tensors[0], corners)
    others = turned(to_weights[::-1], torch.float32, 1 / GAIN)
    return [first, *others, first_bias, *to_biases[::-1]]


def _convolution_slopes(
    grad: Tensor, seen: Tensor, weight: Tensor, padding: int
) -> tuple[Tensor, Tensor]:
    """Gradients of what a convolution saw, and of its weights."""
    ours = _is_ours(weight)
    told, to_weight, _ = torch.ops.aten.convolution_backward(
        grad, seen, weight, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1,
        [not ours, True, False],
    )  # fmt: skip
    return convolved_back(grad, weight, padding) if ours else told, to_weight


def _is_ours(weight: Tensor) -> bool:
    """Whether there is a kernel for a convolution that beats the library's."""
    outputs, inputs, side = weight.shape[:3]
    return side >= LARGE and inputs % DEPTH == 0 and outputs % DEPTH == 0


def convolved(maps: Tensor, weight: Tensor, padding: int) -> Tensor:
    """conv2d(maps, weight), all in half precision and by pixel."""
    if not _is_ours(weight):
        made = F.conv2d(maps, weight, padding=padding)
        return made.contiguous(memory_format=torch.channels_last)
    return _product(maps, weight, padding, turned=False)


def convolved_back(grad: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The gradient of the maps that a convolution saw, by a kernel of ours."""
    return _product(grad, weight, weight.shape[2] - 1 - padding, turned=True)


def _product(maps: Tensor, weight: Tensor, padding: int, *, turned: bool) -> Tensor:
    images, inputs, height, width = maps.shape
    side, outputs = weight.shape[2], weight.shape[1] if turned else weight.shape[0]
    high, wide = (length + 2 * padding - side + 1 for length in (height, width))
    made = torch.empty(
        (images, outputs, high, wide), dtype=torch.float16, device=maps.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    tiles, pixels = product_tiles(outputs), images * high * wide
    if pixels:
        _convolve[(triton.cdiv(pixels, tiles.pixels) * (outputs // tiles.channels),)](
            maps.contiguous(memory_format=torch.channels_last),
            weight.contiguous(memory_format=torch.channels_last), made, pixels, inputs, outputs,
            height, width, high, wide, side, padding, turned, tiles.pixels, tiles.channels, DEPTH,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["pixels"])
def _convolve(
    maps, weight, made, pixels, IN: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    PADDING: tl.constexpr, TURNED: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Some pixels of what comes out, some channels; `TURNED`, by weights turned round.

    Programs of the same pixels follow each other, so that these are read from memory once.
    """
    parts: tl.constexpr = OUT // CHANNELS
    pixel = tl.program_id(0) // parts * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % parts * CHANNELS + tl.arange(0, CHANNELS)
    row, column = pixel // WIDE % HIGH - PADDING, pixel % WIDE - PADDING
    start = ((pixel // (HIGH * WIDE) * HEIGHT + row) * WIDTH + column) * IN
    part = tl.arange(0, DEPTH)
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    turns: tl.constexpr = IN // DEPTH
    for step in range(SIDE * SIDE * turns):
        tap = step // turns
        first = step % turns * DEPTH
        down = tap // SIDE
        right = tap % SIDE
        high, wide = row + down, column + right
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH) & (pixel < pixels)
        at = start + (down * WIDTH + right) * IN + first
        seen = tl.load(maps + at[:, None] + part[None, :], mask=inside[:, None], other=0.0)
        if TURNED:
            line = ((first + part) * (SIDE * SIDE) + (SIDE * SIDE - 1 - tap)) * OUT
            total = tl.dot(seen, tl.load(weight + line[:, None] + channel[None, :]), total)
        else:
            line = (channel * (SIDE * SIDE) + tap) * IN + first
            share = tl.load(weight + line[:, None] + part[None, :])
            total = tl.dot(seen, tl.trans(share), total)
    place = pixel.to(tl.int64)[:, None] * OUT + channel[None, :]
    tl.store(made + place, total.to(tl.float16), mask=(pixel < pixels)[:, None])


def turned(tensors: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Tensors of four dimensions times a number: by pixel in half precision, or the way back.

    The way back, to single precision, is one to the usual order.
    """
    found: list[Tensor] = []
    for start in range(0, len(tensors), MANY):
        found += _turned_at_once(tensors[start : start + MANY], dtype, scale)
    return found


def _turned_at_once(tensors: Sequence[Tensor], dtype: torch.dtype, scale: float) -> list[Tensor]:
    halved = dtype == torch.float16
    order = torch.channels_last if halved else torch.contiguous_format
    source = torch.contiguous_format if halved else torch.channels_last
    tensors = [tensor.contiguous(memory_format=source) for tensor in tensors]
    found = [torch.empty_like(tensor, dtype=dtype, memory_format=order) for tensor in tensors]
    rows = [len(tensor) for tensor in tensors] + [0] * (MANY - len(tensors))
    shapes = [(tensor.shape[1], tensor.shape[2] * tensor.shape[3]) for tensor in tensors]
    shapes += [(1, 1)] * (MANY - len(tensors))
    spare = MANY - len(tensors)
    if sum(tensor.numel() for tensor in tensors):
        most = triton.next_power_of_2(max(channels * pixels for channels, pixels in shapes))
        _turn[(sum(rows),)](
            *tensors, *[tensors[0]] * spare, *found, *[found[0]] * spare, scale, *rows[:-1],
            *(number for shape in shapes for number in shape), halved, most,
            num_warps=4 if most <= 1024 else 8,
        )  # fmt: skip
    return found


@triton.jit
def _turn_row(
    source, target, row, scale, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    HALVED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One row of a tensor, written in the order it is to have."""
    numbers: tl.constexpr = CHANNELS * PIXELS
    at = tl.arange(0, MOST)
    if HALVED:
        other = at % CHANNELS * PIXELS + at // CHANNELS
    else:
        other = at % PIXELS * CHANNELS + at // PIXELS
    start = row.to(tl.int64) * numbers
    value = tl.load(source + start + other, mask=at < numbers, other=0.0).to(tl.float32) * scale
    tl.store(target + start + at, value.to(target.dtype.element_ty), mask=at < numbers)


@triton.jit(do_not_specialize=["rows_a", "rows_b", "rows_c"])
def _turn(
    a, b, c, d, to_a, to_b, to_c, to_d, scale, rows_a, rows_b, rows_c,
    CHANNELS_A: tl.constexpr, PIXELS_A: tl.constexpr, CHANNELS_B: tl.constexpr,
    PIXELS_B: tl.constexpr, CHANNELS_C: tl.constexpr, PIXELS_C: tl.constexpr,
    CHANNELS_D: tl.constexpr, PIXELS_D: tl.constexpr, HALVED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A program for each row of up to four tensors."""
    row = tl.program_id(0)
    if row < rows_a:
        _turn_row(a, to_a, row, scale, CHANNELS_A, PIXELS_A, HALVED, MOST)
    elif row < rows_a + rows_b:
        _turn_row(b, to_b, row - rows_a, scale, CHANNELS_B, PIXELS_B, HALVED, MOST)
    elif row < rows_a + rows_b + rows_c:
        _turn_row(c, to_c, row - rows_a - rows_b, scale, CHANNELS_C, PIXELS_C, HALVED, MOST)
    else:
        row = row - rows_a - rows_b - rows_c
        _turn_row(d, to_d, row, scale, CHANNELS_D, PIXELS_D, HALVED, MOST)


def _halves(taps: int) -> tuple[int, int]:
    """Taps of the two products of a patch: powers of two, the second zero where one suffices."""
    if 64 < taps <= MOST_TAPS:
        return 64, 16
    return max(16, int(triton.next_power_of_2(taps))), 0


def padded(x: Tensor, padding: int) -> Tensor:
    """Images in half precision with zeros around them."""
    count, inputs, height, width = x.shape
    high, wide = height + 2 * padding, width + 2 * padding
    found = torch.empty((count, inputs, high, wide), dtype=torch.float16, device=x.device)
    if found.numel():
        _pad[(triton.cdiv(found.numel(), 1024),)](
            x.contiguous(), found, found.numel(), height, width, padding, 1024, num_warps=4
        )
    return found


@triton.jit(do_not_specialize=["count"])
def _pad(
    x, found, count, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Some numbers of padded images."""
    high: tl.constexpr = HEIGHT + 2 * PADDING
    wide: tl.constexpr = WIDTH + 2 * PADDING
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    row, column = at // wide % high - PADDING, at % wide - PADDING
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (at < count)
    place = (at // (high * wide) * HEIGHT + row) * WIDTH + column
    light = tl.load(x + place, mask=inside, other=0.0)
    tl.store(found + at, light.to(tl.float16), mask=at < count)


def first_block(
    images: Tensor, weight: Tensor, bias: Tensor, kept: int, tiles: Tiles = FORWARD
) -> tuple[Tensor, Tensor]:
    """The pooled maps of padded images, by pixel; which of four pixels was the largest, of some."""
    count, inputs, height, width = images.shape
    channels, kernel = weight.shape[0], weight.shape[2]
    high, wide = ((side - kernel + 1) // 2 for side in (height, width))
    made = torch.empty(
        (count, channels, high, wide), dtype=torch.float16, device=images.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    corners = torch.empty((kept, high, wide, channels), dtype=torch.int8, device=images.device)
    pixels = count * high * wide
    group = min(tiles.channels, max(16, int(triton.next_power_of_2(channels))))
    grid = (triton.cdiv(pixels, tiles.pixels * tiles.rounds), triton.cdiv(channels, group))
    if pixels:
        _pool_first[grid](
            images, weight.contiguous(), bias.contiguous(), made, corners, pixels,
            kept * high * wide, channels, inputs, height, width, kernel,
            *_halves(inputs * kernel * kernel), tiles.rounds, tiles.pixels, group,
            num_warps=tiles.warps, num_stages=1, maxnreg=tiles.registers,
        )  # fmt: skip
    return made, corners


def first_slopes(
    told: Tensor, images: Tensor, weight: Tensor, corners: Tensor, tiles: Tiles = BACKWARD
) -> tuple[Tensor, Tensor]:
    """Gradients of the first weights and of their bias, over the gain; summed in a fixed order."""
    inputs, height, width = images.shape[1:]
    channels, kernel = weight.shape[0], weight.shape[2]
    pixels = corners.numel() // channels
    group = min(tiles.channels, max(16, int(triton.next_power_of_2(channels))))
    along = triton.cdiv(pixels, tiles.pixels * tiles.rounds)
    of_weights = torch.empty((along, *weight.shape), device=images.device)
    of_bias = torch.empty((along, channels), device=images.device)
    if pixels:
        _weigh_first[(along, triton.cdiv(channels, group))](
            images, told.contiguous(memory_format=torch.channels_last), corners, of_weights,
            of_bias, 1 / GAIN, pixels, channels, inputs, height, width, kernel,
            *_halves(inputs * kernel * kernel), tiles.rounds, tiles.pixels, group,
            num_warps=tiles.warps, num_stages=1, maxnreg=tiles.registers,
        )  # fmt: skip
    return of_weights.sum(0), of_bias.sum(0)


@triton.jit
def _places(
    pixel, count, tap, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """[pixel, tap] where the first of the four pixels under each pooled one sees what it sees.

    Beyond the last pixel and the last tap it is some other place of the images.
    """
    high: tl.constexpr = (HEIGHT - KERNEL + 1) // 2
    wide: tl.constexpr = (WIDTH - KERNEL + 1) // 2
    pixel = tl.minimum(pixel, count - 1)
    tap = tl.minimum(tap, INPUTS * KERNEL * KERNEL - 1)
    image, row, column = pixel // (high * wide), pixel // wide % high, pixel % wide
    colour, down, right = tap // (KERNEL * KERNEL), tap // KERNEL % KERNEL, tap % KERNEL
    start = (image * (INPUTS * HEIGHT) + row * 2) * WIDTH + column * 2
    shift = (colour * HEIGHT + down) * WIDTH + right
    return start[:, None] + shift[None, :]


@triton.jit
def _first_weights(weight, channel, channels, tap, TAPS: tl.constexpr):
    """[tap, channel] weights in half precision."""
    known = (channel < channels)[:, None] & (tap < TAPS)[None, :]
    found = tl.load(weight + channel[:, None] * TAPS + tap[None, :], mask=known, other=0.0)
    return tl.trans(found.to(tl.float16))


@triton.jit
def _pooled_pixels(turn, count, channel, channels, ROUNDS: tl.constexpr, PIXELS: tl.constexpr):
    """Pixels of a program's turn; where they lie, with their channels, and which there are."""
    pixel = (tl.program_id(0) * ROUNDS + turn) * PIXELS + tl.arange(0, PIXELS)
    at = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    return pixel, at, (channel < channels)[None, :] & (pixel < count)[:, None]


@triton.jit(do_not_specialize=["count", "kept"])
def _pool_first(
    images, weight, bias, made, corners, count, kept, channels, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KERNEL: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, ROUNDS: tl.constexpr, PIXELS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Some pooled pixels, some channels."""
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    taps: tl.constexpr = INPUTS * KERNEL * KERNEL
    tap = tl.arange(0, FIRST)
    weights = _first_weights(weight, channel, channels, tap, taps)
    if REST:
        more = FIRST + tl.arange(0, REST)
        others = _first_weights(weight, channel, channels, more, taps)
    offset = tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]
    for turn in range(ROUNDS):
        pixel, at, fits = _pooled_pixels(turn, count, channel, channels, ROUNDS, PIXELS)
        place = _places(pixel, count, tap, INPUTS, HEIGHT, WIDTH, KERNEL)
        if REST:
            further = _places(pixel, count, more, INPUTS, HEIGHT, WIDTH, KERNEL)
        best = tl.full([PIXELS, GROUP], float("-inf"), tl.float32)
        largest = tl.zeros([PIXELS, GROUP], tl.int8)
        for corner in range(4):
            light = images + (corner // 2 * WIDTH + corner % 2)
            value = tl.dot(tl.load(light + place), weights)
            if REST:
                value = tl.dot(tl.load(light + further), others, value)
            better = (value > best) | (value != value)  # what is not a number stays so
            largest = tl.where(better, corner, largest).to(tl.int8)
            best = tl.where(better, value, best)
        best += offset
        tl.store(made + at, tl.maximum(best, 0.0, NAN).to(tl.float16), mask=fits)
        fits = fits & (pixel < kept)[:, None]
        tl.store(corners + at, tl.where(best <= 0, DEAD, largest).to(tl.int8), mask=fits)


@triton.jit(do_not_specialize=["count"])
def _weigh_first(
    images, grad, corners, of_weights, of_bias, scale, count, channels, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, KERNEL: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, ROUNDS: tl.constexpr, PIXELS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels' gradients from some pooled pixels: the largest below each hears of it."""
    channel = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    taps: tl.constexpr = INPUTS * KERNEL * KERNEL
    tap = tl.arange(0, FIRST)
    found = tl.zeros([GROUP, FIRST], tl.float32)
    if REST:
        more = FIRST + tl.arange(0, REST)
        others = tl.zeros([GROUP, REST], tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for turn in range(ROUNDS):
        pixel, at, fits = _pooled_pixels(turn, count, channel, channels, ROUNDS, PIXELS)
        largest = tl.load(corners + at, mask=fits, other=DEAD)
        told = tl.load(grad + at, mask=fits, other=0.0)
        told = tl.where(largest < DEAD, told, 0.0).to(tl.float16)
        total += tl.sum(told.to(tl.float32), 0)
        place = _places(pixel, count, tap, INPUTS, HEIGHT, WIDTH, KERNEL)
        if REST:
            further = _places(pixel, count, more, INPUTS, HEIGHT, WIDTH, KERNEL)
        for corner in range(4):
            mine = tl.trans(tl.where(largest == corner, told, 0.0).to(tl.float16))
            light = images + (corner // 2 * WIDTH + corner % 2)
            found = tl.dot(mine, tl.load(light + place), found)
            if REST:
                others = tl.dot(mine, tl.load(light + further), others)
    known = channel < channels
    start = (tl.program_id(0) * channels + channel).to(tl.int64)[:, None] * taps
    fits = known[:, None] & (tap < taps)[None, :]
    tl.store(of_weights + start + tap[None, :], found * scale, mask=fits)
    if REST:
        fits = known[:, None] & (more < taps)[None, :]
        tl.store(of_weights + start + more[None, :], others * scale, mask=fits)
    tl.store(of_bias + tl.program_id(0) * channels + channel, total * scale, mask=known)
