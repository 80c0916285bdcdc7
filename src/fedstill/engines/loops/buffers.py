"""Tensors that stay where they are, over which steps are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.core.torch_internals import copy_each
from fedstill.engines.loops.graphs import Unrecordable


class Buffers:
    """Places for the tensors of a batch; batches whose tensors have equal shapes share them."""

    def __init__(self) -> None:
        self.known: dict[Any, list[Tensor]] = {}

    @property
    def places(self) -> list[Tensor]:
        """All of them, where the next batch is wanted."""
        return [place for places in self.known.values() for place in places]

    def holding(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The places for such tensors, with these in them."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self.known:
            copy_all(self.known[key], tensors)
        else:
            self.known[key] = [tensor.clone() for tensor in tensors]
        return self.known[key]


def check_recordable(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Refuse a step that reads what is not where it is recorded."""
    if any(tensor.device != device for tensor in tensors):
        raise Unrecordable("a number on the host would be recorded as a constant")


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put values into the places, but those that are there, those of a kind in a few launches.

    Different types together, or gaps in one of them, would cost a launch for every tensor. A value
    that lies in another's place is read before that is written.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    pairs = [pair for pair in zip(places, values, strict=True) if not _is_there(*pair)]
    written = {place.data_ptr() for place, _ in pairs}
    for place, value in pairs:
        read = value.clone() if value.data_ptr() in written else value
        dense = place.is_contiguous() and read.is_contiguous()
        alike = kinds.setdefault((place.dtype, read.dtype, dense), ([], []))
        alike[0].append(place)
        alike[1].append(read)
    for mine, theirs in kinds.values():
        copy_each(mine, theirs)


def _is_there(place: Tensor, value: Tensor) -> bool:
    return place.data_ptr() == value.data_ptr() and place.stride() == value.stride()
