"""The engine of one peer: its own node is played here, others are heard; nobody leads.

Every peer runs the one round loop for itself. Who is awake and who hears whom follow from the
recipe's seed, so all loops agree on what comes next. A step ends when everybody has been heard
whose word is due, or at its deadline. What a peer has said lies with it until it is asked for, so
nothing unasked takes anybody's memory, and one who returns finds what it missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedstill.channels.coded import Coded
from fedstill.core import trees
from fedstill.core.errors import LONGEST, BadValue, SiteError, WireError, told
from fedstill.core.method import Method, Place, Step, steps_of
from fedstill.core.node import SERVER, Addressed, Inbox
from fedstill.core.records import Direction, NodeId, Record
from fedstill.engines import scoring
from fedstill.engines.checkpoint import Saved
from fedstill.engines.engine import Outcome
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import Letters, by_hearer, kinds_of, outcome_of
from fedstill.engines.ranks.protocol import Left, Letter
from fedstill.engines.scoring import Scores
from fedstill.federation.post import GROWTH, SMALL, check_left_out, shapes_kept, unexpected
from fedstill.federation.sampling import Sampler
from fedstill.sites.away import Patience, check_kind
from fedstill.sites.exchange import TWICE
from fedstill.sites.journal import Journal
from fedstill.sites.own_node import OwnNode
from fedstill.sites.private_acts import PrivateActs
from fedstill.sites.words import Hello, difference
from fedstill.wire import codec

STANDING = "standing"  # under this name everybody hears where a peer is
TWINS = "twins"  # and under this one, whom it sees twice
PIECE = 1.0  # seconds that a word is waited for before looking whether its speaker is there
KEPT = 2  # rounds of which words are kept; those before the first round are kept for good


class Said(Record):
    """What a step left for one hearer; all of the head is compared with what was asked for."""

    run: str
    node: str
    round: int
    number: int
    step: str
    absent: str | None
    letter: Letter | None
    addressed: bool  # whether others may have heard something else
    lost: bool  # whether a channel lost a message


class Standing(Record):
    """Where a peer is, and what it has agreed on."""

    hello: Hello
    round: int
    ended: bool


class Twins(Record):
    """Which processes a peer sees in another's name beside the one that came first."""

    run: str
    later: dict[str, tuple[str, ...]]


class Mesh(Protocol):
    """Says words by name, to everybody or to one hearer, and fetches others'.

    That it is really they who speak, and that nobody else hears, is its duty.
    """

    @property
    def id(self) -> str:
        """By what others tell this process from another one in the same name."""

    def say(self, name: str, data: bytes, hearer: NodeId | None = None) -> None: ...

    def fetch(self, peer: NodeId, name: str, seconds: float) -> bytes | None:
        """What a peer says to this one, or to all, under a name; None if not in that time.

        Nothing at all (`b""`) is the answer of one who has no such word any more. What did not come
        in time may be on its way, and is there when it is fetched again.
        """

    def forget(self, before: int) -> None:
        """Words of rounds before this one are no longer asked for; those of round 0 are."""

    def passed(self, round: int) -> None:
        """Of rounds before this one nothing is said any more; who waits for it is told so."""

    def here(self) -> set[NodeId]:
        """Who is connected."""

    def lost(self, peer: NodeId, seconds: float) -> bool:
        """Whether a peer has not been connected for longer."""

    def doubled(self, peer: NodeId) -> bool | None:
        """Whether two processes are connected in a peer's name; None while it is not known."""

    def later(self, peer: NodeId) -> set[str]:
        """The processes in a peer's name but the one that came first."""


