"""Loops stacked as one: tensors along a first axis, on a GPU replayed from recordings."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedstill.core import pulse, trees
from fedstill.core.data import Batches
from fedstill.core.errors import ProtocolError
from fedstill.core.gpu import sent, wanted
from fedstill.core.loop import Descent, Loop, overwriting
from fedstill.core.stacked_layers import as_one
from fedstill.engines.allocator import room_made
from fedstill.engines.engine import autograd_gradient, functional_gradient
from fedstill.engines.loops.buffers import check_recordable, copy_all
from fedstill.engines.loops.compiled import Compiler
from fedstill.engines.loops.graphs import Capture, Replay
from fedstill.engines.loops.recorded import WORTHWHILE, worthwhile

CONVOLUTIONS = 8  # shapes of them in a network, at most, for which kernels are compiled


class Stack:
    """Stackable loops, longest first, as one; those that are done leave."""

    def __init__(
        self, loops: Sequence[Loop[Any]], recorder: StackRecorder | None = None,
        compiler: Compiler | None = None,
    ):  # fmt: skip
        self.loops = loops
        self.compiler = compiler if compiler and compiler.takes(loops[0]) else None
        self.plans = [loop.batches for loop in loops]
        plan = self.plans[0]
        together = plan.together if isinstance(plan, Batches) else Batches.together
        self.gather = together(self.plans)
        carries = trees.columns([loop.carry for loop in loops])
        self.recorder = recorder if worthwhile(loops[0]) else None
        lay_out = stacked if self.recorder is None else side_by_side  # recordings copy it anyway
        self.carry = [lay_out(rows) for rows in carries]
        rows = trees.columns([dict(loop.given) for loop in loops])
        self.given = [shared_or_stacked(row) for row in rows]
        self.done: list[list[Tensor]] = []  # carries of finished loops, shortest first
        self.total = torch.zeros(len(loops), device=self.carry[0].device)
        self.step = 0
        self.recording: StackRecording | None = None

    def run(self) -> list[tuple[Any, Tensor | None]]:
        """For each loop its carry and its mean loss (None when it had no batches)."""
        lengths = [len(plan) for plan in self.plans]
        active_at = still_there(lengths)
        alike = Counter(active_at)
        if self.recorder is not None:
            self.recording = self.recorder.known(self.loops[0], self.carry, self.given, self.total)
            self.carry, self.given = self.recording.carry, self.recording.given
            self.total = self.recording.total
        for step, active in enumerate(pulse.counted(active_at, "iteration")):
            room_made()
            self.step = step
            self._dismiss(active)
            with wanted(self.recording.places if self.recording else []):
                gathered = self.gather(active, step)
            for places, batch in gathered:
                everyone = places == list(range(active))
                whole = everyone and active == len(self.loops)
                compiler = self.compiler if whole else None
                if self.recording and everyone and alike[active] >= WORTHWHILE:
                    self.recording.replay(self.loops[0], active, batch, compiler)
                else:
                    self._advance(places, active, batch, compiler)
        self._dismiss(0)
        carries = self.done[::-1]
        steps = torch.tensor(lengths, dtype=self.total.dtype).clamp(min=1)
        means = (self.total / sent(steps, self.total.device)).unbind()
        return [
            (trees.with_tensors(loop.carry, carries[i]), means[i] if lengths[i] else None)
            for i, loop in enumerate(self.loops)
        ]

    def culprit(self) -> tuple[int, Exception] | None:
        """Which loop fails alone at the step where the stack failed, and how; None if none does."""
        gradient = functional_gradient if _stacks(self.loops[0]) else autograd_gradient
        for place in range(len(self.carry[0])):
            loop = self.loops[place]
            carry = trees.with_tensors(loop.carry, [tensor[place] for tensor in self.carry])
            try:
                loop.body(carry, loop.given, loop.batches[self.step], gradient)
            except Exception as error:
                return place, error
        return None

    def _dismiss(self, active: int) -> None:
        """Set aside the carries of loops that have ended."""
        present = len(self.loops) - len(self.done)
        if active < present:
            rows = [tensor[active:present].clone().unbind() for tensor in self.carry]
            self.done += reversed([list(carry) for carry in zip(*rows, strict=True)])
            self.carry = [tensor[:active] for tensor in self.carry]

    def _advance(
        self, places: list[int], active: int, batch: Any, compiler: Compiler | None
    ) -> None:
        """One step of the loops at `places`; the others keep their carry."""
        rows = sent(torch.tensor(places), self.total.device)
        everyone = places == list(range(active))
        carry = self.carry if everyone else [tensor[rows] for tensor in self.carry]
        given = [(tensor if dim is None else tensor[rows], dim) for tensor, dim in self.given]
        try:
            moved, losses = stacked_step(self.loops[0], carry, given, batch, compiler)
        except RuntimeError as error:
            shared = any(dim is None for _, dim in self.given)
            if not (shared and "doesn't match the broadcast shape" in str(error)):
                raise
            # A GRU or RNN on the host writes a stack into what it makes of shared weights alone.
            count = len(self.loops)
            self.given = [
                (tensor if dim == 0 else side_by_side([tensor] * count), 0)
                for tensor, dim in self.given
            ]
            self._advance(places, active, batch, compiler)
            return
        self.total.index_add_(0, rows, losses.float())
        if not everyone:
            pairs = zip(self.carry, moved, strict=True)
            moved = [old.index_copy(0, rows, new) for old, new in pairs]
        if self.recording:  # its memory is where the next step looks
            copy_all(self.carry, moved)
        else:
            self.carry = moved


def still_there(lengths: Sequence[int]) -> list[int]:
    """For each step how many loops are not done yet; lengths come longest first."""
    active = [len(lengths)] * (lengths[-1] if lengths else 0)
    for at in range(len(lengths) - 1, 0, -1):
        active += [at] * (lengths[at - 1] - lengths[at])
    return active


def stacked_step(
    first: Loop[Any], carry: list[Tensor], given: list[tuple[Tensor, int | None]], batch: Any,
    compiler: Compiler | None = None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """One step of stackable loops: their carries and losses, each along a first axis."""

    def one(
        carry: list[Tensor], given: list[Tensor], leaves: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        moved, loss = first.body(
            trees.with_tensors(first.carry, carry),
            trees.with_tensors(dict(first.given), given),
            trees.with_tensors(batch, leaves),
            functional_gradient,
        )
        ordered = trees.map_tensors(lambda _, tensor: tensor, first.carry, moved)
        return trees.tensors(ordered), loss

    values, dims = [tensor for tensor, _ in given], [dim for _, dim in given]
    parts = [carry, values, trees.tensors(batch)]

    def flat(*leaves: Tensor) -> list[Tensor]:
        try:
            moved, losses = torch.func.vmap(one, in_dims=(0, dims, 0))(
                *trees.with_tensors(parts, leaves)
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            refused = str(error).startswith("vmap:") or not _stacks(first)
            raise (_unstackable(error) if refused else error) from error
        return [*moved, losses]

    found = None
    leaves = trees.tensors(parts)
    if compiler is not None:
        shapes = (trees.shape((first.carry, dict(first.given), batch, parts)), tuple(dims))
        found = compiler.call(first.body, shapes, flat, leaves)
    if found is None:  # a compiler has kernels of its own
        with as_one() if leaves[0].is_cuda and few_convolutions(carry) else nullcontext():
            found = flat(*leaves)
    *moved, losses = found
    return moved, losses


def few_convolutions(carry: Sequence[Tensor]) -> bool:
    """Whether kernels of ours are made for the convolutions of a stack.

    Triton compiles them for every shape of weights, seconds each, which a deep network would wait
    for longer than it gains.
    """
    return len({tensor.shape for tensor in carry if tensor.dim() == 5}) <= CONVOLUTIONS


def _stacks(loop: Loop[Any]) -> bool:
    """Whether torch has computed a stack of the network that a loop trains, where it was tried."""
    return not isinstance(loop.body, Descent) or loop.body.model.stackable


def _unstackable(error: RuntimeError) -> ProtocolError:
    if "random operation" in str(error):
        return ProtocolError(
            "clients cannot be trained as one stack, since their network or loss draws random "
            "numbers; draw them by purpose where batches are made, e.g. node.rng('order')"
        )
    return ProtocolError(
        "clients cannot be trained as one stack, since their network or loss asks for the value of "
        "a tensor (an `if` or a loop that rests on it, `.item()`, the lengths of packed "
        "sequences); write it with torch.where, or "
        'choose engine = "in_process" (on a GPU with record = false)'
    )


class StackRecording:
    """One kind of stack: memory that stays where it is, and a replay for each number of loops."""

    def __init__(
        self, carry: list[Tensor], given: list[tuple[Tensor, int | None]], total: Tensor,
        record: Capture,
    ):  # fmt: skip
        self.carry = [tensor.clone(memory_format=torch.contiguous_format) for tensor in carry]
        self.given = [(tensor.clone(), dim) for tensor, dim in given]
        self.total = torch.zeros_like(total)
        self.record = record
        self.replays: dict[Any, tuple[list[Tensor], Replay]] = {}

    @property
    def places(self) -> list[Tensor]:
        """Where batches are wanted."""
        return [place for buffers, _ in self.replays.values() for place in buffers]

    def begin(self, carry: list[Tensor], given: list[tuple[Tensor, int | None]]) -> None:
        """Take over where a stack starts."""
        copy_all(self.carry, carry)
        copy_all([mine for mine, _ in self.given], [theirs for theirs, _ in given])
        self.total.zero_()

    def replay(self, first: Loop[Any], active: int, batch: Any, compiler: Compiler | None) -> None:
        """One step of the loops that are still there, all with batches of one shape."""
        tensors, shape = trees.tensors(batch), (active, compiler is None, trees.shape(batch))
        if shape not in self.replays:
            self.replays[shape] = self._recorded(first, active, batch, compiler)
        buffers, replay = self.replays[shape]
        copy_all(buffers, tensors)
        replay()

    def _recorded(
        self, first: Loop[Any], active: int, batch: Any, compiler: Compiler | None
    ) -> tuple[list[Tensor], Replay]:
        buffers = [tensor.clone() for tensor in trees.tensors(batch)]
        check_recordable(buffers, self.total.device)
        resting = trees.with_tensors(batch, buffers)
        carry, total = [tensor[:active] for tensor in self.carry], self.total[:active]
        given = [(t if dim is None else t[:active], dim) for t, dim in self.given]
        before = [tensor.clone() for tensor in (*carry, total)]

        def step() -> None:
            with overwriting(first.body) if compiler is None else nullcontext():
                moved, losses = stacked_step(first, carry, given, resting, compiler)
            copy_all(carry, moved)
            total.add_(losses)

        replay = self.record(step)
        copy_all([*carry, total], before)
        return buffers, replay


class StackRecorder:
    """Keeps what was recorded of the latest kinds of stack."""

    def __init__(self, record: Capture, keep: int = 8):
        self.record = record
        self.keep = keep
        self.kinds: OrderedDict[Any, StackRecording] = OrderedDict()

    def known(
        self, first: Loop[Any], carry: list[Tensor], given: list[tuple[Tensor, int | None]],
        total: Tensor,
    ) -> StackRecording:  # fmt: skip
        """The recording of such stacks, ready to start."""
        shapes = [trees.shape(carry), trees.shape([t for t, _ in given]), [d for _, d in given]]
        key = (first.body, trees.shape(first.carry), repr(shapes))
        if key not in self.kinds:
            while len(self.kinds) >= self.keep:
                self.kinds.popitem(last=False)
            self.kinds[key] = StackRecording(carry, given, total, self.record)
        self.kinds.move_to_end(key)
        self.kinds[key].begin(carry, given)
        return self.kinds[key]


def begin_as_one(loop: Loop[Any], other: Loop[Any]) -> bool:
    """Whether loops do the same from the very same tensors, as clients with a common start do.

    That is soon seen, and says without a look at shapes that they can be stacked.
    """
    carries = trees.same(loop.carry, other.carry) and trees.same(loop.given, other.given)
    return carries and bool(loop.body == other.body)


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Tensors along a new first axis; a common start is laid out at once."""
    if all(row is rows[0] for row in rows):
        return side_by_side(rows).clone()
    return torch.stack(list(rows))


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Tensors along a new first axis, to be read; a common start stays one."""
    if all(row is rows[0] for row in rows):
        return rows[0].expand(len(rows), *rows[0].shape)
    return torch.stack(list(rows))


def shared_or_stacked(rows: Sequence[Tensor]) -> tuple[Tensor, int | None]:
    """The very same tensor of all loops stays one; others are stacked."""
    if all(row is rows[0] for row in rows):
        return rows[0], None
    return torch.stack(list(rows)), 0
