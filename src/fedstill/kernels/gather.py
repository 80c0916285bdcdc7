"""A GPU kernel that fetches stored examples and normalises them; imported only where Triton is.

The framework's operations would write each batch four times: as bytes, as shares of 255, less the
mean, over the deviation. The numbers here are those of the same operations on a CPU, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core import gpu
from fedstill.kernels import grids

BLOCK = 1024  # pixels of a program


def takes(stored: Tensor) -> bool:
    """Whether there is room in a launch for all pixels of such examples."""
    return stored.shape[1:].numel() <= BLOCK * grids.PLACES


def taken(
    stored: Tensor, rows: Tensor, mean: Tensor, std: Tensor, *, fleeting: bool = False
) -> Tensor:
    """(stored[rows] / 255 - mean) / std of bytes, for a mean and deviation of each channel.

    What is `fleeting` may lie in memory that is written again for the next step.
    """
    shape = stored.shape[1:]
    whole = (*rows.shape, *shape)
    found = gpu.place(whole, stored.device) if fleeting else torch.empty(whole, device=rows.device)
    size = shape.numel()
    programs = (rows.numel(), triton.cdiv(size, BLOCK))
    if found.numel():
        with torch.cuda.device_of(stored):  # type: ignore[no-untyped-call]
            _taken[programs](
                stored.contiguous(), rows.contiguous(), mean.contiguous(), std.contiguous(), found,
                size, size // shape[0], BLOCK,
            )  # fmt: skip
    return found


@triton.jit
def _taken(stored, rows, mean, std, found, size, plane, BLOCK: tl.constexpr):
    """Some pixels of one example."""
    one = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = pixel < size
    start = tl.load(rows + one).to(tl.int64) * size
    light = tl.load(stored + start + pixel, mask=fits, other=0)
    light = tl.div_rn(light.to(tl.float32), 255.0)
    channel = pixel // plane
    level = tl.load(mean + channel, mask=fits, other=0.0)
    spread = tl.load(std + channel, mask=fits, other=1.0)
    tl.store(found + one * size + pixel, tl.div_rn(light - level, spread), mask=fits)
