"""Loops side by side on one GPU: every stream replays a loop of its own; no arithmetic.

One client's step seldom fills a GPU. Clients may be stacked, which needs loops of equal shapes
and other kernels; or their recorded steps may run beside each other, each on a stream of its own,
whatever their networks and lengths. The results are then those of `in_process`. A loop that is not
for a stack begins while the host still draws what the next client's loop needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fedstill.core import trees
from fedstill.core.data import Plan
from fedstill.core.fetched import fetched
from fedstill.core.loop import Descent, Loop, SeededBatches
from fedstill.core.method import Step
from fedstill.core.node import Cache, Inbox
from fedstill.core.precision import half_asked_for
from fedstill.core.records import NodeId
from fedstill.engines.engine import Absences, Outcome
from fedstill.engines.loops.compiled import Compiler
from fedstill.engines.loops.graphs import CudaGraphs
from fedstill.engines.loops.memory_estimate import device_memory_left
from fedstill.engines.loops.recorded import Ended, Recorder, worthwhile
from fedstill.engines.play.batched import Acting, Batched, failed
from fedstill.federation.experiment import Experiment

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution

STREAMS = 8  # more do not make a GPU do more, and each has memory of its own
FETCHED_SHARE = 16  # of free memory, a part of one in so many for examples fetched at once
FIRST = 64  # steps of a loop that are begun before the next node's; a GPU has work in the meantime
STACK = 8  # so many loops of networks that stack well are a stack
SLIGHT = 2**15  # numbers of a batch, of which a step is slight


@dataclass(frozen=True, eq=False)
class Stream:
    """A place where one loop runs at a time."""

    recorder: Recorder
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext  # what runs inside, runs here
    begin: Callable[[], None] = lambda: None  # wait for what was done outside
    end: Callable[[], None] = lambda: None  # let the outside wait for what was done here


def cuda_stream(device: torch.device, notes: list[str], compiler: Compiler | None) -> Stream:
    """A stream and memory of its own."""
    graphs = CudaGraphs(device)
    stream = graphs.stream
    return Stream(
        Recorder(graphs, notes=notes, compiler=compiler),
        lambda: torch.cuda.stream(stream),
        lambda: stream.wait_stream(torch.cuda.current_stream(device)),
        lambda: torch.cuda.current_stream(device).wait_stream(stream),
    )


Playing = Generator[None, None, Ended | None]


class Failed(Exception):
    """A loop failed: which one, and how."""

    def __init__(self, place: int, cause: Exception):
        super().__init__(str(cause))
        self.place, self.cause = place, cause


class StreamSet:
    """Some streams; fewer when their memory does not suffice."""

    def __init__(
        self, make: Callable[[], Stream], count: int = STREAMS, notes: list[str] | None = None
    ):
        self.make = make
        self.count = count
        self.notes = [] if notes is None else notes
        self.streams: list[Stream] = []
        self.begun: dict[int, tuple[Loop[Any], Playing]] = {}  # by the stream's number

    def begin(self, loop: Loop[Any]) -> None:
        """The first steps of a loop that `run` will be asked for, where a stream is free."""
        number = len(self.begun)
        if number >= self.count:
            return
        try:
            if number == len(self.streams):
                self.streams.append(self.make())
            stream = self.streams[number]
            stream.begin()
            playing = stream.recorder.playing(loop)
            with stream.entered():
                try:
                    for _ in range(FIRST):
                        next(playing)
                except StopIteration as end:
                    playing = _at_its_end(end.value)
        except torch.OutOfMemoryError:
            self._become_fewer()
        else:
            self.begun[number] = (loop, playing)

    def run(self, loops: Sequence[Loop[Any]]) -> list[Ended | None]:
        """How each loop ended; None for one that must be run step by step.

        When memory runs out, the loops that have not ended are begun again in half as many streams;
        a loop that does not fit into one is left to the caller.
        """
        ended: dict[int, Ended | None] = {}
        loops = prepared(loops)
        while self.count and len(ended) < len(loops):
            self.streams += [self.make() for _ in range(self.count - len(self.streams))]
            try:
                self._pass(loops, ended)
            except torch.OutOfMemoryError:
                self._become_fewer()
        return [ended.get(place) for place in range(len(loops))]

    def _become_fewer(self) -> None:
        """Half as many streams; what was begun in them is begun again."""
        self.begun.clear()
        self.streams.clear()
        self.count //= 2
        left = f"{self.count} streams" if self.count else "none: loops run step by step"
        self.notes.append(f"the device's memory did not suffice; from now on {left}")

    def _pass(self, loops: Sequence[Loop[Any]], ended: dict[int, Ended | None]) -> None:
        """Longest loops first; a stream that is free takes the next one."""
        longest = sorted(range(len(loops)), key=lambda place: -len(loops[place].batches))
        waiting = [place for place in longest if place not in ended]
        running = self._going_on(loops)
        waiting = [place for place in waiting if all(place != one for one, _ in running.values())]
        for stream in self.streams:
            stream.begin()
        try:
            while waiting or running:
                for number, stream in enumerate(self.streams):
                    if number not in running:
                        if not waiting:
                            continue
                        place = waiting.pop(0)
                        running[number] = (place, stream.recorder.playing(loops[place]))
                    place, playing = running[number]
                    try:
                        with stream.entered():
                            next(playing)
                    except StopIteration as end:
                        ended[place] = end.value
                        del running[number]
                    except torch.OutOfMemoryError:
                        raise
                    except Exception as error:
                        raise Failed(place, error) from error
        finally:
            for stream in self.streams:
                stream.end()

    def _going_on(self, loops: Sequence[Loop[Any]]) -> dict[int, tuple[int, Playing]]:
        """By the stream's number: the places of loops that were begun, and where they are."""
        places = {id(loop): place for place, loop in enumerate(loops)}
        begun, self.begun = self.begun, {}
        return {
            number: (places[id(loop)], playing)
            for number, (loop, playing) in begun.items()
            if id(loop) in places
        }


