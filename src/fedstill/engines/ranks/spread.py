"""One step on the ranks of a job: each plays the clients that are its own; no files, no rounds.

Rank 0 leads: it runs the one round loop, plays the server and its own clients, and delivers all
messages. A client belongs to one rank for the whole run, so its memory stays there and is fetched
only when somebody asks for it, as checkpoints do. The others wait, play and answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from fedstill.core import seeds
from fedstill.core.errors import RankError
from fedstill.core.method import Method, Place, Step, memory_of, steps_of
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, Record, State
from fedstill.engines.engine import Outcome, Question, Scores
from fedstill.engines.memories import Memories
from fedstill.engines.outbox import channels_of, kind_of, owner
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.protocol import (
    LEADER,
    Done,
    Drop,
    Left,
    Letters,
    Look,
    Memory,
    Over,
    Play,
    Played,
    Ready,
    Recall,
    Remember,
    Seen,
    SpillTo,
    Transport,
    ask,
    ask_one,
    failed,
    hear,
    packed,
    say,
    say_to_all,
    unpacked,
)


def owners(clients: Sequence[NodeId], ranks: int) -> dict[NodeId, int]:
    """Which rank plays whom: as many clients each, in an order that has to do with nothing.

    In the order of the list, every second client may be the one with the large network.
    """
    mixed = sorted(clients, key=lambda name: (seeds.draw(0, "rank", name), name))
    return {name: i % ranks for i, name in enumerate(mixed)}


class RemoteMemories(Memories):
    """The memory of every node that has acted; those of other ranks' clients are fetched."""

    def __init__(
        self, own: Memories, transport: Transport, owners: Mapping[NodeId, int], method: Method
    ):
        super().__init__(own.limit, own.device)
        self.transport = transport
        self.owners = owners
        self.kind, self.held = memory_of(method, Place.CLIENTS), method.holds
        self._far: set[NodeId] = set()  # who remembers something, at another rank

    def __getitem__(self, node: NodeId) -> State | None:
        if node not in self._far:
            return super().__getitem__(node)
        answer = cast(Memory, ask_one(self.transport, self.rank_of(node), Recall(node)))
        return unpacked(answer.data, kind_of(node, self.kind), self.device, self.held)

    def __setitem__(self, node: NodeId, state: State | None) -> None:
        if self.rank_of(node) == LEADER:
            super().__setitem__(node, state)
            return
        ask_one(self.transport, self.rank_of(node), Remember(node, packed(state)))
        self.note(node, blank=state is None)

    def __delitem__(self, node: NodeId) -> None:
        super().__delitem__(node)
        if self.rank_of(node) != LEADER:
            ask_one(self.transport, self.rank_of(node), Drop(node))
            self._far.discard(node)

    def is_blank(self, node: NodeId) -> bool:
        return node not in self._far and super().is_blank(node)

    def rank_of(self, node: NodeId) -> int:
        """Who plays a node, or has what channels remember at it; the leader plays the server."""
        return LEADER if owner(node) == SERVER else self.owners[owner(node)]

    def note(self, node: NodeId, *, blank: bool) -> None:
        """Another rank's client remembers something else now, or nothing."""
        self._held[node] = None
        self._far.discard(node)
        if not blank:
            self._far.add(node)
        self.changed.add(node)

    @contextmanager
    def spilling_to(self, folder: Path) -> Iterator[None]:
        with super().spilling_to(folder):
            for rank in range(1, self.transport.size):
                ask_one(self.transport, rank, SpillTo(str((folder / f"rank-{rank}").absolute())))
            yield


