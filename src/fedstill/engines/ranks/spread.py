"""One step on the ranks of a job: each plays the clients that are its own; no files, no rounds.

Rank 0 leads: it runs the one round loop, plays the server and its own clients, and delivers all
messages. A client belongs to one rank for the whole run, so its memory stays there and is fetched
only when somebody asks for it, as checkpoints do. The others wait, play and answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from fedstill.core import seeds
from fedstill.core.errors import BadValue, RankError, WireError
from fedstill.core.method import Method, Place, Step, memory_of, steps_of
from fedstill.core.node import SERVER, Addressed, Inbox, Node
from fedstill.core.records import Direction, Message, NodeId, Record, State
from fedstill.engines import scoring
from fedstill.engines.checkpoint import Saved
from fedstill.engines.engine import Outcome
from fedstill.engines.memories import Memories
from fedstill.engines.outbox import channels_of, kind_of, owner
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.protocol import (
    LEADER,
    Absent,
    AtSite,
    Disconnected,
    Done,
    Drop,
    Failed,
    Keep,
    Left,
    Letters,
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
    all_answered,
    ask,
    ask_one,
    at_place,
    failed,
    limits_of,
    numbered,
    packed,
    say,
    say_to_all,
    unpacked,
)
from fedstill.engines.ranks.shelf import Shelf
from fedstill.engines.scoring import Scores
from fedstill.wire import codec

T = TypeVar("T")


def owners(clients: Sequence[NodeId], ranks: int) -> dict[NodeId, int]:
    """Which rank plays whom: as many clients each, in an order that has to do with nothing.

    In the order of the list, every second client may be the one with the large network.
    """
    mixed = sorted(clients, key=lambda name: (seeds.draw(0, "rank", name), name))
    return {name: i % ranks for i, name in enumerate(mixed)}


def one_each(clients: Sequence[NodeId], ranks: int) -> dict[NodeId, int]:
    """Each client at a rank of its own, in their order; nobody plays beside the server."""
    if ranks != len(clients) + 1:
        raise BadValue(
            f"there are {len(clients)} clients and {ranks - 1} sites; each client is a site of its "
            "own"
        )
    return {name: rank for rank, name in enumerate(clients, start=1)}


class RemoteMemories(Memories):
    """The memory of every node that has acted; those of other ranks' clients are fetched.

    From behind walls they are not: a site keeps its own, and a mark of it is what one gets.
    """

    def __init__(
        self, own: Memories, transport: Transport, owners: Mapping[NodeId, int], method: Method
    ):
        super().__init__(own.limit, own.device)
        self.transport = transport
        self.owners = owners
        self.kind, self.held = memory_of(method, Place.CLIENTS), method.holds
        self.times = 2  # how often a site keeps what a client remembered
        self._far: set[NodeId] = set()  # who remembers something, at another rank

    def __getitem__(self, node: NodeId) -> State | None:
        if node not in self._far:
            return super().__getitem__(node)
        if not self.transport.one_job:
            asked = Keep(node, self.times)
            return cast(AtSite, ask_one(self.transport, self.rank_of(node), asked))
        answer = cast(Memory, ask_one(self.transport, self.rank_of(node), Recall(node)))
        return unpacked(answer.data, kind_of(node, self.kind), self.device, self.held)

    def __setitem__(self, node: NodeId, state: State | None) -> None:
        if self.rank_of(node) == LEADER:
            super().__setitem__(node, state)
            return
        told: Record = Remember(node, packed(state))
        if isinstance(state, AtSite):
            told = Restore(node, state.mark)
        ask_one(self.transport, self.rank_of(node), told)
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
            if not self.transport.one_job:
                yield
                return
            for rank in range(1, self.transport.size):
                ask_one(self.transport, rank, SpillTo(str((folder / f"rank-{rank}").absolute())))
            yield


class Leader:
    """The leader's engine: another engine plays its share, other ranks theirs.

    With a transport between sites behind walls, clients are at their sites, and the server's model
    goes there to be scored; who does not answer in `seconds`, or fails, is absent.
    """

    def __init__(self, inner: InProcess, transport: Transport, seconds: float | None = None):
        self.inner, self.transport, self.name = inner, transport, inner.name
        self.seconds = seconds
        self.notes = inner.notes
        self.experiment, self.population = inner.experiment, inner.population
        self.scoring_bytes = 0  # sent so that others score the server's model
        method = inner.experiment.method
        deal = owners if transport.one_job else one_each
        dealt = deal(inner.population.clients, transport.size)
        self.states = RemoteMemories(inner.states, transport, dealt, method)
        inner.states = self.states
        inner.far_kind = None if transport.one_job else AtSite
        self._kinds = _kinds(method)
        self._unheard: dict[int, int] = {}  # by rank, the question whose answer did not arrive
        if self.experiment.scores == "cross" and not transport.one_job:
            raise BadValue(
                'scores = "cross": behind walls nobody has another\'s tests; use "own" or "auto"'
            )

    def restore(self, states: Mapping[NodeId, State | None]) -> None:
        """Replace what every node remembers, and go on from there."""
        self.inner.restore(states)

    def save(
        self,
        folder: Path,
        round: int,
        *,
        digest: str,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """A checkpoint of all memories, or of the marks under which sites keep theirs."""
        self.states.times = keep
        self.inner.save(folder, round, digest=digest, keep=keep, extra=extra)

    def load(self, folder: Path, *, digest: str | None) -> Saved | None:
        """Go on from the newest checkpoint that is whole; sites from what they have kept."""
        return self.inner.load(folder, digest=digest)

    def memory(self, node: NodeId) -> State | None:
        """What a node remembers, fetched from its rank; a site keeps it to itself."""
        if node != SERVER and not self.transport.one_job:
            return None
        return self.inner.memory(node)

    def spilling_to(self, folder: Path) -> AbstractContextManager[None]:
        """For a while, put memories beyond the limit into files of this folder, on every rank."""
        return self.states.spilling_to(folder)

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
        letters = Letters(self._kinds, self.experiment.method.holds, limits_of(self.transport))
        questions: dict[int, Record] = {
            rank: Play(step.name, round, *letters.enclosed({id: inboxes[id] for id in ids}), toward)
            for rank, ids in others.items()
        }
        mine = {id: inboxes[id] for id in own}
        outcomes, answers = self._asked(
            questions, lambda: self.inner.play(step, round, mine, toward)
        )
        for rank, answer in answers.items():
            if isinstance(answer, Played):
                outcomes |= self._taken(answer, letters, others[rank])
            else:
                outcomes |= dict.fromkeys(others[rank], Outcome(absent=self._excused(rank, answer)))
        return {id: outcomes[id] for id in inboxes}

    def _taken(
        self, played: Played, letters: Letters, asked: Sequence[NodeId]
    ) -> dict[NodeId, Outcome]:
        """What a rank's nodes left behind; what cannot be read makes a site's nodes absent."""
        try:
            messages = letters.opened(played.letters, self.inner.device)
            outcomes = {id: _outcome(played.nodes[id], messages) for id in asked}
        except (WireError, KeyError) as error:
            if self.transport.one_job:
                raise
            return dict.fromkeys(asked, Outcome(absent=f"its answer cannot be read: {error}"))
        for id in asked:
            if played.nodes[id].changed:
                self.states.note(id, blank=played.nodes[id].blank)
            if played.nodes[id].channels:
                self.states.note(channels_of(id), blank=False)
        return outcomes

    def _asked(
        self, questions: Mapping[int, Record], meanwhile: Callable[[], T]
    ) -> tuple[T, Mapping[int, Record | Absent]]:
        """Answers of other ranks: in one job all of them, or a failure that ends the run."""
        self._tell_unheard()
        own, answers = ask(self.transport, questions, meanwhile, self.seconds)
        return own, all_answered(answers) if self.transport.one_job else answers

    def _excused(self, rank: int, answer: Record | Absent) -> str:
        """Why a site did not act. What it may have done unheard, it is told to undo."""
        if isinstance(answer, Absent):
            self._unheard[rank] = answer.number
            self._tell_unheard()
            return answer.reason
        return answer.text if isinstance(answer, Failed) else "it answered something else"

    def _tell_unheard(self) -> None:
        """Tell sites what to undo; one that cannot be reached is told before the next question."""
        for rank, number in [*self._unheard.items()]:
            with suppress(Disconnected):
                say(self.transport, rank, Undo(number))
                del self._unheard[rank]

    def score(self, round: int) -> Iterator[tuple[NodeId, Scores]]:
        """Every scored model with its metrics by test set, each where its node is."""
        method = self.experiment.method
        holders = scoring.holders(method, self.states, self.population.clients)
        played = self._scored_in_job if self.transport.one_job else self._scored_at_sites
        found = played(holders, round)
        yield from ((id, found[id]) for id in holders if id in found)

    def _scored_in_job(self, holders: Sequence[NodeId], round: int) -> Mapping[NodeId, Scores]:
        """Each at its rank, on all tests: the ranks of one job share them."""
        own, others = self._dealt(holders)
        questions: dict[int, Record] = {
            rank: Score(round, tuple(far), True, None, ()) for rank, far in others.items()
        }
        found, answers = self._asked(
            questions, lambda: {id: self.inner.scores_of(id, round) for id in own}
        )
        for answer in answers.values():
            found |= cast(Seen, answer).scores
        return found

    def _scored_at_sites(self, holders: Sequence[NodeId], round: int) -> Mapping[NodeId, Scores]:
        """Each client's model at its site, the server's at all sites, each on its own tests."""
        _, sites = self._dealt(self.population.clients)
        server = None
        if SERVER in holders:
            node = self.inner.node(SERVER, round, scoring.EVALUATION)
            server = packed(self.experiment.method.scored_state(node))
        questions: dict[int, Record] = {}
        for rank, clients in sites.items():
            scored = tuple(id for id in clients if id in holders)
            targets = tuple(clients) if SERVER in holders else ()
            if scored or targets:
                questions[rank] = Score(round, scored, False, server, targets)
                self.scoring_bytes += 0 if server is None else len(server)
        _, answers = self._asked(questions, lambda: None)
        found: dict[NodeId, dict[NodeId, Mapping[str, float]]] = {}
        for rank, answer in answers.items():
            if not isinstance(answer, Seen):
                why = self._excused(rank, answer)
                self.notes.append(f"{', '.join(sites[rank])} not scored in round {round}: {why}")
                continue
            for holder in (SERVER, *sites[rank]):
                mine = {t: m for t, m in answer.scores.get(holder, {}).items() if t in sites[rank]}
                found.setdefault(holder, {}).update(mine)
        return found

    def check_ready(self, ready: Ready) -> None:
        """Every rank has built the same run; else an error says which has not, and why."""
        every = dict.fromkeys(range(1, self.transport.size), ready)
        all_answered(ask(self.transport, every, lambda: None)[1])

    def over(self) -> None:
        """Tell the other ranks that the run has ended."""
        say_to_all(self.transport, Over())

    def _dealt(self, ids: Iterable[NodeId]) -> tuple[list[NodeId], dict[int, list[NodeId]]]:
        """The leader's own share, and those of the other ranks that have one."""
        shares: dict[int, list[NodeId]] = {}
        for id in ids:
            shares.setdefault(self.states.rank_of(id), []).append(id)
        return shares.pop(LEADER, []), shares


def serve(site: Site, transport: Transport) -> None:
    """Play for the leader until the run is over; what goes wrong is answered, not raised."""
    while True:
        number, request = numbered(transport, LEADER)
        if isinstance(request, Over):
            return
        if isinstance(request, Undo):
            site.undo(request.question)
            continue
        try:
            answer = site.answer(request, number)
        except Exception as error:
            answer = failed(error)
        say(transport, LEADER, answer, number)


class Site:
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
        self.steps, self.kinds = _by_name(method), _kinds(method)
        self.memory, self.held = memory_of(method, Place.CLIENTS), method.holds
        self.scored = method.scored_kind
        self.shelf = Shelf(engine.kind_of, folder, method.holds)
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
            self.engine.restore(self._before)
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


def _plain(scores: Scores) -> dict[str, dict[str, float]]:
    return {target: dict(values) for target, values in scores.items()}


def _by_hearer(message: Message | Addressed[Any]) -> Mapping[NodeId, Message]:
    return message if isinstance(message, Addressed) else {"": message}


def _outcome(left: Left, messages: Sequence[Message]) -> Outcome:
    message: Message | Addressed[Any] | None = None
    if left.message is not None:
        found = {hearer: at_place(messages, place) for hearer, place in left.message.items()}
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
