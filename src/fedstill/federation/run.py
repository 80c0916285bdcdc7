"""The only round loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedstill.core.method import Place, Step
from fedstill.core.node import SERVER, Inbox
from fedstill.core.records import NodeId
from fedstill.engines.engine import Act, Engine, Outcome
from fedstill.engines.play.together import Together
from fedstill.federation.evaluate import evaluate
from fedstill.federation.post import Observer, Post, toward
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


Watch = Callable[[Progress], None]
Save = Callable[[int], None]


Outcomes = dict[NodeId, Outcome]
Playing = Generator[Act, Outcomes, None]
"""A run that hands out each step and goes on with what it left behind."""


def run(
    engine: Engine,
    logbook: Logbook,
    *,
    done: int | None = None,
    said: int = 0,
    save: Save = lambda round: None,
    watch: Watch = lambda progress: None,
    observers: Sequence[Observer] = (),
) -> None:
    """Play the whole experiment of an engine; `done` is the last round that a checkpoint holds.

    `watch` and then `save(round)` are called when a round is complete: after the steps before the
    first (round 0) and after every round. What `save` keeps is enough to go on exactly.
    `observers` see every message that arrives.
    """
    playing = rounds_of(
        engine, logbook, done=done, said=said, save=save, watch=watch, observers=observers
    )
    act = going_on(playing)
    while act is not None:
        act = going_on(playing, engine.play(*act))


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
    play = _Player(engine, logbook, observers)
    play.post.bytes = said
    clients = list(experiment.population.clients)
    begun = done is not None
    if not begun:
        yield from play(experiment.method.before(), 0, clients)
    done = done or 0
    metric = name_of(next(iter(experiment.metrics), "accuracy"))
    watch(Progress(done, experiment.rounds, None, play.post.bytes, 0.0, metric))
    if not begun:
        save(0)
    score: float | None = None
    for round in range(done + 1, experiment.rounds + 1):
        began = time.perf_counter()
        yield from play(experiment.method.each_round(), round, list(experiment.awake(round)))
        last = round == experiment.rounds
        if last:
            yield from play(experiment.method.after(), round, clients)
        if scored and (last or round % experiment.evaluate_every == 0):
            score = play.scored(round, metric)
        seconds = time.perf_counter() - began
        logbook.write(Number(round, "round", "", "seconds", "", seconds))
        watch(Progress(round, experiment.rounds, score, play.post.bytes, seconds, metric))
        save(round)


def rehearsed(engine: Engine) -> None:
    """Play every step of the whole experiment, and write and score nothing."""
    playing = rounds_of(engine, MemoryLog(), scored=False)
    act = going_on(playing)
    while act is not None:
        act = going_on(playing, engine.play(*act))


class _Player:
    """Plays lists of steps: engine, post and logbook in turn."""

    def __init__(self, engine: Engine, logbook: Logbook, observers: Sequence[Observer]):
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
        self.told: set[str] = set()  # metrics of which a note says that they are undefined

    def __call__(self, steps: Sequence[Step], round: int, awake: Sequence[NodeId]) -> Playing:
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
            mail = self.post.deliver(round, step, following, outcomes, present, inboxes)

    def scored(self, round: int, metric: str) -> float | None:
        """Evaluate, write the scores down, and return the mean of one metric."""
        found = list(evaluate(self.engine, round))
        self._tell_notes(round)
        for number in found:
            self.logbook.write(number)
        self._tell_undefined(round, found)
        scores = [n for n in found if n.name == metric and not math.isnan(n.value)]
        values = [n.value for n in scores if n.node == SERVER] or [n.value for n in scores]
        return sum(values) / len(values) if values else None

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


def _absent(outcomes: Mapping[NodeId, Outcome], node: NodeId) -> bool:
    return node in outcomes and outcomes[node].absent is not None
