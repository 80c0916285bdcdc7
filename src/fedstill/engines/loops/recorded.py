"""Loops as recorded CUDA graphs: the launches of a step are recorded once and replayed; no nodes.

A step of a small network is hundreds of launches, which take the host longer than the GPU. They are
the same for every batch of one shape, since objectives draw nothing and do not branch on values. So
each shape is recorded once, over buffers that stay where they are, and a step is: copy the batch
into its buffers, replay. Where batches of several steps can be made at once, so many steps are one
recording. What steps need of their batches whatever the value is (`Descent.prepare`) is recorded
apart where there are two lines to run in, and made while the steps before are. Results are those of
the plain loop; a matrix product of tensors that lie elsewhere in memory may round differently.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import nullcontext
from operator import itemgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.gpu import wanted
from fedstill.core.loop import Descent, Loop, overwriting
from fedstill.engines.loops.ahead import TOGETHER, Ahead
from fedstill.engines.loops.buffers import Buffers, check_recordable, copy_all
from fedstill.engines.loops.compiled import Compiler, Steps
from fedstill.engines.loops.graphs import Capture, Lines, Replay, Unrecordable
from fedstill.engines.loops.prepared import DEPTH, Preparing

Ended = tuple[Any, Tensor]  # the carry at the end of a loop, and the mean loss

WORTHWHILE = 4  # steps; recording costs about three, once for many rounds


def worthwhile(loop: Loop[Any]) -> bool:
    """Whether a loop may be recorded, and its body comes back often enough."""
    return getattr(loop.body, "recordable", False) and loop.steps >= WORTHWHILE


def prepares(body: Any) -> TypeGuard[Descent]:
    """Whether steps begin with what can be made while the steps before are."""
    return isinstance(body, Descent) and body.prepares


class Recorder:
    """Runs loops by replaying their steps; keeps what it recorded of the latest kinds of loop."""

    def __init__(
        self, record: Capture, keep: int = 32, notes: list[str] | None = None,
        compiler: Compiler | None = None, lines: Lines | None = None,
    ):  # fmt: skip
        self.record = record
        self.lines = lines
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
        recording, steps = self.known[key], Steps(loop, self.compiler)
        try:
            if self.lines is not None and steps.compiler is None and prepares(body):
                return (yield from recording.in_two_lines(loop, body, steps, self.lines))
            return (yield from recording.playing(loop, steps, self.record))
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
        self.buffers = Buffers()
        self.replays: dict[Any, tuple[list[Tensor], Replay]] = {}
        self.preparing: Preparing | None = None

    def playing(
        self, loop: Loop[Any], steps: Steps, record: Capture
    ) -> Generator[None, None, Ended]:
        """The whole loop, step by step."""
        self._begin(loop)
        done, length, ahead = 0, len(loop.batches), Ahead(loop.batches)
        while done < length:
            batch = ahead.at(done)
            if batch is not None:
                self._replay(batch, TOGETHER, steps, record)
                done += TOGETHER
            else:
                with wanted(self.buffers.places):
                    batch = loop.batches[done]
                self._replay(batch, None, steps, record)
                done += 1
            yield
        return self._ended(length)

    def in_two_lines(
        self, loop: Loop[Any], body: Descent, steps: Steps, lines: Lines
    ) -> Generator[None, None, Ended]:
        """The whole loop; what steps need is made in one line, the steps are in another.

        What one line has made in memory of its own, the other may read as long as it is kept: until
        the first line waits for the step that read it.
        """
        self._begin(loop)
        if self.preparing is None:
            self.preparing = Preparing(body, self.given, lines.early, self.total.device)
        lines.begin()
        kept: deque[tuple[Any, Any]] = deque()
        try:
            for step in range(len(loop.batches)):
                with lines.making():
                    if len(kept) == DEPTH:
                        lines.wait(kept[0][1])
                        kept.popleft()
                    with wanted(self.preparing.buffers.places):
                        batch = loop.batches[step]
                    prepared = self.preparing.made(batch)
                    ready = lines.mark()
                with lines.stepping():
                    lines.wait(ready)
                    self._replay(prepared, None, steps, lines.steps)
                    kept.append((prepared, lines.mark()))
                yield
        finally:
            lines.end()
        return self._ended(len(loop.batches))

    def _begin(self, loop: Loop[Any]) -> None:
        copy_all(self.moving, trees.tensors(loop.carry))
        copy_all(self.resting, trees.tensors(dict(loop.given)))
        self.total.zero_()

    def _ended(self, length: int) -> Ended:
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
        check_recordable([*tensors, *self.moving, *self.resting], self.total.device)
        buffers = self.buffers.holding(tensors)
        resting = trees.with_tensors(batch, buffers)
        changing = [*self.moving, self.total]
        before = [tensor.clone() for tensor in changing]

        def step() -> None:
            for at in [None] if together is None else range(together):
                one = resting if at is None else trees.map_tensors(itemgetter(at), resting)
                with nullcontext() if steps.compiler else overwriting(steps.body):
                    moved, loss = steps(self.carry, self.given, one)
                ordered = trees.map_tensors(lambda _, tensor: tensor, self.carry, moved)
                copy_all(self.moving, trees.tensors(ordered))
                self.total.add_(loss)

        replay = record(step)
        copy_all(changing, before)
        return buffers, replay
