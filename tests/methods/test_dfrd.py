"""DFRD: equals its base without iterations; its losses, averages and roles by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Never

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    State,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.errors import BadMessage, BadValue
from fedstill.core.node import SERVER
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.sampling import Scripted
from fedstill.methods import scaffold
from fedstill.methods.centralised import Centralised
from fedstill.methods.dense import Dense
from fedstill.methods.dfrd import DFRD
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.feddm import FedDM
from fedstill.methods.feddropout import FedDropout
from fedstill.methods.fedftg import FedFTG
from fedstill.methods.fedgen import FedGen
from fedstill.methods.fednova import FedNova
from fedstill.methods.fedprox import FedProx
from fedstill.methods.fedrolex import FedRolex
from fedstill.methods.held_base import Counted, by_label_counts
from fedstill.methods.heterofl import HeteroFL
from fedstill.methods.local import Local
from fedstill.methods.moon import Moon
from fedstill.methods.scaffold import Scaffold
from fedstill.methods.vhl import VHL
from fedstill.models import ConvNet
from fedstill.parts.lessons import View
from methods.tuned import BASE, FAST, LITTLE, same, sent, server_of
from worlds import World, experiment, pictures, played, vectors

BASES: list[Method] = [
    FedAvg(**FAST),
    FedAvg(**FAST, weighting="uniform", momentum=0.5, epochs=2),
    FedProx(**FAST, mu=0.5),
    FedNova(**FAST),
    Scaffold(**FAST),
    Moon(**FAST, projection=4),
    FedGen(**FAST, generator_steps=2, generator_batch=4, free_batch=4, hidden=4),
    HeteroFL(**FAST, rho=2),
    FedDropout(**FAST, rho=2),
    FedRolex(**FAST, rho=2),
    FedAvg(**FAST, views="crop_flip"),
]


# A base method below it


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_without_iterations_it_is_its_base_bit_for_bit(base: Method) -> None:
    away = Scripted({1: ["c1"], 2: ["c0"]})
    ours, log = played(DFRD(base=base, iterations=0), pictures(), 3, sampling=away)
    theirs, their_log = played(base, pictures(), 3, sampling=away)
    assert same(ours.states[SERVER].weights, theirs.states[SERVER].weights)
    for client in ("c0", "c1", "c2"):
        own, their = ours.states[client], theirs.states[client]
        assert (own and own.tensors().keys()) == (their and their.tensors().keys())
    scores = [row.value for row in log.metrics if row.name == "accuracy"]
    assert scores == [row.value for row in their_log.metrics if row.name == "accuracy"]


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_every_base_can_be_fine_tuned(base: Method) -> None:
    engine, _ = played(DFRD(**{**LITTLE, "base": base}), pictures(), 2)
    plain, _ = played(base, pictures(), 2)
    weights = engine.states[SERVER].weights
    assert not same(weights, plain.states[SERVER].weights)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (Local(), "base = Local: its server keeps no model that could be taught"),
        (FedDM(), "base = FedDM: its clients send no weights"),
        (Centralised(), "base = Centralised: its rounds are not broadcast, update, aggregate"),
        (VHL(), "base = VHL: its rounds are not broadcast, update, aggregate"),
        (DFRD(), "base = DFRD: it fine-tunes another method itself"),
        ("fedavg", "base = 'fedavg': must be Method"),
    ],
)
def test_a_base_that_cannot_be_fine_tuned_is_refused(base: Any, why: str) -> None:
    with pytest.raises(BadValue, match=why):
        DFRD(base=base)


class Start(Message):
    """Where all begin."""

    weights: Weights


class Reached(Message):
    """Where one came to, and how many examples it used."""

    weights: Weights
    examples: int


class Common(State):
    """What the server remembers."""

    weights: Weights


@dataclass(frozen=True)
class Plain(Method):
    """Averaging that shares nothing with FedAvg: every client counts alike."""

    def each_round(self) -> Any:
        return [self.broadcast, self.update, self.aggregate]

    def server_state(self, server: Node[Any]) -> Common:
        return Common(server.model.init(server.draw("weights", shared=True)))

    @at_server
    def broadcast(self, server: Node[Common], inbox: Inbox[Never]) -> Start:
        """Send the weights."""
        return Start(server.state.weights)

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Start]) -> Reached:
        """Train."""
        batches = client.data.batches(8, client.rng("order"))
        start = inbox.only().weights
        weights = await minimize(self.objective, client.model, start, batches, SGD(0.1))
        return Reached(weights, len(client.data))

    @at_server
    def aggregate(self, server: Node[Common], inbox: Inbox[Reached]) -> None:
        """Take the mean."""
        server.state = Common(algebra.mean([up.weights for up in inbox.values()]))

    def objective(self, model: Model, weights: Weights, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(weights, batch.x), batch.y)


class Open(Plain):
    """The same, saying what a fine-tuner asks."""

    def network_for(self, server: Node[Any], who: str) -> Model:
        return server.model

    def plan(self, client: Node[Any]) -> Any:
        return client.data.batches(8, client.rng("order"))

    def used(self, up: Reached) -> int:
        return up.examples


def test_a_base_that_is_not_fedavgs_kin_says_three_things_and_can_be_fine_tuned() -> None:
    with pytest.raises(BadValue, match="base = Plain: it must say network_for, plan and used"):
        DFRD(base=Plain())
    ours, _ = played(DFRD(**{**LITTLE, "base": Open(), "iterations": 0}), pictures(), 2)
    theirs, _ = played(Open(), pictures(), 2)
    assert same(ours.states[SERVER].weights, theirs.states[SERVER].weights)
    heard = sent(DFRD(**{**LITTLE, "base": Open()}), pictures())
    assert [int(up.label_counts.sum()) for up in heard.values()] == [20, 27, 23]


def test_the_server_holds_the_memory_of_its_base_and_a_client_the_message() -> None:
    method = DFRD(**{**LITTLE, "base": Scaffold(**FAST)})
    engine, _ = played(method, pictures(), 1)
    state = engine.states[SERVER]
    assert method.holds == [scaffold.Up, scaffold.Global]
    assert type(state.base) is scaffold.Global and state.weights is state.base.weights
    assert [type(up.base) for up in sent(method, pictures()).values()] == [scaffold.Up] * 3


def test_alone_a_client_of_a_base_with_a_memory_cannot_be_played() -> None:
    with pytest.raises(BadValue, match="base = Scaffold: its clients remember more than a model"):
        DFRD(base=Scaffold(), role="data_free")


def test_only_label_counts_travel_besides_what_the_base_sends() -> None:
    _, log = played(DFRD(**LITTLE), pictures(), 2)
    _, base_log = played(BASE, pictures(), 2)

    def rows(log: Any) -> list[Any]:
        return [(r.round, r.step, r.sender, r.field, r.floats, r.hearers) for r in log.messages]

    more = sorted(set(rows(log)) - set(rows(base_log)))
    assert set(rows(base_log)) <= set(rows(log))
    assert more == [
        (round, "update", f"c{i}", "label_counts", 3, 1) for round in (1, 2) for i in range(3)
    ]


def test_counts_are_of_the_examples_used_in_the_round() -> None:
    world = pictures()
    base = FedAvg(**FAST, epochs=3)
    for client, up in sent(DFRD(**{**LITTLE, "base": base}), world).items():
        held = world.party(client).data.counts(3)
        assert up.label_counts.tolist() == (3 * held).tolist()
        assert int(up.label_counts.sum()) == 3 * up.base.examples


class Strange:
    """A channel on which one client's message becomes another in round two."""

    def __init__(self, client: str, **changes: Any):
        self.client, self.changes = client, changes

    def carry(self, message: Any, sender: str, round: int, step: str) -> Any:
        strange = sender == self.client and round == 2
        return changed(message, **self.changes) if strange else message


