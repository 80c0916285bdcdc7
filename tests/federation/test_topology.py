"""Graphs are symmetric, connected and of the degree that was asked for."""

from __future__ import annotations

from collections import Counter

import networkx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.federation.graphs import connected
from fedstill.federation.topology import (
    TOPOLOGIES,
    Complete,
    Edges,
    ErdosRenyi,
    Exponential,
    Grid,
    RandomRegular,
    Ring,
    SmallWorld,
    Star,
    Topology,
    Torus,
)

few = settings(max_examples=60, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**31)


# Drawn once and kept: the graphs of seed 7 that recipes of before have.
REGULAR = {
    "c0": ("c1", "c3", "c4"),
    "c1": ("c0", "c2", "c5"),
    "c2": ("c1", "c4", "c5"),
    "c3": ("c0", "c4", "c5"),
    "c4": ("c0", "c2", "c3"),
    "c5": ("c1", "c2", "c3"),
}
ERDOS = {
    "c0": ("c1", "c2", "c3", "c5"),
    "c1": ("c0", "c2", "c3", "c4"),
    "c2": ("c0", "c1", "c3", "c5"),
    "c3": ("c0", "c1", "c2", "c4"),
    "c4": ("c1", "c3", "c5"),
    "c5": ("c0", "c2", "c4"),
}


def clients(count: int) -> list[str]:
    return [f"c{i}" for i in range(count)]


def assert_sound(edges: Edges) -> None:
    for one, others in edges.items():
        assert one not in others
        assert list(others) == sorted(set(others))
        assert all(one in edges[other] for other in others)


def is_connected(edges: Edges) -> bool:
    reached: set[str] = set()
    waiting = list(edges)[:1]
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting += edges[one]
    return len(reached) == len(edges)


@few
@given(count=st.integers(2, 24), degree=st.integers(1, 23), seed=seeds)
def test_a_random_regular_graph_has_its_degree_everywhere(
    count: int, degree: int, seed: int
) -> None:
    assume(degree < count and count * degree % 2 == 0 and (degree > 1 or count == 2))
    edges = RandomRegular(degree).edges(clients(count), seed)
    assert_sound(edges)
    assert {len(others) for others in edges.values()} == {degree}
    assert is_connected(edges)


@few
@given(count=st.integers(1, 15), probability=st.floats(0.6, 1.0), seed=seeds)
def test_an_erdos_renyi_graph_is_sound_and_connected(
    count: int, probability: float, seed: int
) -> None:
    edges = ErdosRenyi(probability).edges(clients(count), seed)
    assert_sound(edges)
    assert is_connected(edges)


