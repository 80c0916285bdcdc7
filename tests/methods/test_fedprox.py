"""FedProx: FedAvg and a spring to the start."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, algebra
from fedstill.core.node import SERVER
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedprox import FedProx
from worlds import engine_for, pictures, played, vectors


def test_two_full_batch_steps_by_hand() -> None:
    world, method = vectors((25,)), FedProx(lr=0.2, epochs=2, batch_size=100, mu=0.7)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    x, y = world.party("c0").data.all()
    grad = torch.func.grad(lambda w: cross_entropy(world.server_model(w, x), y))
    first = algebra.add(start, grad(start), -0.2)  # the spring has no pull at the start
    pull = algebra.scale(algebra.sub(first, start), 0.7)
    second = algebra.add(first, algebra.add(grad(first), pull), -0.2)
    engine, _ = played(method, world, rounds=1)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, second[name], atol=1e-6)


def test_fedprox_without_its_term_is_fedavg() -> None:
    # Bit for bit.
    for world in (vectors(), pictures(norm="batch")):
        values = {"lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9, "weight_decay": 0.01}
        plain, _ = played(FedAvg(**values), world, rounds=3)
        free, _ = played(FedProx(**values, mu=0.0), world, rounds=3)
        for name, reached in plain.states[SERVER].weights.items():
            assert torch.equal(reached, free.states[SERVER].weights[name])


def test_the_term_is_half_mu_times_the_squared_distance_over_all_parameters() -> None:
    # The traps: the square, all parameters, and no statistics.
    model = pictures(norm="batch").server_model
    start = model.init(0)
    batch = Batch(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    moved = {name: tensor + (100.0 if "running" in name else 0.5) for name, tensor in start.items()}
    method = FedProx(mu=0.2)
    task = FedAvg().objective(model, moved, batch, start)
    count = sum(tensor.numel() for tensor in algebra.parameters(start).values())
    added = float(method.objective(model, moved, batch, start) - task)
    assert added == pytest.approx(0.2 / 2 * count * 0.5**2, rel=1e-4)


def test_a_stronger_spring_keeps_clients_nearer() -> None:
    world = vectors()
    distances = []
    for mu in (0.0, 1.0, 4.0):
        method = FedProx(lr=0.1, epochs=5, batch_size=8, mu=mu)
        start = engine_for(method, world).node(SERVER, 0, "look").state.weights
        engine, _ = played(method, world, rounds=1)
        distances.append(float(algebra.square(algebra.sub(engine.states[SERVER].weights, start))))
    assert distances[0] > distances[1] > distances[2]