def changed(message: Any, **changes: Any) -> Any:
    """A message, or the one that it holds, with other values."""
    if not isinstance(message, Counted):
        return message.replace(**changes)
    own = {name: value for name, value in changes.items() if name == "label_counts"}
    rest = {name: value for name, value in changes.items() if name not in own}
    return message.replace(base=message.base.replace(**rest), **own)


def gone(_: Any, step: str, round: int, node: str) -> str | None:
    return "away" if (step, round, node) == ("update", 2, "c1") else None


PART = ConvNet((1, 8, 8), 3, depth=2, width=4).narrowed(0.25).init(0)
MISCOUNTED = [
    ({"label_counts": torch.tensor([20, 7])}, r"c1 counts [2] labels, there are 3 classes"),
    ({"label_counts": torch.tensor([20, 11, -4])}, "c1 counts [20, 11, -4]: counts are whole"),
    ({"label_counts": torch.tensor([20, 6.5, 0.5])}, "c1 counts [20.0, 6.5, 0.5]: counts are"),
    ({"label_counts": torch.tensor([20, 10, 10])}, "c1 counts 40 labels, but used 27 examples"),
    ({"label_counts": torch.zeros(3)}, "c1 counts 0 labels, but used 27 examples"),
]
MISFIT = ({"weights": PART}, "c1 sent another network than it was given: conv0.weight is (1, 1, 3")


