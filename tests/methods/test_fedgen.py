"""FedGen: FedAvg, a generator taught by heads, and clients that learn from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax, softmax

from fedstill.core import Adam, Batch, Inbox, Weights
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedgen import FedGen, Global, Up
from fedstill.models import MLP
from fedstill.parts.guidance import FeatureLatent, Guided, teacher_shares
from fedstill.parts.learning import Training
from fedstill.parts.losses import diversity
from worlds import CLASSES, engine_for, finished, pictures, played, vectors

COMMON: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 7, "momentum": 0.9}
SMALL: dict[str, Any] = {
    **COMMON, "generator_steps": 3, "generator_batch": 8, "hidden": 6, "noise_size": 4,
}  # fmt: skip


def weights_of(engine: Any) -> Weights:
    weights: Weights = engine.states[SERVER].weights
    return weights


@pytest.mark.parametrize("world", [vectors(), pictures(norm="batch")])
def test_without_its_terms_fedgen_is_fedavg(world: Any) -> None:
    # Bit for bit.
    plain, _ = played(FedAvg(**COMMON), world, rounds=3)
    free, _ = played(FedGen(**SMALL, alpha=0, beta=0), world, rounds=3)
    for name, reached in weights_of(plain).items():
        assert torch.equal(reached, weights_of(free)[name])


def test_the_first_round_is_fedavgs_and_the_second_is_not() -> None:
    world = vectors()
    for rounds, same in ((1, True), (2, False)):
        plain, _ = played(FedAvg(**COMMON), world, rounds=rounds)
        other, _ = played(FedGen(**SMALL), world, rounds=rounds)
        pairs = [(t, weights_of(other)[name]) for name, t in weights_of(plain).items()]
        assert all(torch.equal(a, b) for a, b in pairs) == same


def test_without_guided_epochs_nothing_is_added() -> None:
    world = vectors()
    plain, _ = played(FedAvg(**COMMON), world, rounds=3)
    free, _ = played(FedGen(**SMALL, guided_epochs=0), world, rounds=3)
    for name, reached in weights_of(plain).items():
        assert torch.allclose(reached, weights_of(free)[name], atol=1e-6)


# The teachers


def test_shares_sum_to_one_over_clients_and_counts_start_at_one() -> None:
    counts = torch.tensor([[3, 0, 0], [0, 1, 0]])
    shares = teacher_shares(counts)
    expected = torch.tensor([[4 / 5, 1 / 3, 1 / 2], [1 / 5, 2 / 3, 1 / 2]])
    assert torch.allclose(shares, expected)
    assert torch.allclose(shares.sum(0), torch.ones(3))


def test_the_generators_loss_equals_plain_loops() -> None:
    method, model = FedGen(**SMALL, diversity_weight=0.7), vectors().server_model
    maker = method.generator(model)
    weights, rng = maker.init(0), generator(0)
    batch = FeatureLatent(maker.noise(rng, 5), torch.tensor([0, 2, 1, 1, 0]))
    nets = [model.init(seed) for seed in (1, 2)]
    heads = {k: torch.stack([net[f"head.{k}"] for net in nets]) for k in ("weight", "bias")}
    share = teacher_shares(torch.tensor([[3, 0, 5], [1, 1, 1]]))
    features = maker(weights, *batch)
    total = 0.0
    for client, net in enumerate(nets):
        losses = cross_entropy(
            linear(features, net["head.weight"], net["head.bias"]), batch.labels, reduction="none"
        )
        for row, label in enumerate(batch.labels.tolist()):
            total += float(share[client, label] * losses[row]) / 5
    total += 0.7 * float(diversity(batch.noise, features))
    found = method.taught(maker, weights, batch, heads, share)
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_the_generator_learns_what_a_head_wants() -> None:
    method = FedGen(generator_steps=200, generator_lr=0.01, diversity_weight=0.0, hidden=16)
    node = engine_for(method, vectors()).node(SERVER, 1, "aggregate")
    up = Up(node.state.weights, 30, torch.tensor([10, 10, 10]))
    maker = method.generator(node.model)

    def wrong(weights: Weights) -> float:
        labels = torch.arange(CLASSES).repeat(20)
        made = maker(weights, maker.noise(generator(9), len(labels)), labels)
        return float(cross_entropy(node.model.head(up.weights, made), labels))

    before = wrong(node.state.generator)
    finished(FedGen.aggregate.act(method, node, Inbox({"c0": up})))
    assert wrong(node.state.generator) < 0.2 * before


def test_labels_are_those_that_participants_hold() -> None:
    method = FedGen(**SMALL)
    node = engine_for(method, vectors()).node(SERVER, 1, "aggregate")
    lessons = method.lessons(node, torch.tensor([0, 4, 1]))
    assert len(lessons) == 3
    labels = torch.cat([each.labels for each in lessons])
    assert set(labels.tolist()) == {1, 2}


# The clients


def test_the_local_loss_is_the_sum_of_its_three_terms() -> None:
    method = FedGen(**{**SMALL, "batch_size": 8}, free_batch=6, alpha=3.0, beta=5.0)
    model = vectors().server_model
    maker, rng = method.generator(model), generator(0)
    weights, made_by = model.init(0), maker.init(1)
    x, y = torch.randn(4, 4, generator=rng), torch.tensor([0, 1, 2, 0])
    noise = maker.noise(rng, 4)
    free = FeatureLatent(maker.noise(rng, 6), torch.tensor([2, 2, 1, 0, 1, 0]))
    logits = model(weights, x)
    target = softmax(model.head(weights, maker(made_by, noise, y)), 1)
    told = cross_entropy(model.head(weights, maker(made_by, *free)), free.labels)
    apart = kl_div(log_softmax(logits, 1), target, reduction="none").sum() / (4 * CLASSES)
    expected = cross_entropy(logits, y) + 0.5 * (3 * 6 / 8 * told + 5 * apart)
    batch = Guided(Batch(x, y), noise, free, torch.tensor(0.5))
    assert float(method.guided(model, weights, batch, made_by)) == pytest.approx(float(expected))


def test_the_target_of_the_divergence_stands_still() -> None:
    # A head that sees no real feature gets its slope from the other terms alone.
    method, model = FedGen(**SMALL, alpha=0.0, beta=1.0), vectors().server_model
    maker, rng = method.generator(model), generator(0)
    weights, made_by = model.init(0), maker.init(1)
    real = Batch(torch.randn(3, 4, generator=rng), torch.tensor([0, 1, 2]))
    noise = maker.noise(rng, 3)
    free = FeatureLatent(maker.noise(rng, 2), torch.tensor([0, 1]))
    batch = Guided(real, noise, free, torch.tensor(1.0))
    target = log_softmax(model.head(weights, maker(made_by, batch.noise, real.y)), 1)

    def by_hand(w: Weights) -> Tensor:
        logits = model(w, real.x)
        apart = (target.exp() * (target - log_softmax(logits, 1))).mean()
        return cross_entropy(logits, real.y) + apart

    found = torch.func.grad(lambda w: method.guided(model, w, batch, made_by))(weights)
    expected = torch.func.grad(by_hand)(weights)
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-6)


def test_terms_decay_by_rounds_and_end_after_the_guided_epochs() -> None:
    method = FedGen(**{**SMALL, "epochs": 3}, guided_epochs=1, decay=0.5)
    client = engine_for(method, vectors()).node("c0", 4, "update")  # 20 examples: 3 batches
    real = client.data.batches(7, client.rng("order"), epochs=3)
    drawn = list(method.draws(client, Training(real, None)).batches)
    assert [float(each.strength) for each in drawn] == [0.5**3] * 3 + [0.0] * 6
    assert [len(each.noise) for each in drawn[:3]] == [7, 7, 6]
    assert not torch.equal(drawn[0].noise, drawn[1].noise)


# Messages


def test_the_rate_of_the_generator_decays_by_rounds_too() -> None:
    taught = []

    class Spy(InProcess):
        def _run(self, loop: Any, node: Any) -> Any:
            if node.id == SERVER:
                taught.append(loop.body.optimizer)
            return super()._run(loop, node)

    method = FedGen(**SMALL, decay=0.5, generator_lr=0.01, generator_decay=0.2)
    played(method, vectors(), rounds=3, engine=Spy)
    assert taught == [Adam(rate, weight_decay=0.2) for rate in (0.01, 0.005, 0.0025)]


def test_the_generator_goes_down_and_counts_come_up() -> None:
    world = vectors()
    _, log = played(FedGen(**SMALL), world, rounds=1)
    model = sum(world.server_model.floats().values())
    made = (4 + CLASSES) * 6 + 6 + 2 * 6 + 2 * 6 + 6 * 8 + 8  # 8 features
    sent = {(row.step, row.field): row.floats for row in log.messages}
    assert sent["broadcast", "weights"] == model and sent["broadcast", "generator"] == made
    assert sent["update", "weights"] == model and sent["update", "counts"] == CLASSES


def test_counts_are_the_clients_own() -> None:
    ups: dict[str, Up] = {}

    class Ear:
        def carry(self, message: Any, sender: str, round: int, step: str) -> Any:
            if isinstance(message, Up):
                ups[sender] = message
            return message

    world = vectors()
    played(FedGen(**SMALL), world, rounds=1, meddling=[Ear()])
    for name, up in ups.items():
        assert torch.equal(up.counts, world.party(name).data.counts(CLASSES))


# The bottleneck


def test_a_bottleneck_sets_the_width_of_features_and_of_the_generator() -> None:
    method, world = FedGen(**SMALL, bottleneck=5), pictures()
    engine, log = played(method, world, rounds=3)
    state = engine.states[SERVER]
    assert isinstance(state, Global)
    assert state.weights["head.weight"].shape == (CLASSES, 5)
    assert state.weights["projection0.weight"].shape == (5, 4 * 2 * 2)
    assert state.generator["out.weight"].shape == (5, 6)
    losses = [row.value for row in log.metrics if (row.step, row.name) == ("evaluate", "loss")]
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"alpha": -1.0}, "alpha = -1.0: must be at least 0"),
        ({"decay": 1.5}, r"decay = 1.5: must be in \[0, 1\]"),
        ({"generator_batch": 1}, "generator_batch = 1: must be at least 2"),
        ({"bottleneck": -1}, "bottleneck = -1: must be at least 0"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValue, match=said):
        FedGen(**values)


def test_what_fedavg_refuses_of_a_network_is_refused_here_too() -> None:
    vectors = MLP((5,), 3)
    expected = FedAvg(views="crop_flip").unfit(vectors, {})
    assert len(expected) == 1 and "moves images" in expected[0]
    assert FedGen(views="crop_flip").unfit(vectors, {}) == expected
    assert FedGen().unfit(vectors, {}) == []
