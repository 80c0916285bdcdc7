"""The leader of ranks: an engine that asks others to play the clients that are theirs.

It runs the one round loop, plays the server and its own clients, and delivers all messages. A
client belongs to one rank for the whole run, so its memory stays there. The others wait, play and
answer, see `follower.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from fedstill.core import seeds
from fedstill.core.errors import BadValue, WireError
from fedstill.core.method import Step
from fedstill.core.node import SERVER, Inbox, Node
from fedstill.core.records import Direction, NodeId, Record, State
from fedstill.engines import scoring
from fedstill.engines.checkpoint import Saved
from fedstill.engines.engine import Outcome
from fedstill.engines.outbox import channels_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import (
    Letters,
    kinds_of,
    outcome_of,
    packed,
)
from fedstill.engines.ranks.memories import RemoteMemories
from fedstill.engines.ranks.protocol import (
    LEADER,
    Absent,
    AtSite,
    Disconnected,
    Failed,
    Over,
    Play,
    Played,
    Ready,
    Score,
    Seen,
    Transport,
    Undo,
    all_answered,
    ask,
    limits_of,
    say,
    say_to_all,
)
from fedstill.engines.scoring import Scores

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
        inner.remember_in(self.states)
        inner.far_kind = None if transport.one_job else AtSite
        self._kinds = kinds_of(method)
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
            rank: Play(
                step.name, round, *letters.enclosed({id: inboxes[id] for id in ids}), toward,
                step.again,
            )
            for rank, ids in others.items()
        }  # fmt: skip
        mine = {id: inboxes[id] for id in own}
        outcomes, answers = self._asked(
            questions, lambda: self.inner.play(step, round, mine, toward)
        )
        for rank, answer in answers.items():
            if isinstance(answer, Played):
                outcomes |= self._taken(answer, letters, others[rank], round, step.name)
            else:
                outcomes |= dict.fromkeys(others[rank], Outcome(absent=self._excused(rank, answer)))
        return {id: outcomes[id] for id in inboxes}

    def _taken(
        self,
        played: Played,
        letters: Letters,
        asked: Sequence[NodeId],
        round: int,
        step: str,
    ) -> dict[NodeId, Outcome]:
        """What a rank's nodes left behind; what cannot be read makes a site's nodes absent."""
        try:
            messages = letters.opened(played.letters, self.inner.device)
            outcomes = {id: outcome_of(played.nodes[id], messages, round, step, id) for id in asked}
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
