"""FedHe: mean logits by hand, local training as its limit, and when distillation begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Adam, Batch, Inbox, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.engines.play.batched import Batched
from fedstill.federation.sampling import Scripted
from fedstill.methods.fedhe import Down, FedHe, Up
from fedstill.methods.local import Local
from fedstill.models import MLP
from fedstill.parts.class_tables import ClassTable
from worlds import World, engine_for, examples, pictures, played, vectors

VALUES: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9}


def without(world: World, missing: int, *clients: str) -> World:
    """The same world, in which some clients have no examples of a class."""
    held = [c for c in range(3) if c != missing]
    parties = {
        name: replace(party, data=examples(name, 20, (4,), held)) if name in clients else party
        for name, party in world.parties.items()
    }
    return World(parties, world.server_model)


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(tensor, right[name]) for name, tensor in left.items())


# Limits


def test_fedhe_without_its_term_is_local_training() -> None:
    # Bit for bit.
    for world in (vectors(), vectors(mixed=True), pictures(norm="batch")):
        alone, _ = played(Local(**VALUES), world, rounds=3)
        free, _ = played(FedHe(**VALUES, alpha=0.0), world, rounds=3)
        for client in world.clients:
            assert same(alone.states[client].weights, free.states[client].weights)


def test_the_first_round_is_local_training() -> None:
    world = vectors()
    alone, _ = played(Local(**VALUES), world, rounds=1)
    first, _ = played(FedHe(**VALUES), world, rounds=1)
    assert all(same(alone.states[c].weights, first.states[c].weights) for c in world.clients)


def test_a_class_held_by_nobody_keeps_distillation_from_beginning() -> None:
    world = without(vectors(), 2, "c1", "c2", "c3")
    alone, _ = played(Local(**VALUES), world, rounds=3)
    waiting, log = played(FedHe(**VALUES), world, rounds=3)
    assert waiting.states[SERVER].logits.known.tolist() == [True, True, False]
    assert all(same(alone.states[c].weights, waiting.states[c].weights) for c in world.clients)
    known = [row.value for row in log.metrics if row.name == "known_classes"]
    assert known == [2, 2, 2]


def test_distillation_begins_once_every_class_has_a_value() -> None:
    # c3 alone holds class 2 and sleeps in the first two rounds: the fourth is the first to distil.
    world = without(vectors(), 2, "c1", "c2")
    sampler = Scripted({1: ["c3"], 2: ["c3"]})
    for rounds, equal in ((3, True), (4, False)):
        alone, _ = played(Local(**VALUES), world, rounds=rounds, sampling=sampler)
        other, _ = played(FedHe(**VALUES), world, rounds=rounds, sampling=sampler)
        assert same(alone.states["c1"].weights, other.states["c1"].weights) == equal


def test_a_class_whose_holders_sleep_keeps_its_value() -> None:
    world = without(vectors(), 2, "c1", "c2")
    once, _ = played(FedHe(**VALUES), world, rounds=1)
    asleep, _ = played(FedHe(**VALUES), world, rounds=3, sampling=Scripted({2: ["c3"], 3: ["c3"]}))
    before, after = once.states[SERVER].logits, asleep.states[SERVER].logits
    assert torch.equal(before.rows[2], after.rows[2]) and bool(after.known.all())
    assert not torch.equal(before.rows[0], after.rows[0])


# By hand


def test_two_full_batch_rounds_by_hand_with_networks_of_two_kinds() -> None:
    world = vectors((25, 20), mixed=True)
    method = FedHe(lr=0.2, batch_size=100, alpha=3.0)
    begin = engine_for(method, world)
    first, logits = {}, {}
    for client in world.clients:
        model, (x, y) = world.party(client).model, world.party(client).data.all()
        start = begin.node(client, 0, "look").state.weights
        grad = torch.func.grad(lambda w, m=model, x=x, y=y: cross_entropy(m(w, x), y))(start)
        first[client] = algebra.add(start, grad, -0.2)
        said = model(first[client], x)
        logits[client] = {c: said[y == c].mean(0) for c in y.unique().tolist()}
    holders = [[each[c] for each in logits.values() if c in each] for c in range(3)]
    means = torch.stack([torch.stack(rows).mean(0) for rows in holders])
    engine, _ = played(method, world, rounds=2)
    for client in world.clients:
        model, (x, y) = world.party(client).model, world.party(client).data.all()

        def distilled(w: Any, m: Any = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            gap = m(w, x) - means[y]
            return cross_entropy(m(w, x), y) + 3.0 * gap.square().sum() / gap.numel()

        second = algebra.add(first[client], torch.func.grad(distilled)(first[client]), -0.2)
        for name, reached in engine.states[client].weights.items():
            assert torch.allclose(reached, second[name], atol=1e-6)


def test_the_term_is_a_mean_over_classes_and_examples() -> None:
    model = MLP((2,), 2, hidden=())
    weights = {"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}  # logits are the inputs
    batch = Batch(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([0, 1]))
    table = ClassTable(torch.tensor([[0.0, 0.0], [5.0, 4.0]]), torch.tensor([True, True]))
    method, task = FedHe(alpha=2.0), float(cross_entropy(batch.x, batch.y))
    loss = float(method.distilled(model, weights, batch, table))
    assert loss == pytest.approx(task + 2.0 * (1 + 9 + 0 + 1) / 4)
    part = table.replace(known=torch.tensor([True, False]))
    assert float(method.distilled(model, weights, batch, part)) == pytest.approx(task)


def test_logits_are_means_of_a_pass_after_training_of_the_classes_held() -> None:
    world, method = pictures(norm="batch"), FedHe(**VALUES)
    engine = engine_for(method, world)
    mail = Inbox({SERVER: Down(ClassTable.empty(3, 3, "cpu"))})
    up = engine.play(method.learn, 1, {"c0": mail})["c0"].message
    assert isinstance(up, Up)
    (x, y), weights = world.party("c0").data.all(), engine.states["c0"].weights
    assert up.classes.tolist() == [0, 1]
    for row, c in enumerate([0, 1]):
        said = world.server_model(weights, x)[y == c]
        assert torch.allclose(up.logits[row], said.mean(0), atol=1e-5)


def test_clients_count_alike_whatever_they_hold() -> None:
    world, method = vectors(), FedHe()
    engine = engine_for(method, world)
    ups = {"c0": Up(torch.full((2, 3), 2.0), torch.tensor([0, 2])),
           "c1": Up(torch.full((1, 3), 6.0), torch.tensor([0]))}  # fmt: skip
    engine.play(method.aggregate, 1, {SERVER: Inbox(ups)})
    assert engine.states[SERVER].logits.rows[:, 0].tolist() == [4, 0, 2]


# What travels


def test_up_go_logits_of_the_classes_held_and_down_those_of_all() -> None:
    _, log = played(FedHe(), vectors(mixed=True), rounds=2)
    for round in (1, 2):
        rows = [row for row in log.messages if row.round == round]
        assert sum(row.floats for row in rows if row.direction == "up") == (2 + 3 + 3 + 3) * 3
        assert sum(row.floats for row in rows if row.direction == "down") == 3 * 3


def test_every_clients_model_is_scored_on_every_test_set() -> None:
    world = vectors(mixed=True)
    _, log = played(FedHe(), world, rounds=1)
    scored = {(row.node, row.target) for row in log.metrics if row.name == "accuracy"}
    assert scored == {(one, other) for one in world.clients for other in world.clients}


def test_engines_agree_on_networks_of_two_kinds() -> None:
    world = vectors(mixed=True)
    plain, _ = played(FedHe(**VALUES), world, rounds=4)
    stacked, _ = played(FedHe(**VALUES), world, rounds=4, engine=Batched)
    for client in world.clients:
        for name, reached in plain.states[client].weights.items():
            assert torch.allclose(reached, stacked.states[client].weights[name], atol=1e-4)


# Values


def test_the_papers_preset_is_adam() -> None:
    method = FedHe(**FedHe.presets["paper"])
    assert (method.optimizer, method.batch_size, method.alpha) == (Adam(1e-3), 50, 0.5)
    engine, _ = played(FedHe(**{**FedHe.presets["paper"], "batch_size": 8}), vectors(), rounds=2)
    assert bool(engine.states[SERVER].logits.known.all())


def test_bad_values_are_refused() -> None:
    with pytest.raises(BadValue, match=r"FedHe: alpha = .*: must be at least 0"):
        FedHe(alpha=-0.5)
    with pytest.raises(BadValue, match="FedHe: momentum must be 0 with rule"):
        FedHe(rule="adam", momentum=0.9)
    with pytest.raises(BadValue, match="FedHe: rule = 'adan'"):
        FedHe(rule="adan")  # type: ignore[arg-type]