@cache
def without_c1(method: Method, engine: Any) -> Weights:
    """What the server has after two rounds of which `c1` misses the second."""
    ended, _ = played(method, pictures(), 2, engine, absences=gone)
    return ended.states[SERVER].weights


@pytest.mark.parametrize(("changes", "why"), [MISFIT, *MISCOUNTED])
@pytest.mark.parametrize("base", [BASE, HeteroFL(**FAST, rho=0), FedRolex(**FAST, rho=2)])
def test_a_client_that_sends_what_cannot_be_is_left_out_by_name(
    base: Method, changes: dict[str, Any], why: str
) -> None:
    method, options = DFRD(**{**LITTLE, "base": base}), {"bad_messages": "leave_out"}
    for engine in (InProcess, Batched):
        found, log = played(
            method, pictures(), 2, engine, meddling=[Strange("c1", **changes)], **options
        )
        (note,) = log.notes
        assert (note.round, note.kind, note.node) == (2, "left out", "c1")
        assert note.text.startswith(why) and "(DFRD.update, round 2)" in note.text
        assert same(found.states[SERVER].weights, without_c1(method, engine))


@pytest.mark.parametrize("kind", [FedFTG, Dense])
def test_the_other_fine_tuners_go_on_without_such_a_client_too(kind: Any) -> None:
    method = kind(**LITTLE)
    found, log = played(
        method, pictures(), 2, meddling=[Strange("c1", **MISFIT[0])], bad_messages="leave_out"
    )
    assert [note.node for note in log.notes] == ["c1"]
    without, _ = played(method, pictures(), 2, absences=gone)
    assert same(found.states[SERVER].weights, without.states[SERVER].weights)


def test_who_is_rejected_by_the_base_does_not_teach() -> None:
    method = DFRD(**{**LITTLE, "base": HeteroFL(**FAST, rho=0, masked=True)})
    found, log = played(
        method, pictures(), 2, meddling=[Strange("c1", held=torch.ones(2))],
        bad_messages="leave_out",
    )  # fmt: skip
    (note,) = log.notes
    assert "sent held of shape [2]; expected [class = 3]" in note.text
    without, _ = played(method, pictures(), 2, absences=gone)
    assert same(found.states[SERVER].weights, without.states[SERVER].weights)


@pytest.mark.parametrize("role", ["fine_tune", "data_free"])
def test_when_nobody_sends_what_can_be_the_server_stays_as_it_is(role: Any) -> None:
    method, world = DFRD(**LITTLE, role=role), pictures()
    strange = [Strange(client, weights=PART) for client in world.clients]
    found, log = played(method, world, 2, meddling=strange, bad_messages="leave_out")
    assert [note.kind for note in log.notes] == ["left out"] * 3 + ["skipped"]
    before, _ = played(method, world, 1)
    assert same(found.states[SERVER].weights, before.states[SERVER].weights)


def test_a_run_that_asks_for_it_stops_at_such_a_message() -> None:
    changes, why = MISCOUNTED[3]
    with pytest.raises(BadMessage, match=why):
        played(DFRD(**LITTLE), pictures(), 2, meddling=[Strange("c1", **changes)])


@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_every_base_says_how_many_examples_its_clients_use(base: Any) -> None:
    heard = sent(DFRD(**{**LITTLE, "base": base, "iterations": 0}), pictures())
    for up in heard.values():
        assert int(up.label_counts.sum()) == base.used(up.base)


