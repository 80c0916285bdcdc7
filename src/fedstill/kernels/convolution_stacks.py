"""GPU kernels of convolutions of many networks at once; only where Triton is.

[network, image, channel, height, width], each network with weights of its own. What a kernel sees
of the pixels is never laid out in memory, as it is where products of matrices are asked for.
Factors are rounded to the nearest of ten bits; left to themselves products would cut the other bits
off, by which sums lose some 0.07 %. Sums are in single precision, of a fixed order. Results lie in
memory as those of the framework do, since other layers count on that.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.kernels import grids

PIXELS, CHANNELS, TAPS = 128, 128, 32  # of a program at a time, at most
WEIGHTS = 64  # outputs and taps of a program that weighs, at most
PROGRAMS = 512  # that keep a GPU busy
NUMBERS = 1024  # that a program rounds
BY_PIXEL = 16  # channels from which maps are first turned round: all of a pixel side by side
TURNED = (64, 32)  # pixels and channels that a program turns round
HALF = tl.constexpr(0x1000)  # of the last bit that is kept
KEPT = tl.constexpr(-0x2000)  # sign, exponent and ten bits
Pair = tuple[int, int]


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> Tensor:
    """[network, image, output, height, width] of `weight` [network, output, input, row, column].

    `x` is [network, image, input, height, width], `bias` [network, output].
    """
    height, width = (
        (side + 2 * pad - taps) // step + 1
        for side, taps, step, pad in zip(
            x.shape[3:], weight.shape[3:], stride, padding, strict=True
        )
    )
    made = x.new_empty(*x.shape[:2], weight.shape[1], height, width)
    _launch(x, weight, bias, made, stride, padding, back=False)
    return made


def to_images(grad: Tensor, weight: Tensor, shape: Pair, stride: Pair, padding: Pair) -> Tensor:
    """What `grad` of the above says to images of this height and width."""
    made = grad.new_empty(*grad.shape[:2], weight.shape[2], *shape)
    _launch(grad, weight.transpose(1, 2), None, made, stride, padding, back=True)
    return made


def to_weights(
    grad: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair
) -> tuple[Tensor, Tensor]:
    """What `grad` says to weights [network, output, input, row, column] and bias."""
    networks, images, outputs, high, wide = grad.shape
    inputs, pixels = x.shape[2], images * high * wide
    taps = kernel[0] * kernel[1] * inputs
    grad, (x, ready) = _flat(grad), _turned(x)
    even = math.gcd(pixels, 16)
    across, along = _size(outputs, WEIGHTS), _size(taps + 1, WEIGHTS)
    grid = (triton.cdiv(taps + 1, along), triton.cdiv(outputs, across))
    parts = triton.cdiv(PROGRAMS, grid[0] * grid[1] * networks)
    parts = max(1, min(parts, pixels // (8 * TAPS)))  # each with some work
    parts = 1 if networks > grids.PLACES else parts  # networks of one launch are not all of them
    each = triton.cdiv(triton.cdiv(pixels, parts), TAPS)
    made = grad.new_empty(parts, networks, outputs * (taps + 1))
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        # Four warps would multiply as a group, which needs both factors turned round in memory.
        for some in grids.fitting(grad, x, made.transpose(0, 1)):
            count = len(some[0])
            _weigh[(*grid, count * parts)](
                *some, pixels // even, each, count, outputs, grad.stride(0), x.stride(0),
                even, ready, *grad.stride()[1:], *x.stride()[1:], taps, inputs,
                *x.shape[3:], high, wide, *kernel, *stride, *padding, TAPS, across, along,
                num_warps=2, num_stages=3,
            )  # fmt: skip
    total = made[0] if parts == 1 else made.sum(0)
    to_weight, to_bias = total[:, : outputs * taps], total[:, outputs * taps :]
    return to_weight.view(networks, outputs, inputs, *kernel), to_bias


def _launch(
    seen: Tensor, weight: Tensor, bias: Tensor | None, made: Tensor, stride: Pair, padding: Pair, *,
    back: bool,
) -> None:  # fmt: skip
    networks, images, outputs, high, wide = made.shape
    inputs, *kernel = weight.shape[2:]
    pixels, group, taps = images * high * wide, _size(outputs, CHANNELS), weight[0, 0].numel()
    seen, ready = _turned(seen)
    rounded = weight.new_empty(networks, outputs, taps)
    bias = rounded if bias is None else bias.contiguous()
    with torch.cuda.device_of(made):  # type: ignore[no-untyped-call]
        _round[(triton.cdiv(rounded.numel(), NUMBERS),)](
            weight, rounded, rounded.numel(), outputs, *weight.stride(), inputs, *kernel, NUMBERS
        )
        for some in grids.fitting(seen, rounded, bias, made):
            _convolve[(triton.cdiv(pixels, PIXELS), triton.cdiv(outputs, group), len(some[0]))](
                *some, pixels, outputs, seen.stride(0), *seen.stride()[1:], taps, inputs,
                *seen.shape[3:], high, wide, kernel[1], *stride, *padding, back, ready,
                bias is not rounded, PIXELS, group, TAPS, num_warps=4, num_stages=3,
            )  # fmt: skip


def _turned(maps: Tensor) -> tuple[Tensor, bool]:
    """The same maps; of many channels all of a pixel lie side by side, and are rounded already."""
    networks, images, channels, height, width = maps.shape
    pixels = height * width
    grid = (networks * images, triton.cdiv(pixels, TURNED[0]), triton.cdiv(channels, TURNED[1]))
    if channels < BY_PIXEL or grid[1] > grids.PLACES:
        return maps, False
    maps = _flat(maps)
    made = maps.new_empty(networks, images, height, width, channels)
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        _turn[grid](maps, made, images, pixels, channels, *maps.stride(), *TURNED)
    return made.movedim(4, 2), True


def _flat(maps: Tensor) -> Tensor:
    """[network, image, channel, pixel], a copy only where pixels are not at one distance."""
    return maps.flatten(3)


def _size(count: int, most: int) -> int:
    """A power of two, at least as many as a product of matrices needs."""
    return min(most, max(16, int(triton.next_power_of_2(count))))


@triton.jit
def _ten_bits(values):
    """The nearest numbers of ten bits; what is not a number stays so."""
    bits = (values.to(tl.int32, bitcast=True) + HALF) & KEPT
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def _round(
    weight, rounded, count, outputs, network, output, input, row, column, INPUTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Weights rounded, [network, output, row · column · input]; the others are strides."""
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    tap = place // INPUTS
    across = tap // (ROWS * COLUMNS)
    at = across // outputs * network + across % outputs * output + place % INPUTS * input
    at += tap // COLUMNS % ROWS * row + tap % COLUMNS * column
    values = tl.load(weight + at, mask=place < count, other=0.0)
    tl.store(rounded + place, _ten_bits(values), mask=place < count)


