"""Gossip: eigenvalues in closed form, the mean is kept, and how fast the peers agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Never

import pytest
import torch
from torch import Tensor

from fedstill.core import Inbox, Message, Method, Node, Place, State, Step, at_clients
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count
from fedstill.core.seeds import generator
from fedstill.federation.topology import Complete, ErdosRenyi, RandomRegular, Ring, Star, Topology
from fedstill.parts import gossip
from fedstill.parts.gossip import Graph
from worlds import played, vectors

Kind = Literal["plain", "fast"]


def graph(topology: Topology, peers: int) -> Graph:
    return topology.edges([f"p{i:02}" for i in range(peers)], 0)


def values(peers: Sequence[str], *shape: int) -> dict[str, Tensor]:
    drawn = torch.randn(len(peers), *shape, generator=generator(0, "values"), dtype=torch.float64)
    return dict(zip(peers, drawn, strict=True))


def mixed(near: Graph, start: dict[str, Tensor], kind: Kind, steps: int) -> dict[str, Tensor]:
    """What all peers hold after some steps."""
    now, before = start, start
    for _ in range(steps):
        after = {}
        for peer, own in now.items():
            heard, weights = [now[other] for other in near[peer]], gossip.mixing(near, peer)
            after[peer] = (
                gossip.plain(own, heard, weights)
                if kind == "plain"
                else gossip.fast(own, before[peer], heard, weights)
            )
        now, before = after, now
    return now


def apart(held: dict[str, Tensor]) -> float:
    """The distance of all peers from their mean."""
    every = torch.stack(list(held.values()))
    return float((every - every.mean(0)).norm())


# The numbers a peer must know


def test_two_peers_meet_in_the_middle() -> None:
    # L = [[1, -1], [-1, 1]] has the eigenvalues 0 and 2.
    near = graph(Complete(), 2)
    assert gossip.mixing(near, "p00") == pytest.approx((1 / 2, 0), abs=1e-12)
    one, other = torch.tensor([1.0]), torch.tensor([4.0])
    assert gossip.plain(one, [other], gossip.mixing(near, "p00")).item() == 2.5


@pytest.mark.parametrize("peers", [3, 4, 10])
def test_the_eigenvalues_of_a_ring_are_those_of_cosines(peers: int) -> None:
    found = [2 - 2 * math.cos(2 * math.pi * k / peers) for k in range(peers)]
    weights = gossip.mixing(graph(Ring(), peers), "p00")
    assert weights.edge == pytest.approx(1 / max(found))
    assert weights.second == pytest.approx(1 - found[1] / max(found))


def test_three_in_a_line_have_their_own_eigenvalues() -> None:
    # The Laplacian of a path of three has 0, 1 and 3.
    near = {"a": ["b"], "b": ["a", "c"], "c": ["b"]}
    assert gossip.mixing(near, "c") == pytest.approx((1 / 3, 2 / 3))
    root = math.sqrt(1 - 4 / 9)
    assert gossip.mixing(near, "a").momentum == pytest.approx((1 - root) / (1 + root))


def test_all_who_are_joined_know_the_same_numbers_and_others_do_not_matter() -> None:
    near = {"a": ["b"], "b": ["a"], "c": ["d", "e"], "d": ["c", "e"], "e": ["c", "d"], "f": []}
    assert gossip.mixing(near, "a") == gossip.mixing(near, "b") == pytest.approx((1 / 2, 0))
    assert gossip.mixing(near, "d") == gossip.mixing(near, "e") == pytest.approx((1 / 3, 0))


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_a_peer_alone_keeps_what_it_has(kind: Kind) -> None:
    near = graph(Star(), 2)
    start = values([*near], 3)
    assert all(torch.equal(mixed(near, start, kind, 3)[p], start[p]) for p in near)


def test_a_stranger_is_refused_by_name() -> None:
    with pytest.raises(BadValue, match="x is not in the graph of a"):
        gossip.mixing({"a": []}, "x")


@pytest.mark.parametrize(
    ("near", "so"),
    [
        ({"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}, True),
        ({"a": ["b"], "b": ["a", "c"], "c": ["b"]}, False),  # c does not hear a
        ({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"]}, True),  # in circles of their own
        ({"a": []}, True),
        ({"a": [], "b": ["c"], "c": ["b", "d"], "d": ["c"]}, False),  # b does not hear d
    ],
)
def test_peers_stand_in_circles_where_all_in_each_hear_the_same(near: Graph, so: bool) -> None:
    assert gossip.in_circles(near) is so


# The mean


@pytest.mark.parametrize("kind", ["plain", "fast"])
@pytest.mark.parametrize("topology", [Ring(), Ring(2), RandomRegular(3), ErdosRenyi(0.4)], ids=str)
def test_the_mean_is_kept_and_all_come_to_it(topology: Topology, kind: Kind) -> None:
    near = graph(topology, 10)
    start = values([*near], 2, 3)
    mean = torch.stack([*start.values()]).mean(0)
    for steps in (1, 2, 7):
        held = torch.stack([*mixed(near, start, kind, steps).values()])
        assert torch.allclose(held.mean(0), mean, atol=1e-12)
    assert apart(mixed(near, start, kind, 400)) < 1e-9 * apart(start)


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_where_all_hear_all_one_step_is_the_mean(kind: Kind) -> None:
    near = graph(Complete(), 7)
    start = values([*near], 4)
    mean = torch.stack([*start.values()]).mean(0)
    for held in mixed(near, start, kind, 1).values():
        assert torch.allclose(held, mean, atol=1e-12)


def test_a_message_lost_both_ways_does_not_change_the_mean() -> None:
    near = graph(Ring(), 6)
    start, weights = values([*near], 3), gossip.mixing(near, "p00")
    deaf = {"p00": "p01", "p01": "p00"}
    held = {
        peer: gossip.plain(own, [start[o] for o in near[peer] if o != deaf.get(peer)], weights)
        for peer, own in start.items()
    }
    sums = [torch.stack([*every.values()]).sum(0) for every in (held, start)]
    assert torch.allclose(*sums, atol=1e-12)


def test_a_tree_is_mixed_tensor_by_tensor() -> None:
    weights = gossip.mixing(graph(Complete(), 2), "p00")
    one = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor(1.0)}
    other = {"a": torch.tensor([4.0, 2.0]), "b": torch.tensor(3.0)}
    made = gossip.fast(one, one, [other], weights)
    assert made["a"].tolist() == [2, 2] and made["b"].item() == 2


# The rate


def test_on_a_ring_of_ten_momentum_wins_at_the_rate_of_the_second_eigenvalue() -> None:
    near = graph(Ring(), 10)
    second = gossip.mixing(near, "p00").second
    # The slowest pattern of all: one wave around the ring, an eigenvector of λ₂.
    wave = {
        peer: torch.tensor([math.cos(2 * math.pi * i / 10)], dtype=torch.float64)
        for i, peer in enumerate(near)
    }
    for steps in (10, 40):
        assert apart(mixed(near, wave, "plain", steps)) == pytest.approx(
            second**steps * apart(wave), rel=1e-9
        )
        fast = apart(mixed(near, wave, "fast", steps)) / apart(wave)
        assert fast < math.sqrt(14) * (1 - math.sqrt(1 - second)) ** steps
    start = values([*near], 5)
    assert apart(mixed(near, start, "plain", 40)) / apart(start) > 1e-3
    assert apart(mixed(near, start, "fast", 40)) / apart(start) < 1e-5


@pytest.mark.parametrize(("kind", "left"), [("plain", 2e-2), ("fast", 2e-7)])
def test_forty_exchanges_on_a_ring_of_ten_leave_what_the_page_of_desa_says(
    kind: Kind, left: float
) -> None:
    near = graph(Ring(), 10)
    units = dict(zip(near, torch.eye(10, dtype=torch.float64), strict=True))
    rows = torch.stack([*mixed(near, units, kind, 40).values()]) - 0.1
    most = float(torch.linalg.matrix_norm(rows, 2))  # of any differences there can be
    assert most == pytest.approx(left, rel=0.1)


# As messages


class Held(State):
    """A number, and what it was a step ago."""

    now: Tensor
    before: Tensor


class Number(Message):
    """A peer's number."""

    value: Tensor


