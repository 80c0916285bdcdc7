"""A site: one client with its own data, which answers what it is asked; no transport.

Whatever is asked, only what the method's step sends, its logged numbers and scores leave. What is
wrong is answered with a refusal and never raised.
"""

from __future__ import annotations

import csv
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, cast

from fedstill.core import content, ranges
from fedstill.core.errors import BadValue, FedstillError, SiteError, StepError, told
from fedstill.core.method import Method, Place, Step, plan_of
from fedstill.core.node import SERVER, Inbox
from fedstill.core.ranges import Count, Positive
from fedstill.core.records import Direction, Message, NodeId, Record
from fedstill.core.release import Spending
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import (
    Letters,
    at_place,
    by_hearer,
    kinds_of,
    left_of,
    spent_of,
    steps_by_name,
    unpacked,
)
from fedstill.federation.post import toward
from fedstill.privacy.privacy import Privacy
from fedstill.sites import words
from fedstill.sites.keeper import SCORES, Keeper
from fedstill.sites.release_log import DISTILLED
from fedstill.sites.words import (
    NEVER,
    Act,
    Acted,
    Done,
    Examine,
    Examined,
    Hello,
    Over,
    Present,
    Refused,
)
from fedstill.wire import codec

MOST_LOG = 1 << 26  # bytes; a coordinator may ask without end, and a disk has one
COLUMNS = ("at", "round", "asked", "bytes_in", "bytes_out", "seconds", "said")


@dataclass(frozen=True)
class Policy:
    """What a site allows, whatever it is asked for; its own affair."""

    allow_examples: bool = False  # take part in methods that show training examples, or may do so
    tell_counts: bool = False  # say how many examples of each class there are; never private ones
    most_acts: Count | None = None  # different acts in all; twice the recipe's when left out
    most_epsilon: Positive | None = None  # of a whole run; without one, none is asked for
    most_delta: Positive | None = None  # at which that is promised; the recipe's when left out

    def __post_init__(self) -> None:
        if wrong := ranges.faults(self):
            raise BadValue([f"policy: {line}" for line in wrong])

    def check_privacy(self, privacy: Privacy | None) -> None:
        """Refuse a run that promises less than this site asks for."""
        asked = {"most_epsilon": self.most_epsilon, "most_delta": self.most_delta}
        for name, most in asked.items():
            if most is None:
                continue
            if privacy is None or not privacy.valid:
                raise SiteError(
                    f"this site asks for differential privacy ({name} = {most:g}), and the recipe "
                    "promises none"
                )
            what = name.removeprefix("most_")
            spent: float = getattr(privacy, what)
            if spent > most:
                raise SiteError(
                    f"the recipe spends {what} = {spent:g} of each record's privacy, this site "
                    f"allows {most:g} ({name})"
                )

    def check(self, method: Method) -> None:
        """Refuse a method that this site does not take part in."""
        if self.allow_examples:
            return
        name = type(method).__name__
        consent = (
            "if that is meant, join with --allow-examples (allow_examples = true in site.toml)"
        )
        if method.sends_examples:
            raise SiteError(
                f"{name} shows training examples to others, which this site does not allow; "
                f"{consent}"
            )
        if method.begins_with_examples:
            raise SiteError(
                f"images that {name} sends begin as training examples and may still show them "
                '(start = "real"), which this site does not allow; ask for start = "noise", or, '
                f"{consent}"
            )


@dataclass(frozen=True)
class Line:
    """One answer in the site's own log; it names steps and sizes, never an example."""

    at: str
    round: int | None
    asked: str
    bytes_in: int
    bytes_out: int
    seconds: float
    said: str


