"""Loops as recorded CUDA graphs: the launches of a step are recorded once and replayed; no nodes.

A step of a small network is hundreds of launches, which take the host longer than the GPU. They are
the same for every batch of one shape, since objectives draw nothing and do not branch on values. So
each shape is recorded once, over buffers that stay where they are, and a step is: copy the batch
into its buffers, replay. Results are those of the plain loop; a matrix product of tensors that lie
elsewhere in memory may round differently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.loop import Descent, Loop
from fedstill.engines.engine import autograd_gradient

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]

WORTHWHILE = 8  # steps; recording costs a few of them


class Unrecordable(Exception):
    """A step does what a recording cannot hold."""


class Recorder:
    """Runs loops by replaying their steps; keeps what it recorded of the latest kinds of loop."""

    def __init__(self, record: Record, keep: int = 32):
        self.record = record
        self.keep = keep
        self.known: OrderedDict[Any, _Recording] = OrderedDict()
        self.refused: set[Descent] = set()

    def run(self, loop: Loop[Any]) -> tuple[Any, Tensor] | None:
        """The carry at the end and the mean loss; None for a loop that must be run step by step.

        Which loops are replayed depends on the loop alone, so a resumed run does the same.
        """
        body = loop.body
        if not isinstance(body, Descent) or body.privacy is not None or body in self.refused:
            return None
        if len(loop.batches) < WORTHWHILE:
            return None
        key = (body, trees.shape(loop.carry), trees.shape(dict(loop.given)))
        if key not in self.known:
            while len(self.known) >= self.keep:
                self.known.popitem(last=False)
            self.known[key] = _Recording(loop)
        self.known.move_to_end(key)
        try:
            return self.known[key].run(loop, self.record)
        except Unrecordable:
            del self.known[key]
            self.refused.add(body)
            return None


class _Recording:
    """One kind of loop: its buffers, and a replay for each shape of batch."""

    def __init__(self, loop: Loop[Any]):
        self.body = loop.body
        self.carry = trees.map_tensors(torch.clone, loop.carry)
        self.given = trees.map_tensors(torch.clone, dict(loop.given))
        self.total = torch.zeros((), device=trees.tensors(self.carry)[0].device)
        self.buffers: dict[Any, list[Tensor]] = {}  # for batches whose tensors have equal shapes
        self.replays: dict[Any, tuple[list[Tensor], Replay]] = {}

    def run(self, loop: Loop[Any], record: Record) -> tuple[Any, Tensor]:
        """The whole loop."""
        _copy(trees.tensors(self.carry), trees.tensors(loop.carry))
        _copy(trees.tensors(self.given), trees.tensors(dict(loop.given)))
        self.total.zero_()
        for batch in loop.batches:
            tensors, shape = trees.tensors(batch), trees.shape(batch)
            if shape not in self.replays:
                self.replays[shape] = self._recorded(batch, tensors, record)
            buffers, replay = self.replays[shape]
            _copy(buffers, tensors)
            replay()
        return trees.map_tensors(torch.clone, self.carry), self.total / len(loop.batches)

    def _recorded(
        self, batch: Any, tensors: list[Tensor], record: Record
    ) -> tuple[list[Tensor], Replay]:
        """A replay of one step; what recording does to the buffers is undone."""
        everything = [*tensors, *trees.tensors(self.carry), *trees.tensors(self.given)]
        if any(tensor.device != self.total.device for tensor in everything):
            raise Unrecordable("a number on the host would be recorded as a constant")
        buffers = self.buffers.setdefault(
            tuple((tensor.shape, tensor.dtype) for tensor in tensors),
            [tensor.clone() for tensor in tensors],
        )
        _copy(buffers, tensors)
        resting = trees.with_tensors(batch, buffers)
        moving = [*trees.tensors(self.carry), self.total]
        before = [tensor.clone() for tensor in moving]

        def step() -> None:
            moved, loss = self.body(self.carry, self.given, resting, autograd_gradient)
            ordered = trees.map_tensors(lambda _, tensor: tensor, self.carry, moved)
            _copy(trees.tensors(self.carry), trees.tensors(ordered))
            self.total.add_(loss)

        replay = record(step)
        _copy(moving, before)
        return buffers, replay


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put values into the places, all in a few launches."""
    if places:
        torch._foreach_copy_(list(places), list(values))


class CudaGraphs:
    """Records steps as CUDA graphs that share their memory, since one is replayed at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.memory: Any = None
        self.stream: Any = None

    def __call__(self, step: Callable[[], None]) -> Replay:
        with torch.cuda.device(self.device):
            return self._recorded(step)

    def _recorded(self, step: Callable[[], None]) -> Replay:
        if self.stream is None:
            self.memory, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()  # libraries prepare themselves at the first call; a fault shows here
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.memory)
                try:
                    step()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.memory = torch.cuda.graph_pool_handle()  # the other one may be left half-used
            raise Unrecordable(str(error)) from error
        return graph.replay
