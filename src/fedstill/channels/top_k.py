"""TopK: the largest entries and where they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from fedstill.channels.coded import Parts, fitting
from fedstill.channels.tensors import TensorChannel
from fedstill.core.ranges import Range
from fedstill.core.records import Direction

NARROW = 2**15  # entries of a tensor whose places fit into sixteen bits


@dataclass(frozen=True, kw_only=True)
class TopK(TensorChannel):
    """The entries of largest size, values and places; the others count as zero.

    Weights are coded as their difference from those that the client has heard, and what was left
    out is added to the next difference: error feedback, as in Stich, Cordonnier, Jaggi. Sparsified
    SGD with Memory. NeurIPS 2018, Algorithm 1, and Karimireddy, Rebjock, Stich, Jaggi. Error
    Feedback Fixes SignSGD and other Gradient Compression Schemes. ICML 2019, Algorithm 2. What the
    server sends has no such common start, so by default it travels whole.
    """

    directions: tuple[Direction, ...] = ("up",)
    of_change: bool = True
    feedback: bool = True
    share: Annotated[float, Range(0, 1, open_low=True)] = 0.1  # of a tensor's entries

    def encode(self, tensor: Tensor, rng: Generator) -> Parts:
        flat = tensor.flatten()
        largest = flat.abs().topk(self._count(len(flat)), sorted=False).indices
        places = largest.sort().values
        kind = torch.int16 if len(flat) <= NARROW else torch.int32
        return {"values": flat[places], "places": places.to(kind)}

    def decode(self, parts: Parts, shape: tuple[int, ...]) -> Tensor:
        entries = math.prod(shape)
        sent = [self._count(entries)]
        values, places = fitting(parts, values=sent, places=sent)
        whole, places = values.new_zeros(entries), places.long()
        # On a GPU a place outside would end the process rather than be refused.
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(whole):
            raise IndexError(f"a place is not among the {len(whole)} entries")
        return whole.index_put((places,), values)

    def worth(self, tensor: Tensor) -> bool:
        width = 2 if tensor.numel() <= NARROW else 4
        return self._count(tensor.numel()) * (tensor.element_size() + width) < tensor.nbytes

    def _count(self, entries: int) -> int:
        return math.ceil(self.share * entries)
