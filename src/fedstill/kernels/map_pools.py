"""GPU kernels of max-pooling over windows of 2x2, for maps row by row; only where Triton is.

The framework keeps for each number that comes out where it was, in eight bytes, and for gradients
first writes zeros. Here that is one byte, and gradients are written once. Values are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024  # of a program
Pair = tuple[int, int]


def pooled(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window of [..., height, width], and which of the four it is."""
    maps = maps.contiguous()
    *outer, height, width = maps.shape
    made = maps.new_empty(*outer, height // 2, width // 2)
    which = torch.empty(made.shape, dtype=torch.int8, device=maps.device)
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        _pool[(triton.cdiv(made.numel(), NUMBERS),)](
            maps, made, which, made.numel(), *made.shape[-2:], height, width, NUMBERS
        )
    return made, which


def spread(grad: Tensor, which: Tensor, size: Pair) -> Tensor:
    """What `grad` of the largest says to maps of this height and width."""
    grad, which = grad.contiguous(), which.contiguous()
    made = grad.new_empty(*grad.shape[:-2], *size)
    with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
        _spread[(triton.cdiv(made.numel(), NUMBERS),)](
            grad, which, made, made.numel(), *grad.shape[-2:], *size, NUMBERS
        )
    return made


@triton.jit
def _own(count, HIGH: tl.constexpr, WIDE: tl.constexpr, NUMBERS: tl.constexpr):
    """A program's numbers among maps of a height and width, which there are, and where they lie."""
    number = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    return number, number < count, number // (HIGH * WIDE), number // WIDE % HIGH, number % WIDE


@triton.jit(do_not_specialize=["count"])
def _pool(
    maps, made, which, count, HIGH: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    number, here, image, row, column = _own(count, HIGH, WIDE, NUMBERS)
    maps += (image * HEIGHT + row * 2) * WIDTH + column * 2
    best, place = tl.load(maps, mask=here, other=0.0), tl.zeros([NUMBERS], tl.int8)
    for other in tl.static_range(1, 4):
        value = tl.load(maps + (other // 2 * WIDTH + other % 2), mask=here, other=0.0)
        better = (value > best) | (value != value)
        best, place = tl.where(better, value, best), tl.where(better, other, place).to(tl.int8)
    tl.store(made + number, best, mask=here)
    tl.store(which + number, place, mask=here)


@triton.jit(do_not_specialize=["count"])
def _spread(
    grad, which, made, count, HIGH: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    number, here, image, row, column = _own(count, HEIGHT, WIDTH, NUMBERS)
    inside = here & (row // 2 < HIGH) & (column // 2 < WIDE)
    at = (image * HIGH + row // 2) * WIDE + column // 2
    told = tl.load(grad + at, mask=inside, other=0.0)
    place = tl.load(which + at, mask=inside, other=-1)
    tl.store(made + number, tl.where(place == row % 2 * 2 + column % 2, told, 0.0), mask=here)
