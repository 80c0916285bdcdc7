"""What the steps of a loop need whatever their value, recorded apart from the steps; no steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.loop import Descent, Given, Prepared
from fedstill.engines.loops.buffers import Buffers, check_recordable, copy_all
from fedstill.engines.loops.graphs import Capture, Replay

DEPTH = 4  # steps for which something is prepared and that have not been made


@dataclass(frozen=True, eq=False)
class _Recorded:
    """How batches of one shape are prepared."""

    buffers: list[Tensor]  # for a batch
    found: list[Prepared]  # one, of what the recording leaves and of these buffers
    replay: Replay


class Preparing:
    """Prepares the batches of one kind of loop by replaying how those of a shape were prepared."""

    def __init__(self, body: Descent, given: Given, record: Capture, device: torch.device):
        self.body, self.given, self.record, self.device = body, given, record, device
        self.buffers = Buffers()
        self.known: dict[Any, _Recorded] = {}

    def made(self, batch: Any) -> Prepared:
        """What a step needs of its batch: tensors that were made of it, and others as they are."""
        tensors, shape = trees.tensors(batch), trees.shape(batch)
        if shape not in self.known:
            self.known[shape] = self._recorded(batch, tensors)
        one = self.known[shape]
        copy_all(one.buffers, tensors)
        one.replay()
        own = {id(buffer): tensor for buffer, tensor in zip(one.buffers, tensors, strict=True)}
        found: Prepared = one.found[0]
        leaves = [own.get(id(leaf), leaf) for leaf in trees.tensors(found)]
        # The next replay writes where this one did, and the next batch where this one is.
        theirs = {id(tensor) for tensor in tensors} - {id(buffer) for buffer in one.buffers}
        kept = [leaf if id(leaf) in theirs else leaf.clone() for leaf in leaves]
        return trees.with_tensors(found, kept)

    def _recorded(self, batch: Any, tensors: list[Tensor]) -> _Recorded:
        check_recordable(tensors, self.device)
        buffers = self.buffers.holding(tensors)
        resting = trees.with_tensors(batch, buffers)
        found: list[Prepared] = []

        def step() -> None:
            found[:] = [self.body.prepared(self.given, resting)]

        replay = self.record(step)
        return _Recorded(buffers, found, replay)