def test_networks_that_the_base_cannot_narrow_are_refused_before_the_first_round() -> None:
    with pytest.raises(
        BadValue, match="DFRD: c1: convnet: rate = 1e-09 leaves block0, block1 with"
    ):
        experiment(DFRD(base=FedRolex(budgets=(1.0, 1e-9, 1.0))), pictures())
    with pytest.raises(BadValue, match="DFRD: c2: convnet: norm = 'group' has four groups, and 1"):
        experiment(DFRD(base=HeteroFL(rho=2)), pictures(norm="group"))


def test_parts_of_the_base_are_scored_beside_the_server() -> None:
    method = DFRD(**{**LITTLE, "base": FedRolex(**FAST, rho=2, score_parts=True)})
    _, log = played(method, pictures(), 1)
    scored = [(r.node, r.target) for r in log.metrics if r.name == "accuracy"]
    assert [s for s in scored if s[0] != SERVER] == [("c0", "c0"), ("c1", "c1"), ("c2", "c2")]
    assert ("server", "c0") in scored


def test_images_are_needed() -> None:
    with pytest.raises(BadValue, match="its generator makes images"):
        played(DFRD(**LITTLE), vectors(), 1)


# Losses


def view(method: DFRD, world: World) -> View:
    """What one step of the generator would see."""
    heard = sent(method, world)
    server = server_of(method, world)
    teaching = method.teaching(server, heard, *by_label_counts(heard))
    maker = method.generator(server.model)
    (batch,) = teaching.latents(server.rng("x"), 1)
    generator, student = server.state.image_generator, server.state.weights
    return teaching.networks.view(
        maker, generator, batch, student, teaching.stacks, teaching.shares
    )


def test_the_ensemble_weighs_logits_by_the_label_counts_of_each_image() -> None:
    method, world = DFRD(**LITTLE), pictures()
    heard, seen = sent(method, world), view(method, world)
    total = sum(up.label_counts for up in heard.values()).tolist()
    for image, label in enumerate(seen.labels.tolist()):
        by_hand = sum(
            up.label_counts[label] / total[label]
            * world.server_model(up.base.weights, seen.images[image : image + 1])[0]
            for up in heard.values()
        )  # fmt: skip
        assert torch.allclose(seen.ensemble[image], by_hand, atol=1e-5)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("selection", ["wrong_student", "disagreement", "all"])
def test_the_generators_loss_is_equation_five(selection: Any, detached: bool) -> None:
    method = DFRD(
        **LITTLE, selection=selection, detached=detached, transferability_weight=3.0,
        diversity_weight=0.5,
    )  # fmt: skip
    seen = view(method, pictures())
    terms = method.generator_terms(seen)
    assert float(terms["fidelity"]) == pytest.approx(
        float(cross_entropy(seen.ensemble, seen.labels)), rel=1e-6
    )
    by_hand = terms["fidelity"] + 3 * terms["transferability"] + 0.5 * terms["diversity"]
    assert torch.equal(method.generator_loss(seen), by_hand)
    assert terms["transferability"] <= 0 < terms["diversity"] <= 1


def test_the_students_loss_is_both_divergences_at_the_temperature() -> None:
    method, world = DFRD(**LITTLE, average_weight=0.25, temperature=2.0), pictures()
    heard, server = sent(method, world), server_of(method, world)
    teaching = method.teaching(server, heard, *by_label_counts(heard))
    draws = teaching.latents(server.rng("x"), 2)
    lessons = [teaching.lesson(server.state.image_generator, draw) for draw in draws]
    weights = server.state.weights
    by_hand = [
        kl_div(
            (server.model(weights, lesson.images) / 2).log_softmax(1),
            (lesson.target / 2).softmax(1), reduction="batchmean",
        )
        for lesson in lessons
    ]  # fmt: skip
    found = method.lesson_loss(server.model, weights, lessons)
    assert torch.allclose(found, by_hand[0] + 0.25 * by_hand[1], atol=1e-6)


def test_images_for_the_student_come_from_a_generator_at_rest() -> None:
    method, world = DFRD(**LITTLE), pictures()
    server = server_of(method, world)
    heard = sent(method, world)
    teaching = method.teaching(server, heard, *by_label_counts(heard))
    maker = method.generator(server.model)
    (draw,) = teaching.latents(server.rng("x"), 1)
    lesson = teaching.lesson(server.state.image_generator, draw)
    still = maker.evaluating(server.state.image_generator, draw.noise, draw.labels)
    assert torch.equal(lesson.images, still)
    assert not lesson.images.requires_grad