class Spread:
    """The leader's engine: another engine plays its share, other ranks theirs."""

    def __init__(self, inner: InProcess, transport: Transport):
        self.inner, self.transport, self.name = inner, transport, inner.name
        self.notes = inner.notes
        self.experiment, self.population = inner.experiment, inner.population
        method = inner.experiment.method
        dealt = owners(inner.population.clients, transport.size)
        self.states = RemoteMemories(inner.states, transport, dealt, method)
        inner.states = self.states
        self._kinds = _kinds(method)

    def restore(self, states: Mapping[NodeId, State | None]) -> None:
        """Go on from these memories."""
        self.inner.restore(states)

    def node(self, id: NodeId, round: int, step: str) -> Node[Any]:
        """A node as a step sees it, whoever plays it."""
        return self.inner.node(id, round, step)

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        """One step on every node that has an inbox, each at its rank."""
        own, others = self._dealt(inboxes)
        letters = Letters(self._kinds, self.experiment.method.holds)
        questions: dict[int, Record] = {
            rank: Play(step.name, round, *letters.enclosed({id: inboxes[id] for id in ids}), toward)
            for rank, ids in others.items()
        }
        outcomes, answers = ask(
            self.transport,
            questions,
            lambda: self.inner.play(step, round, {id: inboxes[id] for id in own}, toward),
        )
        for answer in answers.values():
            played = cast(Played, answer)
            messages = letters.opened(played.letters, self.inner.device)
            for id, left in played.nodes.items():
                outcomes[id] = _outcome(left, messages)
                if left.changed:
                    self.states.note(id, blank=left.blank)
                if left.channels:
                    self.states.note(channels_of(id), blank=False)
        return {id: outcomes[id] for id in inboxes}

    def look(
        self, ids: Sequence[NodeId], round: int, step: str, question: Question
    ) -> Iterator[tuple[NodeId, Scores]]:
        """What a question finds in nodes; other ranks ask their own, which is the same one."""
        own, others = self._dealt(ids)
        questions: dict[int, Record] = {
            rank: Look(step, round, tuple(far)) for rank, far in others.items()
        }
        found, answers = ask(
            self.transport, questions, lambda: dict(self.inner.look(own, round, step, question))
        )
        for answer in answers.values():
            found |= cast(Seen, answer).scores
        yield from ((id, found[id]) for id in ids)

    def check_ready(self, ready: Ready) -> None:
        """Every rank has built the same run; else an error says which has not, and why."""
        ask(self.transport, dict.fromkeys(range(1, self.transport.size), ready), lambda: None)

    def over(self) -> None:
        """Let the other ranks go."""
        say_to_all(self.transport, Over())

    def _dealt(self, ids: Iterable[NodeId]) -> tuple[list[NodeId], dict[int, list[NodeId]]]:
        """The leader's own share, and those of the other ranks that have one."""
        shares: dict[int, list[NodeId]] = {}
        for id in ids:
            shares.setdefault(self.states.rank_of(id), []).append(id)
        return shares.pop(LEADER, []), shares


def serve(worker: Worker, transport: Transport) -> None:
    """Play for the leader until the run is over; what goes wrong is answered, not raised."""
    while not isinstance(request := hear(transport, LEADER), Over):
        try:
            answer = worker.answer(request)
        except Exception as error:
            answer = failed(error)
        say(transport, LEADER, answer)


class Worker:
    """Answers the leader with an engine of its own.

    `question` is what evaluation asks of a node, `standing` what this rank has built.
    """

    def __init__(
        self, engine: InProcess, question: Question | None = None, standing: Ready | None = None
    ):
        self.engine, self.question, self.standing = engine, question, standing
        method = engine.experiment.method
        self.steps, self.kinds = _by_name(method), _kinds(method)
        self.memory, self.held = memory_of(method, Place.CLIENTS), method.holds

    def answer(self, request: Record) -> Record:
        """What was asked for."""
        states = self.engine.states
        match request:
            case Ready():
                self._compare(request)
            case Play():
                return self._played(request)
            case Look(step, round, nodes) if self.question is not None:
                found = self.engine.look(nodes, round, step, self.question)
                return Seen({id: {t: dict(each) for t, each in by.items()} for id, by in found})
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

    def _played(self, request: Play) -> Played:
        engine, letters = self.engine, Letters(self.kinds, self.held)
        messages = letters.opened(request.letters, engine.device)
        inboxes: dict[NodeId, Inbox[Any]] = {
            node: Inbox({sender: messages[place] for sender, place in places.items()})
            for node, places in request.inboxes.items()
        }
        engine.states.changed.clear()
        toward = cast(Direction | None, request.toward)
        outcomes = engine.play(self.steps[request.step], request.round, inboxes, toward)
        said = {n: _by_hearer(o.message) for n, o in outcomes.items() if o.message is not None}
        places, enclosed = letters.enclosed(said)
        lefts = {
            node: Left(
                places.get(node),
                isinstance(outcome.message, Addressed),
                dict(outcome.numbers),
                tuple(map(str, outcome.spent)),
                dict(outcome.rejected),
                outcome.absent,
                node in engine.states.changed,
                engine.states.is_blank(node),
                channels_of(node) in engine.states.changed,
                outcome.lost,
            )
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


def _by_hearer(message: Message | Addressed[Any]) -> Mapping[NodeId, Message]:
    return message if isinstance(message, Addressed) else {"": message}


def _outcome(left: Left, messages: Sequence[Message]) -> Outcome:
    message: Message | Addressed[Any] | None = None
    if left.message is not None:
        found = {hearer: messages[place] for hearer, place in left.message.items()}
        message = Addressed(found) if left.addressed else found[""]
    return Outcome(message, left.numbers, left.spent, left.rejected, left.absent, lost=left.lost)


def _kinds(method: Method) -> list[type[Message]]:
    """Every kind of message that a method sends."""
    return list(dict.fromkeys(step.sends for step in steps_of(method) if step.sends))


def _by_name(method: Method) -> dict[str, Step]:
    """A method's steps; ranks speak of them by name, so two may not share one."""
    found: dict[str, Step] = {}
    for step in steps_of(method):
        other = found.setdefault(step.name, step)
        alike = (step.place, step.reads, step.sends, step.act.__qualname__)
        if (other.place, other.reads, other.sends, other.act.__qualname__) != alike:
            raise RankError(
                f"{type(method).__name__} has two different steps {step.name}; give each a name "
                "of its own to play it over several ranks"
            )
    return found
