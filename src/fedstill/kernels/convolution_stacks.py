"""GPU kernels of convolutions of many networks at once, by pixel; only where Triton is.

[network, image, height, width, channel], each network with weights of its own. What a kernel sees
of the pixels is never laid out in memory, as it is where products of matrices are asked for.
Factors are rounded to the nearest of ten bits; left to themselves products would cut the other bits
off, by which sums lose some 0.07 %. Sums are in single precision, of a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS, TAPS = 128, 128, 32  # of a program at a time, at most
WEIGHTS = 64  # outputs and taps of a program that weighs, at most
PROGRAMS = 512  # that keep a GPU busy
NUMBERS = 1024  # that a program rounds
HALF = tl.constexpr(0x1000)  # of the last bit that is kept
KEPT = tl.constexpr(-0x2000)  # sign, exponent and ten bits
Pair = tuple[int, int]


def convolved(x: Tensor, weight: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """[network, image, height, width, output] of `weight` [network, output, row · column · input].

    `x` is [network, image, height, width, input]; both lie without gaps.
    """
    height, width = (
        (side + 2 * pad - taps) // step + 1
        for side, taps, step, pad in zip(x.shape[2:4], kernel, stride, padding, strict=True)
    )
    made = x.new_empty(*x.shape[:2], height, width, weight.shape[1])
    _launch(x, weight, made, kernel, stride, padding, back=False)
    return made


def to_images(
    grad: Tensor, weight: Tensor, shape: Pair, kernel: Pair, stride: Pair, padding: Pair
) -> Tensor:
    """What `grad` of the above says to images of this height and width.

    `weight` is [network, input, row · column · output].
    """
    made = grad.new_empty(*grad.shape[:2], *shape, weight.shape[1])
    _launch(grad, weight, made, kernel, stride, padding, back=True)
    return made


def to_weights(grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """[network, output, row · column · input], what `grad` says to weights."""
    networks, images, high, wide, outputs = grad.shape
    taps, pixels = kernel[0] * kernel[1] * x.shape[4], images * high * wide
    across, along = _size(outputs, WEIGHTS), _size(taps, WEIGHTS)
    grid = (triton.cdiv(taps, along), triton.cdiv(outputs, across))
    parts = triton.cdiv(PROGRAMS, grid[0] * grid[1] * networks)
    parts = max(1, min(parts, pixels // (8 * TAPS)))  # each with some work
    each = triton.cdiv(triton.cdiv(pixels, parts), TAPS) * TAPS
    made = grad.new_empty(parts, networks, outputs, taps)
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        # Four warps would multiply as a group, which needs both factors turned round in memory.
        _weigh[(*grid, networks * parts)](
            grad, x, made, pixels, each, networks, outputs, taps, *x.shape[2:5], high, wide,
            kernel[1], *stride, *padding, TAPS, across, along, num_warps=2, num_stages=3,
        )  # fmt: skip
    return made[0] if parts == 1 else made.sum(0)


def _launch(
    seen: Tensor, weight: Tensor, made: Tensor, kernel: Pair, stride: Pair, padding: Pair, *,
    back: bool,
) -> None:  # fmt: skip
    networks, images, high, wide, outputs = made.shape
    pixels, group = images * high * wide, _size(outputs, CHANNELS)
    rounded = torch.empty_like(weight)
    with torch.cuda.device_of(made):  # type: ignore[no-untyped-call]
        _round[(triton.cdiv(weight.numel(), NUMBERS),)](weight, rounded, weight.numel(), NUMBERS)
        _convolve[(triton.cdiv(pixels, PIXELS), triton.cdiv(outputs, group), networks)](
            seen, rounded, made, pixels, outputs, weight.shape[2], *seen.shape[1:5], high, wide,
            kernel[1], *stride, *padding, back, PIXELS, group, TAPS, num_warps=4, num_stages=3,
        )  # fmt: skip


def _size(count: int, most: int) -> int:
    """A power of two, at least as many as a product of matrices needs."""
    return min(most, max(16, int(triton.next_power_of_2(count))))


@triton.jit
def _ten_bits(values):
    """The nearest numbers of ten bits; what is not a number stays so."""
    bits = (values.to(tl.int32, bitcast=True) + HALF) & KEPT
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def _round(numbers, rounded, count, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    values = tl.load(numbers + place, mask=place < count, other=0.0)
    tl.store(rounded + place, _ten_bits(values), mask=place < count)


@triton.jit
def _place(
    image, row, column, channel, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Where an entry of some images lies, and whether it lies inside of them."""
    inside = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    return ((image * HEIGHT + row) * WIDTH + column) * CHANNELS + channel, inside


