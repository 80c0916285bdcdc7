"""Timeline: simulated time while it passes; it knows messages by their sizes alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.core.work import Work
from fedstill.federation.clock import Clock


class Parcel(NamedTuple):
    """One message on its way from one party to another."""

    sender: NodeId
    hearer: NodeId
    bytes: int


class Timeline:
    """When everybody is ready. All begin a round together, when the one before is over.

    A party's link carries one message at a time, those that are ready first (by name where that
    is equal); sending and receiving overlap. Answers are waited for until the deadline, counted
    from when they were asked for: from the beginning of the round, or from the end of the
    server's step before; among peers, from when the first of them could begin.
    """

    def __init__(self, clock: Clock, clients: Sequence[NodeId], seed: int, *, now: float = 0.0):
        self.clock = clock
        self.paces = clock.paces(clients, seed)
        self.now = now  # at the end of the last round
        self.waiting = False  # whether the deadline counts
        self.busy: dict[NodeId, float] = {}  # seconds of work and traffic since they were asked for
        self.begin([])

    def begin(self, awake: Collection[NodeId], *, waiting: bool = True) -> None:
        """A round, or the steps before the first, which wait for everybody, or after the last."""
        self.waiting = waiting
        self.asked = self.now
        self.ready = dict.fromkeys((SERVER, *awake), self.now)
        self.sending: dict[NodeId, float] = {}  # until when
        self.receiving: dict[NodeId, float] = {}

    def end(self) -> None:
        """The round is over when nobody is busy who is waited for."""
        self.now = max(self.ready.values())
        if not math.isfinite(self.now):
            raise BadValue(
                "clock: the simulated time is no longer a finite number; speeds and links are too "
                "slow for this work"
            )

    def taken(self) -> dict[NodeId, float]:
        """The seconds that each client worked, sent and received since this was asked last."""
        found, self.busy = dict(sorted(self.busy.items())), {}
        return found

    @property
    def deadline(self) -> float | None:
        """The moment until which answers are waited for."""
        wanted = self.clock.deadline if self.waiting else None
        return None if wanted is None else self.asked + wanted

    def work(self, done: Mapping[NodeId, Work]) -> None:
        """Let everybody do a step's work."""
        for node, work in done.items():
            amount = work.operations if self.clock.work == "operations" else work.steps
            self._pass(node, amount / self.paces[node].speed)
        if SERVER in done:
            self.asked = self.ready[SERVER]

    def carry(self, parcels: Iterable[Parcel]) -> dict[Parcel, float]:
        """When each message arrives, as if nobody waited in vain."""
        arrivals: dict[Parcel, float] = {}
        for parcel in sorted(parcels, key=lambda p: (self.ready[p.sender], p.sender, p.hearer)):
            sender, hearer = self.paces[parcel.sender], self.paces[parcel.hearer]
            begun = max(self.ready[parcel.sender], self.sending.get(parcel.sender, 0.0))
            sent = begun + parcel.bytes / sender.up
            free = max(begun, self.receiving.get(parcel.hearer, 0.0))
            there = max(sent, free + parcel.bytes / hearer.down)
            self.sending[parcel.sender], self.receiving[parcel.hearer] = sent, there
            arrivals[parcel] = there + sender.latency + hearer.latency
            self._note(parcel.sender, parcel.bytes / sender.up)
            self._note(parcel.hearer, parcel.bytes / hearer.down)
        return arrivals

    def late(self, arrivals: Mapping[Parcel, float]) -> dict[Parcel, float]:
        """The clients' messages that arrive after the deadline, with the seconds after asking."""
        if self.deadline is None:
            return {}
        return {
            parcel: there - self.asked
            for parcel, there in arrivals.items()
            if parcel.sender != SERVER and there > self.deadline
        }

    def hear(self, arrivals: Mapping[Parcel, float], gone: Collection[NodeId]) -> None:
        """Whoever hears goes on when all has arrived, or waits for the rest until the deadline.

        Those gone are waited for no longer than that.
        """
        limit = self.deadline
        peers = [p.hearer for p in arrivals if SERVER not in (p.sender, p.hearer)]
        for parcel, there in arrivals.items():
            if limit is not None and parcel.sender != SERVER:
                there = min(there, limit)
            if parcel.hearer in self.ready:
                self.ready[parcel.hearer] = max(self.ready[parcel.hearer], there)
        for node in gone:
            self.ready.pop(node, None)
        if peers:
            able = [self.ready[node] for node in peers if node in self.ready]
            self.asked = min(able, default=self.asked)
            if limit is not None and not able:  # they have waited for each other in vain
                self.ready[SERVER] = max(self.ready[SERVER], limit)

    def _pass(self, node: NodeId, seconds: float) -> None:
        self.ready[node] = self.ready.get(node, self.asked) + seconds
        self._note(node, seconds)

    def _note(self, node: NodeId, seconds: float) -> None:
        if node != SERVER:
            self.busy[node] = self.busy.get(node, 0.0) + seconds
