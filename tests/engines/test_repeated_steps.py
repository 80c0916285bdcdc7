"""A step that is listed several times in a round draws other numbers each time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

import pytest
import torch

import worlds
from engines.fake_line import spread
from fedstill.channels import EightBit
from fedstill.core import (
    SERVER,
    Inbox,
    Message,
    Method,
    Node,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.node import Node as Party
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.play.streams import Streams
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.models import MLP
from fedstill.sites import words
from fedstill.testing import at_sites

ROUNDING = EightBit(directions=("up", "peer"), stochastic=True, least=1)


class Said(Message):
    """The same numbers every time."""

    values: torch.Tensor


class Drawn(State):
    """What a client has drawn so far, a row each time."""

    rows: torch.Tensor


class Known(State):
    """What the server has heard, as it arrived."""

    weights: Weights
    heard: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Once(Method):
    """Clients draw, and say what they always say."""

    def each_round(self) -> Sequence[Step]:
        return [self.say, self.hear]

    def server_state(self, server: Node[Any]) -> Known:
        return Known({}, ())

    def client_state(self, client: Node[Any]) -> Drawn:
        return Drawn(torch.zeros(0, 4))

    def predict(self, node: Node[Any], x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), worlds.CLASSES)

    @at_clients
    def say(self, client: Node[Drawn], inbox: Inbox[Never]) -> Said:
        """Draw, and say what is always said."""
        drawn = client.noise("numbers", 1, 4)
        client.state = Drawn(torch.cat([client.state.rows, drawn]))
        return Said(torch.linspace(0, 1, 33).square())

    @at_server
    def hear(self, server: Node[Known], inbox: Inbox[Said]) -> None:
        """Keep what arrived."""
        arrived = [said.values for said in inbox.values()]
        server.state = Known({}, (*server.state.heard, torch.stack(arrived)))


@dataclass(frozen=True)
class Often(Once):
    """They say it three times in each round, and once more after the last."""

    def each_round(self) -> Sequence[Step]:
        return [self.say, self.say, self.hear, self.say, self.hear]

    def after(self) -> Sequence[Step]:
        return [self.say, self.hear]


def remembered(engine: Any) -> dict[str, list[torch.Tensor]]:
    states = {node: engine.memory(node) for node in (SERVER, *engine.population.clients)}
    return {node: list(state.tensors().values()) for node, state in states.items()}


def assert_same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    for node, tensors in one.items():
        assert all(map(torch.equal, tensors, other[node])), node


def straight(rounds: int = 2) -> Any:
    return worlds.played(Often(), worlds.vectors(), rounds, channels=[ROUNDING])[0]


@pytest.mark.parametrize("engine", [InProcess, Batched, Streams])
def test_every_time_it_draws_other_numbers_and_the_first_time_those_of_a_step_listed_once(
    engine: Any,
) -> None:
    often, _ = worlds.played(Often(), worlds.vectors(), 2, engine, channels=[ROUNDING])
    once, _ = worlds.played(Once(), worlds.vectors(), 2, engine, channels=[ROUNDING])
    rows = often.states["c0"].rows
    assert len(rows) == 3 + 3 + 1 == len(torch.unique(rows, dim=0))
    assert torch.equal(rows[[0, 3]], once.states["c0"].rows)
    assert_same(remembered(often), remembered(straight()))


def test_every_time_its_channel_draws_other_numbers() -> None:
    heard: list[tuple[str, int, torch.Tensor]] = []

    def ear(message: Any, sender: str, round: int) -> None:
        heard.append((sender, round, message.values))

    worlds.played(Often(), worlds.vectors(), 1, channels=[ROUNDING], observers=[ear])
    own = [values for sender, _, values in heard if sender == "c0"]
    assert len(own) == 4 == len(torch.unique(torch.stack(own), dim=0))
    once, _ = worlds.played(Once(), worlds.vectors(), 1, channels=[ROUNDING])
    assert torch.equal(own[0], once.states[SERVER].heard[0][0])


def test_over_ranks_it_draws_the_same() -> None:
    world = worlds.vectors()
    engines = [worlds.engine_for(Often(), world, rounds=2, channels=[ROUNDING]) for _ in range(2)]
    with spread(engines) as leader:
        run(leader, MemoryLog())
        assert_same(remembered(leader), remembered(straight()))


def test_at_sites_it_draws_the_same() -> None:
    method, world = Often(), worlds.vectors()
    there = at_sites.sites(method, world, rounds=2, channels=[ROUNDING])
    engine = at_sites.away(method, world, there, rounds=2, channels=[ROUNDING])
    run(engine, MemoryLog())
    expected = remembered(straight())
    assert_same({SERVER: list(engine.memory(SERVER).tensors().values())}, {  # type: ignore[union-attr]
        SERVER: expected[SERVER]
    })  # fmt: skip
    assert torch.equal(there["c0"].engine.states["c0"].rows, expected["c0"][0])  # type: ignore[union-attr]


def test_a_site_does_not_play_a_step_more_often_than_the_plan_has_it() -> None:
    site = at_sites.sites(Often(), worlds.vectors(), rounds=2)["c0"]
    asked = words.Act("trial", "c0", 1, 0, "say", 0, "peer", "never", "never", (), {}, ())
    assert isinstance(words.read(site.answer(words.written(asked))), words.Acted)
    too_often = words.read(site.answer(words.written(replace(asked, again=3))))
    assert isinstance(too_often, words.Refused)
    assert "say, 3 times played before, is not act 0 of round 1" in too_often.text
    once_more = words.read(site.answer(words.written(replace(asked, number=1))))
    assert isinstance(once_more, words.Refused)  # at that place it was played once before


class Interrupted(Exception):
    """A run is broken off."""


def test_a_run_that_is_resumed_draws_the_same(tmp_path: Path) -> None:
    first = worlds.engine_for(Often(), worlds.vectors(), rounds=2, channels=[ROUNDING])

    def save(round: int) -> None:
        first.save(tmp_path, round, digest="d")
        if round == 1:
            raise Interrupted

    with suppress(Interrupted):
        run(first, MemoryLog(), save=save)
    second = worlds.engine_for(Often(), worlds.vectors(), rounds=2, channels=[ROUNDING])
    saved = second.load(tmp_path, digest="d")
    assert saved is not None
    run(second, MemoryLog(), done=saved.round)
    assert_same(remembered(second), remembered(straight()))


def test_secret_noise_of_a_step_that_is_played_again_is_another() -> None:
    model = MLP((4,), 3, hidden=())
    for key in (None, b"k" * 32):
        nodes = [Party("c0", 1, None, model=model, step="say", again=n, key=key) for n in (0, 1)]
        drawn = [node.secret("noise").normal(torch.empty(8)) for node in nodes]
        assert not torch.equal(*drawn)