@few
@given(count=st.integers(3, 20), seed=seeds, data=st.data())
def test_a_ring_joins_the_nearest_on_either_side(
    count: int, seed: int, data: st.DataObject
) -> None:
    reach = data.draw(st.integers(1, (count - 1) // 2))
    edges = Ring(reach).edges(clients(count), seed)
    assert_sound(edges)
    assert {len(others) for others in edges.values()} == {2 * reach}
    assert is_connected(edges)


def test_a_ring_follows_the_order_of_names() -> None:
    assert Ring().edges(["d", "b", "a", "c"], 0) == {
        "a": ("b", "d"), "b": ("a", "c"), "c": ("b", "d"), "d": ("a", "c"),
    }  # fmt: skip
    assert Ring().edges(["b", "a"], 0) == {"a": ("b",), "b": ("a",)}
    assert Ring().edges(["a"], 0) == {"a": ()}
    assert Ring(2).edges(clients(4), 0) == Complete().edges(clients(4), 0)


def test_in_a_star_clients_hear_only_the_server() -> None:
    graph = Star().graph(["b", "a", "c"], 0)
    assert graph.hearers("a", ["a", "b", "c"]) == [SERVER]
    assert graph.hearers(SERVER, ["c", "a"]) == ["a", "c"]
    assert graph.matrix().sum() == 0


def test_in_a_complete_graph_everyone_awake_hears_everyone() -> None:
    graph = Complete().graph(clients(4), 0)
    assert graph.hearers("c1", clients(4)) == [SERVER, "c0", "c2", "c3"]
    assert graph.hearers("c1", ["c1", "c3"]) == [SERVER, "c3"]
    assert graph.hearers(SERVER, ["c3", "c1"]) == ["c1", "c3"]
    assert torch.equal(graph.matrix(), torch.ones(4, 4) - torch.eye(4))


@few
@given(count=st.integers(1, 12), seed=seeds)
def test_a_complete_graph_has_the_edges_of_all_pairs(count: int, seed: int) -> None:
    edges = Complete().edges(clients(count), seed)
    assert dict(edges) == dict(Topology.edges(Complete(), clients(count), seed))
    assert_sound(edges)


@few
@given(count=st.integers(2, 40), chance=st.floats(0.3, 1), seed=seeds)
def test_pairs_are_drawn_as_if_all_at_once(count: int, chance: float, seed: int) -> None:
    pairs = list(Complete().pairs(count, seed))
    drawn = torch.rand(len(pairs), generator=generator(seed, "topology", 0), dtype=torch.float64)
    joined = [pair for pair, number in zip(pairs, drawn.tolist(), strict=True) if number < chance]
    assume(connected(count, joined))
    assert list(ErdosRenyi(chance).pairs(count, seed)) == joined


def test_a_grid_joins_those_beside_above_and_below() -> None:
    # c0 c1 c2
    # c3 c4 c5
    edges = Grid().edges(clients(6), 0)
    assert edges["c0"] == ("c1", "c3")
    assert edges["c4"] == ("c1", "c3", "c5")
    assert sum(map(len, edges.values())) == 2 * (2 * 2 + 3)  # two rows of two joins, three columns
    assert Grid(1).edges(clients(4), 0) == {
        "c0": ("c1",), "c1": ("c0", "c2"), "c2": ("c1", "c3"), "c3": ("c2",),
    }  # fmt: skip


def test_on_a_torus_everyone_has_four_neighbours() -> None:
    edges = Torus(3).edges([f"{i:02d}" for i in range(12)], 0)
    assert_sound(edges)
    assert edges["00"] == ("01", "03", "04", "08")
    assert {len(others) for others in edges.values()} == {4}
    assert Torus(1).edges(clients(5), 0) == Ring().edges(clients(5), 0)
    assert Torus().edges(["a"], 0) == Grid().edges(["a"], 0) == {"a": ()}


def test_an_exponential_graph_joins_places_a_power_of_two_apart() -> None:
    edges = Exponential().edges([f"{i:02d}" for i in range(16)], 0)
    assert_sound(edges)
    assert edges["00"] == ("01", "02", "04", "08", "12", "14", "15")
    assert Exponential().edges(clients(4), 0) == Complete().edges(clients(4), 0)
    assert Exponential().edges(["a"], 0) == {"a": ()}


@few
@given(count=st.integers(5, 24), probability=st.floats(0.01, 1.0), seed=seeds)
def test_a_small_world_keeps_the_number_of_edges_of_its_ring(
    count: int, probability: float, seed: int
) -> None:
    edges = SmallWorld(2, probability).edges(clients(count), seed)
    assert_sound(edges)
    assert is_connected(edges)
    assert sum(map(len, edges.values())) == 2 * 2 * count


def test_a_small_world_is_a_ring_with_some_edges_moved() -> None:
    ring = set(Ring(2).graph(clients(40), 0).pairs())
    moved = [len(set(SmallWorld(2, 0.1).graph(clients(40), s).pairs()) - ring) for s in range(40)]
    # 80 edges, each moved with probability 0.1: 8 on average, a few of them onto the ring again.
    assert 6 < sum(moved) / len(moved) < 9
    assert set(SmallWorld(2, 1e-9).graph(clients(40), 0).pairs()) == ring


def test_pairs_name_every_edge_once() -> None:
    assert list(Ring().graph(["d", "b", "a", "c"], 0).pairs()) == [
        ("a", "b"), ("a", "d"), ("b", "c"), ("c", "d"),
    ]  # fmt: skip
    assert list(Star().graph(["a", "b"], 0).pairs()) == []
    assert len(list(Complete().graph(clients(5), 0).pairs())) == 10


@few
@given(count=st.integers(1, 20), chance=st.floats(0.01, 0.3), seed=seeds)
def test_connected_is_what_networkx_says(count: int, chance: float, seed: int) -> None:
    drawn = networkx.gnp_random_graph(count, chance, seed=seed)
    assert connected(count, list(drawn.edges)) == networkx.is_connected(drawn)


def test_drawn_graphs_of_recipes_stay_as_they_were() -> None:
    assert RandomRegular(3).edges(clients(6), 7) == REGULAR
    assert ErdosRenyi(0.4).edges(clients(6), 7) == ERDOS


def test_sleeping_neighbours_do_not_hear() -> None:
    graph = Ring().graph(clients(5), 0)
    assert graph.hearers("c0", ["c0", "c1", "c2"]) == [SERVER, "c1"]


def test_the_matrix_has_a_one_for_every_edge() -> None:
    graph = RandomRegular(3).graph(clients(8), 1)
    matrix = graph.matrix()
    assert torch.equal(matrix, matrix.T)
    assert matrix.sum(1).tolist() == [3] * 8
    row = graph.members.index("c5")
    heard = [graph.members[i] for i in torch.nonzero(matrix[row]).flatten().tolist()]
    assert heard == list(graph.neighbours["c5"])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_graph_depends_on_names_and_seed_only(name: str) -> None:
    topology: Topology = TOPOLOGIES[name]()
    before = torch.get_rng_state()
    first = topology.edges(clients(12), 5)
    assert topology.edges(clients(12)[::-1], 5) == first
    assert TOPOLOGIES[name]() == topology
    assert hash(TOPOLOGIES[name]()) == hash(topology)
    assert torch.equal(torch.get_rng_state(), before)
    differs = any(topology.edges(clients(12), seed) != first for seed in range(5))
    assert differs == (name in ("random_regular", "erdos_renyi", "small_world"))


@pytest.mark.parametrize("degree", [2, 3])
def test_all_pairs_are_joined_equally_often(degree: int) -> None:
    draws = 600
    joined = Counter(
        frozenset((one, other))
        for seed in range(draws)
        for one, others in RandomRegular(degree).edges(clients(6), seed).items()
        for other in others
        if one < other
    )
    expected = draws * degree / 5  # each client has 5 others
    deviation = (draws * degree / 5 * (1 - degree / 5)) ** 0.5
    assert len(joined) == 15
    assert all(abs(times - expected) < 4 * deviation for times in joined.values())


def test_both_cubic_graphs_of_six_clients_are_drawn() -> None:
    def has_triangle(seed: int) -> bool:
        near = RandomRegular(3).graph(clients(6), seed).matrix()
        return bool((near @ near @ near).trace() > 0)

    # Of the 70 cubic graphs with six named vertices 60 are prisms and 10 have no triangle.
    draws = 700
    prisms = sum(has_triangle(seed) for seed in range(draws))
    assert abs(prisms - draws * 6 / 7) < 4 * (draws * 6 / 7 * 1 / 7) ** 0.5


def test_a_large_graph_is_made_in_reasonable_time() -> None:
    edges = RandomRegular(20).edges(clients(300), 0)
    assert {len(others) for others in edges.values()} == {20}


@pytest.mark.parametrize(
    "topology, count, reason",
    [
        (RandomRegular(4), 4, "degree = 4 needs more than 4 clients, there are 4"),
        (RandomRegular(3), 5, "degree = 3 times 5 clients is odd"),
        (RandomRegular(1), 4, "joins 4 clients in separate pairs; take at least 2"),
        (Ring(3), 5, "neighbours = 3 on each side, but a circle of 5 clients has 2"),
        (ErdosRenyi(0.001), 30, "probability = 0.001 left some of 30 clients apart .* take about"),
        (SmallWorld(3), 6, "neighbours = 3 on each side needs more than 6 clients, there are 6"),
        (Grid(), 7, "Grid: 7 clients cannot stand in equal rows; .* or rows = 1"),
        (Torus(5), 12, "Torus: rows = 5 does not divide 12 clients"),
    ],
)
def test_a_graph_that_cannot_be_made_says_what_to_change(
    topology: Topology, count: int, reason: str
) -> None:
    with pytest.raises(BadValue, match=reason):
        topology.edges(clients(count), 0)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(BadValue, match="RandomRegular: degree = 0: must be at least 1"):
        RandomRegular(0)
    with pytest.raises(BadValue, match=r"ErdosRenyi: probability = 1\.5: must be in"):
        ErdosRenyi(1.5)
    with pytest.raises(BadValue, match="Ring: neighbours = 0"):
        Ring(0)


def test_names_must_differ_and_leave_the_server_its_own() -> None:
    with pytest.raises(BadValue, match="more than one is a"):
        Star().edges(["a", "b", "a"], 0)
    with pytest.raises(BadValue, match="no client may be named 'server'"):
        Star().edges(["a", SERVER], 0)
    with pytest.raises(BadValue, match="unknown client 'c9'; did you mean"):
        Complete().graph(clients(3), 0).hearers("c9", clients(3))


def test_there_may_be_nobody() -> None:
    for topology in (Star(), Complete(), Ring(), ErdosRenyi(), Grid(), Torus(), Exponential()):
        assert topology.graph([], 0).hearers(SERVER, []) == []
