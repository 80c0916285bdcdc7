"""MOON: FedAvg with a projection head as its limit, one step by hand, and what clients remember."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.moon import Moon
from fedstill.models import ConvNet
from fedstill.parts.heads import projected
from worlds import World, engine_for, pictures, played, vectors

VALUES: dict[str, Any] = {
    "lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9, "weight_decay": 0.01,
}  # fmt: skip


def with_head(world: World, hidden: int, width: int) -> World:
    """The same world of networks that have the head themselves."""
    parties = {
        name: replace(party, model=projected(party.model, hidden, width))
        for name, party in world.parties.items()
    }
    return World(parties, projected(world.server_model, hidden, width))


# Limits


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("world", [vectors(), pictures(norm="batch")], ids=["vectors", "pictures"])
def test_moon_without_its_term_is_fedavg_of_the_network_with_the_head(
    world: World, weighting: Any
) -> None:
    # Bit for bit.
    features = world.server_model.feature_width
    values = {**VALUES, "weighting": weighting}
    plain, _ = played(FedAvg(**values), with_head(world, features, 4), rounds=3)
    free, _ = played(Moon(**values, mu=0.0, projection=4), world, rounds=3)
    for name, reached in plain.states[SERVER].weights.items():
        assert torch.equal(reached, free.states[SERVER].weights[name])


def test_the_first_round_is_fedavg_since_global_and_previous_are_the_same() -> None:
    world = vectors()
    for rounds, equal in ((1, True), (2, False)):
        plain, _ = played(FedAvg(**VALUES), with_head(world, 8, 4), rounds=rounds)
        moon, _ = played(Moon(**VALUES, mu=5.0, projection=4), world, rounds=rounds)
        close = [
            torch.allclose(reached, moon.states[SERVER].weights[name], atol=1e-5)
            for name, reached in plain.states[SERVER].weights.items()
        ]
        assert all(close) == equal


# By hand


def test_the_objective_by_hand() -> None:
    world = vectors()
    method = Moon(mu=3.0, temperature=0.5, projection=4)
    model = method.network(engine_for(method, world).node("c0", 0, "look"))
    now, start, previous = (model.init(seed) for seed in range(3))
    x, y = world.party("c1").data.all()
    z, near, far = (model.features(weights, x) for weights in (now, start, previous))
    each = []
    for row in range(len(x)):
        alike = [
            float(z[row] @ other[row] / z[row].norm() / other[row].norm()) / 0.5
            for other in (near, far)
        ]
        each.append(math.log(sum(map(math.exp, alike))) - alike[0])
    expected = float(cross_entropy(model(now, x), y)) + 3.0 * sum(each) / len(each)
    found = method.contrasted(model.train({}), now, Batch(x, y), start, previous)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_two_full_batch_rounds_by_hand() -> None:
    world = vectors((25, 20))
    values: dict[str, Any] = {"lr": 0.2, "batch_size": 100, "momentum": 0.0, "weight_decay": 0.0}
    method = Moon(**values, mu=3.0, projection=4)
    model = method.network(engine_for(method, world).node("c0", 0, "look"))
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    parts = {client: world.party(client).data.all() for client in world.clients}
    shares = [len(y) for _, y in parts.values()]

    def task(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(weights, x), y)

    previous = [
        algebra.add(start, torch.func.grad(task)(start, x, y), -0.2) for x, y in parts.values()
    ]
    middle = algebra.mean(previous, shares)
    ended = []
    for old, (x, y) in zip(previous, parts.values(), strict=True):

        def whole(w: Any, old: Any = old, x: Tensor = x, y: Tensor = y) -> Tensor:
            z = model.features(w, x)
            alike = [
                torch.nn.functional.cosine_similarity(z, model.features(other, x)) / 0.5
                for other in (middle, old)
            ]
            return task(w, x, y) - 3.0 * torch.stack(alike, 1).log_softmax(1)[:, 0].mean()

        ended.append(algebra.add(middle, torch.func.grad(whole)(middle), -0.2))
    expected = algebra.mean(ended, shares)
    engine, _ = played(method, world, rounds=2)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, expected[name], atol=1e-6)
    for client, weights in zip(world.clients, ended, strict=True):
        for name, kept in engine.states[client].previous.items():
            assert torch.allclose(kept, weights[name], atol=1e-6)


def test_the_other_two_networks_leave_no_statistics_behind() -> None:
    # The trap: in training mode they would note statistics over those of the network that learns.
    world, method = pictures(norm="batch"), Moon(projection=4)
    model = method.network(engine_for(method, world).node("c0", 0, "look"))
    x, y = world.party("c1").data.all()
    now, start, previous = (model.init(seed) for seed in range(3))
    alone: dict[str, Tensor] = {}
    model.train(alone).features(now, x)
    notes: dict[str, Tensor] = {}
    method.contrasted(model.train(notes), now, Batch(x, y), start, previous)
    assert notes.keys() == alone.keys()
    assert all(torch.equal(notes[name], alone[name]) for name in alone)


# What is remembered and what travels


def test_clients_begin_with_the_initial_model_and_keep_their_last_one_while_asleep() -> None:
    world, method = vectors(), Moon(**VALUES, projection=4)
    engine = engine_for(method, world)
    start = engine.node(SERVER, 0, "look").state.weights
    for name, tensor in engine.node("c1", 0, "look").state.previous.items():
        assert torch.equal(tensor, start[name])
    once, _ = played(method, world, rounds=1)
    asleep, _ = played(method, world, rounds=3, sampling=Scripted({2: ["c1"], 3: ["c1"]}))
    for name, tensor in once.states["c1"].previous.items():
        assert torch.equal(tensor, asleep.states["c1"].previous[name])
    assert not torch.equal(
        once.states["c0"].previous["head.weight"], asleep.states["c0"].previous["head.weight"]
    )


def test_the_head_travels_with_the_network_both_ways() -> None:
    world = vectors()
    _, log = played(Moon(projection=4), world, rounds=1)
    size = sum(projected(world.server_model, 8, 4).floats().values())
    assert size == (4 * 8 + 8) + (8 * 8 + 8) + (8 * 4 + 4) + (4 * 3 + 3)
    assert sum(row.floats for row in log.messages if row.direction == "down") == size
    assert sum(row.floats for row in log.messages if row.direction == "up") == 4 * (size + 1)


def test_the_servers_model_is_scored_with_the_head() -> None:
    world, method = vectors(), Moon(projection=4)
    engine, log = played(method, world, rounds=1)
    assert {row.node for row in log.metrics if row.name == "accuracy"} == {SERVER}
    x, weights = world.party("c0").test.all().x, engine.states[SERVER].weights
    said = method.predict(engine.node(SERVER, 1, "evaluate"), x)
    assert torch.equal(said, projected(world.server_model, 8, 4)(weights, x))


# Values


def test_the_head_is_as_wide_as_the_features_and_then_256() -> None:
    world = World({}, ConvNet((3, 32, 32), 10))
    node = engine_for(Moon(), world).node(SERVER, 0, "look")
    initial = Moon().network(node).initial()
    assert initial["projection0.weight"].shape == (2048, 2048)
    assert initial["projection1.weight"].shape == (256, 2048)
    assert initial["head.weight"].shape == (10, 256)
    narrow = Moon(hidden=64, projection=32).network(node).initial()
    assert narrow["projection0.weight"].shape == (64, 2048)
    assert narrow["head.weight"].shape == (10, 32)


def test_the_defaults_are_those_of_the_public_code() -> None:
    method = Moon()
    assert (method.mu, method.temperature, method.projection) == (1.0, 0.5, 256)
    assert (method.lr, method.momentum, method.weight_decay) == (0.01, 0.9, 1e-5)
    assert Moon(**Moon.presets["cifar10"]).mu == 5.0


@pytest.mark.parametrize(
    "values", [{"mu": -1.0}, {"temperature": 0.0}, {"projection": 0}, {"hidden": -1}]
)
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match=f"Moon: {next(iter(values))} = "):
        Moon(**values)
