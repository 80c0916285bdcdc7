"""Loops as recorded CUDA graphs: the launches of a step are recorded once and replayed; no nodes.

A step of a small network is hundreds of launches, which take the host longer than the GPU. They are
the same for every batch of one shape, since objectives draw nothing and do not branch on values. So
each shape is recorded once, over buffers that stay where they are, and a step is: copy the batch
into its buffers, replay. Where batches of several steps can be made at once, so many steps are one
recording. Results are those of the plain loop; a matrix product of tensors that lie elsewhere in
memory may round differently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.loop import Loop
from fedstill.core.torch_internals import copy_each
from fedstill.engines.loops.ahead import TOGETHER, Ahead
from fedstill.engines.loops.compiled import Compiler, Steps
from fedstill.engines.loops.graphs import Capture, Replay, Unrecordable

Ended = tuple[Any, Tensor]  # the carry at the end of a loop, and the mean loss

WORTHWHILE = 4  # steps; recording costs about three, once for many rounds


def worthwhile(loop: Loop[Any]) -> bool:
    """Whether a loop may be recorded, and its body comes back often enough."""
    return getattr(loop.body, "recordable", False) and loop.steps >= WORTHWHILE


class Recorder:
    """Runs loops by replaying their steps; keeps what it recorded of the latest kinds of loop."""

    def __init__(
        self, record: Capture, keep: int = 32, notes: list[str] | None = None,
        compiler: Compiler | None = None,
    ):  # fmt: skip
        self.record = record
        self.keep = keep
        self.compiler = compiler
        self.notes = [] if notes is None else notes
        self.known: OrderedDict[Any, _Recording] = OrderedDict()
        self.refused: set[Any] = set()  # bodies of loops

    def run(self, loop: Loop[Any]) -> Ended | None:
        """The carry at the end and the mean loss; None for a loop that must be run step by step.

        Which loops are replayed depends on the loop alone, so a resumed run does the same.
        """
        playing = self.playing(loop)
        while True:
            try:
                next(playing)
            except StopIteration as end:
                ended: Ended | None = end.value
                return ended
            except torch.OutOfMemoryError:  # recordings hold memory; a plain step may fit
                self.known.clear()
                self.notes.append("no memory to record a loop; it was run step by step")
                return None

    def playing(self, loop: Loop[Any]) -> Generator[None, None, Ended | None]:
        """As `run`, with a rest after every step."""
        body = loop.body
        if not worthwhile(loop) or body in self.refused:
            return None
        key = (body, trees.shape(loop.carry), trees.shape(dict(loop.given)))
        if key not in self.known:
            while len(self.known) >= self.keep:
                self.known.popitem(last=False)
            self.known[key] = _Recording(loop)
        self.known.move_to_end(key)
        try:
            return (
                yield from self.known[key].playing(loop, Steps(loop, self.compiler), self.record)
            )
        except Unrecordable as error:
            del self.known[key]
            self.refused.add(body)
            self.notes.append(f"a loop is not recorded: {error}")
            return None


class _Recording:
    """One kind of loop: its buffers, and a replay for each shape of batch."""

    def __init__(self, loop: Loop[Any]):
        self.carry = trees.map_tensors(torch.clone, loop.carry)
        self.given = trees.map_tensors(torch.clone, dict(loop.given))
        self.moving, self.resting = trees.tensors(self.carry), trees.tensors(self.given)
        self.total = torch.zeros((), device=self.moving[0].device)
        self.buffers: dict[Any, list[Tensor]] = {}  # for batches whose tensors have equal shapes
        self.replays: dict[Any, tuple[list[Tensor], Replay]] = {}

    def playing(
        self, loop: Loop[Any], steps: Steps, record: Capture
    ) -> Generator[None, None, Ended]:
        """The whole loop, step by step."""
        copy_all(self.moving, trees.tensors(loop.carry))
        copy_all(self.resting, trees.tensors(dict(loop.given)))
        self.total.zero_()
        done, length, ahead = 0, len(loop.batches), Ahead(loop.batches)
        while done < length:
            batch = ahead.at(done)
            if batch is not None:
                self._replay(batch, TOGETHER, steps, record)
                done += TOGETHER
            else:
                self._replay(loop.batches[done], None, steps, record)
                done += 1
            yield
        kept = [torch.empty_like(tensor) for tensor in self.moving]
        copy_all(kept, self.moving)
        return trees.with_tensors(self.carry, kept), self.total / length

    def _replay(self, batch: Any, together: int | None, steps: Steps, record: Capture) -> None:
        """One step; or some, whose batches are stacked."""
        tensors, shape = trees.tensors(batch), (together, trees.shape(batch), steps.first)
        if shape not in self.replays:
            self.replays[shape] = self._recorded(batch, tensors, together, steps, record)
        buffers, replay = self.replays[shape]
        copy_all(buffers, tensors)
        replay()

    def _recorded(
        self, batch: Any, tensors: list[Tensor], together: int | None, steps: Steps, record: Capture
    ) -> tuple[list[Tensor], Replay]:
        """A replay; what recording does to the buffers is undone."""
        everything = [*tensors, *self.moving, *self.resting]
        if any(tensor.device != self.total.device for tensor in everything):
            raise Unrecordable("a number on the host would be recorded as a constant")
        buffers = self.buffers.setdefault(
            tuple((tensor.shape, tensor.dtype) for tensor in tensors),
            [tensor.clone() for tensor in tensors],
        )
        copy_all(buffers, tensors)
        resting = trees.with_tensors(batch, buffers)
        changing = [*self.moving, self.total]
        before = [tensor.clone() for tensor in changing]

        def step() -> None:
            for at in [None] if together is None else range(together):
                one = resting if at is None else trees.map_tensors(itemgetter(at), resting)
                moved, loss = steps(self.carry, self.given, one)
                ordered = trees.map_tensors(lambda _, tensor: tensor, self.carry, moved)
                copy_all(self.moving, trees.tensors(ordered))
                self.total.add_(loss)

        replay = record(step)
        copy_all(changing, before)
        return buffers, replay


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Put values into the places, those of a kind in a few launches.

    Different types together, or gaps in one of them, would cost a launch for every tensor.
    """
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        dense = place.is_contiguous() and value.is_contiguous()
        alike = kinds.setdefault((place.dtype, value.dtype, dense), ([], []))
        alike[0].append(place)
        alike[1].append(value)
    for mine, theirs in kinds.values():
        copy_each(mine, theirs)
