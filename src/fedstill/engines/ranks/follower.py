"""What answers a leader: an engine of one's own that plays the clients of this rank or site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from fedstill.core.errors import RankError
from fedstill.core.method import Place, memory_of
from fedstill.core.node import SERVER, Inbox
from fedstill.core.records import Direction, NodeId, Record, State
from fedstill.engines.outbox import kind_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import (
    Letters,
    at_place,
    by_hearer,
    kinds_of,
    left_of,
    packed,
    steps_by_name,
    unpacked,
)
from fedstill.engines.ranks.protocol import (
    LEADER,
    Abandoned,
    AtSite,
    Done,
    Drop,
    GivenUp,
    Keep,
    Memory,
    Over,
    Play,
    Played,
    Ready,
    Recall,
    Remember,
    Restore,
    Score,
    Seen,
    SpillTo,
    Transport,
    Undo,
    failed,
    numbered,
    say,
)
from fedstill.engines.ranks.shelf import Shelf
from fedstill.engines.scoring import Scores
from fedstill.engines.spending import put, spent
from fedstill.wire import codec

T = TypeVar("T")


def serve(site: Follower, transport: Transport) -> None:
    """Play for the leader until the run is over; what goes wrong is answered, not raised.

    Raises `Abandoned` where the leader gives up the run.
    """
    while True:
        number, request = numbered(transport, LEADER)
        if isinstance(request, Over):
            return
        if isinstance(request, GivenUp):
            raise Abandoned("the leader has given up the run")
        if isinstance(request, Undo):
            site.undo(request.question)
            continue
        try:
            answer = site.answer(request, number)
        except Exception as error:
            answer = failed(error)
        say(transport, LEADER, answer, number)


class Follower:
    """Answers the leader with an engine of its own; `standing` is what this rank has built.

    One that is not of the leader's `one_job` keeps its memory to itself, in a `folder` of its own,
    and undoes an act whose answer has not arrived.
    """

    def __init__(
        self,
        engine: InProcess,
        standing: Ready | None = None,
        *,
        one_job: bool = True,
        folder: Path | None = None,
    ):
        self.engine, self.standing, self.one_job = engine, standing, one_job
        self.limits = codec.OWN if one_job else codec.STRANGERS
        method = engine.experiment.method
        self.steps, self.kinds = steps_by_name(method), kinds_of(method)
        self.memory, self.held = memory_of(method, Place.CLIENTS), method.holds
        self.scored = method.scored_kind
        self.shelf = Shelf(engine.kind_of, folder, method.holds, engine.device)
        self._last = 0  # the number of the last act
        self._before: Mapping[NodeId, State | None] = {}  # and what was remembered before it

    def answer(self, request: Record, number: int = 0) -> Record:
        """Do what the leader asks, and answer it."""
        states = self.engine.states
        match request:
            case Ready():
                self._compare(request)
            case Play():
                if not self.one_job:
                    self._last, self._before = number, dict(states)
                return self._played(request)
            case Score():
                return self._scored(request)
            case Recall() | Remember() | SpillTo() if not self.one_job:
                raise RankError("it keeps what it remembers to itself")
            case Keep(node, times) if (state := states[node]) is not None:
                return AtSite(self.shelf.put(node, state, times))
            case Restore(node, mark):
                states[node] = self.shelf.get(node, mark)
            case Recall(node):
                return Memory(packed(states[node]))
            case Remember(node, data):
                kind = kind_of(node, self.memory)
                states[node] = unpacked(data, kind, self.engine.device, self.held)
            case Drop(node):
                del states[node]
            case SpillTo(folder):
                if Path(folder).parents[1].is_dir():  # the leader's run folder is seen from here
                    states.folder = Path(folder)
            case _:
                raise RankError(f"it was asked for {type(request).__name__} at the wrong time")
        return Done()

    def undo(self, question: int) -> None:
        """Remember what was remembered before an act, if that was the last one."""
        if question == self._last and not self.one_job:
            rows = {node: spent(self.engine.states, node) for node in self.engine.states}
            self.engine.restore(self._before)
            for node, own in rows.items():  # what may have left is spent, whoever heard it
                if own:
                    put(self.engine.states, node, own)
            self._last = 0

    def _scored(self, request: Score) -> Seen:
        engine, round = self.engine, request.round
        one = engine.scores_of if request.crosswise else engine.own_scores
        found = {holder: _plain(one(holder, round)) for holder in request.holders}
        if request.targets:
            state = unpacked(request.server, self.scored, engine.device, self.held, self.limits)
            for target in request.targets:
                scores = engine.scores_at(target, state, round)
                found.setdefault(SERVER, {}).update(_plain(scores))
        return Seen(found)

    def _played(self, request: Play) -> Played:
        engine, letters = self.engine, Letters(self.kinds, self.held, self.limits)
        messages = letters.opened(request.letters, engine.device)
        inboxes: dict[NodeId, Inbox[Any]] = {
            node: Inbox({sender: at_place(messages, place) for sender, place in places.items()})
            for node, places in request.inboxes.items()
        }
        engine.states.changed.clear()
        toward = cast(Direction | None, request.toward)
        step = replace(self.steps[request.step], again=request.again)
        outcomes = engine.play(step, request.round, inboxes, toward)
        said = {n: by_hearer(o.message) for n, o in outcomes.items() if o.message is not None}
        places, enclosed = letters.enclosed(said)
        lefts = {
            node: left_of(node, outcome, places.get(node), engine.states)
            for node, outcome in outcomes.items()
        }
        return Played(lefts, enclosed)

    def _compare(self, leader: Ready) -> None:
        own = self.standing
        if own is None:
            raise RankError("it has built no run")
        if own.versions != leader.versions:
            raise RankError(f"it runs {own.versions}, rank {LEADER} runs {leader.versions}")
        if own.digest != leader.digest:
            raise RankError(
                f"its data are not those of rank {LEADER}; put the same files on every machine"
            )


def _plain(scores: Scores) -> dict[str, dict[str, float]]:
    return {target: dict(values) for target, values in scores.items()}
