"""How many programs a launch has room for: a GPU takes few along all axes but the first."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PLACES = 2**16 - 1  # along the second axis, and along the third; the first has 2**31 - 1


def fitting(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one length, for a launch with an axis along it; longer ones for several."""
    if len(tensors[0]) <= PLACES:
        yield tensors
    else:
        yield from zip(*(torch.split(tensor, PLACES) for tensor in tensors), strict=True)