@dataclass(frozen=True)
class Agree(Method):
    """Peers take the mean of numbers of their own."""

    scored: ClassVar[Place] = Place.CLIENTS
    steps: Count = 3

    def before(self) -> Sequence[Step]:
        return [self.begin, *[self.mix] * (self.steps - 1), self.settle]

    def client_state(self, client: Node[Any]) -> Held:
        own = torch.tensor([float(len(client.data))])
        return Held(own, own)

    @at_clients
    def begin(self, client: Node[Held], inbox: Inbox[Never]) -> Number:
        """Say the own number."""
        return Number(client.state.now)

    @at_clients
    def mix(self, client: Node[Held], inbox: Inbox[Number]) -> Number:
        """Mix once, and say it."""
        self.moved(client, inbox)
        return Number(client.state.now)

    @at_clients
    def settle(self, client: Node[Held], inbox: Inbox[Number]) -> None:
        """Mix for the last time."""
        self.moved(client, inbox)

    def moved(self, client: Node[Held], inbox: Inbox[Number]) -> None:
        now, heard = client.state.now, [number.value for number in inbox.values()]
        weights = gossip.mixing(client.graph, client.id)
        client.state = Held(gossip.fast(now, client.state.before, heard, weights), now)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return torch.zeros(len(x), 3)


def test_peers_who_send_only_to_neighbours_reach_the_mean_of_all() -> None:
    sizes = (20, 27, 23, 30, 22, 28)
    world = vectors(sizes)
    topology = Ring()
    engine, log = played(Agree(steps=25), world, rounds=1, topology=topology)
    for client in world.clients:
        assert engine.states[client].now.item() == pytest.approx(sum(sizes) / 6, abs=1e-3)
    assert len(log.messages) == 25 * 6
    assert {row.hearers for row in log.messages} == {2}
