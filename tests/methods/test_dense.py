"""DENSE: its terms, the search that keeps its best images, the pool, the one-shot role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedstill.core import Adam, Data, Weights
from fedstill.core.node import SERVER, Inbox
from fedstill.engines.engine import autograd_gradient
from fedstill.engines.play.batched import Batched
from fedstill.methods.dense import Dense
from fedstill.parts.image_generators import Deconvolution, Upsampling
from fedstill.parts.image_search import Found, Search
from fedstill.parts.label_distribution import alike
from fedstill.parts.lessons import Lesson, View
from methods.tuned import BASE, LITTLE, aggregated, same, sent, server_of
from worlds import finished, pictures, played

RNG = torch.Generator().manual_seed(0)
SAID, STUDENT = torch.randn(2, 4, 3, generator=RNG), torch.randn(4, 3, generator=RNG)
LABELS, SHARES = torch.tensor([0, 2, 1, 0]), torch.full((2, 4), 0.5)
IMAGES, NOISE = torch.randn(4, 1, 2, 2, generator=RNG), torch.randn(4, 5, generator=RNG)
VIEW = View(NOISE, IMAGES, LABELS, SAID, STUDENT, SHARES, torch.tensor([2.0, 3.0]), NOISE, None)


def test_without_iterations_it_is_its_base() -> None:
    ours, log = played(Dense(base=BASE, iterations=0), pictures(), 3)
    theirs, their_log = played(BASE, pictures(), 3)
    assert same(ours.states[SERVER].weights, theirs.states[SERVER].weights)
    assert [r.floats for r in log.messages] == [r.floats for r in their_log.messages]


def test_the_generators_loss_is_made_of_three_terms() -> None:
    method = Dense(fidelity_weight=2.0, statistics_weight=0.1, transferability_weight=3.0)
    terms, mean = method.generator_terms(VIEW), SAID.mean(0)
    apart = mean.argmax(1) != STUDENT.argmax(1)
    p, q = mean.softmax(1), STUDENT.softmax(1)  # at temperature 1
    gaps = (p * (p / q).log()).sum(1) * apart
    assert apart.any() and not apart.all()
    assert float(terms["fidelity"]) == pytest.approx(float(cross_entropy(mean, LABELS)))
    assert float(terms["transferability"]) == pytest.approx(-float(gaps.mean()))
    assert float(terms["statistics"]) == 5
    by_hand = 2 * terms["fidelity"] + 0.1 * 5 + 3 * terms["transferability"]
    assert float(method.generator_loss(VIEW)) == pytest.approx(float(by_hand))


def test_without_batch_norms_there_is_no_statistics_term() -> None:
    terms = Dense().generator_terms(VIEW._replace(gaps=None))
    assert set(terms) == {"fidelity", "transferability"}
    for norm, present in (("instance", False), ("none", False), ("batch", True)):
        _, log = played(Dense(**LITTLE), pictures(norm=norm), 1)
        names = {row.name for row in log.metrics if row.step == "aggregate"}
        assert ("statistics" in names) == present
        assert {"fidelity", "transferability", "generator_loss", "distil_loss"} <= names


def test_the_students_loss_has_the_square_of_the_temperature_as_published() -> None:
    def loss(**values: Any) -> torch.Tensor:
        lesson = Lesson(IMAGES, SAID.mean(0))
        return Dense(temperature=20.0, **values).lesson_loss(
            lambda weights, x: STUDENT, {}, (lesson,)  # type: ignore[arg-type]
        )  # fmt: skip

    p, q = (SAID.mean(0) / 20).softmax(1), (STUDENT / 20).softmax(1)
    plain = (p * (p / q).log()).sum(1).mean()
    assert float(loss()) == pytest.approx(400 * float(plain), rel=1e-3)
    assert float(loss(synthesis="stream")) == pytest.approx(float(plain), rel=1e-3)


def test_clients_and_labels_count_alike() -> None:
    shares, frequencies = alike(4, 5)
    assert shares.tolist() == [[0.25] * 5] * 4
    assert frequencies.tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("role", ["fine_tune", "data_free"])
def test_a_client_without_examples_teaches_nothing(role: Any) -> None:
    method, world = Dense(**LITTLE, role=role), pictures((20, 0, 23))
    heard = sent(method, world)
    assert [*heard] == ["c0", "c1", "c2"]
    node = server_of(method, world)
    assert [*finished(method.aggregated(node, Inbox(heard)))] == ["c0", "c2"]
    without = {client: up for client, up in heard.items() if client != "c1"}
    taught = [aggregated(method, world, some).state.weights for some in (heard, without)]
    assert same(*taught)


def test_the_search_keeps_the_images_of_the_lowest_loss() -> None:
    method, world = Dense(**LITTLE), pictures(norm="batch")
    server = server_of(method, world)
    teaching = method.teaching(server, sent(method, world), *alike(3, 3))
    maker = method.generator(server.model)
    (batch,) = teaching.latents(server.rng("x"), 1)
    body = Search(teaching.networks, maker, Adam(0.5, (0.5, 0.999)))  # so fast that it gets worse
    value: Weights = {**maker.init(1), "noise": batch.noise}
    moving = {name: t for name, t in value.items() if "running" not in name}
    carry = Found(value, body.optimizer.start(moving), torch.zeros(8, 1, 8, 8), torch.tensor(9e9))
    given = {
        "student": server.state.weights, "teachers": teaching.stacks, "shares": teaching.shares,
    }  # fmt: skip
    seen = []
    for _ in range(8):
        before = carry
        carry, loss = body(carry, given, batch, autograd_gradient)
        images = maker.train({})(before.value, before.value["noise"], batch.labels)
        seen.append((float(loss), images))
    losses = [loss for loss, _ in seen]
    best = losses.index(min(losses))
    assert 0 < best < 7 or losses[0] != min(losses)
    assert float(carry.lowest) == pytest.approx(min(losses))
    assert torch.allclose(carry.images, seen[best][1], atol=1e-6)
    assert not torch.equal(carry.value["noise"], batch.noise)  # the noise is learnt too


def test_the_pool_grows_by_a_batch_each_turn_up_to_its_size() -> None:
    lengths = []

    class Watched(Dense):
        def passed(self, server, rng, teaching, pool):  # type: ignore[no-untyped-def]
            lengths.append(len(pool))
            return super().passed(server, rng, teaching, pool)

    played(Watched(**{**LITTLE, "iterations": 4}, pool=3), pictures(), 1)
    assert lengths == [8, 16, 24, 24]


def test_each_image_of_the_pool_is_seen_once_a_pass() -> None:
    method, world = Dense(**LITTLE), pictures()
    server = server_of(method, world)
    teaching = method.teaching(server, sent(method, world), *alike(3, 3))
    pool = Data.of(torch.rand(20, 1, 8, 8), torch.zeros(20, dtype=torch.long))
    lessons = method.passed(server, server.rng("x"), teaching, pool)
    assert [len(lesson.images) for (lesson,) in lessons] == [8, 8, 4]
    (lesson,) = lessons[0]
    said = torch.stack(
        [world.server_model(up.weights, lesson.images) for up in sent(method, world).values()]
    )
    assert torch.allclose(lesson.target, said.mean(0), atol=1e-5)


def test_as_published_the_server_remembers_no_generator_and_in_a_stream_it_does() -> None:
    world = pictures()
    assert isinstance(Dense().generator(world.server_model), Upsampling)
    pool, _ = played(Dense(**LITTLE), world, 1)
    stream, _ = played(Dense(**LITTLE, synthesis="stream"), world, 1)
    assert pool.states[SERVER].image_generator is None
    assert stream.states[SERVER].image_generator
    made = Dense(**LITTLE, synthesis="stream").generator(world.server_model)
    assert isinstance(made, Deconvolution) and made.merge == "none"


def test_one_shot_means_one_round_without_averaging() -> None:
    values = {**Dense.presets["one_shot"], **LITTLE, "base": replace(BASE, epochs=20)}
    method, world = Dense(**values), pictures(norm="batch")
    engine, log = played(method, world, 1)
    assert method.role == "data_free"
    assert {(row.direction, row.field) for row in log.messages} == {
        ("up", "weights"), ("up", "examples"),
    }  # fmt: skip
    floats = sum(world.server_model.floats().values())  # statistics included
    assert {row.floats for row in log.messages if row.field == "weights"} == {floats}
    assert not same(engine.states[SERVER].weights, server_of(method, world).state.weights)


@pytest.mark.parametrize("synthesis", ["pool", "stream"])
def test_engines_agree_on_batch_norms(synthesis: Any) -> None:
    method = Dense(**LITTLE, synthesis=synthesis)
    plain, _ = played(method, pictures(norm="batch"), 2)
    stacked, _ = played(method, pictures(norm="batch"), 2, engine=Batched)
    for name, tensor in plain.states[SERVER].weights.items():
        assert torch.allclose(tensor, stacked.states[SERVER].weights[name], atol=1e-3), name


def test_the_servers_model_names_images_of_a_generator_that_knows_no_labels() -> None:
    world, method = pictures(), Dense(**LITTLE, synthesis="stream")
    server = server_of(method, world)
    images, labels = method.imagined(server, 4)  # type: ignore[misc]
    assert torch.equal(labels, method.predict(server, images).argmax(1))
    assert Dense(**LITTLE).imagined(server_of(Dense(**LITTLE), world), 4) is None