def test_labels_are_drawn_by_the_counts_and_draws_may_be_reused() -> None:
    world = pictures()
    for reuse in (False, True):
        method = DFRD(**LITTLE, reuse_draws=reuse)
        server, heard = server_of(method, world), sent(method, world)
        shares, _ = by_label_counts(heard)
        teaching = method.teaching(server, heard, shares, torch.tensor([0.0, 1.0, 0.0]))
        draws = teaching.latents(server.rng("x"), 3)
        assert all(draw.labels.tolist() == [1] * 8 for draw in draws)
        assert torch.equal(draws[0].noise, draws[1].noise) == reuse


# The average


def test_the_average_follows_the_generator_in_closed_form() -> None:
    keep, kept = 0.7, []
    world, method = pictures(), DFRD(**LITTLE, average_decay=0.7)
    begin = server_of(method, world).state
    assert begin.average_generator is None
    for rounds in (1, 2, 3):
        engine, _ = played(method, world, rounds)
        kept.append(engine.states[SERVER].image_generator)
    average = engine.states[SERVER].average_generator
    for name, first in begin.image_generator.items():
        by_hand = keep**3 * first
        for round, generator in enumerate(kept, start=1):
            by_hand = by_hand + (1 - keep) * keep ** (3 - round) * generator[name]
        assert torch.allclose(average[name], by_hand, atol=1e-6)


def test_without_its_weight_the_average_does_not_teach() -> None:
    some = [
        played(DFRD(**LITTLE, average_weight=weight, average_decay=decay), pictures(), 2)[0]
        for weight, decay in ((0.0, 0.1), (0.0, 0.9), (1.0, 0.1), (1.0, 0.9))
    ]
    weights = [engine.states[SERVER].weights for engine in some]
    assert same(weights[0], weights[1])
    assert not same(weights[2], weights[3])


# Without averaging


def test_as_data_free_clients_train_on_alone_and_nothing_is_sent_down() -> None:
    world = pictures()
    method = DFRD(**LITTLE, role="data_free")
    engine, log = played(method, world, 3)
    assert {row.direction for row in log.messages} == {"up"}
    assert [step.name for step in method.each_round()] == ["update", "aggregate"]
    for client in world.clients:
        one = World({client: world.parties[client]}, world.server_model)
        alone, _ = played(BASE, one, 3)
        assert same(engine.states[client].weights, alone.states[SERVER].weights)


def test_as_data_free_without_iterations_the_server_stays_as_it_began() -> None:
    world = pictures()
    method = DFRD(base=BASE, iterations=0, role="data_free")
    engine, _ = played(method, world, 2)
    assert same(engine.states[SERVER].weights, server_of(method, world).state.weights)


def test_as_data_free_the_student_learns_from_the_clients() -> None:
    world = pictures()
    big = {**LITTLE, "iterations": 10, "generator_batch": 16, "generator_width": 32}
    method = DFRD(**big, role="data_free", distil_lr=0.1, temperature=2.0)
    _, log = played(method, world, 8)
    scores = [row.value for row in log.metrics if row.name == "accuracy" and row.round == 8]
    assert sum(scores) / len(scores) > 1 / 3 + 0.2


# Numbers and engines


def test_a_curve_of_every_term_can_be_drawn() -> None:
    _, log = played(DFRD(**LITTLE), pictures(), 2)
    names = {"generator_loss", "distil_loss", "fidelity", "transferability", "diversity", "loss"}
    for round in (1, 2):
        found = {r.name for r in log.metrics if (r.round, r.step) == (round, "aggregate")}
        assert found == names


@pytest.mark.parametrize("role", ["fine_tune", "data_free"])
def test_engines_agree_with_batch_norms_in_every_network(role: Any) -> None:
    method = DFRD(**LITTLE, role=role)
    plain, _ = played(method, pictures(norm="batch"), 2)
    stacked, _ = played(method, pictures(norm="batch"), 2, engine=Batched)

    def close(left: Weights, right: Weights) -> bool:
        return all(torch.allclose(left[name], right[name], atol=1e-3) for name in left)

    assert close(plain.states[SERVER].weights, stacked.states[SERVER].weights)