def _at_its_end(ended: Ended | None) -> Playing:
    """A loop that has been run, or cannot be: with what it would end."""
    yield from ()
    return ended


def prepared(loops: Sequence[Loop[Any]]) -> list[Loop[Any]]:
    """The same loops, with the examples of all of them fetched at once as far as memory goes."""
    plans = [loop.batches for loop in loops]
    if sum(isinstance(plan, Plan) for plan in plans) < 2:
        return list(loops)
    free = device_memory_left(trees.tensors(loops[0].carry)[0].device) or 0
    found = zip(loops, fetched(plans, free // FETCHED_SHARE), strict=True)
    return [loop if plan is loop.batches else replace(loop, batches=plan) for loop, plan in found]


class Streams(Batched):
    """Plays all nodes to their next `await`, then runs their loops side by side."""

    name = "streams"

    def __init__(
        self,
        experiment: Experiment,
        execution: Execution,
        *,
        cache: Cache | None = None,
        absences: Absences | None = None,
    ):
        super().__init__(experiment, execution, cache=cache, absences=absences)
        self.beside: StreamSet | None = None
        if self.recorder is not None:
            self.beside = StreamSet(
                lambda: cuda_stream(self.device, self.notes, self.compiler),
                execution.streams,
                self.notes,
            )

    def begun(
        self, step: Step, round: int, inboxes: Mapping[NodeId, Inbox[Any]]
    ) -> tuple[dict[NodeId, Outcome], list[Acting]]:
        if self.beside is not None:
            self.beside.begun.clear()  # of a step that failed
        return super().begun(step, round, inboxes)

    def _awaits(self, actor: Acting) -> None:
        """Begin its loops, unless they may be for a stack, while the next node is on its way."""
        for each in actor.beside or [actor]:
            if self.beside is not None and each.waiting is not None and never_stacked(each.waiting):
                self.beside.begin(each.waiting)

    def _run_loops(self, step: Step, round: int, waiting: list[Acting]) -> None:
        """What stacks well in stacks, what can be recorded in streams, the rest as `in_process`."""
        if self.beside is not None:
            stacked = [
                stackable for stackable in self._stackable(waiting) if stacks_well(stackable)
            ]
            done = {id(actor) for stackable in stacked for actor in stackable}
            self._run_stacks(step, round, stacked)
            waiting = [actor for actor in waiting if id(actor) not in done]
        fit: list[Acting] = []
        left: list[Acting] = []
        for actor in waiting:
            recordable = actor.waiting is not None and worthwhile(actor.waiting)
            (fit if self.beside is not None and recordable else left).append(actor)
        if self.beside is not None and (len(fit) > 1 or self.beside.begun):
            left += self._side_by_side(self.beside, step, round, fit)
        else:  # one that has the GPU to itself may branch, see `in_process`
            left += fit
        for actor in left:
            self._guarded(step, round, actor, lambda actor=actor: self._run_alone(actor))

    def _side_by_side(
        self, beside: StreamSet, step: Step, round: int, actors: list[Acting]
    ) -> list[Acting]:
        """Run what can be recorded; the others are returned."""
        loops = [actor.waiting for actor in actors if actor.waiting is not None]
        try:
            ended = beside.run(loops)
        except Failed as error:
            raise failed(step, round, actors[error.place].node.id, error.cause) from error.cause
        left = []
        for actor, end in zip(actors, ended, strict=True):
            if end is None:
                left.append(actor)
                continue
            actor.answer, loss = end
            if actor.waiting is not None and actor.waiting.tells_loss:
                actor.node.log(loss=loss)
        return left


def never_stacked(loop: Loop[Any]) -> bool:
    """Whether a loop is for a stream whatever others come: it moves something else than a network.

    Plans are left out, whose examples are fetched for all loops at once (`prepared`).
    """
    body, plan = loop.body, isinstance(loop.batches, Plan)
    return worthwhile(loop) and isinstance(body, Descent) and not plan and not trains(body, loop)


def trains(body: Descent, loop: Loop[Any]) -> bool:
    """Whether what a loop moves is all of its network."""
    value = loop.carry[0]
    return isinstance(value, dict) and value.keys() == body.model.initial().keys()


def stacks_well(stackable: Sequence[Acting]) -> bool:
    """Whether these loops train enough networks of a kind that is faster as a stack."""
    loop = stackable[0].waiting
    if loop is None or not isinstance(loop.body, Descent):
        return False
    well = loop.body.stacks_well or steps_are_slight(loop.body, loop.batches)
    return len(stackable) >= STACK and trains(loop.body, loop) and well


def steps_are_slight(body: Descent, batches: Sequence[Any]) -> bool:
    """Whether a step's launches take longer than its work, in a network without own kernels.

    A stack rounds in another way than its members alone, so this is for half precision only. What
    an objective asks of a network at rest is asked of a stack too.
    """
    if not half_asked_for() or body.mechanism is not None or body.model.takes_half:
        return False
    if not body.model.stackable_at_rest:
        return False
    plan = batches.plain if isinstance(batches, SeededBatches) else batches
    if not isinstance(plan, Plan) or not plan.sizes:
        return False
    return max(plan.sizes) * math.prod(plan.data.parts[0].pool.stored.shape[1:]) <= SLIGHT
