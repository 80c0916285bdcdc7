"""Loops as recorded CUDA graphs: the launches of a step are recorded once and replayed; no nodes.

A step of a small network is hundreds of launches, which take the host longer than the GPU. They are
the same for every batch of one shape, since objectives draw nothing and do not branch on values. So
each shape is recorded once, over buffers that stay where they are, and a step is: copy the batch
into its buffers, replay. Where batches of several steps can be made at once, so many steps are one
recording; so are the steps of several loops that are alike to the number, one loop's behind the
other's. Results are those of the plain loop; a matrix product of tensors that lie elsewhere in
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
                ended: list[Ended] | None = end.value
                return None if ended is None else ended[0]
            except torch.OutOfMemoryError:  # recordings hold memory; a plain step may fit
                self.known.clear()
                self.notes.append("no memory to record a loop; it was run step by step")
                return None

    def playing(self, *loops: Loop[Any]) -> Generator[None, None, list[Ended] | None]:
        """As `run`, with a rest after every step; or of several loops that are alike.

        These have equal bodies, carries and givens of one shape, and batches of the same shapes.
        """
        first = loops[0]
        body = first.body
        if not worthwhile(first) or body in self.refused:
            return None
        key = (body, trees.shape(first.carry), trees.shape(dict(first.given)), len(loops))
        if key not in self.known:
            while len(self.known) >= self.keep:
                self.known.popitem(last=False)
            self.known[key] = _Recording(loops)
        self.known.move_to_end(key)
        try:
            return (
                yield from self.known[key].playing(loops, Steps(first, self.compiler), self.record)
            )
        except Unrecordable as error:
            del self.known[key]
            self.refused.add(body)
            self.notes.append(f"a loop is not recorded: {error}")
            return None


class _Recording:
    """One kind of loop, once or in a row: its buffers, and a replay for each shape of batch."""

    def __init__(self, loops: Sequence[Loop[Any]]):
        self.carries = [trees.map_tensors(torch.clone, loop.carry) for loop in loops]
        self.givens = [trees.map_tensors(torch.clone, dict(loop.given)) for loop in loops]
        self.moving, self.resting = trees.tensors(self.carries), trees.tensors(self.givens)
        self.totals = torch.zeros(len(loops), device=self.moving[0].device)
        self.buffers: dict[Any, list[Tensor]] = {}  # for batches whose tensors have equal shapes
        self.replays: dict[Any, tuple[list[Tensor], Replay]] = {}

    def playing(
        self, loops: Sequence[Loop[Any]], steps: Steps, record: Capture
    ) -> Generator[None, None, list[Ended]]:
        """The loops as a whole, step by step."""
        copy_all(self.moving, trees.tensors([loop.carry for loop in loops]))
        copy_all(self.resting, trees.tensors([dict(loop.given) for loop in loops]))
        self.totals.zero_()
        done, length = 0, len(loops[0].batches)
        supplies = [Ahead(loop.batches) for loop in loops]
        while done < length:
            batches = [supply.at(done) for supply in supplies]
            if batches[0] is not None:
                self._replay(batches, TOGETHER, steps, record)
                done += TOGETHER
            else:
                self._replay([loop.batches[done] for loop in loops], None, steps, record)
                done += 1
            yield
        kept = [torch.empty_like(tensor) for tensor in self.moving]
        copy_all(kept, self.moving)
        means = (self.totals / length).unbind()
        return list(zip(trees.with_tensors(self.carries, kept), means, strict=True))

    def _replay(
        self, batches: list[Any], together: int | None, steps: Steps, record: Capture
    ) -> None:
        """One step of each loop; or some, whose batches are stacked."""
        tensors = trees.tensors(batches)
        shape = (together, trees.shape(batches[0]), steps.first)
        if shape not in self.replays:
            self.replays[shape] = self._recorded(batches, tensors, together, steps, record)
        buffers, replay = self.replays[shape]
        copy_all(buffers, tensors)
        replay()

    def _recorded(
        self, batches: list[Any], tensors: list[Tensor], together: int | None, steps: Steps,
        record: Capture,
    ) -> tuple[list[Tensor], Replay]:  # fmt: skip
        """A replay; what recording does to the buffers is undone."""
        everything = [*tensors, *self.moving, *self.resting]
        if any(tensor.device != self.totals.device for tensor in everything):
            raise Unrecordable("a number on the host would be recorded as a constant")
        buffers = self.buffers.setdefault(
            tuple((tensor.shape, tensor.dtype) for tensor in tensors),
            [tensor.clone() for tensor in tensors],
        )
        copy_all(buffers, tensors)
        seen = trees.with_tensors(batches, buffers)
        changing = [*self.moving, self.totals]
        before = [tensor.clone() for tensor in changing]

        def step() -> None:
            for place, (carry, given) in enumerate(zip(self.carries, self.givens, strict=True)):
                for at in [None] if together is None else range(together):
                    batch = seen[place]
                    one = batch if at is None else trees.map_tensors(itemgetter(at), batch)
                    moved, loss = steps(carry, given, one)
                    ordered = trees.map_tensors(lambda _, tensor: tensor, carry, moved)
                    copy_all(trees.tensors(carry), trees.tensors(ordered))
                    self.totals[place].add_(loss)

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
