"""FedRolex: windows that roll over the network, one unit a round."""

from __future__ import annotations

import torch

from fedstill.core.node import SERVER
from fedstill.methods.fedrolex import FedRolex
from fedstill.methods.heterofl import HeteroFL
from worlds import engine_for, played, vectors

SMALL = {"lr": 0.1, "batch_size": 8}


def windows(round: int, client: str) -> set[int]:
    method = FedRolex(budgets=(1.0, 0.5, 0.5, 0.25))
    server = engine_for(method, vectors()).node(SERVER, round, "broadcast")
    return set(method.units(server, client)["layer0"].tolist())


def test_the_first_round_is_heterofl_and_the_next_is_not() -> None:
    for rounds, same in ((1, True), (2, False)):
        one, _ = played(HeteroFL(rho=3, **SMALL), vectors(), rounds)
        other, _ = played(FedRolex(rho=3, **SMALL), vectors(), rounds)
        left, right = (engine.states[SERVER].weights for engine in (one, other))
        assert all(torch.equal(left[name], right[name]) for name in left) == same


def test_windows_advance_by_one_unit_a_round_and_are_the_same_for_equal_budgets() -> None:
    assert windows(1, "c1") == {0, 1, 2, 3}
    assert windows(2, "c1") == windows(2, "c2") == {1, 2, 3, 4}
    assert windows(8, "c1") == {7, 0, 1, 2}
    assert windows(9, "c1") == windows(1, "c1")
    assert windows(6, "c3") == {5, 6} <= windows(6, "c1")


def test_after_a_whole_turn_every_unit_was_visited_equally_often() -> None:
    visits = torch.zeros(8)
    for round in range(3, 11):
        visits[sorted(windows(round, "c3"))] += 1
    assert visits.tolist() == [2] * 8


def test_weak_clients_alone_train_the_whole_network_in_turn() -> None:
    world, method = vectors(), FedRolex(budgets=(0.25,) * 4, **SMALL)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights["layer0.bias"]
    for rounds, touched in ((1, {0, 1}), (3, {0, 1, 2, 3}), (7, set(range(8)))):
        found = played(method, world, rounds)[0].states[SERVER].weights["layer0.bias"]
        assert set(torch.nonzero(found != start).flatten().tolist()) == touched