class Site:
    """Answers requests with an engine of its own; what was agreed on is `standing`."""

    def __init__(
        self,
        engine: InProcess,
        standing: Hello,
        *,
        policy: Policy | None = None,
        folder: Path | None = None,
        watch: Callable[[Line], None] = lambda line: None,
        class_names: Sequence[str] = (),
        key: bytes | None = None,
        privacy: Privacy | None = None,
        spent: Sequence[Spending] = (),
    ):
        """`privacy` is what its data promise that were distilled before, by what was `spent`."""
        self.engine, self.standing, self.folder, self.watch = engine, standing, folder, watch
        self.policy = policy or Policy()
        self.class_names = class_names
        method = engine.experiment.method
        self.policy.check(method)
        self.private = engine.experiment.privacy is not None
        self.policy.check_privacy(engine.experiment.privacy or privacy)
        engine.key = key
        if self.private and key is None:
            raise SiteError("noise for privacy needs a key that only this site has")
        self.steps = {n: s for n, s in steps_by_name(method).items() if s.place is Place.CLIENTS}
        self.kinds, self.held = kinds_of(method), method.holds
        self.keeper = Keeper(self.name, engine, folder)
        self.spent = spent_of(spent)
        if spent:
            self.keeper.spend(DISTILLED, spent)
        self.most_acts = self.policy.most_acts or 2 * planned_acts(engine)
        self.most_scores = 2 * (engine.experiment.rounds + 1)
        self.over = False  # whether the coordinator said so
        self._lock = Lock()

    @property
    def name(self) -> NodeId:
        """Whom it plays."""
        return self.standing.node

    def answer(self, data: bytes) -> bytes:
        """Bytes in, bytes out, one request after the other."""
        with self._lock:
            began, request = time.perf_counter(), None
            try:
                request = words.read(data)
                reply = self._reply(request, data)
            except Exception as error:
                self._own_log(error)
                reply = Refused(self.name, self._excuse(error))
            sent = reply if isinstance(reply, bytes) else words.written(reply)
            self._note(request, data, sent, time.perf_counter() - began)
            return sent

    def _reply(self, request: Record, data: bytes) -> Record | bytes:
        match request:
            case Hello():
                return self._hello(request)
            case Act() | Examine() | Over():
                self._check_head(request)
            case _:
                raise SiteError(f"{type(request).__name__} is not asked of a site")
        match request:
            case Act():
                content = words.written(request.replace(keep=()))  # what it comes to
                return self.keeper.answer_to(content) or self._acted(request, content)
            case Examine():
                return self._examined(request, data)
        self.over = True
        return Done(self.name)

    def _check_head(self, request: Act | Examine | Over) -> None:
        if request.run != self.standing.run:
            raise SiteError(f"it takes part in run {self.standing.run}, not in {told(request.run)}")
        if request.node != self.name:
            raise SiteError(f"this is {self.name}, not {told(request.node)}")

    def _hello(self, hello: Hello) -> Present:
        own = self.standing
        if found := words.difference(own, hello, ("run", "node", "recipe", "fedstill", "wire")):
            here, there, remedy = found
            raise SiteError(f"it has {here}, the coordinator has {there}{remedy}")
        data = self.engine.population.party(self.name).data
        privacy = self.engine.experiment.privacy
        public = privacy is None or privacy.labels == "public" or not privacy.valid
        tells = self.policy.tell_counts and public
        counts = Counter(data.all().y.tolist()) if tells else {}
        named = {self._class_name(label): count for label, count in sorted(counts.items())}
        return Present(self.name, own.torch, len(data) if tells else None, named, self.spent)

    def _class_name(self, label: int) -> str:
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def _acted(self, act: Act, content: bytes) -> bytes:
        self._check_planned(act)
        if len(act.keep) > words.MOST_MARKS:
            raise SiteError(f"it was asked to keep {len(act.keep)} memories of one client")
        place = f"{act.round} {act.step} {act.again}"  # as its noise is drawn
        if self.private and self.keeper.asked_otherwise(place, content):
            raise SiteError(
                f"it has played {act.step} of round {act.round} for another inbox or memory; under "
                "privacy an act is released once"
            )
        inbox = self._opened(act)
        if not self.keeper.allowed(place, content, self.most_acts):
            raise SiteError(
                f"it was asked for more than {self.most_acts} different acts, the most that its "
                "policy allows (most_acts)"
            )
        reply = words.written(self._played(act, content, inbox))
        if self.private:
            self.keeper.release(content, reply)
        self.keeper.answered(content, reply)
        return reply

    def _check_planned(self, act: Act) -> None:
        """Refuse an act that the recipe does not have at that place of that round."""
        method, rounds = self.engine.experiment.method, self.engine.experiment.rounds
        if act.step not in self.steps:
            title = type(method).__name__
            raise SiteError(f"{title} has no step {told(act.step)} for clients")
        if not 0 <= act.round <= rounds:
            raise SiteError(f"it was asked for round {act.round}, but the recipe has {rounds}")
        plan = [
            (step.name, step.again, toward(step, following))
            for part in plan_of(method, act.round, rounds)
            for step, following in pairwise([*part, None])
            if step is not None
        ]
        # The rest of a round is skipped where the server hears nobody, so a step may come sooner.
        left = plan[act.number :] if act.number >= 0 else []
        if (act.step, act.again) not in [(name, again) for name, again, _ in left]:
            before = f", {act.again} times played before," if act.again else ""
            raise SiteError(
                f"{act.step}{before} is not act {act.number} of round {act.round} in the recipe's "
                "plan"
            )
        # What travels elsewhere than the plan says would not be coded by the recipe's channels.
        if (act.step, act.again, act.toward) not in left:
            ways = " or ".join(
                str(way or "nowhere") for *played, way in left if played == [act.step, act.again]
            )
            raise SiteError(
                f"what {act.step} says travels {ways} in the recipe's plan, not "
                f"{told(act.toward or 'nowhere')}: it would leave otherwise than was agreed"
            )

    def _opened(self, act: Act) -> Inbox[Any]:
        """What an act is for, with the memory that it goes on from; all that can be refused is."""
        known = {SERVER, *self.engine.population.clients}
        for sender in act.inbox:
            if sender not in known:
                raise SiteError(f"{told(sender)} takes no part in this run")
        letters = Letters(self.kinds, self.held, codec.STRANGERS)
        messages = letters.opened(act.letters, self.engine.device)
        inbox = Inbox({sender: at_place(messages, place) for sender, place in act.inbox.items()})
        self._check_heard(self.steps[act.step], inbox, act.round)
        self.keeper.recall(act.after, act.channels)
        return inbox

    def _played(self, act: Act, content: bytes, inbox: Inbox[Any]) -> Acted:
        engine, name = self.engine, self.name
        if self.private:
            self.keeper.recall_ledger(content)
        engine.states.changed.clear()
        toward = cast(Direction | None, act.toward)
        step = replace(self.steps[act.step], again=act.again)
        outcome = engine.play(step, act.round, {name: inbox}, toward)[name]
        if self.private:
            self.keeper.spend(content, outcome.spent)
        marks = self.keeper.remember()
        self.keeper.tidy([*act.keep, act.after, act.channels, *marks])
        said = {} if outcome.message is None else {name: by_hearer(outcome.message)}
        places, enclosed = Letters(self.kinds, self.held).enclosed(said)
        left = left_of(name, outcome, places.get(name), engine.states)
        return Acted(
            act.run, name, act.round, act.number, act.step, left, enclosed, marks[0], marks[1]
        )

    def _check_heard(self, step: Step, inbox: Inbox[Message], round: int) -> None:
        """Refuse what cannot be used, whoever sent it: a site does not trust its coordinator.

        A message of another kind, or one that is still coded, would be judged by other hints.
        """
        experiment = self.engine.experiment
        reader = experiment.reader(self.name, round)
        for sender, message in inbox.items():
            if step.reads is not None and not isinstance(message, step.reads):
                raise SiteError(
                    f"{told(sender)} sent {type(message).__name__}, but {step.name} reads "
                    f"{step.reads.__name__}"
                )
            if why := content.refusal(experiment.method, reader, sender, message):
                raise SiteError(f"{told(sender)} {told(why)}")

    def _examined(self, request: Examine, data: bytes) -> Examined:
        engine, name, round = self.engine, self.name, request.round
        if not 0 <= round <= engine.experiment.rounds:
            raise SiteError(
                f"it was asked for scores of round {round}, but the recipe has "
                f"{engine.experiment.rounds}"
            )
        if not self.keeper.allowed(f"{SCORES} {round}", data, self.most_scores):
            raise SiteError(
                f"it was asked for more than {self.most_scores} different scores, twice what the "
                "recipe plans: whoever may ask without end learns its tests"
            )
        server = own = None
        if request.server is not None:
            kind = engine.experiment.method.scored_kind
            state = unpacked(request.server, kind, engine.device, self.held, codec.STRANGERS)
            server = dict(engine.scores_at(name, state, round).get(name, {}))
        if request.after:
            self.keeper.recall(request.after, NEVER)
            own = dict(engine.own_scores(name, round).get(name, {}))
        return Examined(request.run, name, round, server, own)

    def _excuse(self, error: Exception) -> str:
        """What others are told: of a failure inside a step only that there was one.

        What torch says of a failure may show values of examples.
        """
        if isinstance(error, StepError):
            return f"{error.method}.{error.step} failed in round {error.round}; see its own log"
        if isinstance(error, FedstillError):
            return told(str(error))
        return f"it failed ({type(error).__name__}); see its own log"

    def _own_log(self, error: Exception) -> None:
        if self.folder is None or isinstance(error, SiteError):
            return
        try:
            with (self.folder / "failures.log").open("a", encoding="utf-8") as file:
                if file.tell() < MOST_LOG:
                    file.write(f"{_now()}\n{''.join(traceback.format_exception(error))}\n")
        except OSError:
            return  # the disk is full: the coordinator is told all the same

    def _note(self, request: Record | None, data: bytes, sent: bytes, seconds: float) -> None:
        reply = words.read(sent, codec.OWN)
        asked = request.step if isinstance(request, Act) else _word(request)
        line = Line(
            _now(),
            getattr(request, "round", None),
            asked if isinstance(reply, Acted) else told(asked),
            len(data),
            len(sent),
            round(seconds, 3),
            reply.text if isinstance(reply, Refused) else "ok",
        )
        self.watch(line)
        if self.folder is not None:
            append(self.folder / "answers.csv", line)


def append(path: Path, line: Line) -> None:
    """One more row of the site's log, up to `MOST_LOG`; a full disk does not end the run."""
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() >= MOST_LOG:
                return
            if not file.tell():
                writer.writerow(COLUMNS)
            writer.writerow(["" if v is None else v for v in vars(line).values()])
    except OSError:
        return


def planned_acts(engine: InProcess) -> int:
    """How many acts of a client the recipe asks for."""
    method, rounds = engine.experiment.method, engine.experiment.rounds
    at_clients = [
        sum(step.place is Place.CLIENTS for step in steps)
        for steps in (method.before(), method.each_round(), method.after())
    ]
    return max(1, at_clients[0] + rounds * at_clients[1] + at_clients[2])


def _word(request: Record | None) -> str:
    return "something unreadable" if request is None else type(request).__name__.lower()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
