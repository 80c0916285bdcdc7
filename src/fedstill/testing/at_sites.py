"""Sites in this process: each client an answering site behind bytes, with data of its own alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstill.core import NodeId
from fedstill.core.method import Method
from fedstill.core.node import SERVER
from fedstill.engines.play.in_process import InProcess
from fedstill.sites.away import Away, Patience
from fedstill.sites.exchange import Exchange, Loopback
from fedstill.sites.people import OnePlace
from fedstill.sites.site import Policy, Site
from fedstill.sites.words import Hello
from fedstill.testing import worlds
from fedstill.testing.worlds import World

STANDING = Hello("trial", SERVER, "the same", "this", 1, "this")  # what all have agreed on


def seen_from(world: World, own: NodeId) -> OnePlace:
    """A federation as one party sees it."""
    here = {} if own == SERVER else {own: world.party(own)}
    return OnePlace(world.models, world.server_model, parties=here, public=world.public)


def engine_at(method: Method, world: World, own: NodeId, **options: Any) -> InProcess:
    """The engine of one party."""
    seen: Any = seen_from(world, own)
    made: InProcess = worlds.engine_for(method, seen, **options)
    return made


def sites(
    method: Method, world: World, folder: Path | None = None, **options: Any
) -> dict[NodeId, Site]:
    """Every client as a site, which allows all that the method asks for."""
    return {
        name: Site(
            engine_at(method, world, name, **options),
            replace(STANDING, node=name),
            policy=Policy(allow_examples=True),
            folder=None if folder is None else folder / name,
        )
        for name in world.clients
    }


def away(
    method: Method,
    world: World,
    at: Mapping[NodeId, Site],
    line: Callable[[Exchange], Exchange] = lambda exchange: exchange,
    patience: Patience | None = None,
    **options: Any,
) -> Away:
    """The coordinator's engine over these sites; `line` is what stands between."""
    exchange = line(Loopback({name: site.answer for name, site in at.items()}))
    own = engine_at(method, world, SERVER, **options)
    return Away(own, exchange, STANDING, patience)


class Meeting:
    """Where peers in threads of one process say words and hear each other's."""

    def __init__(self) -> None:
        self.said: dict[tuple[NodeId, NodeId | None, str], bytes] = {}
        self.present: set[NodeId] = set()
        self.twice: set[NodeId] = set()  # in whose names two are there
        self.second: dict[NodeId, str] = {}  # and the process of each that came later
        self.in_round: dict[NodeId, int] = {}  # where each is
        self.changed = threading.Condition()

    def never(self, key: tuple[NodeId, NodeId | None, str]) -> bool:
        """Whether a word was not said while its round lasted."""
        speaker, hearer, name = key
        of = 0 if hearer is None else int(name.split("/")[0])
        return key not in self.said and 0 < of < self.in_round.get(speaker, 0)


class ThreadMesh:
    """One peer's end of such a meeting."""

    def __init__(self, meeting: Meeting, me: NodeId):
        self.meeting, self.me, self.id = meeting, me, f"{me} itself"
        with meeting.changed:
            meeting.present.add(me)

    def say(self, name: str, data: bytes, hearer: NodeId | None = None) -> None:
        """Leave a word."""
        with self.meeting.changed:
            self.meeting.said[self.me, hearer, name] = bytes(data)
            self.meeting.changed.notify_all()

    def fetch(self, peer: NodeId, name: str, seconds: float) -> bytes | None:
        """A peer's word."""
        key, meeting = (peer, self.me if "/" in name else None, name), self.meeting
        with meeting.changed:
            meeting.changed.wait_for(lambda: key in meeting.said or meeting.never(key), seconds)
            return meeting.said.get(key, b"" if meeting.never(key) else None)

    def forget(self, before: int) -> None:
        """Threads keep all words."""

    def passed(self, round: int) -> None:
        """Of earlier rounds nothing new is said."""
        with self.meeting.changed:
            self.meeting.in_round[self.me] = round
            self.meeting.changed.notify_all()

    def here(self) -> set[NodeId]:
        """Who has not left."""
        return set(self.meeting.present)

    def lost(self, peer: NodeId, seconds: float) -> bool:
        """Who is not there has left long ago."""
        return peer not in self.meeting.present

    def doubled(self, peer: NodeId) -> bool | None:
        """Whether somebody said so."""
        return peer in self.meeting.twice

    def later(self, peer: NodeId) -> set[str]:
        """As somebody said."""
        return {self.meeting.second[peer]} if peer in self.meeting.second else set()

    def leave(self) -> None:
        """Be no longer there."""
        with self.meeting.changed:
            self.meeting.present.discard(self.me)
