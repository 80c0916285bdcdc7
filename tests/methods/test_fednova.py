"""FedNova: ways are compared per step, whatever the number of steps."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import SGD, Inbox, Node
from fedstill.core.node import SERVER
from fedstill.methods.fedavg import Down, FedAvg, Global
from fedstill.methods.fednova import FedNova, Up
from worlds import engine_for, pictures, played, vectors


def aggregated(method: FedNova, start: dict[str, torch.Tensor], **ups: Up) -> dict[str, float]:
    server: Node = Node(SERVER, 1, Global(start), model=vectors().server_model)
    method.aggregate(server, Inbox(ups))
    return {name: float(tensor) for name, tensor in server.state.weights.items()}


def test_two_clients_by_hand() -> None:
    # a = 4, 1; ways per step 4/4 = 1 and 2/1 = 2; effective steps (3·4 + 1·1)/4.
    ups = {
        "c0": Up({"w": torch.tensor(6.0)}, examples=3, steps=4),
        "c1": Up({"w": torch.tensor(8.0)}, examples=1, steps=1),
    }
    effective = (3 * 4 + 1 * 1) / 4
    expected = 10 - effective * (3 / 4 * (10 - 6) / 4 + 1 / 4 * (10 - 8) / 1)
    assert aggregated(FedNova(), {"w": torch.tensor(10.0)}, **ups)["w"] == pytest.approx(expected)


def test_the_length_of_a_way_without_momentum_is_its_number_of_steps() -> None:
    assert [FedNova().path_length(k) for k in (1, 5, 100)] == [1, 5, 100]


def test_the_length_of_two_steps_with_momentum_by_hand() -> None:
    # Unit gradients: the first step is 1, the second 0.5 · 1 + 1.
    assert FedNova(momentum=0.5).path_length(2) == pytest.approx(1 + (0.5 * 1 + 1))


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_length_of_a_way_is_how_far_unit_gradients_carry(momentum: float, steps: int) -> None:
    optimizer, value = SGD(1.0, momentum), torch.tensor(0.0, dtype=torch.float64)
    memory = optimizer.start(value)
    for _ in range(steps):
        value, memory = optimizer.step(value, torch.ones_like(value), memory)
    assert FedNova(momentum=momentum).path_length(steps) == pytest.approx(-float(value))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equally_many_steps_fednova_is_fedavg(momentum: float) -> None:
    # To 1e-6: a division and a multiplication by the same length remain.
    world = vectors((21, 24, 19))  # three batches of eight each
    values = {"lr": 0.1, "epochs": 2, "batch_size": 8, "momentum": momentum}
    nova, _ = played(FedNova(**values), world, rounds=3)
    plain, _ = played(FedAvg(**values), world, rounds=3)
    for name, reached in nova.states[SERVER].weights.items():
        assert torch.allclose(reached, plain.states[SERVER].weights[name], atol=1e-6)


def test_with_unequal_steps_it_is_not_fedavg() -> None:
    values = {"lr": 0.1, "batch_size": 4}
    nova, _ = played(FedNova(**values), vectors((4, 40)), rounds=1)
    plain, _ = played(FedAvg(**values), vectors((4, 40)), rounds=1)
    ends = [engine.states[SERVER].weights["head.weight"] for engine in (nova, plain)]
    assert not torch.allclose(*ends, atol=1e-3)


def test_the_steps_sent_are_those_actually_taken() -> None:
    # The trap: epochs times examples over batch size would be 2 · 2.5.
    method = FedNova(epochs=2, batch_size=8)
    engine = engine_for(method, vectors((20,)))
    start = engine.node(SERVER, 0, "look").state.weights
    outcome = engine.play(method.update, 1, {"c0": Inbox({SERVER: Down(start)})})
    sent = outcome["c0"].message
    assert isinstance(sent, Up)
    assert (sent.examples, sent.steps) == (20, 2 * 3)


def test_statistics_are_averaged_and_not_rescaled() -> None:
    ups = {
        f"c{i}": Up(
            {"n.weight": torch.tensor(0.0), "n.running_mean": torch.tensor(mean)},
            examples=1,
            steps=steps,
        )
        for i, (mean, steps) in enumerate([(2.0, 1), (6.0, 9)])
    }
    start = {"n.weight": torch.tensor(0.0), "n.running_mean": torch.tensor(100.0)}
    assert aggregated(FedNova(), start, **ups)["n.running_mean"] == (2 + 6) / 2


def test_a_robust_rule_joins_the_ways_of_a_step_and_statistics_as_they_are() -> None:
    # Ways of a step 4/4, 2/1 and 10/2: their median is 2, that of the lengths 4, 1, 2 is 2.
    ups = {
        f"c{i}": Up(
            {"n.weight": torch.tensor(weight), "n.running_mean": torch.tensor(mean)},
            examples=1,
            steps=steps,
        )
        for i, (weight, mean, steps) in enumerate([(6.0, 2.0, 4), (8.0, 5.0, 1), (0.0, 90.0, 2)])
    }
    start = {"n.weight": torch.tensor(10.0), "n.running_mean": torch.tensor(100.0)}
    reached = aggregated(FedNova(aggregation="median"), start, **ups)
    assert reached == {"n.weight": 10 - 2 * 2, "n.running_mean": 5.0}


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_client_that_took_no_step_does_not_move_the_others(weighting: str) -> None:
    ups = {
        "c0": Up({"w": torch.tensor(6.0)}, examples=3, steps=4),
        "c1": Up({"w": torch.tensor(10.0)}, examples=0, steps=0),
    }
    method = FedNova(weighting=weighting)  # type: ignore[arg-type]
    reached = aggregated(method, {"w": torch.tensor(10.0)}, **ups)["w"]
    share = 1 if weighting == "examples" else 1 / 2
    assert reached == pytest.approx(10 - (share * 4) * (share * (10 - 6) / 4))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_where_nobody_took_a_step_the_weights_stay(weighting: str) -> None:
    ups = {f"c{i}": Up({"w": torch.tensor(10.0)}, examples=0, steps=0) for i in range(2)}
    method = FedNova(weighting=weighting)  # type: ignore[arg-type]
    assert aggregated(method, {"w": torch.tensor(10.0)}, **ups) == {"w": 10.0}


def test_one_number_more_than_in_fedavg_travels_up() -> None:
    _, log = played(FedNova(), pictures(), rounds=1)
    sent = {row.field: row.floats for row in log.messages if row.sender == "c0"}
    assert sent["steps"] == 1
    assert set(sent) == {"weights", "examples", "steps"}
