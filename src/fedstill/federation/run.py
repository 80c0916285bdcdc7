"""The only round loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedstill.core import pulse
from fedstill.core.errors import BadValue
from fedstill.core.method import Place, Step, plan_of
from fedstill.core.node import SERVER, Inbox
from fedstill.core.records import NodeId
from fedstill.core.work import Work
from fedstill.engines.engine import Act, Engine, Outcome
from fedstill.engines.play.together import Together
from fedstill.federation.evaluate import evaluate
from fedstill.federation.post import Observer, Post, toward
from fedstill.federation.timeline import Timeline
from fedstill.logbook.events import Note, Number
from fedstill.logbook.writer import Logbook, MemoryLog
from fedstill.metrics import name_of


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever watches."""

    round: int
    rounds: int
    score: float | None  # mean over the latest scores, of the metric that was named first
    bytes: int  # said so far
    seconds: float  # of the latest round
    metric: str = "accuracy"
    clock: float | None = None  # simulated seconds so far, where there is a clock

    def __str__(self) -> str:
        told = [f"round {self.round} of {self.rounds}"]
        if self.score is not None:
            told.append(f"{self.metric} {self.score:.4f}")
        return ", ".join([*told, f"{self.bytes:,} bytes sent, {self.seconds:.1f} s in this round"])


Watch = Callable[[Progress], None]
Save = Callable[[int], None]


Outcomes = dict[NodeId, Outcome]
Late = set[tuple[NodeId, NodeId]]  # senders and hearers
Playing = Generator[Act, Outcomes, None]
"""A run that hands out each step and goes on with what it left behind."""


def run(
    engine: Engine,
    logbook: Logbook,
    *,
    done: int | None = None,
    said: int = 0,
    now: float = 0.0,
    save: Save = lambda round: None,
    watch: Watch = lambda progress: None,
    observers: Sequence[Observer] = (),
) -> None:
    """Play the whole experiment of an engine; `done` is the last round that a checkpoint holds.

    `said` and `now` are the bytes and the simulated seconds of the rounds that it holds.
    `watch` and then `save(round)` are called when a round is complete: after the steps before the
    first (round 0) and after every round. What `save` keeps is enough to go on exactly.
    `observers` see every message that arrives.
    """
    playing = rounds_of(
        engine, logbook, done=done, said=said, now=now, save=save, watch=watch, observers=observers
    )
    act = going_on(playing)
    while act is not None:
        with pulse.working_on(act.step.name, act.round):
            outcomes = engine.play(*act)
        act = going_on(playing, outcomes)


def run_together(together: Together, playings: Sequence[Playing]) -> None:
    """Play several federations to their ends; steps that come at the same time are one play."""
    waiting = {place: going_on(playing) for place, playing in enumerate(playings)}
    while acts := {place: act for place, act in waiting.items() if act is not None}:
        at: dict[tuple[int, str], dict[int, Act]] = {}
        for place, act in acts.items():
            at.setdefault((act.round, act.step.name), {})[place] = act
        for same in at.values():
            for place, outcomes in together.play(same).items():
                waiting[place] = going_on(playings[place], outcomes)


def going_on(playing: Playing, outcomes: Outcomes | None = None) -> Act | None:
    """What a run waits for next; None when it is over."""
    try:
        return playing.send(outcomes)  # type: ignore[arg-type]  # None begins it
    except StopIteration:
        return None


