"""The coordinator's engine: the server's steps are played here, the clients' at their sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fedstill.channels.coded import unwrapped
from fedstill.core.errors import BadValue, SiteError, WireError, told
from fedstill.core.method import Place, Step
from fedstill.core.node import SERVER, Addressed, Inbox
from fedstill.core.ranges import Range, Whole
from fedstill.core.records import Direction, NodeId, Record
from fedstill.core.release import Spending
from fedstill.engines import scoring
from fedstill.engines.checkpoint import Saved
from fedstill.engines.engine import Outcome
from fedstill.engines.outbox import channels_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import Letters, kinds_of, outcome_of, packed
from fedstill.engines.ranks.protocol import AtSite, Spent
from fedstill.engines.scoring import Scores
from fedstill.metrics import chosen
from fedstill.privacy.accounting import LEAST_SIGMA
from fedstill.privacy.privacy import Privacy
from fedstill.sites import words
from fedstill.sites.exchange import Exchange, Silence, Stopped
from fedstill.sites.own_node import OwnNode
from fedstill.sites.words import (
    BLANK,
    NEVER,
    Act,
    Acted,
    Done,
    Examine,
    Examined,
    Hello,
    Over,
    Present,
)
from fedstill.wire import codec

R = TypeVar("R", bound=Record)
MOST_SPENT = 1000  # rows of a ledger for one step
MOST_RELEASES = 2**20  # in one of them
MOST_NUMBERS = 1000  # that a step logs
MOST_SIGMA = 1e9  # noise of a release; an accountant overflows far beyond
ALL_BUT = 1 - 1e-6  # rate of a sample that is not everybody; nearer to 1 an accountant fails
Seconds = Annotated[float, Range(0, 1e9, open_low=True)]  # a line can wait no longer
ASKED = "asked"  # what is said of a site that was asked and has not answered yet


@dataclass(frozen=True)
class Patience:
    """How long a coordinator waits, in seconds, and for how many."""

    start: Seconds = 600.0  # for all sites to be there, and for steps before the first round
    step: Seconds = 600.0  # for the answers to one request
    gone: Seconds = 90.0  # for one whose connection is lost to come back
    least: Whole = 1  # sites that must answer in each step; with fewer the run stops


@dataclass(frozen=True)
class Asked:
    """What a site was asked and how it answered, for whoever watches."""

    node: NodeId
    round: int
    step: str
    sent: int  # bytes
    received: int
    said: str


class Away(OwnNode):
    """Server here, clients at their sites; of their memories only marks are known here.

    A site that does not answer in time, refuses, or says what cannot be read is absent in that
    step: it goes on from the memory it had before.
    """

    name = "sites"

    def __init__(
        self,
        inner: InProcess,
        exchange: Exchange,
        standing: Hello,
        patience: Patience | None = None,
        watch: Callable[[Asked], None] = lambda asked: None,
    ):
        super().__init__(inner, SERVER)
        self.exchange, self.standing = exchange, standing
        self.patience = patience or Patience()
        self.watch = watch
        inner.far_kind = AtSite
        self.limits = codec.STRANGERS
        self._kinds = kinds_of(self.experiment.method)
        self._kept: list[dict[NodeId, str]] = []  # marks of the last checkpoints
        self._strangers: set[NodeId] = set()  # who must say first what they have joined
        if self.experiment.scores == "cross":
            raise BadValue(
                'scores = "cross": at sites nobody has another\'s tests; use "own" or "auto"'
            )

    def met(self, sites: Iterable[NodeId]) -> dict[NodeId, Present | Silence]:
        """What these sites say that they have joined, or why they do not.

        All others are asked for it before their next step, and so are those who do not say it.
        """
        self._strangers = {*self.population.clients}
        # A site may still play what the coordinator had asked before it was killed.
        return self._greeted(sites, 0, max(self.patience.start, self.patience.step))

    def hello(self) -> dict[NodeId, Present]:
        """All sites have joined this very run; else an error says who has not, and why."""
        answers = self.met(self.population.clients)
        wrong = [f"{n}: {a.reason}" for n, a in answers.items() if isinstance(a, Silence)]
        if wrong:
            raise SiteError("\n".join(wrong))
        return {n: a for n, a in answers.items() if isinstance(a, Present)}

    def over(self) -> None:
        """Tell the sites that the run has ended; who does not hear it waits on."""
        run, clients = self.standing.run, self.population.clients
        told: dict[NodeId, Record] = {node: Over(run, node) for node in clients}
        with suppress(Stopped):
            self._asked(Done, told, self.experiment.rounds, "over", min(10.0, self.patience.step))

    def save(
        self,
        folder: Path,
        round: int,
        *,
        digest: str,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """A checkpoint of the server's memory and of the marks of all others."""
        super().save(folder, round, digest=digest, keep=keep, extra=extra)
        self._kept = [*self._kept, self._marks()][-keep:]

    def load(self, folder: Path, *, digest: str | None) -> Saved | None:
        """Go on from the newest checkpoint that is whole; sites from the memories it marks."""
        saved = super().load(folder, digest=digest)
        self._kept = [] if saved is None else [self._marks()]
        return saved

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        """One step on every node that has an inbox, each at its site."""
        self._next_act(round)
        if step.place is Place.SERVER:
            return self.inner.play(step, round, inboxes, toward)
        letters = Letters(self._kinds, self.experiment.method.holds, self.limits)
        asked: dict[NodeId, Record] = {
            node: self._act(step, round, toward, node, inbox, letters)
            for node, inbox in inboxes.items()
        }
        seconds = self.patience.step if round else self.patience.start
        answers = self._asked_members(Acted, asked, round, step.name, seconds)
        outcomes = {
            n: self._outcome(step, round, n, answers[n], inboxes[n], letters) for n in inboxes
        }
        self._check_enough(step, round, outcomes)
        return outcomes

    def score(self, round: int) -> Iterator[tuple[NodeId, Scores]]:
        """Each client's model at its site, the server's at all sites, each on its own tests."""
        method, clients = self.experiment.method, self.population.clients
        holders = scoring.holders(method, self.inner.states, clients)
        server = None
        if SERVER in holders:
            node = self.inner.node(SERVER, round, scoring.EVALUATION)
            server = packed(method.scored_state(node))
        asked: dict[NodeId, Record] = {
            c: Examine(
                self.standing.run, c, round, self._mark(c) if c in holders else "", server
            )
            for c in clients
            if c in holders or server is not None
        }  # fmt: skip
        found: dict[NodeId, dict[NodeId, Mapping[str, float]]] = {}
        answers = self._asked_members(
            Examined, asked, round, scoring.EVALUATION, self.patience.step
        )
        for client, answer in answers.items():
            if isinstance(answer, Silence):
                self.notes.append(f"{client} not scored in round {round}: {answer.reason}")
                continue
            for holder, scores in ((SERVER, answer.server), (client, answer.own)):
                if scores is not None and holder in holders:
                    found.setdefault(holder, {})[client] = self._sound(scores)
        yield from ((holder, found[holder]) for holder in holders if holder in found)

    def _act(
        self, step: Step, round: int, toward: Direction | None, node: NodeId, inbox: Inbox[Any],
        letters: Letters,
    ) -> Act:  # fmt: skip
        places, enclosed = letters.enclosed({node: inbox})
        names = (node, channels_of(node))
        keep = {marks[name] for marks in self._kept for name in names if name in marks}
        return Act(
            self.standing.run, node, round, self._at[1], step.name, step.again, toward,
            self._mark(node), self._mark(channels_of(node)), tuple(sorted(keep)), places[node],
            enclosed,
        )  # fmt: skip

    def _greeted(
        self, sites: Iterable[NodeId], round: int, seconds: float
    ) -> dict[NodeId, Present | Silence]:
        """What each says that it has joined; who has joined this very run is no stranger."""
        asked: dict[NodeId, Record] = {n: replace(self.standing, node=n) for n in sites}
        answers = self._asked(Present, asked, round, "hello", seconds)
        for node, present in answers.items():
            if isinstance(present, Silence):
                continue
            self._strangers.discard(node)
            if present.torch != self.standing.torch:
                self.notes.append(
                    f"{node} runs torch {told(present.torch)}, the coordinator "
                    f"{self.standing.torch}: sums may differ in their last digits"
                )
        return answers

    def _asked_members(
        self, kind: type[R], requests: Mapping[NodeId, Record], round: int, step: str,
        seconds: float,
    ) -> dict[NodeId, R | Silence]:  # fmt: skip
        """As `_asked`, but who was away says first what it has joined, as it may differ."""
        strangers = [node for node in requests if node in self._strangers]
        came = self._greeted(strangers, round, min(seconds, self.patience.gone))
        silent = {node: said for node, said in came.items() if isinstance(said, Silence)}
        members = {node: asked for node, asked in requests.items() if node not in silent}
        answers = self._asked(kind, members, round, step, seconds)
        for node, answer in answers.items():
            if isinstance(answer, Silence) and answer.gone:
                self._strangers.add(node)
        found: dict[NodeId, R | Silence] = {**answers, **silent}
        return {node: found[node] for node in requests}

    def _asked(
        self, kind: type[R], requests: Mapping[NodeId, Record], round: int, step: str,
        seconds: float,
    ) -> dict[NodeId, R | Silence]:  # fmt: skip
        """The answer of each, of this kind and to this request, or why there is none."""
        sent = {node: words.written(request) for node, request in requests.items()}
        for node, data in sent.items():
            self.watch(Asked(node, round, step, len(data), 0, ASKED))
        came = self.exchange.ask(sent, seconds) if sent else {}
        found: dict[NodeId, R | Silence] = {}
        for node, request in requests.items():
            answered = came.get(node, Silence("did not answer"))
            found[node] = self._read(kind, request, answered)
            answer, size = found[node], 0 if isinstance(answered, Silence) else len(answered)
            said = answer.reason if isinstance(answer, Silence) else "ok"
            self.watch(Asked(node, round, step, len(sent[node]), size, said))
        return found

    def _read(self, kind: type[R], request: Record, data: bytes | Silence) -> R | Silence:
        if isinstance(data, Silence):
            return data
        try:
            return words.answered(kind, request, words.read(data, self.limits))
        except SiteError as error:
            return Silence(str(error))
        except WireError as error:
            return Silence(f"sent what cannot be read: {told(str(error))}")

    def _outcome(
        self,
        step: Step,
        round: int,
        node: NodeId,
        answer: Acted | Silence,
        inbox: Inbox[Any],
        letters: Letters,
    ) -> Outcome:
        if isinstance(answer, Silence):
            return Outcome(absent=answer.reason)
        try:
            messages = letters.opened(answer.letters, self.inner.device)
            outcome = outcome_of(answer.left, messages, round, step.name, node)
            check_kind(step, outcome)
            check_spent(answer.left.spent, self.experiment.privacy)
            check_numbers(answer.left.numbers)
            marks = [_checked_mark(mark) for mark in (answer.mark, answer.channels)]
        except (WireError, KeyError) as error:
            return Outcome(absent=f"sent what cannot be read: {told(str(error))}")
        if outcome.absent is not None:
            return Outcome(absent=told(outcome.absent))
        for name, mark in zip((node, channels_of(node)), marks, strict=True):
            if mark != NEVER:
                self.inner.states[name] = None if mark == BLANK else AtSite(mark)
        return replace(
            outcome,
            numbers={told(k): v for k, v in outcome.numbers.items()},
            spent=tuple(replace(row, mechanism=told(row.mechanism)) for row in outcome.spent),
            rejected={s: told(w) for s, w in outcome.rejected.items() if s in inbox},
        )

    def _check_enough(self, step: Step, round: int, outcomes: Mapping[NodeId, Outcome]) -> None:
        """Stop where too few answered; the last checkpoint is there to go on from."""
        heard = [node for node, outcome in outcomes.items() if outcome.absent is None]
        least = min(self.patience.least, len(outcomes))
        if len(heard) < least:
            lines = [f"{n}: {o.absent}" for n, o in outcomes.items() if o.absent is not None]
            raise SiteError(
                f"{len(heard)} of {len(outcomes)} sites answered {step.name} in round {round}, but "
                f"at least {least} must; start again when they are back. " + "; ".join(lines)
            )

    def _sound(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The metrics that were asked for, as numbers that one can average."""
        known = chosen(self.experiment.metrics)
        return {
            name: float(value) if math.isfinite(value) else math.nan
            for name, value in scores.items()
            if name in known
        }

    def _mark(self, name: NodeId) -> str:
        states = self.inner.states
        if name not in states:
            return NEVER
        held = states[name]
        return held.mark if isinstance(held, AtSite) else BLANK

    def _marks(self) -> dict[NodeId, str]:
        """The marks of all memories that lie at sites."""
        states = self.inner.states
        found = {name: states[name] for name in states if name != SERVER}
        return {name: held.mark for name, held in found.items() if isinstance(held, AtSite)}


def check_kind(step: Step, outcome: Outcome) -> None:
    """A step sends its own kind of message and no other of the method's."""
    message = outcome.message
    each = message.values() if isinstance(message, Addressed) else [message]
    for one in each:
        if one is not None and type(unwrapped(one)[0]) is not step.sends:
            expected = step.sends.__name__ if step.sends else "nothing"
            came = type(unwrapped(one)[0]).__name__
            raise WireError(f"{step.name} sends {expected}, but {came} came")


def _checked_mark(mark: str) -> str:
    fits = mark in (NEVER, BLANK) or (len(mark) == 64 and set(mark) <= set("0123456789abcdef"))
    if not fits:
        raise WireError(f"{mark[:80]!r} is no mark of a memory")
    return mark


def check_numbers(numbers: Mapping[str, float]) -> None:
    """Refuse more than any step logs: each is a row of a table, kept as long as the run is."""
    if len(numbers) > MOST_NUMBERS:
        raise WireError(f"{len(numbers)} numbers of a log came, the limit is {MOST_NUMBERS}")


def check_spent(rows: Sequence[Spent], privacy: Privacy | None) -> None:
    """Refuse rows of a ledger that nobody can account for, or that nobody asked for."""
    if rows and privacy is None:
        raise WireError("it says what it spent, but the recipe has no privacy")
    if len(rows) > MOST_SPENT:
        raise WireError(f"{len(rows)} rows of a ledger came, the limit is {MOST_SPENT}")
    for row in rows if privacy is not None and privacy.valid else ():
        noisy = LEAST_SIGMA <= row.sigma <= MOST_SIGMA
        sampled = 0 <= row.rate <= ALL_BUT or row.rate == 1
        if not (noisy and sampled and 0 <= row.releases <= MOST_RELEASES):
            raise WireError(
                f"it says that it spent {row.releases} releases at rate {row.rate:g} with "
                f"noise {row.sigma:g}, which no plan has"
            )


def spent_before(site: NodeId, present: Present, privacy: Privacy | None) -> list[Spending]:
    """What a site says that it spent before the run, on virtual data."""
    try:
        check_spent(present.spent, privacy)
    except WireError as error:
        raise SiteError(f"{site}: {error}") from error
    return [
        Spending(0, "warm_up", site, told(row.mechanism), row.sigma, row.rate, row.releases)
        for row in present.spent
    ]
