"""FedDF: one student for each architecture, taught by everybody."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from fedstill.core import Weights
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER, Inbox
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.feddf import FedDF
from worlds import World, engine_for, played, vectors

FAST = {"lr": 0.3, "batch_size": 8, "epochs": 2, "momentum": 0.5}
BIG, LITTLE = 4 * 8 + 8 + 8 * 3 + 3, 4 * 5 + 5 + 5 * 3 + 3


def only(world: World, clients: list[str]) -> World:
    parties = {name: world.parties[name] for name in clients}
    return World(parties, world.parties[clients[0]].model, world.public)


def assert_close(left: Weights, right: Weights, tolerance: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name in left:
        if tolerance:
            assert torch.allclose(left[name], right[name], atol=tolerance, rtol=0), name
        else:
            assert torch.equal(left[name], right[name]), name


def test_without_distillation_it_is_fedavg_for_each_architecture() -> None:
    world = vectors(mixed=True)  # c0 and c2 share one, c1 and c3 the other
    engine, _ = played(FedDF(distil_steps=0, **FAST), world, rounds=3)
    for clients in (["c0", "c2"], ["c1", "c3"]):
        alone, _ = played(FedAvg(**FAST), only(world, clients), rounds=3)
        for client in clients:
            assert_close(engine.states[client].weights, alone.states[SERVER].weights)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_without_distillation_sampled_clients_are_averaged_as_in_fedavg(weighting: str) -> None:
    world, away = vectors(), Scripted({1: ["c1"], 2: ["c0", "c3"]})
    values = {**FAST, "weighting": weighting}
    ours, _ = played(FedDF(distil_steps=0, **values), world, rounds=3, sampling=away)
    theirs, _ = played(FedAvg(**values), world, rounds=3, sampling=away)
    assert_close(ours.states[SERVER].weights["c0"], theirs.states[SERVER].weights)


def test_a_single_client_distils_to_itself() -> None:
    world = vectors((25,))
    with_steps, log = played(FedDF(distil_steps=20, distil_batch=8, **FAST), world, rounds=1)
    without, _ = played(FedDF(distil_steps=0, **FAST), world, rounds=1)
    # Adam makes small steps even of rounding errors, so the weights are close and not equal.
    assert_close(with_steps.states["c0"].weights, without.states["c0"].weights, 2e-3)
    (loss,) = [row.value for row in log.metrics if (row.step, row.name) == ("distil", "loss")]
    assert abs(loss) < 1e-5


def test_one_step_by_hand_goes_down_the_divergence_from_the_mean_logits() -> None:
    world = vectors(mixed=True)
    values = {**FAST, "distil_batch": 100}  # all 24 public examples at once
    start, _ = played(FedDF(distil_steps=0, **values), world, rounds=1)
    engine, _ = played(FedDF(distil_steps=1, distil_lr=0.01, **values), world, rounds=1)
    x, models = world.public.all().x, world.models
    spoken = {}

    class Ear:
        def carry(self, message, sender, round, step):  # type: ignore[no-untyped-def]
            spoken[sender] = message
            return message

    played(FedDF(distil_steps=0, **values), world, rounds=1, meddling=[Ear()])
    teachers = [models[c](spoken[c].weights, x) for c in world.clients]
    target = torch.stack(teachers).mean(0).softmax(1)
    for client in ("c0", "c1"):
        begin = start.states[client].weights

        def loss(w: Weights, model=models[client]) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return kl_div(model(w, x).log_softmax(1), target, reduction="batchmean")

        grad = torch.func.grad(loss)(begin)
        for name, reached in engine.states[client].weights.items():
            moved = 0.01 * grad[name] / (grad[name].abs() + 1e-8)  # Adam's first step
            assert torch.allclose(reached, begin[name] - moved, atol=1e-4)


def test_a_client_without_examples_is_not_asked() -> None:
    world = vectors((20, 0, 23, 30), mixed=True)
    method, spoken = FedDF(distil_steps=0, **FAST), {}

    class Ear:
        def carry(self, message, sender, round, step):  # type: ignore[no-untyped-def]
            if step == "update":
                spoken[sender] = message
            return message

    played(method, world, rounds=1, meddling=[Ear()])
    server = engine_for(method, world).node(SERVER, 1, "distil")
    x, models = world.public.all().x, world.models
    said = {c: models[c](up.weights, x) for c, up in spoken.items()}
    knowing = torch.stack([said[c] for c in ("c0", "c2", "c3")]).mean(0)
    assert torch.allclose(method.ensemble(server, Inbox(spoken)), knowing)
    nobody = Inbox({c: up.replace(examples=0) for c, up in spoken.items()})
    assert torch.allclose(method.ensemble(server, nobody), torch.stack([*said.values()]).mean(0))


def test_distillation_brings_students_nearer_to_the_ensemble() -> None:
    world = vectors(mixed=True)
    losses = []
    for steps in (1, 200):
        method = FedDF(distil_steps=steps, distil_lr=0.02, distil_batch=8, **FAST)
        _, log = played(method, world, rounds=1)
        losses += [row.value for row in log.metrics if (row.step, row.name) == ("distil", "loss")]
    assert losses[1] < losses[0] / 2


def test_clients_hold_and_are_scored_by_the_student_of_their_architecture() -> None:
    world = vectors(mixed=True)
    engine, log = played(FedDF(distil_steps=3, **FAST), world, rounds=2)
    students = engine.states[SERVER].weights
    assert [*students] == ["c0", "c1"]
    for client, first in FedDF().kinds(world.models).items():
        assert_close(engine.states[client].weights, students[first])
    scored = {(row.node, row.target) for row in log.metrics if row.name == "accuracy"}
    assert len(scored) == 16


def test_as_many_floats_travel_as_the_paper_says() -> None:
    _, log = played(FedDF(distil_steps=1), vectors(mixed=True), rounds=2)
    for round in (1, 2):
        rows = [row for row in log.messages if row.round == round and row.field == "weights"]
        ups = {row.sender: row.floats for row in rows if row.direction == "up"}
        down = sorted((row.floats, row.hearers) for row in rows if row.direction == "down")
        assert ups == {"c0": BIG, "c1": LITTLE, "c2": BIG, "c3": LITTLE}
        assert down == [(LITTLE, 2), (BIG, 2)]  # each student is said once


def test_who_was_away_gets_the_latest_student_first_and_nobody_gets_it_twice() -> None:
    away = Scripted({1: ["c1", "c2"], 2: ["c0"]})
    world = vectors(mixed=True)
    engine, log = played(FedDF(distil_steps=1, **FAST), world, rounds=3, sampling=away)
    first = [
        (row.round, row.floats, row.hearers) for row in log.messages if row.step == "broadcast"
    ]
    assert sorted(first) == [(2, LITTLE, 1), (2, BIG, 1), (3, BIG, 1)]
    assert sorted(engine.states[SERVER].holders) == ["c0", "c1", "c2", "c3"]


def test_an_architecture_without_participants_stays_as_it_is() -> None:
    world = vectors(mixed=True)
    method = FedDF(distil_steps=2, **FAST)
    begin = engine_for(method, world).node(SERVER, 0, "look").state.weights["c1"]
    away = Scripted({1: ["c1", "c3"], 2: ["c1", "c3"]})
    engine, _ = played(method, world, rounds=2, sampling=away)
    assert_close(engine.states[SERVER].weights["c1"], begin)
    assert set(engine.states[SERVER].holders) == {"c0", "c1", "c2", "c3"}


def test_all_start_from_the_weights_of_their_architecture_without_a_message() -> None:
    world = vectors(mixed=True)
    engine = engine_for(FedDF(), world)
    students = engine.node(SERVER, 0, "look").state.weights
    for client, first in FedDF().kinds(world.models).items():
        assert_close(engine.node(client, 0, "look").state.weights, students[first])


def test_labels_of_public_data_cannot_be_reached() -> None:
    server = engine_for(FedDF(), vectors()).node(SERVER, 1, "distil")
    assert server.public.labels.tolist() == list(range(24))


def test_without_public_data_it_is_refused_before_anything_is_played() -> None:
    world = World(vectors().parties, vectors().server_model)
    with pytest.raises(BadValue, match="FedDF needs public data, but the population has none"):
        played(FedDF(), world)


def test_without_averaging_each_network_is_a_student_of_its_own() -> None:
    world = vectors()  # one architecture
    alone, _ = played(FedDF(average=False, distil_steps=0, **FAST), world, rounds=2)
    ends = [alone.states[client].weights["head.weight"] for client in world.clients]
    assert not any(torch.equal(ends[0], other) for other in ends[1:])
    assert set(alone.states[SERVER].weights) == set(world.clients)
    # Nothing is averaged and nothing distilled: FedAvg of a single client.
    for client, end in zip(world.clients, ends, strict=True):
        single, _ = played(FedAvg(**FAST), only(world, [client]), rounds=2)
        assert torch.equal(end, single.states[SERVER].weights["head.weight"])
    taught, _ = played(FedDF(average=False, distil_steps=5, distil_batch=8, **FAST), world, 1)
    once, _ = played(FedDF(average=False, distil_steps=0, **FAST), world, 1)
    x = world.public.all().x
    apart = [
        torch.stack([world.server_model(e.states[c].weights, x) for c in world.clients]).std(0)
        for e in (once, taught)
    ]
    assert float(apart[1].mean()) < float(apart[0].mean())  # they come to agree
