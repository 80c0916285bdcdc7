"""FedDM: what clients send, the two balls, and the controls that a paper needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Data, Inbox, Node, Weights, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.federation.population import Party
from fedstill.methods import feddm
from fedstill.methods.centralised import Centralised
from fedstill.methods.feddm import Down, FedDM, Global, Up
from fedstill.parts import balls
from fedstill.testing import check
from worlds import CLASSES, World, as_bytes, engine_for, examples, pictures, played

PLAIN: dict[str, Any] = {
    "augmentation": "none", "server_augmentation": "none", "server_momentum": 0.0,
    "server_weight_decay": 0.0, "server_epochs": 1, "server_batch": 1000, "real_batch": 8,
}  # fmt: skip


def start_of(method: FedDM, world: World) -> Weights:
    weights: Weights = engine_for(method, world).node(SERVER, 0, "look").state.weights
    return weights


def sent(method: FedDM, world: World, client: str = "c1", round: int = 1) -> Up:
    engine = engine_for(method, world)
    mail = Inbox({SERVER: Down(start_of(method, world))})
    message = engine.play(method.synthesize, round, {client: mail})[client].message
    assert isinstance(message, Up)
    return message


def trained(method: FedDM, world: World, *ups: Up) -> Weights:
    """What the server makes of some sets, from the weights it starts with."""
    engine = engine_for(method, world)
    mail = Inbox({f"c{i}": up for i, up in enumerate(ups)})
    engine.play(method.train, 1, {SERVER: mail})
    state = engine.states[SERVER]
    assert isinstance(state, Global)
    return state.weights


def distance(left: Weights, right: Weights) -> float:
    gap = algebra.sub(algebra.parameters(left), algebra.parameters(right))
    return float(torch.cat([tensor.double().flatten() for tensor in gap.values()]).norm())


def is_among(image: Tensor, pool: Tensor) -> bool:
    return bool((pool == image).flatten(1).all(1).any())


# The ball of the clients


@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
def test_networks_are_drawn_on_the_sphere_of_exactly_the_radius(radius: float) -> None:
    # The trap: a Gaussian in hundreds of dimensions is always longer than the radius.
    world, method = pictures(norm="batch"), FedDM(radius=radius)
    centre = start_of(method, world)
    drawn = balls.networks(
        engine_for(method, world).node("c0", 1, "synthesize"), centre, method.radius
    )
    for step in range(5):
        network = drawn(step)
        assert distance(network, centre) == pytest.approx(radius, rel=1e-5)
        assert torch.equal(network["norm0.running_var"], centre["norm0.running_var"])


def test_every_step_client_and_round_has_a_network_of_its_own() -> None:
    world, method = pictures(), FedDM()
    centre, engine = start_of(method, world), engine_for(method, world)
    drawn = [
        balls.networks(engine.node(client, round, "synthesize"), centre, method.radius)(step)[
            "head.bias"
        ]
        for client, round, step in (("c0", 1, 0), ("c0", 1, 1), ("c1", 1, 0), ("c0", 2, 0))
    ]
    assert len({tuple(bias.tolist()) for bias in drawn}) == 4
    again = balls.networks(engine.node("c0", 1, "synthesize"), centre, method.radius)(0)[
        "head.bias"
    ]
    assert torch.equal(again, drawn[0])


# The ball of the server


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_server_never_leaves_the_ball_around_the_weights_it_sent(momentum: float) -> None:
    # The trap: the projection of appendix G.4 is easily missed; its centre is this round's.
    world, radius = pictures(), 0.05
    method = FedDM(
        upload="real", per_class=4, radius=radius, server_lr=0.5, server_momentum=momentum,
        server_epochs=6, server_batch=4,
    )  # fmt: skip
    path = [start_of(method, world)]
    for rounds in (1, 2, 3):
        engine, _ = played(method, world, rounds=rounds)
        path.append(engine.states[SERVER].weights)
    steps = [distance(path[i + 1], path[i]) for i in range(3)]
    assert all(step <= radius * (1 + 1e-5) for step in steps)
    assert steps[0] == pytest.approx(radius, rel=1e-3)  # it wants to go farther
    assert distance(path[3], path[0]) > radius


def test_inside_the_ball_the_server_walks_down_the_loss_on_the_union() -> None:
    world = pictures()
    method = FedDM(**PLAIN, radius=100.0, server_lr=0.3)
    ups = [sent(FedDM(**PLAIN, upload="real", per_class=3), world, c) for c in world.clients]
    x = torch.cat([up.images for up in ups])
    y = torch.cat([up.labels for up in ups])
    start, model = start_of(method, world), world.server_model
    grad = torch.func.grad(lambda w: cross_entropy(model(w, x), y))(start)
    for name, reached in trained(method, world, *ups).items():
        assert torch.allclose(reached, start[name] - 0.3 * grad[name], atol=1e-6)


def test_sending_everything_and_one_step_is_centralised_training() -> None:
    # To 1e-5: the union is summed in another order.
    world = pictures()
    method = FedDM(**PLAIN, upload="real", per_class=1000, radius=100.0, server_lr=0.3)
    sets, _ = played(method, world, rounds=3)
    pooled, _ = played(Centralised(lr=0.3, batch_size=1000), world, rounds=3)
    for name, reached in sets.states[SERVER].weights.items():
        assert torch.allclose(reached, pooled.states[SERVER].weights[name], atol=1e-5)


# Replay


def test_the_server_replays_the_sets_of_the_latest_rounds() -> None:
    world = pictures()
    method = FedDM(**PLAIN, upload="real", per_class=2, replay=2)
    engine, _ = played(method, world, rounds=4)
    kept = engine.states[SERVER].past
    for sets, round in zip(kept, (4, 3), strict=True):
        ups = [sent(method, world, client, round) for client in world.clients]
        assert torch.equal(sets.images, torch.cat([up.images for up in ups]))
        assert torch.equal(sets.labels, torch.cat([up.labels for up in ups]))
        assert sets.counts is None
    engine, _ = played(FedDM(**PLAIN), world, rounds=2)
    assert engine.states[SERVER].past == ()


def test_with_replay_the_server_walks_down_the_loss_on_all_of_it() -> None:
    world = pictures()
    method = FedDM(**PLAIN, upload="real", per_class=2, replay=1, radius=100.0, server_lr=0.3)
    first, _ = played(method, world, rounds=1)
    second, _ = played(method, world, rounds=2)
    ups = [sent(method, world, client, round) for round in (2, 1) for client in world.clients]
    x, y = torch.cat([up.images for up in ups]), torch.cat([up.labels for up in ups])
    start, model = first.states[SERVER].weights, world.server_model
    grad = torch.func.grad(lambda w: cross_entropy(model(w, x), y))(start)
    for name, reached in second.states[SERVER].weights.items():
        assert torch.allclose(reached, start[name] - 0.3 * grad[name], atol=1e-6)


def test_with_replay_the_server_takes_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    plain = feddm.training_batches

    def noted(*given: Any, **options: Any) -> Any:
        batches = plain(*given, **options)
        steps.append(len(batches))
        return batches

    monkeypatch.setattr(feddm, "training_batches", noted)
    values = {**PLAIN, "upload": "real", "per_class": 2, "server_epochs": 12, "server_batch": 4}
    for replay in (0, 2):
        played(FedDM(**values, replay=replay), pictures(), rounds=3)
    assert steps[0] == steps[1] == steps[2] == steps[3]
    assert all(abs(more - steps[0]) <= 4 for more in steps[4:])  # epochs are whole


def test_counts_are_replayed_too() -> None:
    world = pictures()
    method = FedDM(**PLAIN, per_class=2, steps=1, client_weight="examples", replay=1)
    engine, _ = played(method, world, rounds=2)
    (sets,) = engine.states[SERVER].past
    ups = [sent(method, world, client, 2) for client in world.clients]
    assert torch.equal(sets.counts, torch.cat([up.counts for up in ups if up.counts is not None]))


def test_with_replay_the_contract_is_kept() -> None:
    assert check(FedDM(**{**FedDM.presets["small"], "replay": 1}), raising=False).broken == []


# What is sent


@pytest.mark.parametrize("values", [{"upload": "real"}, {"steps": 0}, {"steps": 2}])
def test_images_are_sorted_by_class_and_only_of_classes_held(values: dict[str, Any]) -> None:
    world, method = pictures(), FedDM(**PLAIN, per_class=4, **values)
    assert sent(method, world, "c0").labels.tolist() == [0] * 4 + [1] * 4
    assert sent(method, world, "c1").labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("values", [{"upload": "real"}, {"steps": 2}])
def test_a_class_of_few_examples_has_as_few_images(values: dict[str, Any]) -> None:
    # The trap: images beyond the number of examples would be duplicates.
    world = pictures()
    x, y = world.party("c1").data.all()
    few = torch.cat([torch.nonzero(y == c).flatten()[:n] for c, n in enumerate((2, 5, 1))])
    data = Data.of(x[few], y[few])
    world.parties["c1"] = Party(data, Data(), world.server_model)
    up = sent(FedDM(**PLAIN, per_class=4, **values), world)
    assert up.labels.tolist() == [0] * 2 + [1] * 4 + [2]
    assert len({tuple(image.flatten().tolist()) for image in up.images}) == 7


@pytest.mark.parametrize(("least", "classes"), [(1, [0, 1, 2]), (6, [0, 2]), (7, [0, 2]), (8, [2])])
def test_a_class_of_too_few_examples_is_not_sent(least: int, classes: list[int]) -> None:
    world, method = pictures(), FedDM(**PLAIN, per_class=2, steps=1, least_examples=least)
    assert world.party("c2").data.counts(CLASSES).tolist() == [7, 5, 11]
    assert sent(method, world, "c2").labels.unique().tolist() == classes


def test_a_client_without_enough_examples_of_any_class_sends_nothing() -> None:
    world, method = pictures(), FedDM(**PLAIN, per_class=2, steps=1, least_examples=10)
    assert world.party("c1").data.counts(CLASSES).tolist() == [9, 9, 9]
    _, log = played(method, world, rounds=1)
    assert {row.sender for row in log.messages} == {SERVER, "c0", "c2"}


def test_the_real_control_sends_exact_training_examples_and_says_so() -> None:
    world, method = pictures(), FedDM(upload="real", per_class=4)
    assert method.sends_examples
    up, (x, y) = sent(method, world), world.party("c1").data.all()
    assert all(
        is_among(image, x[y == label]) for image, label in zip(up.images, up.labels, strict=True)
    )


def test_synthetic_images_are_no_training_examples() -> None:
    world, method = pictures(), FedDM(**PLAIN, steps=5, per_class=4)
    assert not method.sends_examples
    x = world.party("c1").data.all().x
    assert not any(is_among(image, x) for image in sent(method, world).images)


def test_without_steps_a_real_start_is_the_real_control_and_says_so() -> None:
    world = pictures()
    idle, real = FedDM(steps=0, per_class=4), FedDM(upload="real", per_class=4)
    left, right = sent(idle, world), sent(real, world)
    assert torch.equal(left.images, right.images) and torch.equal(left.labels, right.labels)
    assert idle.sends_examples
    assert not FedDM(steps=0, start="noise").sends_examples


def test_real_images_are_drawn_anew_in_every_round() -> None:
    world, method = pictures(), FedDM(upload="real", per_class=4)
    assert not torch.equal(sent(method, world).images, sent(method, world, round=2).images)


def test_a_start_from_noise_does_not_depend_on_the_examples() -> None:
    # The trap: a start from real images would show them when few steps are made.
    world, other, method = pictures(), pictures(), FedDM(start="noise", steps=0, per_class=4)
    strange = as_bytes(examples("strangers", 40, (1, 8, 8), [0, 1, 2]))
    other.parties["c1"] = Party(strange, Data(), world.server_model)
    left, right = sent(method, world), sent(method, other)
    assert torch.equal(left.images, right.images)
    assert left.images.shape == (CLASSES * 4, 1, 8, 8)
    assert float(left.images.mean()) == pytest.approx(0, abs=0.15)
    assert float(left.images.std()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("start", ["real", "noise"])
def test_matching_brings_class_means_together_under_networks_not_seen_before(start: Any) -> None:
    world = pictures()
    values: dict[str, Any] = {**PLAIN, "per_class": 2, "start": start, "radius": 1.0}
    method = FedDM(**values, steps=100)
    centre = start_of(method, world)
    fresh = balls.networks(
        engine_for(method, world).node("c1", 9, "synthesize"), centre, method.radius
    )
    x, y = world.party("c1").data.all()

    def gap(up: Up) -> float:
        """Mean squared distance of class means of logits over ten networks of the sphere."""
        total = 0.0
        for step in range(10):
            for c in range(CLASSES):
                real = world.server_model(fresh(step), x[y == c]).mean(0)
                made = world.server_model(fresh(step), up.images[up.labels == c]).mean(0)
                total += float((real - made).square().sum())
        return total / 10

    before, after = sent(FedDM(**values, steps=0), world), sent(method, world)
    assert gap(after) < 0.5 * gap(before)


# Weights of images


def test_counts_travel_only_when_they_are_asked_for() -> None:
    world = pictures()
    assert sent(FedDM(**PLAIN, steps=1), world).counts is None
    up = sent(FedDM(**PLAIN, steps=1, per_class=3, client_weight="examples"), world)
    held = world.party("c1").data.counts(CLASSES).tolist()
    expected = [held[c] / 3 for c in range(CLASSES) for _ in range(3)]
    assert up.counts is not None
    assert up.counts.tolist() == pytest.approx(expected)
    assert float(up.counts.sum()) == pytest.approx(27)  # all examples of the client


def test_an_image_weighs_as_many_examples_as_it_stands_for() -> None:
    world, lr = pictures(), 0.3
    method = FedDM(**PLAIN, radius=100.0, server_lr=lr, client_weight="examples")
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y, counts = torch.tensor([0, 2, 1]), torch.tensor([5.0, 1.0, 12.0])
    ups = [Up(x[:2], y[:2], counts[:2]), Up(x[2:], y[2:], counts[2:])]
    start, model = start_of(method, world), world.server_model

    def loss(weights: Weights) -> Tensor:
        each = cross_entropy(model(weights, x), y, reduction="none")
        return (5 * each[0] + 1 * each[1] + 12 * each[2]) / (5 + 1 + 12)

    grad = torch.func.grad(loss)(start)
    for name, reached in trained(method, world, *ups).items():
        assert torch.allclose(reached, start[name] - lr * grad[name], atol=1e-6)


def test_the_floats_of_a_round_are_pairs_times_images_times_pixels() -> None:
    world = pictures()
    _, log = played(FedDM(**PLAIN, steps=1, per_class=5), world, rounds=1)
    pairs = 2 + 3 + 3  # the first client lacks a class
    assert sum(row.floats for row in log.messages if row.direction == "up") == pairs * 5 * 64
    size = sum(tensor.numel() for tensor in world.server_model.init(0).values())
    assert sum(row.floats for row in log.messages if row.direction == "down") == size


# Values


def test_presets_are_known_values_that_make_a_method() -> None:
    assert set(FedDM.presets) >= {"paper", "real", "noise"}
    for values in FedDM.presets.values():
        method = FedDM(**values)
        assert all(getattr(method, name) == value for name, value in values.items())
    assert FedDM(**FedDM.presets["real"]).sends_examples
    assert not FedDM(**FedDM.presets["noise"]).sends_examples


def test_a_wrong_strategy_is_told_with_its_field() -> None:
    with pytest.raises(BadValue) as error:
        FedDM(augmentation="flop", server_augmentation="flip_flip")
    assert [line.split(":")[1].strip() for line in error.value.faults] == [
        "augmentation", "server_augmentation",
    ]  # fmt: skip


def test_clients_remember_nothing() -> None:
    engine, _ = played(FedDM(**PLAIN, steps=1), pictures(), rounds=1)
    assert all(engine.states[client] is None for client in ("c0", "c1", "c2"))
    node: Node[Any] = engine.node(SERVER, 2, "look")
    assert list(node.state.tensors()) == [f"weights.{name}" for name in node.model.initial()]
