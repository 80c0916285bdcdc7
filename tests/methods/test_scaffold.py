"""SCAFFOLD: controls that sum up, start at zero and cancel the drift."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Inbox, Node, Weights, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.scaffold import Down, Global, Own, Scaffold, Up
from worlds import engine_for, pictures, played, vectors


def test_one_full_batch_step_a_round_is_gradient_descent_on_the_mean_loss() -> None:
    world, method = vectors(), Scaffold(lr=0.5, batch_size=100)
    weights: Weights = engine_for(method, world).node(SERVER, 0, "look").state.weights
    held = [world.party(client).data.all() for client in world.clients]

    def loss(w: Weights) -> torch.Tensor:
        return sum(cross_entropy(world.server_model(w, x), y) for x, y in held) / len(held)

    for _ in range(3):  # from the second round on controls are at work, and cancel
        weights = algebra.add(weights, torch.func.grad(loss)(weights), -0.5)
    engine, _ = played(method, world, rounds=3)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, weights[name], atol=1e-6)


@pytest.mark.parametrize("correction", ["gradient", "step"])
def test_controls_cancel_at_a_rate_that_decays_too(correction: str) -> None:
    world = vectors()
    method = Scaffold(lr=0.5, batch_size=100, rate_decay=0.5, correction=correction)  # type: ignore[arg-type]
    weights: Weights = engine_for(method, world).node(SERVER, 0, "look").state.weights
    held = [world.party(client).data.all() for client in world.clients]

    def loss(w: Weights) -> torch.Tensor:
        return sum(cross_entropy(world.server_model(w, x), y) for x, y in held) / len(held)

    for rate in (0.5, 0.25, 0.125):
        weights = algebra.add(weights, torch.func.grad(loss)(weights), -rate)
    engine, _ = played(method, world, rounds=3)
    for name, reached in engine.states[SERVER].weights.items():
        assert torch.allclose(reached, weights[name], atol=1e-6)


def test_after_one_full_batch_step_a_control_is_the_clients_gradient() -> None:
    world, method = vectors(), Scaffold(lr=0.5, batch_size=100)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    engine, _ = played(method, world, rounds=1)
    for client in world.clients:
        x, y = world.party(client).data.all()
        grad = torch.func.grad(lambda w, x=x, y=y: cross_entropy(world.server_model(w, x), y))(
            start
        )
        for name, control in engine.states[client].control.items():
            assert torch.allclose(control, grad[name], atol=1e-5)


def test_the_first_round_is_fedavg_with_equal_weights() -> None:
    # Bit for bit: all controls are zero.
    world, values = vectors(), {"lr": 0.1, "epochs": 2, "batch_size": 7}
    controlled, _ = played(Scaffold(**values), world, rounds=1)
    plain, _ = played(FedAvg(**values, weighting="uniform"), world, rounds=1)
    for name, reached in controlled.states[SERVER].weights.items():
        assert torch.equal(reached, plain.states[SERVER].weights[name])


def test_the_second_round_is_not_fedavg() -> None:
    world, values = vectors(), {"lr": 0.1, "epochs": 2, "batch_size": 7}
    controlled, _ = played(Scaffold(**values), world, rounds=2)
    plain, _ = played(FedAvg(**values, weighting="uniform"), world, rounds=2)
    ends = [engine.states[SERVER].weights["head.weight"] for engine in (controlled, plain)]
    assert not torch.allclose(*ends, atol=1e-4)


@pytest.mark.parametrize("absent", [{}, {1: ["c0"], 2: ["c1", "c3"], 3: ["c0", "c1", "c2"]}])
def test_client_controls_sum_to_n_times_the_servers(absent: dict[int, list[str]]) -> None:
    # From zero it holds even when some sleep: the server adds their changes over all N.
    world = vectors()
    method = Scaffold(lr=0.1, epochs=2, batch_size=7)
    engine, _ = played(method, world, rounds=4, sampling=Scripted(absent))
    own = [engine.states[client].control for client in world.clients]
    for name, common in engine.states[SERVER].control.items():
        assert torch.allclose(sum(c[name] for c in own), 4 * common, atol=1e-4)


def test_a_local_step_and_the_new_control_by_hand() -> None:
    # In a mean over clients the sign of the correction would cancel; here is one client alone.
    world, method = vectors((25,)), Scaffold(lr=0.5, batch_size=100)
    start = world.server_model.init(0)
    own, common = (algebra.scale(world.server_model.init(seed), 0.1) for seed in (1, 2))
    engine = engine_for(method, world)
    engine.restore({"c0": Own(own)})
    mail = Inbox({SERVER: Down(start, common)})
    up = engine.play(method.update, 1, {"c0": mail})["c0"].message
    x, y = world.party("c0").data.all()
    grad = torch.func.grad(lambda w: cross_entropy(world.server_model(w, x), y))(start)
    for name in start:
        moved = start[name] - 0.5 * (grad[name] - own[name] + common[name])
        control = own[name] - common[name] + (start[name] - moved) / (1 * 0.5)
        assert torch.allclose(up.weights[name], moved, atol=1e-6)
        assert torch.allclose(engine.states["c0"].control[name], control, atol=1e-5)
        assert torch.allclose(up.control[name], control - own[name], atol=1e-5)


@pytest.mark.parametrize(("round", "rate"), [(1, 0.2), (3, 0.05)])
def test_a_correction_of_the_step_leaves_momentum_alone(round: int, rate: float) -> None:
    # NIID-Bench: a step of SGD with momentum and decay, then w ← w - lr · (c - c_i); three steps.
    world = vectors((24,))
    method = Scaffold(
        lr=0.2, epochs=3, batch_size=100, momentum=0.9, weight_decay=0.01, correction="step",
        rate_decay=0.5,
    )  # fmt: skip
    model, start = world.server_model, world.server_model.init(0)
    own, common = (algebra.scale(model.init(seed), 0.1) for seed in (1, 2))
    engine = engine_for(method, world)
    engine.restore({"c0": Own(own)})
    mail = Inbox({SERVER: Down(start, common)})
    up = engine.play(method.update, round, {"c0": mail})["c0"].message
    x, y = world.party("c0").data.all()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=rate, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(weights, x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor -= rate * (common[name] - own[name])
    for name, reached in weights.items():
        assert torch.allclose(up.weights[name], reached, atol=1e-6)
        control = own[name] - common[name] + (start[name] - reached) / (3 * rate)
        assert torch.allclose(engine.states["c0"].control[name], control, atol=1e-5)


def test_without_momentum_both_corrections_are_the_same() -> None:
    world, values = vectors(), {"lr": 0.1, "epochs": 2, "batch_size": 7}
    by_gradient, _ = played(Scaffold(**values), world, rounds=3)
    by_step, _ = played(Scaffold(**values, correction="step"), world, rounds=3)
    for name, reached in by_gradient.states[SERVER].weights.items():
        assert torch.allclose(reached, by_step.states[SERVER].weights[name], atol=1e-5)


def test_the_new_control_is_the_mean_gradient_over_the_steps_taken() -> None:
    world, method = vectors((20,)), Scaffold(lr=0.1, epochs=2, batch_size=8)
    start = engine_for(method, world).node(SERVER, 0, "look").state.weights
    engine, _ = played(method, world, rounds=1)
    for name, control in engine.states["c0"].control.items():
        way = start[name] - engine.states[SERVER].weights[name]
        assert torch.allclose(control, way / (2 * 3 * 0.1), atol=1e-5)  # 8 + 8 + 4 examples, twice


def test_the_local_loss_gains_the_drift_times_the_weights() -> None:
    world, method = vectors(), Scaffold()
    weights, batch = world.server_model.init(0), world.party("c0").data.all()
    drift = algebra.zeros(weights)
    drift["head.bias"] = torch.tensor([3.0, -1.0, 0.0])
    plain = method.objective(world.server_model, weights, batch, weights)
    found = method.corrected(world.server_model, weights, batch, weights, drift)
    b = weights["head.bias"].tolist()
    assert float(found - plain) == pytest.approx(3 * b[0] - 1 * b[1], abs=1e-5)


def test_the_server_divides_by_all_clients_and_not_by_those_awake() -> None:
    # The trap: two of four clients are heard, their changes are 4 and 8.
    model = vectors().server_model
    state = Global({"w": torch.tensor(0.0)}, {"w": torch.tensor(1.0)})
    everybody = dict.fromkeys(["c0", "c1", "c2", "c3"], model)
    server: Node = Node(SERVER, 1, state, model=model, models=everybody)
    ups = {
        "c0": Up({"w": torch.tensor(2.0)}, 1, {"w": torch.tensor(4.0)}),
        "c2": Up({"w": torch.tensor(6.0)}, 9, {"w": torch.tensor(8.0)}),
    }
    Scaffold(server_lr=0.5).aggregate(server, Inbox(ups))
    assert float(server.state.control["w"]) == 1 + (4 + 8) / 4
    assert float(server.state.weights["w"]) == 0 + 0.5 * (2 + 6) / 2


def test_controls_start_at_zero_and_leave_statistics_out() -> None:
    world = pictures(norm="batch")
    engine = engine_for(Scaffold(), world)
    common = engine.node(SERVER, 0, "look").state.control
    own = engine.node("c0", 0, "look").state
    assert isinstance(own, Own)
    for control in (common, own.control):
        assert list(control) == list(algebra.parameters(world.server_model.init(0)))
        assert not any(tensor.any() for tensor in control.values())


def test_statistics_are_the_plain_mean_however_far_the_server_steps() -> None:
    # Variances of 1 go to 0.25 and 0.35, of which the mean is 0.3; four times that way is -1.8.
    model = vectors().server_model
    start = {"norm.weight": torch.tensor(1.0), "norm.running_var": torch.tensor(1.0)}
    state = Global(start, {"norm.weight": torch.tensor(0.0)})
    server: Node = Node(SERVER, 1, state, model=model, models=dict.fromkeys("ab", model))
    ups = {
        name: Up(
            {"norm.weight": torch.tensor(weight), "norm.running_var": torch.tensor(variance)},
            1,
            {"norm.weight": torch.tensor(0.0)},
        )
        for name, weight, variance in (("a", 2.0, 0.25), ("b", 4.0, 0.35))
    }
    Scaffold(server_lr=4.0).aggregate(server, Inbox(ups))
    assert float(server.state.weights["norm.weight"]) == 1 + 4 * (3 - 1)
    assert float(server.state.weights["norm.running_var"]) == pytest.approx(0.3)


def test_a_sleeping_clients_control_is_not_touched() -> None:
    world = vectors()
    method = Scaffold(lr=0.1, batch_size=7)
    before, _ = played(method, world, rounds=1)
    after, _ = played(method, world, rounds=2, sampling=Scripted({2: ["c1"]}))
    for name, control in before.states["c1"].control.items():
        assert torch.equal(control, after.states["c1"].control[name])


def test_momentum_and_weight_decay_are_refused() -> None:
    for values in ({"momentum": 0.9}, {"weight_decay": 1e-4}):
        with pytest.raises(BadValue, match="option II reads the gradient off the way"):
            Scaffold(**values)


def test_twice_the_model_travels_both_ways() -> None:
    _, log = played(Scaffold(), vectors(), rounds=1)
    size = 4 * 8 + 8 + 8 * 3 + 3
    for sender in (SERVER, "c0"):
        sent = {row.field: row.floats for row in log.messages if row.sender == sender}
        assert sent["weights"] == sent["control"] == size