def rounds_of(
    engine: Engine,
    logbook: Logbook,
    *,
    done: int | None = None,
    said: int = 0,
    now: float = 0.0,
    save: Save = lambda round: None,
    watch: Watch = lambda progress: None,
    observers: Sequence[Observer] = (),
    scored: bool = True,
) -> Playing:
    """The round loop, as `run` plays it; whoever drives it plays each step.

    So several federations can be played beside each other, see `engines.play.together`. Without
    `scored` no model is evaluated.
    """
    experiment = engine.experiment
    play = _Player(engine, logbook, observers, now)
    play.post.bytes = said
    clients = list(experiment.population.clients)
    begun = done is not None
    if not begun:
        (steps,) = plan_of(experiment.method, 0, experiment.rounds)
        yield from play(steps, 0, clients)
        play.tell_time(0)
    done = done or 0
    metric = name_of(next(iter(experiment.metrics), "accuracy"))
    watch(Progress(done, experiment.rounds, None, play.post.bytes, 0.0, metric, play.now))
    if not begun:
        save(0)
    score: float | None = None
    for round in range(done + 1, experiment.rounds + 1):
        began = time.perf_counter()
        awake = list(experiment.awake(round))
        steps, *after = plan_of(experiment.method, round, experiment.rounds)
        yield from play(steps, round, awake, waiting=True)
        for ending in after:
            yield from play(ending, round, clients)
        last = round == experiment.rounds
        if scored and (last or round % experiment.evaluate_every == 0):
            metric, score = play.scored(round, metric)
        play.tell_time(round)
        seconds = time.perf_counter() - began
        logbook.write(Number(round, "round", "", "seconds", "", seconds))
        so_far = (play.post.bytes, seconds, metric, play.now)
        watch(Progress(round, experiment.rounds, score, *so_far))
        save(round)


def rehearsed(engine: Engine) -> None:
    """Play every step of the whole experiment, and write and score nothing."""
    playing = rounds_of(engine, MemoryLog(), scored=False)
    act = going_on(playing)
    while act is not None:
        act = going_on(playing, engine.play(*act))


