"""Nodes meet at each awaited loop and loops alike run as one; no method knowledge.

Loops with the same body and the same shapes can be stacked. A client whose loop is shorter leaves
the stack when it is done; batches of another shape run in a stack of their own. Examples are never
padded, so the result is that of `in_process` up to the order of floating-point sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fedstill.core import trees
from fedstill.core.errors import StepError
from fedstill.core.loop import Loop, Several
from fedstill.core.method import Step
from fedstill.core.node import Cache, Inbox, Node
from fedstill.core.records import Direction, NodeId
from fedstill.engines.engine import Absences, Outcome
from fedstill.engines.loops.graphs import CudaGraphs, Unrecordable
from fedstill.engines.loops.memory_estimate import loops_that_fit
from fedstill.engines.loops.stacks import Stack, StackRecorder, begin_as_one
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.experiment import Experiment

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution


@dataclass(eq=False)
class Acting:
    """A node in the middle of a step."""

    node: Node[Any]
    inbox: Inbox[Any]
    coroutine: Any = None
    answer: Any = None
    waiting: Loop[Any] | None = None
    beside: list[Acting] = field(default_factory=list)  # of several loops, one for each
    one_of_several: bool = False
    message: Any = None

    @property
    def waits(self) -> bool:
        return self.waiting is not None or bool(self.beside)


class Batched(InProcess):
    """Plays all nodes to their next `await`, then runs their loops together."""

    name = "batched"

    def __init__(
        self,
        experiment: Experiment,
        execution: Execution,
        *,
        cache: Cache | None = None,
        absences: Absences | None = None,
    ):
        super().__init__(experiment, execution, cache=cache, absences=absences)
        self.stack_at_most = execution.stack_at_most
        self.company: tuple[NodeId, ...] = ()  # who plays the step, whose loops are one stack
        self._holdings: str | None = None  # how much each of them holds, once it was asked for
        self.fitting: dict[Any, int] = {}  # loops in a stack, by kind
        recording = self.recorder is not None
        self.stacks = StackRecorder(CudaGraphs(self.device)) if recording else None

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        def played() -> dict[NodeId, Outcome]:
            outcomes, actors = self.begun(step, round, inboxes)
            self.to_the_end(step, round, actors)
            outcomes |= self.left_behind(step, actors, toward)
            return {id: outcomes[id] for id in inboxes}

        return played() if self.cache is None else self.cache.all_or_nobody(played)

    def begun(
        self, step: Step, round: int, inboxes: Mapping[NodeId, Inbox[Any]]
    ) -> tuple[dict[NodeId, Outcome], list[Acting]]:
        """Who is absent, and the others, played to the first loop that they await."""
        self.company, self._holdings = tuple(inboxes), None
        outcomes: dict[NodeId, Outcome] = {}
        actors: list[Acting] = []
        for id, inbox in inboxes.items():
            gone = self._absence(step, round, id)
            if gone:
                outcomes[id] = Outcome(absent=gone)
                continue
            actor = Acting(self.node(id, round, step.name, step.again), inbox)
            actors.append(actor)
            self._guarded(step, round, actor, lambda actor=actor: self._enter(step, actor))
            if len(inboxes) > 1:
                self._guarded(step, round, actor, lambda actor=actor: self._awaits(actor))
        return outcomes, actors

    def computed(self) -> str:
        """Sums of a stack are rounded by who else is in it."""
        if self._holdings is None:  # each of thousands asks for it
            sizes = [(id, len(self.population.party(id).data)) for id in self.company]
            self._holdings = str(sizes)
        return f"{super().computed()}, {self.stack_at_most} at most of {self._holdings}"

    def to_the_end(self, step: Step, round: int, actors: Sequence[Acting]) -> None:
        """Run loop after loop of nodes, which may be another engine's, until no one waits."""
        while waiting := [actor for actor in actors if actor.waits]:
            self._run_loops(step, round, [a for actor in waiting for a in actor.beside or [actor]])
            for actor in waiting:
                if actor.beside:
                    actor.answer = [each.answer for each in actor.beside]
                self._guarded(step, round, actor, lambda actor=actor: self._advance(actor))
                if len(waiting) > 1:
                    self._guarded(step, round, actor, lambda actor=actor: self._awaits(actor))

    def left_behind(
        self, step: Step, actors: Sequence[Acting], toward: Direction | None
    ) -> dict[NodeId, Outcome]:
        """What the step left on each of this engine's nodes."""
        ended = [(actor.node, actor.inbox, actor.message) for actor in actors]
        made = self._all_committed(ended, step, toward)
        return {actor.node.id: outcome for actor, outcome in zip(actors, made, strict=True)}

    def _awaits(self, actor: Acting) -> None:
        """One of several nodes came to its next loop, if it has one; others are on their way."""

    def _run_loops(self, step: Step, round: int, waiting: list[Acting]) -> None:
        """Run the loops that nodes wait for, and put down each one's answer.

        On a GPU the loops that one node awaits side by side are recorded and run in turn: they move
        images, whose stacks took longer than that (docs/benchmarks.md, matching).
        """
        in_turn = [a for a in waiting if a.one_of_several and self.recorder is not None]
        self._run_stacks(step, round, self._stackable([a for a in waiting if a not in in_turn]))
        for actor in in_turn:
            self._guarded(step, round, actor, lambda actor=actor: self._run_alone(actor))

    def _run_stacks(self, step: Step, round: int, queue: list[list[Acting]]) -> None:
        """Stacks that memory should suffice for; if it does not, each is run in two.

        Later ones are no larger.
        """
        while queue:
            stackable = queue.pop(0)
            size = self._fitting(stackable)
            if len(stackable) > size:
                queue[:0] = [stackable[i : i + size] for i in range(0, len(stackable), size)]
                continue
            try:
                self._run_together(step, round, stackable)
            except torch.OutOfMemoryError:
                self.stack_at_most = half = len(stackable) // 2
                self.notes.append(f"memory did not suffice; from now on stacks of {half} at most")
                queue[:0] = [stackable[:half], stackable[half:]]

    def _guarded(self, step: Step, round: int, actor: Acting, work: Any) -> None:
        try:
            work()
        except Exception as error:
            raise failed(step, round, actor.node.id, error) from error

    def _enter(self, step: Step, actor: Acting) -> None:
        acting = step(actor.node, actor.inbox)
        if inspect.iscoroutine(acting):
            actor.coroutine = acting
            self._advance(actor)
        else:
            actor.message = acting

    def _advance(self, actor: Acting) -> None:
        """Go on to the next awaited loop, or to the end."""
        node, actor.waiting, actor.beside = actor.node, None, []
        try:
            asked = actor.coroutine.send(actor.answer)
        except StopIteration as end:
            actor.message = end.value
            return
        if not isinstance(asked, Several):
            actor.waiting = self._noted(asked, node)
            return
        loops = [self._noted(loop, node) for loop in asked.loops]
        actor.beside = [
            Acting(node, actor.inbox, waiting=loop, one_of_several=True) for loop in loops
        ]

    def _stackable(self, waiting: Sequence[Acting]) -> list[list[Acting]]:
        """Loops that can be stacked, no more at once than `stack_at_most`."""
        groups: dict[Any, list[Acting]] = {}
        alone: list[list[Acting]] = []
        known: dict[int, Any] = {}
        latest: tuple[Loop[Any], list[Acting]] | None = None
        for actor in waiting:
            loop = actor.waiting
            assert loop is not None
            if not getattr(loop.body, "stackable", True):
                alone.append([actor])
                continue
            if latest is not None and begin_as_one(loop, latest[0]):
                latest[1].append(actor)
                continue
            given = tuple((name, trees.shape(item, known)) for name, item in loop.given.items())
            key = (loop.body, trees.shape(loop.carry, known), given)
            group = groups.setdefault(key, [])
            group.append(actor)
            latest = (loop, group)
        size = self.stack_at_most
        stacks = [
            stackable[i : i + size]
            for stackable in groups.values()
            for i in range(0, len(stackable), size)
        ]
        return stacks + alone

    def _fitting(self, stackable: list[Acting]) -> int:
        """How many of these may be one stack: all, unless memory is scarce when they first meet."""
        if len(stackable) == 1:
            return 1
        longest = max(
            (actor.waiting for actor in stackable if actor.waiting),
            key=lambda loop: len(loop.batches),
        )
        kind = (
            longest.body,
            trees.shape(longest.carry),
            trees.shape(trees.tensors(dict(longest.given))),
        )
        if kind not in self.fitting:
            fit = loops_that_fit(longest, self.device)
            self.fitting[kind] = self.stack_at_most if fit is None else fit
            if self.fitting[kind] < min(len(stackable), self.stack_at_most):
                self.notes.append(f"stacks of {fit} at most, by the memory that is free")
        return min(self.fitting[kind], self.stack_at_most)

    def _run_together(self, step: Step, round: int, stackable: list[Acting]) -> None:
        loops = [actor.waiting for actor in stackable if actor.waiting is not None]
        if len(loops) == 1:
            self._guarded(step, round, stackable[0], lambda: self._run_alone(stackable[0]))
            return
        by_length = sorted(range(len(loops)), key=lambda i: -len(loops[i].batches))
        stack: Stack | None = None
        try:
            in_order = [loops[i] for i in by_length]
            try:
                stack = Stack(in_order, self.stacks, self.compiler)
                ended = stack.run()
            except Unrecordable as error:
                self.stacks = None
                self.notes.append(f"stacks are not recorded: {error}")
                stack = Stack(in_order, compiler=self.compiler)
                ended = stack.run()
        except torch.OutOfMemoryError:
            if self.stacks:
                self.stacks.kinds.clear()  # recordings hold memory
            raise
        except Exception as error:
            place, cause = (stack and stack.culprit()) or (None, error)
            guilty = stackable if place is None else [stackable[by_length[place]]]
            names = ", ".join(actor.node.id for actor in guilty)
            raise failed(step, round, names, cause) from cause
        for place, (carry, loss) in enumerate(ended):
            actor = stackable[by_length[place]]
            actor.answer = carry
            if loss is not None and loops[by_length[place]].tells_loss:
                actor.node.log(loss=loss)

    def _run_alone(self, actor: Acting) -> None:
        assert actor.waiting is not None
        actor.answer = self._run(actor.waiting, actor.node)


def failed(step: Step, round: int, node: NodeId, cause: BaseException) -> StepError:
    return StepError(type(step.method).__name__, step.name, node, round, cause)
