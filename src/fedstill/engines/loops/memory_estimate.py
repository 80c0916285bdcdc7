"""How much memory a stack takes: a step of a small one is made and measured; no nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from fedstill.core import trees
from fedstill.core.loop import Loop
from fedstill.core.torch_internals import looking_at_results
from fedstill.engines.allocator import memory_left
from fedstill.engines.loops.stacks import stacked_step

TRIED = 2  # loops in the stack that is measured
MARGIN = 1.5  # for what libraries take besides, and gaps


def loops_that_fit(loop: Loop[Any], device: torch.device) -> int | None:
    """How many loops of this kind a stack may hold; None if that is unknown."""
    left = device_memory_left(device)
    each = None if left is None else bytes_a_loop(loop)
    return None if left is None or each is None else max(1, int(left / (MARGIN * max(1, each))))


def bytes_a_loop(loop: Loop[Any]) -> int | None:
    """What a stack takes for each of its loops at the height of a step; None if a step fails."""
    if not len(loop.batches):
        return 0
    batch = loop.batches[0]
    given = trees.tensors(dict(loop.given))
    tally = _Tally()
    try:
        with looking_at_results(tally.add):
            carry, leaves = (
                [torch.stack([tensor] * TRIED) for tensor in trees.tensors(part)]
                for part in (loop.carry, batch)
            )
            resting = trees.with_tensors(batch, leaves)
            stacked_step(loop, carry, [(tensor, None) for tensor in given], resting)
    except Exception:  # which shows again where it can be told whose it is
        return None
    return tally.peak // TRIED + sum(tensor.nbytes for tensor in given)


def device_memory_left(device: torch.device) -> int | None:
    """Bytes that may still be taken where the work is done; None if the system does not tell."""
    if device.type != "cuda":
        return memory_left()
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    # A process that shares a GPU may take a part of it, see runs.worker. Torch asks for a
    # number here.
    index = torch.cuda.current_device() if device.index is None else device.index
    own = int(total * torch.cuda.get_per_process_memory_fraction(index)) - reserved
    return int(min(free, own)) + reserved - torch.cuda.memory_allocated(device)


class _Tally:
    """The bytes of all tensors that are made, as long as they are there."""

    def __init__(self) -> None:
        self.there: dict[Any, int] = {}  # by a weak reference to a storage
        self.now: int = 0
        self.peak: int = 0

    def add(self, results: list[Tensor]) -> None:
        """Count what one operation returned."""
        for tensor in results:
            storage = tensor.untyped_storage()
            key = WeakIdRef(storage, self._freed)
            if key not in self.there:
                self.there[key] = storage.nbytes()
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, key: Any) -> None:
        self.now -= self.there.pop(key)