def test_the_server_can_show_images_of_each_class() -> None:
    method, world = DFRD(**LITTLE), pictures()
    server = server_of(method, world)
    images, labels = method.imagined(server, 2)  # type: ignore[misc]
    assert images.shape == (6, 1, 8, 8) and labels.tolist() == [0, 0, 1, 1, 2, 2]
    again, _ = method.imagined(server, 2)  # type: ignore[misc]
    assert torch.equal(images, again)


def test_images_of_the_average_generator_are_shown_beside_from_the_same_noise() -> None:
    method, world = DFRD(**LITTLE), pictures()
    server = server_of(method, world)
    state = server.state.replace(average_generator=method.generator(server.model).init(7))
    server = server.remembering(state)
    images, labels = method.pictures(server)["average"]
    assert images.shape == (30, 1, 8, 8) and labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    own, _ = method.imagined(server, 10)  # type: ignore[misc]
    assert not torch.allclose(images, own)
    alike = server.remembering(state.replace(average_generator=state.image_generator))
    assert torch.equal(method.pictures(alike)["average"][0], own)
    assert DFRD(**LITTLE, average_weight=0.0).pictures(server) == {}
    assert method.pictures(server.remembering(None)) == {}


def test_values_out_of_range_are_refused() -> None:
    for wrong in (
        {"iterations": -1}, {"generator_batch": 1}, {"average_decay": 1.5}, {"temperature": 0.0},
        {"merge": "mix"}, {"selection": "some"}, {"role": "teacher"},
    ):  # fmt: skip
        with pytest.raises(BadValue, match=next(iter(wrong))):
            replace(DFRD(), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["fine_tune", "data_free"])
def test_what_clients_of_fedavg_trained_can_be_scored_beside_the_fine_tuned_model(
    role: Any,
) -> None:
    world = pictures()
    method = DFRD(**{**LITTLE, "base": FedAvg(**FAST, score_own=True)}, role=role)
    engine, log = played(method, world, rounds=2)
    rows = [row for row in log.metrics if row.step == "evaluate" and row.name == "accuracy"]
    last = {row.node: row.value for row in rows if row.round == 2 and row.node == row.target}
    assert set(last) == set(world.clients)
    x, y = world.party("c1").test.all()
    said = world.server_model.evaluating(engine.states["c1"].weights, x).argmax(1)
    assert last["c1"] == pytest.approx(float((said == y).float().mean()))


def test_without_feedback_clients_go_on_from_the_base_and_the_taught_model_is_scored() -> None:
    world = pictures()
    values = {**LITTLE, "base": FedAvg(**FAST), "distil_lr": 0.5, "temperature": 1.0}
    apart, log = played(DFRD(**values, feedback=False), world, rounds=2)
    base, _ = played(FedAvg(**FAST), world, rounds=2)
    state = apart.states[SERVER]
    assert same(state.base.weights, base.states[SERVER].weights)
    assert state.shown is not None and not same(state.shown, state.base.weights)
    scored = [
        row.value for row in log.metrics
        if (row.round, row.step, row.name, row.target) == (2, "evaluate", "loss", "c0")
    ]  # fmt: skip
    x, y = world.party("c0").test.all()
    loss = cross_entropy(world.server_model.evaluating(state.shown, x), y)
    assert scored[0] == pytest.approx(float(loss), rel=1e-4)
    with pytest.raises(BadValue, match="feedback = false: as data_free nothing is sent"):
        DFRD(feedback=False, role="data_free")


def test_label_embeddings_that_are_too_long_cost_what_they_are_too_long() -> None:
    # Four numbers each: √4 · γ = 1 with γ = 1/2. Lengths are 5 and 0.5: (4 + 0) / 2.
    embedded = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    view = View(
        torch.randn(2, 4), torch.randn(2, 1, 2, 2), torch.tensor([0, 1]), torch.randn(1, 2, 3),
        torch.randn(2, 3), torch.ones(1, 2), None, torch.randn(2, 4), embedded,
    )  # fmt: skip
    method = DFRD(latent=4, embedding_weight=3.0, embedding_reach=0.5)
    terms = method.generator_terms(view)
    assert float(terms["embedding"]) == 2
    plain = DFRD(latent=4)
    assert "embedding" not in plain.generator_terms(view)
    extra = method.generator_loss(view) - plain.generator_loss(view)
    assert float(extra) == pytest.approx(3 * 2, rel=1e-5)


