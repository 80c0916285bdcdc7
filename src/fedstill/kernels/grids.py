"""How large a launch may be: along all axes but the first a GPU takes few programs, and places are
counted in 32 bits where these are enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PLACES = 2**16 - 1  # along the second axis, and along the third; the first has 2**31 - 1
COUNTED = 2**30  # numbers whose places have room in 32 bits, with those of a frame around maps


def fitting(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one length, for a launch with an axis along it; longer ones for several."""
    if len(tensors[0]) <= PLACES:
        yield tensors
    else:
        yield from zip(*(torch.split(tensor, PLACES) for tensor in tensors), strict=True)


def long(*stacks: Tensor) -> bool:
    """Whether a member of a stack lies over so many numbers of memory that places need 64 bits.

    With such places the loops of a kernel take longer.
    """
    return any(_reach(stack.shape[1:], stack.stride()[1:]) > COUNTED for stack in stacks)


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """From the first of a tensor's numbers in memory to the last, others between them included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
