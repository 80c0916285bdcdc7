"""The acts of a private peer: each is played for one inbox and one memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedstill.core.method import Step
from fedstill.core.node import Inbox
from fedstill.core.records import Message, NodeId, Record, State
from fedstill.core.release import Spending
from fedstill.engines.engine import Outcome
from fedstill.engines.outbox import channels_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.letters import Letters, kinds_of
from fedstill.engines.ranks.protocol import Letter
from fedstill.sites.release_log import ReleaseLog, digest_of
from fedstill.sites.words import BLANK, NEVER
from fedstill.wire import codec


class Act(Record):
    """All that an act of a peer depends on besides its data and its key."""

    round: int
    step: str
    again: int
    toward: str | None
    inbox: dict[str, int]
    letters: tuple[Letter, ...]
    marks: tuple[str, str]  # of what the peer and its channels remember


class PrivateActs(ReleaseLog):
    """What a peer has played, and what that spent."""

    def __init__(self, name: NodeId, engine: InProcess, folder: Path | None = None):
        super().__init__(name, engine, folder)
        self._told: set[str] = set()  # acts whose spending this process has told

    def act(self, step: Step, round: int, inbox: Inbox[Message], toward: str | None) -> bytes:
        """What is played now, as it is known by."""
        method = self.engine.experiment.method
        letters = Letters(kinds_of(method), method.holds)
        places, enclosed = letters.enclosed({self.name: dict(inbox.items())})
        marks = (self._mark(self.name), self._mark(channels_of(self.name)))
        own = Act(round, step.name, step.again, toward, places[self.name], enclosed, marks)
        return codec.encode(own)

    def played(self, step: Step, round: int, act: bytes, play: Callable[[], Outcome]) -> Outcome:
        """Play an act, unless it was played for something else."""
        place = f"{round} {step.name} {step.again}"  # as its noise is drawn
        if self.asked_otherwise(place, act):
            return Outcome(
                absent=f"it has played {step.name} of this round for another inbox or memory; "
                "under privacy an act is released once",
                spent=[*self._untold(round)],
            )
        self.ask(place, act)
        self.recall_ledger(act)
        outcome = play()
        self.spend(act, outcome.spent)
        return replace(outcome, spent=self._once(digest_of(act), outcome.spent))

    def _untold(self, round: int) -> Iterator[Spending]:
        """What acts of a round spent before, of which this peer is absent in the rest now."""
        for digest, place in self._asked.items():
            if place.startswith(f"{round} "):
                for row in self._once(digest, self._spent.get(digest, ())):
                    yield replace(row, round=round, step=place.split(" ")[1])

    def _once(self, digest: str, rows: Sequence[Spending]) -> Sequence[Spending]:
        """The rows of an act, unless they were told before."""
        new = digest not in self._told
        self._told.add(digest)
        return rows if new else ()

    def began(self, round: int) -> bool:
        """Whether an act of a round was played before, so that it has been paid for."""
        return any(place.startswith(f"{round} ") for place in self._asked.values())

    def _mark(self, node: NodeId) -> str:
        states = self.engine.states
        if node not in states:
            return NEVER
        state: State | None = states[node]
        return BLANK if state is None else digest_of(codec.encode(state))
