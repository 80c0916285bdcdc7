"""FedProto: mean features by hand, local training as its limit, networks of different widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Inbox, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Party
from fedstill.federation.sampling import Scripted
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.fedproto import Down, FedProto, Up, nearness
from fedstill.methods.local import Local
from fedstill.models import MLP
from fedstill.parts.class_tables import ClassTable
from fedstill.parts.heads import projected
from fedstill.testing import CHECKS, check
from worlds import World, engine_for, examples, pictures, played, vectors

VALUES: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9}


def without(world: World, missing: int) -> World:
    """The same world, in which nobody has examples of a class to learn from."""
    held = [c for c in range(3) if c != missing]
    parties = {
        name: Party(examples(name, 20, party.model.shape, held), party.test, party.model)
        for name, party in world.parties.items()
    }
    return World(parties, world.server_model)


def floats(log: MemoryLog, round: int, direction: str) -> int:
    rows = [row for row in log.messages if (row.round, row.direction) == (round, direction)]
    return sum(row.floats for row in rows)


def empty(classes: int = 3, width: int = 8) -> ClassTable:
    return ClassTable.empty(classes, width, "cpu")


def sent(method: FedProto, world: World, client: str, table: ClassTable) -> tuple[Up, InProcess]:
    engine = engine_for(method, world)
    outcome = engine.play(method.learn, 1, {client: Inbox({SERVER: Down(table)})})
    message = outcome[client].message
    assert isinstance(message, Up)
    return message, engine


# Limits


def test_fedproto_without_its_pull_is_local_training() -> None:
    # Bit for bit.
    for world in (vectors(), pictures(norm="batch")):
        alone, _ = played(Local(**VALUES), world, rounds=3)
        free, _ = played(FedProto(**VALUES, pull=0.0), world, rounds=3)
        for client in world.clients:
            for name, reached in alone.states[client].weights.items():
                assert torch.equal(reached, free.states[client].weights[name])


def test_the_first_round_is_local_training_since_nobody_has_prototypes() -> None:
    world = vectors()
    alone, _ = played(Local(**VALUES), world, rounds=1)
    first, _ = played(FedProto(**VALUES, pull=5.0), world, rounds=1)
    second, _ = played(FedProto(**VALUES, pull=5.0), world, rounds=2)
    for name, reached in alone.states["c1"].weights.items():
        assert torch.equal(reached, first.states["c1"].weights[name])
        assert not torch.equal(reached, second.states["c1"].weights[name])


def test_networks_of_one_width_are_left_as_they_are() -> None:
    world = vectors()
    engine, _ = played(FedProto(), world, rounds=1)
    assert list(engine.states["c0"].weights) == list(world.server_model.initial())


def test_with_a_projection_and_without_its_pull_it_is_local_training_of_such_networks() -> None:
    world = vectors(mixed=True)
    wide = {n: replace(p, model=projected(p.model, 6)) for n, p in world.parties.items()}
    alone, _ = played(Local(**VALUES), World(wide, world.server_model), rounds=3)
    free, _ = played(FedProto(**VALUES, pull=0.0, feature_width=6), world, rounds=3)
    for client in world.clients:
        assert "projection0.weight" in free.states[client].weights
        for name, reached in alone.states[client].weights.items():
            assert torch.equal(reached, free.states[client].weights[name])


# By hand


def test_two_full_batch_rounds_by_hand() -> None:
    world = vectors((25, 20))
    method = FedProto(lr=0.2, batch_size=100, momentum=0.0, pull=3.0)
    model = world.server_model
    parts = {client: world.party(client).data.all() for client in world.clients}
    start = engine_for(method, world).node("c0", 0, "look").state.weights

    def task(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(weights, x), y)

    first, means = {}, {}
    for client, (x, y) in parts.items():
        first[client] = algebra.add(start, torch.func.grad(task)(start, x, y), -0.2)
        features = model.features(first[client], x)
        means[client] = {c: features[y == c].mean(0) for c in y.unique().tolist()}
    holders = [[each[c] for each in means.values() if c in each] for c in range(3)]
    prototypes = torch.stack([torch.stack(rows).mean(0) for rows in holders])
    engine, _ = played(method, world, rounds=2)
    for client, (x, y) in parts.items():

        def pulled(weights: Any, x: Tensor = x, y: Tensor = y) -> Tensor:
            gap = model.features(weights, x) - prototypes[y]
            return task(weights, x, y) + 3.0 * gap.square().sum() / gap.numel()

        second = algebra.add(first[client], torch.func.grad(pulled)(first[client]), -0.2)
        for name, reached in engine.states[client].weights.items():
            assert torch.allclose(reached, second[name], atol=1e-6)


def test_prototypes_are_means_of_a_pass_after_training() -> None:
    # The trap: features collected during the epoch belong to weights that no longer exist.
    world, method = pictures(norm="batch"), FedProto(**VALUES)
    up, engine = sent(method, world, "c0", empty(width=16))
    (x, y), weights = world.party("c0").data.all(), engine.states["c0"].weights
    features = world.server_model.features(weights, x)
    assert up.classes.tolist() == [0, 1]  # it lacks class 2
    for row, c in enumerate([0, 1]):
        assert torch.allclose(up.prototypes[row], features[y == c].mean(0), atol=1e-5)


def test_the_pull_is_a_mean_over_features_and_skips_classes_without_a_prototype() -> None:
    model = MLP((2,), 2, hidden=())  # features are the inputs
    weights = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    table = ClassTable(torch.tensor([[0.0, 0.0], [9.0, 9.0]]), torch.tensor([True, False]))
    batch = Batch(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([0, 1]))
    loss = FedProto(pull=2.0).pulled(model, weights, batch, table)
    task = torch.tensor(2.0).log()
    assert float(loss) == pytest.approx(float(task) + 2.0 * (1 + 9) / (2 * 2))


# The server


def aggregated(method: FedProto, world: World, *ups: Up) -> ClassTable:
    engine = engine_for(method, world)
    mail = Inbox({f"c{i}": up for i, up in enumerate(ups)})
    engine.play(method.aggregate, 1, {SERVER: mail})
    return engine.states[SERVER].prototypes


def test_the_mean_is_over_the_holders_of_a_class_plain_or_by_examples() -> None:
    world = vectors()
    one = Up(torch.full((2, 8), 2.0), torch.tensor([0, 2]), None)
    other = Up(torch.full((1, 8), 6.0), torch.tensor([0]), None)
    table = aggregated(FedProto(), world, one, other)
    assert table.rows[:, 0].tolist() == [4, 0, 2] and table.known.tolist() == [True, False, True]
    counted = [one.replace(counts=torch.tensor([3, 5])), other.replace(counts=torch.tensor([1]))]
    table = aggregated(FedProto(weighting="examples"), world, *counted)
    assert table.rows[:, 0].tolist() == [3, 0, 2]  # (3 · 2 + 6) / 4, not divided by two again


def test_a_class_whose_holders_sleep_keeps_its_prototype() -> None:
    world = vectors()
    for client in ("c1", "c2"):
        data = examples(client, 20, (4,), [0, 1])
        world.parties[client] = replace(world.parties[client], data=data)
    method = FedProto(**VALUES)  # c3 alone holds class 2
    once, _ = played(method, world, rounds=1)
    asleep, _ = played(method, world, rounds=3, sampling=Scripted({2: ["c3"], 3: ["c3"]}))
    before, after = once.states[SERVER].prototypes, asleep.states[SERVER].prototypes
    assert torch.equal(before.rows[2], after.rows[2]) and bool(after.known.all())
    assert not torch.equal(before.rows[0], after.rows[0])


@pytest.mark.parametrize("inference", ["head", "prototype"])
def test_a_class_held_by_nobody_has_no_prototype_and_does_no_harm(inference: Any) -> None:
    world = without(vectors(), 2)
    method = FedProto(**VALUES, inference=inference)
    engine, log = played(method, world, rounds=3)
    assert engine.states[SERVER].prototypes.known.tolist() == [True, True, False]
    assert all(torch.isfinite(torch.tensor(row.value)) for row in log.metrics)
    if inference == "prototype":
        x = world.party("c1").test.all().x
        guesses = method.predict(engine.node("c1", 3, "evaluate"), x).argmax(1)
        assert 2 not in guesses.tolist()


# What travels


def test_up_go_the_means_of_the_classes_held_and_down_those_of_all() -> None:
    world = vectors()
    _, log = played(FedProto(), world, rounds=2)
    held = 2 + 3 + 3 + 3
    for round in (1, 2):
        assert floats(log, round, "up") == held * 8
        assert floats(log, round, "down") == 3 * 8
    _, log = played(FedProto(weighting="examples"), world, rounds=1)
    assert floats(log, 1, "up") == held * 8 + held


def test_inference_by_prototypes_costs_a_second_message_down() -> None:
    _, log = played(FedProto(inference="prototype"), vectors(), rounds=1)
    assert floats(log, 1, "down") == 2 * 3 * 8


def test_networks_of_different_widths_meet_in_a_common_one() -> None:
    world, method = vectors(mixed=True), FedProto(**VALUES, feature_width=6)
    plain, log = played(method, world, rounds=3)
    assert floats(log, 3, "down") == 3 * 6 and floats(log, 3, "up") == 11 * 6
    weights = [plain.states[client].weights for client in ("c0", "c1")]
    assert [tuple(w["projection0.weight"].shape) for w in weights] == [(6, 8), (6, 5)]
    assert [tuple(w["head.weight"].shape) for w in weights] == [(3, 6), (3, 6)]
    stacked, _ = played(method, world, rounds=3, engine=Batched)
    for client in world.clients:
        for name, reached in plain.states[client].weights.items():
            assert torch.allclose(reached, stacked.states[client].weights[name], atol=1e-4)


def test_a_network_whose_features_have_the_common_width_needs_no_layer() -> None:
    engine, _ = played(FedProto(feature_width=8), vectors(mixed=True), rounds=1)
    has = ["projection0.weight" in engine.states[c].weights for c in ("c0", "c1", "c2", "c3")]
    assert has == [False, True, False, True]


# Inference


def test_the_nearest_prototype_wins_and_a_missing_one_lies_beyond_all() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.1, 0.0]])
    table = ClassTable(rows, torch.tensor([True, True, False]))
    near = nearness(torch.tensor([[0.0, 0.0], [3.0, 3.0]]), table)
    expected = torch.tensor([[0.0, -5.0, -6.0], [-(18**0.5), -1.0, -(18**0.5) - 1]])
    assert torch.allclose(near, expected, atol=1e-6)


def test_clients_are_scored_by_their_head_or_by_the_newest_prototypes() -> None:
    world, values = vectors(), {**VALUES, "pull": 0.5}
    head, _ = played(FedProto(**values), world, rounds=2)
    near, log = played(FedProto(**values, inference="prototype"), world, rounds=2)
    x = world.party("c2").test.all().x
    for name, reached in head.states["c2"].weights.items():  # training is the same
        assert torch.equal(reached, near.states["c2"].weights[name])
    weights, model = head.states["c2"].weights, world.server_model
    assert head.states["c2"].prototypes is None
    assert torch.equal(
        FedProto(**values).predict(head.node("c2", 2, "evaluate"), x), model(weights, x)
    )
    rows = near.states[SERVER].prototypes.rows
    gaps = (model.features(weights, x).unsqueeze(1) - rows).square().sum(2)
    method = FedProto(**values, inference="prototype")
    guesses = method.predict(near.node("c2", 2, "evaluate"), x).argmax(1)
    assert torch.equal(guesses, gaps.argmin(1))
    scored = {(row.node, row.target) for row in log.metrics if row.name == "accuracy"}
    assert scored == {(one, other) for one in world.clients for other in world.clients}


# Values


@pytest.mark.parametrize("promise", sorted(set(CHECKS) - {"plan"}))
def test_the_options_keep_the_contract_too(promise: str) -> None:
    method = FedProto(lr=0.1, batch_size=8, weighting="examples", inference="prototype")
    check(method, only=[promise])


def test_the_defaults_are_those_of_the_public_code_but_for_the_batch() -> None:
    method = FedProto()
    assert (method.lr, method.momentum, method.epochs, method.pull) == (0.01, 0.5, 1, 1.0)
    assert (method.weighting, method.inference, method.feature_width) == ("uniform", "head", 512)
    assert FedProto(**FedProto.presets["reference"]).batch_size == 4


@pytest.mark.parametrize(
    "values", [{"pull": -1.0}, {"feature_width": 0}, {"inference": "nearest"}, {"weighting": "n"}]
)
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(BadValue, match=f"FedProto: {next(iter(values))} = "):
        FedProto(**values)