class _Player:
    """Plays lists of steps: engine, post and logbook in turn."""

    def __init__(
        self, engine: Engine, logbook: Logbook, observers: Sequence[Observer], now: float = 0.0
    ):
        experiment = engine.experiment
        self.engine, self.logbook = engine, logbook
        self.post = Post(
            experiment.graph,
            logbook,
            channels=experiment.channels,
            bad_messages=experiment.bad_messages,
            observers=observers,
            readers=experiment.reader,
        )
        clock, clients = experiment.clock, experiment.population.clients
        self.time = None if clock is None else Timeline(clock, clients, experiment.seed, now=now)
        self.told: set[str] = set()  # metrics of which a note says that they are undefined

    @property
    def now(self) -> float | None:
        """The simulated seconds so far."""
        return None if self.time is None else self.time.now

    def __call__(
        self,
        steps: Sequence[Step],
        round: int,
        awake: Sequence[NodeId],
        *,
        waiting: bool = False,
    ) -> Playing:
        """Play steps one after another; `waiting`, no longer for an answer than the clock says."""
        if self.time is None:
            yield from self._played(steps, round, awake)
        else:
            self.time.begin(awake, waiting=waiting)
            yield from self._played(steps, round, awake)
            self.time.end()

    def _played(self, steps: Sequence[Step], round: int, awake: Sequence[NodeId]) -> Playing:
        mail: dict[NodeId, Inbox[Any]] = {}
        present = list(awake)
        for step, following in pairwise([*steps, None]):
            assert step is not None
            actors = [SERVER] if step.place is Place.SERVER else present
            if self._nobody_heard(step, mail, round):
                return
            inboxes = {actor: mail.get(actor, Inbox()) for actor in actors}
            outcomes = yield Act(step, round, inboxes, toward(step, following))
            self._tell_notes(round)
            self._write(round, step, outcomes)
            present = [node for node in present if not _absent(outcomes, node)]
            if _absent(outcomes, SERVER):
                return
            late: Late = set()
            if self.time is not None:
                late, gone = self._time_passes(self.time, round, step, following, outcomes, present)
                present = [node for node in present if node not in gone]
            mail = self.post.deliver(round, step, following, outcomes, present, inboxes, late)

    def _time_passes(
        self, time: Timeline, round: int, step: Step, following: Step | None,
        outcomes: Mapping[NodeId, Outcome], present: Sequence[NodeId],
    ) -> tuple[Late, set[NodeId]]:  # fmt: skip
        """The time of a step and of its messages: what is late, and who is gone because of it."""
        acted = {node: outcome for node, outcome in outcomes.items() if outcome.absent is None}
        time.work({node: _work(outcome, self.engine) for node, outcome in acted.items()})
        arrivals = time.carry(self.post.parcels(step, following, acted, present))
        late = time.late(arrivals)
        in_time = {parcel.sender for parcel in arrivals if parcel not in late}
        needed: dict[NodeId, float] = {}
        for parcel, seconds in late.items():
            if parcel.sender not in in_time:
                needed[parcel.sender] = min(seconds, needed.get(parcel.sender, seconds))
            elif parcel.hearer in present:
                text = f"{step.name}: its message to {parcel.hearer} came after {seconds:.6g} s"
                self.logbook.write(Note(round, "late", parcel.sender, text))
        for node, seconds in sorted(needed.items()):
            text = f"{step.name}: answered after {seconds:.6g} s, past the deadline"
            self.logbook.write(Note(round, "absent", node, text))
        time.hear(arrivals, {*needed, *(outcomes.keys() - acted.keys())})
        return {(parcel.sender, parcel.hearer) for parcel in late}, set(needed)

    def tell_time(self, round: int) -> None:
        """Write down the simulated time at the end of a round, and what each client took of it."""
        if self.time is None:
            return
        for client, seconds in self.time.taken().items():
            self.logbook.write(Number(round, "clock", client, "busy", "", seconds))
        if round or self.time.now:
            self.logbook.write(Number(round, "round", "", "clock", "", self.time.now))

    def scored(self, round: int, metric: str) -> tuple[str, float | None]:
        """Evaluate, write the scores down, and return the mean of one metric with its name.

        A metric that has a number for each class has no mean, and accuracy takes its place.
        """
        with pulse.working_on("evaluate", round):
            found = list(evaluate(self.engine, round))
        self._tell_notes(round)
        for number in found:
            self.logbook.write(number)
        self._tell_undefined(round, found)
        metric = metric if any(n.name == metric for n in found) else "accuracy"
        scores = [n for n in found if n.name == metric and not math.isnan(n.value)]
        values = [n.value for n in scores if n.node == SERVER] or [n.value for n in scores]
        return metric, sum(values) / len(values) if values else None

    def _tell_notes(self, round: int) -> None:
        """Write down what the engine had to do otherwise than asked."""
        while self.engine.notes:
            self.logbook.write(Note(round, "engine", "", self.engine.notes.pop(0)))

    def _tell_undefined(self, round: int, scores: Sequence[Number]) -> None:
        """A note on each metric that has no value somewhere, the first time."""
        undefined: dict[str, list[Number]] = {}
        for number in scores:
            if math.isnan(number.value) and number.name not in self.told:
                undefined.setdefault(number.name, []).append(number)
        for name, where in undefined.items():
            self.told.add(name)
            first = f"first {where[0].node} on {where[0].target}"
            text = f"{name} is not a number on {len(where)} test sets, {first}; means leave it out"
            self.logbook.write(Note(round, "undefined", where[0].node, text))

    def _nobody_heard(self, step: Step, mail: Mapping[NodeId, Any], round: int) -> bool:
        """Whether a server that needs to hear somebody hears nobody: the round ends there."""
        if step.place is not Place.SERVER or step.reads is None or SERVER in mail:
            return False
        text = f"{step.title} heard nobody; the rest of the round is skipped"
        self.logbook.write(Note(round, "skipped", SERVER, text))
        return True

    def _write(self, round: int, step: Step, outcomes: Mapping[NodeId, Outcome]) -> None:
        for node, outcome in outcomes.items():
            if outcome.absent is not None:
                self.logbook.write(Note(round, "absent", node, f"{step.name}: {outcome.absent}"))
            for name, value in outcome.numbers.items():
                self.logbook.write(Number(round, step.name, node, name, "", value))
            for sender, why in outcome.rejected.items():
                self.post.leave_out(round, step, sender, why)
            for row in outcome.spent:
                self.logbook.write(row)


def _work(outcome: Outcome, engine: Engine) -> Work:
    if outcome.work is None:
        raise BadValue(
            f"clock: the engine {engine.name} does not tell how much its nodes compute; leave the "
            "clock out, or choose another engine"
        )
    return outcome.work


def _absent(outcomes: Mapping[NodeId, Outcome], node: NodeId) -> bool:
    return node in outcomes and outcomes[node].absent is not None
