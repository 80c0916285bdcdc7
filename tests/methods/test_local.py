"""Local: every client walks down its own loss, and nobody hears of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core.node import SERVER
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.local import Local
from worlds import engine_for, played, vectors


def test_a_full_batch_round_is_one_step_down_the_clients_own_loss() -> None:
    world, method = vectors(), Local(lr=0.5, batch_size=100)
    begin = engine_for(method, world)
    engine, _ = played(method, world, rounds=1)
    for client in world.clients:
        (x, y), model = world.party(client).data.all(), world.party(client).model
        start = begin.node(client, 0, "look").state.weights
        grad = torch.func.grad(lambda w, m=model, x=x, y=y: cross_entropy(m(w, x), y))(start)
        for name, reached in engine.states[client].weights.items():
            assert torch.allclose(reached, start[name] - 0.5 * grad[name], atol=1e-6)


def test_a_federation_of_one_is_the_client_alone() -> None:
    # To 1e-6: the two draw their orders under different names, so sums are in another order.
    world, values = vectors((25,)), {"lr": 0.3, "batch_size": 100, "momentum": 0.5}
    alone, _ = played(Local(**values), world, rounds=5)
    averaged, _ = played(FedAvg(**values), world, rounds=5)
    for name, reached in alone.states["c0"].weights.items():
        assert torch.allclose(reached, averaged.states[SERVER].weights[name], atol=1e-6)


def test_nothing_travels_and_the_server_remembers_nothing() -> None:
    engine, log = played(Local(), vectors(), rounds=2)
    assert log.messages == []
    assert sorted(engine.states) == ["c0", "c1", "c2", "c3"]


def test_all_clients_of_one_architecture_start_from_the_same_weights() -> None:
    world = vectors()
    engine = engine_for(Local(), world)
    starts = [engine.node(client, 0, "look").state.weights for client in world.clients]
    assert all(torch.equal(starts[0][name], start[name]) for start in starts for name in start)


def test_every_clients_model_is_scored_on_every_test_set() -> None:
    _, log = played(Local(), vectors(), rounds=1)
    scored = {(row.node, row.target) for row in log.metrics if row.name == "accuracy"}
    names = ["c0", "c1", "c2", "c3"]
    assert scored == {(holder, target) for holder in names for target in names}


def test_a_client_learns_only_when_it_is_awake_and_goes_on_from_its_own_weights() -> None:
    world, method = vectors(), Local(lr=0.5, batch_size=100)
    absent = {1: ["c1"], 2: ["c0", "c2", "c3"]}
    engine, _ = played(method, world, rounds=2, sampling=Scripted(absent))
    once, _ = played(method, world, rounds=1)
    for client in ("c0", "c1"):  # full batches: which round it was does not matter
        for name, reached in engine.states[client].weights.items():
            assert torch.allclose(reached, once.states[client].weights[name], atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_are_passes_over_the_own_examples(epochs: int) -> None:
    world = vectors((25,))
    many, _ = played(Local(lr=0.1, batch_size=100, epochs=epochs), world, rounds=1)
    one, _ = played(Local(lr=0.1, batch_size=100), world, rounds=epochs)
    for name, reached in many.states["c0"].weights.items():
        assert torch.allclose(reached, one.states["c0"].weights[name], atol=1e-6)