@pytest.mark.parametrize(("merge", "learnt"), [("mul", True), ("cat", True), ("ncat", False)])
def test_what_stands_for_labels_is_seen_where_it_is_learnt(merge: Any, learnt: bool) -> None:
    maker = DFRD(merge=merge, latent=4, generator_width=4).generator(pictures().server_model)
    weights, labels = maker.init(0), torch.tensor([2, 0])
    found = maker.embedded(weights, labels)
    assert (found is not None) == learnt
    if found is not None:
        assert torch.equal(found, weights["label.weight"][[2, 0]])


def test_labels_are_counted_as_used_or_as_held_or_not_at_all() -> None:
    world, heard = pictures(), {}

    def listen(message: Any, sender: str, round: int) -> None:
        if sender != SERVER:
            heard[sender] = message.label_counts.tolist()

    base = FedAvg(**{**FAST, "epochs": 3})
    for counts, times in (("used", 3), ("held", 1)):
        played(DFRD(**{**LITTLE, "base": base, "counts": counts}), world, 1, observers=[listen])
        assert heard["c2"] == [7 * times, 5 * times, 11 * times]
    two = {name: Counted(Message(), torch.tensor(n)) for name, n in (("a", [3, 1]), ("b", [1, 0]))}
    shares, frequencies = DFRD(counts="held").weighing(two, 2)
    assert shares.tolist() == [[0.75, 1.0], [0.25, 0.0]]
    assert frequencies.tolist() == pytest.approx([0.8, 0.2])
    shares, frequencies = DFRD(counts="alike").weighing(two, 2)
    assert shares.tolist() == [[0.5, 0.5]] * 2 and frequencies.tolist() == [0.5, 0.5]


def test_optimisers_may_begin_anew_in_every_turn() -> None:
    values = {**LITTLE, "iterations": 2, "generator_lr": 0.05}
    kept, anew = (
        played(DFRD(**values, fresh_optimizers=fresh), pictures(), 1)[0].states[SERVER]
        for fresh in (False, True)
    )
    assert not same(kept.image_generator, anew.image_generator)
    single = {**values, "iterations": 1}
    one, same_one = (
        played(DFRD(**single, fresh_optimizers=fresh), pictures(), 1)[0].states[SERVER]
        for fresh in (False, True)
    )
    assert same(one.image_generator, same_one.image_generator)


def test_the_average_generator_teaches_from_the_second_round_on() -> None:
    # In the first it is what the generator was before any training.
    values = {**LITTLE, "distil_lr": 0.5, "temperature": 1.0}
    for rounds, equal in ((1, True), (2, False)):
        with_it, without = (
            played(DFRD(**values, average_weight=weight), pictures(), rounds)[0].states[SERVER]
            for weight in (0.5, 0.0)
        )
        assert same(with_it.weights, without.weights) == equal


def test_a_generator_that_was_never_trained_does_not_teach() -> None:
    values = {**LITTLE, "distil_lr": 0.5, "temperature": 1.0}

    def all_away(method: Any, step: str, round: int, node: str) -> str | None:
        return "away" if step == "update" and round == 1 else None

    for rounds, equal in ((2, True), (3, False)):
        with_it, without = (
            played(DFRD(**values, average_weight=weight), pictures(), rounds, absences=all_away)[0]
            .states[SERVER]
            for weight in (0.5, 0.0)
        )  # fmt: skip
        assert same(with_it.weights, without.weights) == equal
    method = DFRD(**values)
    engine, _ = played(method, pictures(), 1, absences=all_away)
    server = engine.node(SERVER, 1, "pictures")
    assert method.pictures(server) == {}


def test_the_student_has_no_momentum_unless_asked_for() -> None:
    assert DFRD().student_optimizer(1) == SGD(0.01, 0.0, 1e-4)
    assert DFRD(distil_momentum=0.9).student_optimizer(1) == SGD(0.01, 0.9, 1e-4)
    assert DFRD().generator_optimizer(1) == Adam(2e-4, (0.5, 0.999))