class Peers(OwnNode):
    """One peer's own node, and the others as far as they are heard."""

    name = "peers"

    def __init__(
        self,
        inner: InProcess,
        mesh: Mesh,
        standing: Hello,
        patience: Patience | None = None,
        journal: Journal | None = None,
        private: PrivateActs | None = None,
    ):
        check_no_server(inner.experiment.method)
        if inner.experiment.privacy is not None and (private is None or inner.key is None):
            raise SiteError(
                "noise for privacy needs a key that only this peer has, and a log of what it has "
                "released"
            )
        super().__init__(inner, standing.node)
        self.mesh, self.standing = mesh, standing
        self.journal, self.private = journal, private
        self.patience = patience or Patience()
        self.experiment = replace(
            inner.experiment, sampling=Catching(inner.experiment.sampling, self)
        )
        self.others = [c for c in self.population.clients if c != self.me]
        self.round = 0  # where it stands
        self._kinds = kinds_of(inner.experiment.method)
        self._claimed: dict[NodeId, int] = {}  # the round that each of the others last named
        self._differ: dict[NodeId, str] = {}  # who runs or agreed to something else, and what
        self._twin_of: list[NodeId] = []  # who say that another process was here before this one
        self._pool = ThreadPoolExecutor(max(1, len(self.others)))

    def save(self, folder: Path, round: int, **more: Any) -> None:
        """A checkpoint of what is remembered here."""
        super().save(folder, round, **more)
        if self.journal is not None:
            self.journal.saved(round)

    def load(self, folder: Path, *, digest: str | None) -> Saved | None:
        """Go on from the newest checkpoint that is whole."""
        saved = super().load(folder, digest=digest)
        self.round = 0 if saved is None else saved.round
        for round, number, words in () if self.journal is None else self.journal.said():
            for hearer, data in words.items():
                self.mesh.say(f"{round}/{number}", data, hearer)
        return saved

    def began(self, round: int) -> bool:
        """Whether this peer has played in a round before, as far as it knows."""
        kept = (self.journal, self.private)
        return any(own.began(round) for own in kept if own is not None)

    def score(self, round: int) -> Iterator[tuple[NodeId, Scores]]:
        """This peer's model on its own tests."""
        holders = scoring.holders(self.experiment.method, self.inner.states, [self.me])
        if self.me in holders:
            yield self.me, self.inner.own_scores(self.me, round)

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        """Play one's own node, say what it leaves, and hear those whose word is due."""
        self._next_act(round)
        outcomes = {id: Outcome() for id in inboxes}
        if self.me not in inboxes:
            return outcomes
        inbox, act, speaks = inboxes[self.me], b"", step.sends is not None and toward is not None
        if self.journal is not None and not speaks:
            self.journal.heard(round, self._at[1], dict)  # nothing: a note that it has begun

        def own() -> Outcome:
            return self.inner.play(step, round, {self.me: inbox}, toward)[self.me]

        if self.private is None:
            outcomes[self.me] = own()
        else:
            act = self.private.act(step, round, inbox, toward)
            outcomes[self.me] = self.private.played(step, round, act, own)
        if not speaks:
            return outcomes
        awake, graph = list(inboxes), self.experiment.graph
        hearers = [id for id in graph.hearers(self.me, awake) if id not in (self.me, SERVER)]
        self._say(self._words(step, round, outcomes[self.me], hearers), round, act)
        speakers = [id for id in awake if id != self.me and self.me in graph.hearers(id, awake)]
        return outcomes | self._heard(step, round, speakers)

    def _say(self, words: Mapping[NodeId, bytes], round: int, act: bytes) -> None:
        """Leave a word for each hearer; what is meant for one, nobody else can ask for."""
        if self.private is not None:
            self.private.release(act, b"".join(words[hearer] for hearer in sorted(words)))
        if self.journal is not None:
            self.journal.say(round, self._at[1], words)
            self.journal.forget(round - KEPT)
        for hearer, data in words.items():
            self.mesh.say(f"{round}/{self._at[1]}", data, hearer)
        self.mesh.forget(round - KEPT)

    def _words(
        self, step: Step, round: int, outcome: Outcome, hearers: Sequence[NodeId]
    ) -> dict[NodeId, bytes]:
        """What an act leaves for each hearer."""
        letters, addressed = self._letters(), isinstance(outcome.message, Addressed)
        each = {} if outcome.message is None else by_hearer(outcome.message)
        made: dict[int | None, bytes] = {}  # by message: what several hear is written once
        words: dict[NodeId, bytes] = {}
        for hearer in hearers:
            message = each.get(hearer if addressed else "")
            key = None if message is None else id(message)
            if key not in made:
                letter = None
                if message is not None:
                    _, (letter,) = letters.enclosed({self.me: {"": message}})
                said = Said(
                    self.standing.run, self.me, round, self._at[1], step.name, outcome.absent,
                    letter, addressed, outcome.lost,
                )  # fmt: skip
                made[key] = codec.encode(said)
            words[hearer] = made[key]
        return words

    def _letters(self) -> Letters:
        """For the words of one step."""
        return Letters(self._kinds, self.experiment.method.holds, codec.STRANGERS)

    def _heard(self, step: Step, round: int, speakers: Sequence[NodeId]) -> dict[NodeId, Outcome]:
        seconds = self.patience.step if round else self.patience.start
        until, number = time.monotonic() + seconds, self._at[1]
        outcomes: dict[NodeId, Outcome] = {}

        def judge(words: Mapping[NodeId, bytes | str]) -> None:
            for peer in speakers:
                outcomes[peer] = self._outcome(step, peer, round, number, words[peer])

        def listen() -> dict[NodeId, bytes | str]:
            asked = {
                peer: self._pool.submit(self._fetched, peer, round, number, until)
                for peer in speakers
            }
            words = {peer: future.result() for peer, future in asked.items()}
            judge(words)  # of what cannot be used only the reason is kept
            absent = {peer: outcome.absent for peer, outcome in outcomes.items()}
            return {peer: absent[peer] or word for peer, word in words.items()}

        words = listen() if self.journal is None else self.journal.heard(round, number, listen)
        if not outcomes:
            judge(words)
        return outcomes

    def _fetched(self, peer: NodeId, round: int, number: int, until: float) -> bytes | str:
        """A peer's word; before the first round nobody is given up, since all must agree there.

        Of two processes in one name neither is heard: each would say something else.
        """
        if peer in self._differ:
            return self._differ[peer]
        name, doubled = f"{round}/{number}", None
        while (left := until - time.monotonic()) > 0:
            self.check_alone()
            doubled = self.mesh.doubled(peer)
            if doubled and round:
                return TWICE
            if doubled is not False:
                time.sleep(min(left, 0.1))  # the one before may just have ended
                continue
            data = self.mesh.fetch(peer, name, min(left, PIECE))
            if data is not None:
                return data or "it is further, and has no word of this round for this peer"
            if round and self.mesh.lost(peer, self.patience.gone):
                return "its connection is lost"
        return TWICE if doubled else "nothing was heard in time"

    def _outcome(
        self, step: Step, peer: NodeId, round: int, number: int, data: bytes | str
    ) -> Outcome:
        if isinstance(data, str):
            return Outcome(absent=data)
        try:
            said = codec.decode(data, Said, limits=codec.STRANGERS)
            was = (self.standing.run, peer, round, number, step.name)
            came = (said.run, said.node, said.round, said.number, said.step)
            if was != came:
                text = told(f"spoke of {came[1:]}, but was asked for {was[1:]}")
                return Outcome(absent=text)
            if said.absent is not None:
                return Outcome(absent=told(said.absent) or "it does not say why")
            outcome = self._opened(step, said)
        except (WireError, KeyError) as error:
            return Outcome(absent=f"sent what cannot be read: {told(str(error))}")
        why = self._unexpected(peer, round, outcome, len(data))
        if why is None:
            return outcome
        text = told(f"{peer} {why} ({step.title}, round {round})", 3 * LONGEST)
        check_left_out(self.experiment.bad_messages, text)
        return Outcome(absent=told(why, 2 * LONGEST))

    def _opened(self, step: Step, said: Said) -> Outcome:
        letters = () if said.letter is None else (said.letter,)
        messages = self._letters().opened(letters, self.inner.device)
        hearer = self.me if said.addressed else ""
        places = {hearer: 0} if messages else None
        left = Left(
            places, said.addressed, {}, (), {}, None, False, True, False, said.lost
        )  # fmt: skip
        outcome = outcome_of(left, messages, said.round, step.name, said.node)
        check_kind(step, outcome)
        return outcome

    def _unexpected(self, peer: NodeId, round: int, outcome: Outcome, size: int) -> str | None:
        """Why a word is none of this step, by the shapes in it and its size; None if it may be.

        What is heard is kept on the disk, so a peer could fill that with words of any size.
        """
        reader, most = self.experiment.reader(self.me, round), SMALL
        messages = {} if outcome.message is None else by_hearer(outcome.message)
        for message in trees.to([*messages.values()], "meta"):
            if shapes_kept(self.experiment.channels, "peer"):
                why = unexpected(message, self.experiment.method, [reader], peer)
                if why is not None:
                    return why
            whole = message.announced() if isinstance(message, Coded) else message
            most += GROWTH * sum(whole.bytes().values())
        if size > most:
            return f"sent {size} bytes for a message that takes at most {most}"
        return None

    def stand(self, *, ended: bool = False) -> None:
        """Let everybody know where this peer is; of earlier rounds it says nothing new."""
        self.mesh.passed(self.round + 1 if ended else self.round)
        self.mesh.say(STANDING, codec.encode(Standing(self.standing, self.round, ended)))

    def standings(self, seconds: float = PIECE) -> dict[NodeId, Standing]:
        """Where the others are who are connected and say so in time."""
        here = [peer for peer in self.others if peer in self.mesh.here()]
        asked = {peer: self._pool.submit(self._standing_of, peer, seconds) for peer in here}
        found = {peer: future.result() for peer, future in asked.items()}
        return {peer: said for peer, said in found.items() if said is not None}

    def _standing_of(self, peer: NodeId, seconds: float) -> Standing | None:
        if self.mesh.doubled(peer) is not False:
            return None  # one of two would answer, and nobody knows which
        data = self.mesh.fetch(peer, STANDING, seconds)
        try:
            said = None if data is None else codec.decode(data, Standing)
        except WireError:
            return None
        return said if said is not None and said.hello.node == peer else None

    def look_for_twins(self) -> None:
        """Say which processes are one too many, and hear whether this is one of them.

        A process counts as one only by the word of more than half of all others, as `furthest`
        does, so one of several cannot end another. Who came first is not named: whoever has copied
        a peer's key cannot end that peer by it.
        """
        twice = [peer for peer in self.others if self.mesh.doubled(peer)]
        later = {peer: tuple(sorted(self.mesh.later(peer))) for peer in twice}
        self.mesh.say(TWINS, codec.encode(Twins(self.standing.run, later)))
        here = [peer for peer in self.others if peer in self.mesh.here() and peer not in twice]
        naming = [peer for peer in here if self._is_twin_for(peer)]
        if len(naming) > len(self.others) // 2:
            self._twin_of = naming

    def _is_twin_for(self, peer: NodeId) -> bool:
        data = self.mesh.fetch(peer, TWINS, PIECE)
        try:
            said = Twins(self.standing.run, {}) if data is None else codec.decode(data, Twins)
        except WireError:
            return False
        return said.run == self.standing.run and self.mesh.id in said.later.get(self.me, ())

    def check_alone(self) -> None:
        """End a process whose peer is already played by another one."""
        if self._twin_of:
            raise SiteError(
                f"another process plays {self.me} and was connected before this one, as "
                f"{', '.join(self._twin_of)} see; only one may take part, since each has memories "
                "of its own. If this is the one that is to go on, end the other and start again"
            )

    def furthest(self) -> int:
        """The round that more than half of all others say they have reached.

        One who is away confirms nothing but what it said when it was last heard, so the fewer are
        heard, the more of them must agree; no round is skipped on the word of one among several.
        """
        for peer, said in self.standings().items():
            why = self._differing(said)
            if why is None:
                self._claimed[peer] = said.round
                self._differ.pop(peer, None)
            else:  # it came back with something else
                self._differ[peer] = why
        claimed = sorted(self._claimed.values(), reverse=True)
        needed = len(self.others) // 2 + 1
        return min(self.experiment.rounds, claimed[needed - 1]) if len(claimed) >= needed else 0

    def check_standing(self, peer: NodeId, said: Standing) -> None:
        """Refuse a peer that has agreed to something else, or runs other code, with both values."""
        if why := self._differing(said):
            self._differ[peer] = why
            raise SiteError(f"{peer}: {why}")

    def _differing(self, said: Standing) -> str | None:
        """In what a peer differs from this one that all must share, and what to do about it."""
        found = difference(self.standing, said.hello, ("run", "recipe", "fedstill", "wire"))
        if found is None:
            return None
        here, there, remedy = found
        remedy = remedy or "; all must join with the same invitation"
        return f"it has {there}, this peer has {here}{remedy}"

    def close(self) -> None:
        """End what was begun to hear others."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class Catching:
    """The recipe's sampler; a peer that fell behind sleeps through rounds that are over.

    Those that it had begun it plays again, with what it heard then.
    """

    sampler: Sampler
    peers: Peers

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        """Who is awake, in the order of their names."""
        peers = self.peers
        peers.check_alone()
        reached = peers.furthest()
        if round < reached and not peers.began(round):
            peers.notes.append(f"round {round} is over elsewhere; others are in round {reached}")
            return []
        peers.round = round
        peers.stand()
        return self.sampler.awake(round, members, seed)


def check_no_server(method: Method) -> None:
    """Refuse a method that somebody has to lead."""
    led = [step.name for step in steps_of(method) if step.place is Place.SERVER]
    if led or method.scored is Place.SERVER:
        raise BadValue(
            f"{type(method).__name__} has a server ({', '.join(led) or 'its model is scored'}), so "
            "it needs a coordinator: make the deployment with --address"
        )
