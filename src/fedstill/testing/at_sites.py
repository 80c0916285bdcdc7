"""Sites in this process: each client an answering site behind bytes, with data of its own alone."""

from __future__ import annotations

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
