"""FedAvg: the mean of where clients come, weighted by what they hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Node, Weights, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.engines.play.batched import Batched
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedavg import FedAvg, Global, Up
from fedstill.methods.fednova import FedNova
from fedstill.methods.fedprox import FedProx
from fedstill.methods.scaffold import Scaffold
from worlds import engine_for, pictures, played, vectors


def start_of(method: FedAvg, world) -> Weights:  # type: ignore[no-untyped-def]
    weights: Weights = engine_for(method, world).node(SERVER, 0, "look").state.weights
    return weights


def stepped(world, clients: list[str], shares: list[float], start: Weights, lr: float) -> Weights:  # type: ignore[no-untyped-def]
    """A step on the weighted mean of the clients' losses."""

    def loss(weights: Weights) -> torch.Tensor:
        losses = [
            cross_entropy(world.server_model(weights, batch.x), batch.y)
            for batch in (world.party(client).data.all() for client in clients)
        ]
        return sum(s * one for s, one in zip(shares, losses, strict=True)) / sum(shares)

    grad = torch.func.grad(loss)(start)
    return {name: start[name] - lr * grad[name] for name in start}


@pytest.mark.parametrize(
    ("weighting", "shares"), [("examples", [20, 27, 23, 30]), ("uniform", [1, 1, 1, 1])]
)
def test_a_full_batch_round_is_a_step_on_the_weighted_mean_gradient(
    weighting: str, shares: list[float]
) -> None:
    world = vectors()
    method = FedAvg(lr=0.5, batch_size=100, weighting=weighting)  # type: ignore[arg-type]
    expected = stepped(world, world.clients, shares, start_of(method, world), 0.5)
    engine, _ = played(method, world, rounds=1)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, expected[name], atol=1e-6)


def test_a_rate_that_decays_is_that_share_of_the_one_before() -> None:
    world, method = vectors(), FedAvg(lr=0.5, batch_size=100, rate_decay=0.5)
    weights = start_of(method, world)
    for lr in (0.5, 0.25, 0.125):
        weights = stepped(world, world.clients, [20, 27, 23, 30], weights, lr)
    engine, _ = played(method, world, rounds=3)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, weights[name], atol=1e-6)


def test_a_client_moves_no_further_in_a_step_than_rate_times_clip() -> None:
    world, method = vectors(), FedAvg(lr=0.5, batch_size=100, clip=0.01)
    start = start_of(method, world)
    engine, _ = played(method, world, rounds=1, sampling=Scripted({1: ["c0", "c1", "c2"]}))
    moved = algebra.sub(engine.states[SERVER].weights, start)
    assert float(algebra.square(moved)) ** 0.5 == pytest.approx(0.5 * 0.01, rel=1e-4)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedNova, Scaffold])
def test_stacked_clients_learn_at_the_rate_and_length_of_those_in_turn(kind: type[FedAvg]) -> None:
    world, method = vectors(), kind(lr=0.5, batch_size=10, rate_decay=0.5, clip=0.2)
    alone, _ = played(method, world, rounds=2)
    stacked, _ = played(method, world, rounds=2, engine=Batched)
    for name, reached in alone.states[SERVER].weights.items():
        assert torch.allclose(stacked.states[SERVER].weights[name], reached, atol=1e-5)


def test_only_those_who_are_awake_are_averaged() -> None:
    world, method = vectors(), FedAvg(lr=0.5, batch_size=100)
    expected = stepped(world, ["c1", "c3"], [27, 30], start_of(method, world), 0.5)
    engine, _ = played(method, world, rounds=1, sampling=Scripted({1: ["c0", "c2"]}))
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, expected[name], atol=1e-6)


def test_the_mean_by_hand() -> None:
    ups = {
        "c0": Up({"w": torch.tensor([1.0, 0.0])}, 3),
        "c1": Up({"w": torch.tensor([5.0, 8.0])}, 1),
    }
    for weighting, expected in (("examples", [2.0, 2.0]), ("uniform", [3.0, 4.0])):
        server: Node = Node(SERVER, 1, Global({"w": torch.zeros(2)}), model=vectors().server_model)
        FedAvg(weighting=weighting).aggregate(server, Inbox(ups))  # type: ignore[arg-type]
        assert server.state.weights["w"].tolist() == expected