@triton.jit(do_not_specialize=["pixels"])
def _convolve(
    seen, weight, made, pixels, outputs, TAPS: tl.constexpr, images, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr,
    BESIDE: tl.constexpr, BACK: tl.constexpr, SOME_PIXELS: tl.constexpr,
    SOME_OUTPUTS: tl.constexpr, SOME_TAPS: tl.constexpr,
):  # fmt: skip
    """Some pixels and channels of what one network makes.

    `weight` is rounded already. `BACK` goes from what came out to what was seen: taps the other
    way round.
    """
    network = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * SOME_PIXELS + tl.arange(0, SOME_PIXELS)
    output = tl.program_id(1) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    image, row, column = pixel // (HIGH * WIDE), pixel // WIDE % HIGH, pixel % WIDE
    seen += network * images * (HEIGHT * WIDTH * INPUTS)
    weight += network * outputs * TAPS
    total = tl.zeros([SOME_PIXELS, SOME_OUTPUTS], tl.float32)
    for first in range(0, TAPS, SOME_TAPS):
        tap = first + tl.arange(0, SOME_TAPS)
        tap_row, tap_column = tap // (COLUMNS * INPUTS), tap // INPUTS % COLUMNS
        there = (pixel < pixels)[:, None] & (tap < TAPS)[None, :]
        if BACK:
            up = row[:, None] + ABOVE - tap_row[None, :]
            side = column[:, None] + BESIDE - tap_column[None, :]
            there = there & (up % DOWN == 0) & (side % RIGHT == 0) & (up >= 0) & (side >= 0)
            up, side = up // DOWN, side // RIGHT
        else:
            up = row[:, None] * DOWN - ABOVE + tap_row[None, :]
            side = column[:, None] * RIGHT - BESIDE + tap_column[None, :]
        at, inside = _place(
            image[:, None], up, side, (tap % INPUTS)[None, :], there, HEIGHT, WIDTH, INPUTS
        )
        values = tl.load(seen + at, mask=inside, other=0.0)
        known = (output < outputs)[None, :] & (tap < TAPS)[:, None]
        factors = tl.load(weight + output[None, :] * TAPS + tap[:, None], mask=known, other=0.0)
        total = tl.dot(_ten_bits(values), factors, total, input_precision="tf32")
    place = (network * pixels + pixel)[:, None] * outputs + output[None, :]
    tl.store(made + place, total, mask=(pixel < pixels)[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["pixels", "each"])
def _weigh(
    grad, seen, made, pixels, each, networks, outputs, TAPS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr,
    BESIDE: tl.constexpr, SOME_PIXELS: tl.constexpr, SOME_OUTPUTS: tl.constexpr,
    SOME_TAPS: tl.constexpr,
):  # fmt: skip
    """Some weights of one network: what came out by what was seen, over `each` of its pixels."""
    part, network = tl.program_id(2) // networks, (tl.program_id(2) % networks).to(tl.int64)
    tap = tl.program_id(0) * SOME_TAPS + tl.arange(0, SOME_TAPS)
    output = tl.program_id(1) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    tap_row, tap_column = tap // (COLUMNS * INPUTS), tap // INPUTS % COLUMNS
    grad += network * pixels * outputs
    seen += network * (pixels // (HIGH * WIDE)) * (HEIGHT * WIDTH * INPUTS)
    total = tl.zeros([SOME_OUTPUTS, SOME_TAPS], tl.float32)
    for first in range(part * each, tl.minimum((part + 1) * each, pixels), SOME_PIXELS):
        pixel = first + tl.arange(0, SOME_PIXELS)
        image, row, column = pixel // (HIGH * WIDE), pixel // WIDE % HIGH, pixel % WIDE
        at, inside = _place(
            image[:, None], row[:, None] * DOWN - ABOVE + tap_row[None, :],
            column[:, None] * RIGHT - BESIDE + tap_column[None, :], (tap % INPUTS)[None, :],
            (pixel < pixels)[:, None] & (tap < TAPS)[None, :], HEIGHT, WIDTH, INPUTS,
        )  # fmt: skip
        values = tl.load(seen + at, mask=inside, other=0.0)
        known = (output < outputs)[:, None] & (pixel < pixels)[None, :]
        told = tl.load(grad + pixel[None, :] * outputs + output[:, None], mask=known, other=0.0)
        total = tl.dot(_ten_bits(told), _ten_bits(values), total, input_precision="tf32")
    place = ((part * networks + network) * outputs + output)[:, None] * TAPS + tap[None, :]
    tl.store(made + place, total, mask=(output < outputs)[:, None] & (tap < TAPS)[None, :])
