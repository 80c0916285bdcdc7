"""Nodes meet at each awaited loop and kin run as one: stacking and masks; no method knowledge.

Kin are loops with the same body and the same shapes. A client whose loop is shorter leaves the
stack when it is done; batches of another shape run in a stack of their own. Examples are never
padded, so the result is that of `in_process` up to the order of floating-point sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.data import Batches
from fedstill.core.errors import StepError
from fedstill.core.loop import Loop
from fedstill.core.method import Step
from fedstill.core.node import Inbox, Node
from fedstill.core.records import NodeId
from fedstill.engines.engine import Outcome, functional_gradient
from fedstill.engines.in_process import InProcess


@dataclass
class _Acting:
    """A node in the middle of a step."""

    node: Node[Any]
    coroutine: Any = None
    answer: Any = None
    waiting: Loop[Any] | None = None
    message: Any = None


class Batched(InProcess):
    """Plays all nodes to their next `await`, then runs their loops together."""

    name = "batched"

    def __init__(self, *args: Any, stack_at_most: int = 256, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stack_at_most = stack_at_most

    def play(
        self, step: Step, round: int, inboxes: Mapping[NodeId, Inbox[Any]]
    ) -> dict[NodeId, Outcome]:
        outcomes: dict[NodeId, Outcome] = {}
        actors: list[_Acting] = []
        for id, inbox in inboxes.items():
            gone = self._absence(step, round, id)
            if gone:
                outcomes[id] = Outcome(absent=gone)
                continue
            actor = _Acting(self.node(id, round, step.name))
            actors.append(actor)
            self._guarded(
                step, round, actor, lambda actor=actor, inbox=inbox: self._enter(step, actor, inbox)
            )
        while waiting := [actor for actor in actors if actor.waiting is not None]:
            for kin in self._kin(waiting):
                self._run_together(step, round, kin)
            for actor in waiting:
                self._guarded(step, round, actor, lambda actor=actor: self._advance(actor))
        made = {actor.node.id: self._committed(actor.node, actor.message) for actor in actors}
        return {id: outcomes.get(id) or made[id] for id in inboxes}

    def _guarded(self, step: Step, round: int, actor: _Acting, work: Any) -> None:
        try:
            work()
        except Exception as error:
            raise _failed(step, round, actor.node.id, error) from error

    def _enter(self, step: Step, actor: _Acting, inbox: Inbox[Any]) -> None:
        acting = step(actor.node, inbox)
        if inspect.iscoroutine(acting):
            actor.coroutine = acting
            self._advance(actor)
        else:
            actor.message = acting

    def _advance(self, actor: _Acting) -> None:
        """Go on to the next awaited loop, or to the end."""
        try:
            actor.waiting = actor.coroutine.send(actor.answer)
        except StopIteration as end:
            actor.waiting, actor.message = None, end.value

    def _kin(self, waiting: Sequence[_Acting]) -> list[list[_Acting]]:
        """Loops that can be stacked, no more at once than `stack_at_most`."""
        groups: dict[Any, list[_Acting]] = {}
        for actor in waiting:
            loop = actor.waiting
            assert loop is not None
            key = (loop.body, trees.shape(loop.carry), trees.shape(dict(loop.given)))
            groups.setdefault(key, []).append(actor)
        size = self.stack_at_most
        return [kin[i : i + size] for kin in groups.values() for i in range(0, len(kin), size)]

    def _run_together(self, step: Step, round: int, kin: list[_Acting]) -> None:
        loops = [actor.waiting for actor in kin if actor.waiting is not None]
        if len(loops) == 1:
            self._guarded(step, round, kin[0], lambda: self._run_alone(kin[0], loops[0]))
            return
        by_length = sorted(range(len(loops)), key=lambda i: -len(loops[i].batches))
        stack: _Stack | None = None
        try:
            stack = _Stack([loops[i] for i in by_length])
            ended = stack.run()
        except Exception as error:
            place, cause = (stack and stack.culprit()) or (None, error)
            guilty = kin if place is None else [kin[by_length[place]]]
            names = ", ".join(actor.node.id for actor in guilty)
            raise _failed(step, round, names, cause) from cause
        for place, (carry, loss) in enumerate(ended):
            actor = kin[by_length[place]]
            actor.answer = carry
            if loss is not None:
                actor.node.log(loss=loss)

    def _run_alone(self, actor: _Acting, loop: Loop[Any]) -> None:
        actor.answer = self._run(loop, actor.node)


def _failed(step: Step, round: int, node: NodeId, cause: BaseException) -> StepError:
    return StepError(type(step.method).__name__, step.name, node, round, cause)


class _Stack:
    """Kin loops, longest first, as one; those that are done leave."""

    def __init__(self, loops: Sequence[Loop[Any]]):
        self.loops = loops
        self.plans = [loop.batches for loop in loops]
        plan = self.plans[0]
        self.gather = plan.together if isinstance(plan, Batches) else Batches.together
        self.carry = trees.tensors(trees.stack([loop.carry for loop in loops]))
        rows = zip(*(trees.tensors(dict(loop.given)) for loop in loops), strict=True)
        self.given = [_shared_or_stacked(row) for row in rows]
        self.done: list[list[Tensor]] = []  # carries of finished loops, shortest first
        self.total = torch.zeros(len(loops), device=self.carry[0].device)
        self.step = 0

    def run(self) -> list[tuple[Any, Tensor | None]]:
        """For each loop its carry and its mean loss (None when it had no batches)."""
        lengths = [len(plan) for plan in self.plans]
        for step in range(lengths[0]):
            self.step = step
            active = sum(length > step for length in lengths)
            self._dismiss(active)
            for places, batch in self.gather(self.plans[:active], step):
                self._advance(places, active, batch)
        self._dismiss(0)
        carries = self.done[::-1]
        return [
            (
                trees.with_tensors(loop.carry, carries[i]),
                self.total[i] / lengths[i] if lengths[i] else None,
            )
            for i, loop in enumerate(self.loops)
        ]

    def culprit(self) -> tuple[int, Exception] | None:
        """Which loop fails alone at the step where the stack failed, and how; None if none does."""
        for place in range(len(self.carry[0])):
            loop = self.loops[place]
            carry = trees.with_tensors(loop.carry, [tensor[place] for tensor in self.carry])
            try:
                loop.body(carry, loop.given, loop.batches[self.step], functional_gradient)
            except Exception as error:
                return place, error
        return None

    def _dismiss(self, active: int) -> None:
        """Set aside the carries of loops that have ended."""
        present = len(self.loops) - len(self.done)
        for i in reversed(range(active, present)):
            self.done.append([tensor[i].clone() for tensor in self.carry])
        if active < present:
            self.carry = [tensor[:active] for tensor in self.carry]

    def _advance(self, places: list[int], active: int, batch: Any) -> None:
        """One step of the loops at `places`; the others keep their carry."""
        rows = torch.tensor(places, device=self.total.device)
        everyone = places == list(range(active))
        carry = self.carry if everyone else [tensor[rows] for tensor in self.carry]
        given = [tensor if dim is None else tensor[rows] for tensor, dim in self.given]
        dims = [dim for _, dim in self.given]
        first = self.loops[0]

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

        moved, losses = torch.func.vmap(one, in_dims=(0, dims, 0))(
            carry, given, trees.tensors(batch)
        )
        self.total.index_add_(0, rows, losses.float())
        self.carry = (
            moved
            if everyone
            else [old.index_copy(0, rows, new) for old, new in zip(self.carry, moved, strict=True)]
        )


def _shared_or_stacked(rows: Sequence[Tensor]) -> tuple[Tensor, int | None]:
    """The very same tensor of all kin stays one; others are stacked."""
    if all(row is rows[0] for row in rows):
        return rows[0], None
    return torch.stack(list(rows)), 0