@triton.jit
def _turn(
    maps, made, images, pixels, channels, network, image, channel, step, PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some pixels and channels of an image, rounded, channels side by side; `step` to a pixel."""
    which = tl.program_id(0).to(tl.int64)
    across = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    along = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    here = (across < pixels)[None, :] & (along < channels)[:, None]
    maps += which // images * network + which % images * image
    values = tl.load(maps + along[:, None] * channel + across[None, :] * step, mask=here)
    place = which * pixels * channels + across[None, :] * channels + along[:, None]
    tl.store(made + place, _ten_bits(values), mask=here)


@triton.jit
def _seen(
    maps, image, channel, row, column, there, IMAGE: tl.constexpr, CHANNEL: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    EDGES: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Entries of some images, rounded; capital words are strides and sizes.

    `EDGES`: some lie outside, where images are zero. `READY`: they are rounded already.
    """
    if EDGES:
        there = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    at = image * IMAGE + row * ROW + column * COLUMN + channel * CHANNEL
    values = tl.load(maps + at, mask=there, other=0.0)
    return values if READY else _ten_bits(values)


@triton.jit(do_not_specialize=["pixels"])
def _convolve(
    seen, weight, bias, made, pixels, outputs, apart, IMAGE: tl.constexpr, CHANNEL: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TAPS: tl.constexpr, INPUTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr,
    BESIDE: tl.constexpr, BACK: tl.constexpr, READY: tl.constexpr, BIAS: tl.constexpr,
    SOME_PIXELS: tl.constexpr, SOME_OUTPUTS: tl.constexpr, SOME_TAPS: tl.constexpr,
):  # fmt: skip
    """Some pixels and channels of what one network makes; networks' maps lie `apart`.

    `weight` is rounded already. `BACK` goes from what came out to what was seen: taps the other
    way round.
    """
    network = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * SOME_PIXELS + tl.arange(0, SOME_PIXELS)
    output = tl.program_id(1) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    image, row, column = pixel // (HIGH * WIDE), pixel // WIDE % HIGH, pixel % WIDE
    seen += network * apart
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
        values = _seen(
            seen, image[:, None], (tap % INPUTS)[None, :], up, side, there, IMAGE, CHANNEL, ROW,
            COLUMN, HEIGHT, WIDTH, BACK or ABOVE > 0 or BESIDE > 0, READY,
        )  # fmt: skip
        known = (output < outputs)[None, :] & (tap < TAPS)[:, None]
        factors = tl.load(weight + output[None, :] * TAPS + tap[:, None], mask=known, other=0.0)
        total = tl.dot(values, factors, total, input_precision="tf32")
    if BIAS:
        total += tl.load(bias + network * outputs + output, mask=output < outputs)[None, :]
    place = network * pixels * outputs + (image * outputs * (HIGH * WIDE))[:, None]
    place += (pixel % (HIGH * WIDE))[:, None] + output[None, :] * (HIGH * WIDE)
    tl.store(made + place, total, mask=(pixel < pixels)[:, None] & (output < outputs)[None, :])


@triton.jit(do_not_specialize=["groups", "each"])
def _weigh(
    grad, seen, made, groups, each, networks, outputs, grads_apart, apart, EVEN: tl.constexpr,
    READY: tl.constexpr, GRAD_IMAGE: tl.constexpr, GRAD_CHANNEL: tl.constexpr,
    GRAD_PIXEL: tl.constexpr, IMAGE: tl.constexpr, CHANNEL: tl.constexpr, ROW: tl.constexpr,
    COLUMN: tl.constexpr, TAPS: tl.constexpr, INPUTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr,
    BESIDE: tl.constexpr, SOME_PIXELS: tl.constexpr, SOME_OUTPUTS: tl.constexpr,
    SOME_TAPS: tl.constexpr,
):  # fmt: skip
    """Some weights of one network: what came out by what was seen, summed over pixels.

    There are `groups` of `EVEN` pixels; a part has `each` times `SOME_PIXELS` of them. The bias is
    one more tap, which sees a one everywhere.
    """
    pixels, each = groups * EVEN, each * SOME_PIXELS
    part, network = tl.program_id(2) // networks, (tl.program_id(2) % networks).to(tl.int64)
    tap = tl.program_id(0) * SOME_TAPS + tl.arange(0, SOME_TAPS)
    output = tl.program_id(1) * SOME_OUTPUTS + tl.arange(0, SOME_OUTPUTS)
    tap_row, tap_column = tap // (COLUMNS * INPUTS), tap // INPUTS % COLUMNS
    grad += network * grads_apart
    seen += network * apart
    total = tl.zeros([SOME_OUTPUTS, SOME_TAPS], tl.float32)
    for first in range(part * each, tl.minimum((part + 1) * each, pixels), SOME_PIXELS):
        pixel = first + tl.arange(0, SOME_PIXELS)
        image, row, column = pixel // (HIGH * WIDE), pixel // WIDE % HIGH, pixel % WIDE
        values = _seen(
            seen, image[:, None], (tap % INPUTS)[None, :],
            row[:, None] * DOWN - ABOVE + tap_row[None, :],
            column[:, None] * RIGHT - BESIDE + tap_column[None, :],
            (pixel < pixels)[:, None] & (tap < TAPS)[None, :], IMAGE, CHANNEL, ROW, COLUMN,
            HEIGHT, WIDTH, ABOVE > 0 or BESIDE > 0, READY,
        )  # fmt: skip
        values = tl.where((tap == TAPS)[None, :], 1.0, values)
        known = (output < outputs)[:, None] & (pixel < pixels)[None, :]
        place = (image * GRAD_IMAGE + pixel % (HIGH * WIDE) * GRAD_PIXEL)[None, :]
        told = tl.load(grad + place + output[:, None] * GRAD_CHANNEL, mask=known, other=0.0)
        total = tl.dot(_ten_bits(told), values, total, input_precision="tf32")
    made += (part * networks + network) * outputs * (TAPS + 1)
    within = (tap % INPUTS * ROWS + tap_row) * COLUMNS + tap_column
    place = tl.where(
        (tap < TAPS)[None, :],
        output[:, None] * TAPS + within[None, :],
        outputs * TAPS + output[:, None],
    )
    tl.store(made + place, total, mask=(output < outputs)[:, None] & (tap <= TAPS)[None, :])
