"""Sites behind walls: each party has its own data alone, and speaks in encoded bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from fedstill.core import Data, Model, NodeId
from fedstill.core.errors import RankError
from fedstill.core.method import Method
from fedstill.core.node import SERVER
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.follower import Follower, serve
from fedstill.engines.ranks.leader import Leader
from fedstill.engines.ranks.threads import Threads, transports
from fedstill.federation.population import Party, Population
from fedstill.testing import worlds


class Seen(Population):
    """A population as one party sees it: names and networks of all, data of its own."""

    def __init__(self, world: worlds.World, own: NodeId):
        self.world, self.own = world, own

    @property
    def clients(self) -> Sequence[NodeId]:
        return self.world.clients

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return self.world.models

    @property
    def public(self) -> Data:
        return self.world.public

    @property
    def common_test(self) -> Data | None:
        raise PermissionError(f"{self.own} asks for the tests of all")

    def on(self, device: torch.device | str) -> Seen:
        return self

    def party(self, node: NodeId) -> Party:
        if node not in (self.own, SERVER):
            raise PermissionError(f"{self.own} asks for the data of {node}")
        party = self.world.party(node)
        return replace(party, data=worlds.alone(party.data))


def engines(method: Method, world: worlds.World, **options: Any) -> list[InProcess]:
    """The server's engine, and one for each client."""
    return [
        worlds.engine_for(method, Seen(world, own), **options)  # type: ignore[arg-type]
        for own in (SERVER, *world.clients)
    ]


@contextmanager
def behind_walls(
    method: Method,
    world: worlds.World,
    *,
    line: Callable[[Threads], Any] = lambda transport: transport,
    folder: Path | None = None,
    seconds: float | None = 60,
    **options: Any,
) -> Iterator[Leader]:
    """The server's engine, while every client is a site of its own; `line` is the leader's."""
    leading, *own = engines(method, world, **options)
    leader, *others = transports(len(world.clients) + 1, one_job=False)
    threads = []
    for name, engine, transport in zip(world.clients, own, others, strict=True):
        site = Follower(engine, one_job=False, folder=None if folder is None else folder / name)
        threads.append(Thread(target=serve, args=(site, transport), daemon=True))
        threads[-1].start()
    made = Leader(leading, line(leader), seconds)
    try:
        yield made
    finally:
        made.over()
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            raise RankError(f"{thread.name} has not ended a minute after the run was over")