def test_renaming_clients_changes_nothing_in_the_mean() -> None:
    ups = [Up({"w": torch.tensor([float(i)])}, i + 1) for i in range(3)]
    servers = [Node(SERVER, 1, Global({}), model=vectors().server_model) for _ in range(2)]
    FedAvg().aggregate(servers[0], Inbox(dict(zip("abc", ups, strict=True))))
    FedAvg().aggregate(servers[1], Inbox(dict(zip("cab", ups, strict=True))))
    means = [float(server.state.weights["w"]) for server in servers]
    assert means == pytest.approx([(0 * 1 + 1 * 2 + 2 * 3) / 6] * 2)


def test_statistics_of_norm_layers_are_averaged_too() -> None:
    # The trap: a server that averages parameters only keeps statistics of a network nobody has.
    world = pictures(norm="batch")
    method = FedAvg(lr=1e-9, batch_size=100)
    engine, _ = played(method, world, rounds=1)
    start = start_of(method, world)
    means = []
    for client in world.clients:
        x = world.party(client).data.all().x
        seen = torch.conv2d(x, start["conv0.weight"], start["conv0.bias"], padding=1)
        means.append(0.1 * seen.mean((0, 2, 3)))
    expected = sum(n * mean for n, mean in zip([20, 27, 23], means, strict=True)) / 70
    reached = engine.states[SERVER].weights["norm0.running_mean"]
    assert torch.allclose(reached, expected, atol=1e-5)


def test_as_many_floats_travel_as_the_paper_says() -> None:
    world = vectors()
    _, log = played(FedAvg(), world, rounds=1)
    size = 4 * 8 + 8 + 8 * 3 + 3
    down = sum(row.floats for row in log.messages if row.direction == "down")
    up = [row for row in log.messages if row.sender == "c0" and row.field == "weights"]
    assert (down, up[0].floats) == (size, size)


def test_clients_remember_nothing_between_rounds() -> None:
    engine, _ = played(FedAvg(), vectors(), rounds=2)
    assert all(engine.states[client] is None for client in ("c0", "c1", "c2", "c3"))


def test_the_local_order_is_drawn_anew_in_every_round() -> None:
    world, method = vectors((30,)), FedAvg(batch_size=5)
    engine = engine_for(method, world)
    orders = [engine.node("c0", round, "update").rng("order").initial_seed() for round in (1, 2)]
    assert orders[0] != orders[1]


def test_every_client_takes_the_same_number_of_steps() -> None:
    sizes = (20, 27, 5, 8)
    world, method = vectors(sizes), FedAvg(lr=0.1, batch_size=8, epochs=9, round_steps=5)
    engine = engine_for(method, world)
    used = [36, 35, 25, 40]  # of 20 examples 8, 8, 4, 8, 8
    for client, size, count in zip(world.clients, sizes, used, strict=True):
        plan = method.batches(engine.node(client, 1, "update"))
        assert len(plan) == 5 and sum(map(len, plan.rows)) == count
        assert method.used(Up({}, size)) == count
    assert method.used(Up({}, 0)) == 0


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedNova])
def test_what_clients_trained_may_be_scored_on_their_own_test_sets(kind: type[FedAvg]) -> None:
    world = vectors()
    engine, log = played(kind(lr=0.1, batch_size=8, score_own=True), world, rounds=2)
    plain, _ = played(kind(lr=0.1, batch_size=8), world, rounds=2)
    for name, tensor in engine.states[SERVER].weights.items():
        assert torch.equal(tensor, plain.states[SERVER].weights[name])
    assert plain.states["c0"] is None
    rows = [row for row in log.metrics if row.step == "evaluate" and row.name == "accuracy"]
    last = {row.node: row.value for row in rows if row.round == 2 and row.node == row.target}
    assert set(last) == set(world.clients)
    x, y = world.party("c3").test.all()
    said = world.server_model(engine.states["c3"].weights, x).argmax(1)
    assert last["c3"] == pytest.approx(float((said == y).float().mean()))


def test_a_method_whose_clients_remember_something_else_says_so() -> None:
    with pytest.raises(BadValue, match="score_own: clients of this method remember"):
        Scaffold(score_own=True)
