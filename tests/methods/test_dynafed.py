"""DynaFed: FedAvg until the path is long enough, and what the set is made from."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Data, Weights, algebra
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.methods.dynafed import DynaFed, Stretch
from fedstill.methods.fedavg import FedAvg
from fedstill.parts import augment
from fedstill.parts.losses import soft_cross_entropy
from fedstill.parts.synthetic_batches import training_batches
from worlds import CLASSES, World, engine_for, pictures, played

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 8}
SMALL: dict[str, Any] = {
    **LOCAL, "path_rounds": 3, "expert_steps": 1, "per_class": 2, "synthesis_steps": 2,
    "inner_steps": 2, "tune_epochs": 2, "tune_batch": 4, "tune_lr": 0.01,
}  # fmt: skip


def states(method: FedAvg, rounds: int, world: World | None = None) -> list[Any]:
    """The server's memory after each round."""
    world = world or pictures()
    return [played(method, world, rounds=r)[0].states[SERVER] for r in range(1, rounds + 1)]


def same(left: Weights, right: Weights) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


# Limits


def test_without_tuning_it_is_fedavg() -> None:
    for rounds in (1, 4):
        ours, _ = played(DynaFed(**{**SMALL, "tune_epochs": 0}), pictures(), rounds=rounds)
        theirs, _ = played(FedAvg(**LOCAL), pictures(), rounds=rounds)
        assert same(ours.states[SERVER].weights, theirs.states[SERVER].weights)
        assert ours.states[SERVER].images is None


def test_before_the_path_is_long_enough_it_is_fedavg() -> None:
    ours, theirs = states(DynaFed(**SMALL), 4), states(FedAvg(**LOCAL), 4)
    equal = [same(one.weights, other.weights) for one, other in zip(ours, theirs, strict=True)]
    assert equal == [True, True, False, False]  # the third round ends on the set


def test_the_set_is_made_once_and_the_path_then_forgotten() -> None:
    found = states(DynaFed(**SMALL), 5)
    assert [len(state.path) for state in found] == [2, 3, 0, 0, 0]  # with the first weights
    assert [state.images is None for state in found] == [True, True, False, False, False]
    assert torch.equal(found[2].images, found[4].images)
    assert found[2].images.shape == (2 * CLASSES, 1, 8, 8)
    assert found[2].labels.shape == (2 * CLASSES, CLASSES)


def test_the_set_stays_on_the_server() -> None:
    _, log = played(DynaFed(**SMALL), pictures(), rounds=4)
    assert {row.field for row in log.messages} == {"weights", "examples"}


# The path


def server_of(method: DynaFed, world: World, round: int = 3) -> Any:
    return engine_for(method, world).node(SERVER, round, "aggregate")


def numbered(count: int) -> tuple[Weights, ...]:
    return tuple({"w": torch.tensor([float(i)])} for i in range(count))


@pytest.mark.parametrize(("latest", "last"), [(50, 7), (2, 2)])
def test_stretches_begin_anywhere_up_to_the_latest_and_end_on_the_path(
    latest: int, last: int
) -> None:
    values = {**SMALL, "expert_steps": 3, "latest_start": latest, "synthesis_steps": 200}
    method = DynaFed(**values)
    made = method.stretches(server_of(method, pictures()), numbered(11))
    begins = {float(stretch.start["w"]) for stretch in made}
    assert begins == set(range(last + 1))
    assert all(float(s.target["w"]) == float(s.start["w"]) + 3 for s in made)


def test_every_inner_step_and_image_has_an_augmentation_of_its_own() -> None:
    method = DynaFed(**{**SMALL, "augmentation": "rotate", "inner_steps": 3})
    made = method.stretches(server_of(method, pictures()), numbered(5))
    draws = torch.cat([d.rotate.flatten() for stretch in made for d in stretch.draws])
    assert len(draws) == len(set(draws.tolist())) == 2 * 3 * 2 * CLASSES
    again = method.stretches(server_of(method, pictures()), numbered(5))
    assert torch.equal(made[1].draws[2].rotate, again[1].draws[2].rotate)


def test_the_loss_of_a_stretch_is_the_way_left_over_the_way_to_be_gone() -> None:
    world, method = pictures(), DynaFed(**{**SMALL, "augmentation": "none"})
    model, start = world.server_model, world.server_model.init(0)
    still = augment.draw(torch.Generator(), "none", groups=1, image=(8, 8))
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1.0, 0.0, 0.0]] * 2 + [[0.0, 2.0, 0.0]] * 2)
    value = {"images": x, "labels": labels, "rate": torch.tensor(0.3)}
    target = model.init(1)
    weights = start
    for _ in range(2):

        def loss(w: Weights) -> Tensor:
            return soft_cross_entropy(model(w, x), labels.softmax(1))

        weights = algebra.add(weights, torch.func.grad(loss)(weights), -0.3)
    left = algebra.square(algebra.sub(weights, target))
    expected = float(left / algebra.square(algebra.sub(start, target)))
    batch = Stretch(start, target, (still, still), ("none", "none"))
    assert float(method.off_the_path(model, value, batch)) == pytest.approx(expected, rel=1e-5)
    # The three things that are learnt all have a slope.
    found = torch.func.grad(lambda v: method.off_the_path(model, v, batch))(value)
    assert all(float(grad.abs().sum()) > 0 for grad in found.values())


def test_a_stretch_is_gone_in_evaluation_mode_whatever_a_loop_asks_for() -> None:
    method, model = DynaFed(**SMALL), pictures(norm="batch").server_model
    still = augment.draw(torch.Generator(), "none", groups=1, image=(8, 8))
    value = {
        "images": torch.randn(4, 1, 8, 8, generator=generator(0)),
        "labels": torch.randn(4, 3, generator=generator(1)),
        "rate": torch.tensor(0.3),
    }
    batch = Stretch(model.init(0), model.init(1), (still, still), ("none", "none"))
    notes: Weights = {}
    found = method.off_the_path(model.train(notes), value, batch)
    assert torch.equal(found, method.off_the_path(model.evaluating, value, batch)) and notes == {}


def test_the_set_leads_nearer_to_the_target_than_the_noise_it_began_with() -> None:
    world = pictures()
    values = {**SMALL, "augmentation": "none", "inner_steps": 3, "tune_epochs": 1}
    ends = {}
    still = augment.draw(torch.Generator(), "none", groups=1, image=(8, 8))
    path = [state.weights for state in states(FedAvg(**LOCAL), 3, world)]
    for steps in (1, 60):
        method = DynaFed(**{**values, "synthesis_steps": steps}, first_rate=0.5, label_lr=0.1)
        made = played(method, world, rounds=3)[0].states[SERVER]
        stretch = Stretch(path[0], path[1], (still,) * 3, ("none",) * 3)
        value = {"images": made.images, "labels": made.labels, "rate": torch.tensor(0.5)}
        ends[steps] = float(method.off_the_path(world.server_model, value, stretch))
    assert ends[60] < ends[1]


# Tuning


def test_one_step_of_tuning_is_adam_on_soft_labels() -> None:
    world = pictures()
    values = {**SMALL, "augmentation": "none", "tune_epochs": 1, "tune_batch": 100}
    method = DynaFed(**values)
    state = played(method, world, rounds=3)[0].states[SERVER]
    mean, model = states(FedAvg(**LOCAL), 3, world)[2].weights, world.server_model

    def loss(weights: Weights) -> Tensor:
        return soft_cross_entropy(model(weights, state.images), state.labels.softmax(1))

    grads = torch.func.grad(loss)(mean)
    for name, grad in grads.items():  # the first step of Adam is of length lr · sign
        steep = grad.abs() > 1e-4
        expected = mean[name] - 0.01 * grad.sign()
        assert torch.allclose(state.weights[name][steep], expected[steep], atol=1e-4)


def test_tuning_changes_each_image_in_its_own_way_and_batches_are_of_the_size() -> None:
    method, world = DynaFed(**SMALL, augmentation="rotate"), pictures()
    data = Data.of(torch.zeros(6, 1, 8, 8), torch.zeros(6, CLASSES))
    batches = training_batches(
        server_of(method, world), data, torch.ones(6), method.tune_batch, 2, method.augmentation
    )
    assert [len(batch.x) for batch in batches] == [4, 2, 4, 2]
    assert batches[0].y.shape == (4, CLASSES)
    assert len(set(batches[0].draws.rotate.flatten().tolist())) == 4


# Values


def test_the_defaults_are_those_of_the_released_code() -> None:
    method = DynaFed()
    assert (method.path_rounds, method.expert_steps, method.latest_start) == (25, 3, 50)
    assert (method.per_class, method.synthesis_steps, method.inner_steps) == (15, 3000, 20)
    assert (method.image_lr, method.label_lr, method.rate_lr) == (0.05, 0.01, 1e-5)
    assert (method.first_rate, method.tune_epochs, method.tune_lr) == (0.04, 20, 1e-4)
    assert method.tune_batch == 256
    short = DynaFed(**DynaFed.presets["twenty rounds"])
    assert (short.path_rounds, short.expert_steps) == (10, 2)


def test_a_path_shorter_than_a_stretch_is_refused() -> None:
    with pytest.raises(BadValue, match="path_rounds must be at least expert_steps"):
        DynaFed(path_rounds=2)


def test_a_target_may_be_the_mean_of_some_of_the_next_weights() -> None:
    path = tuple({"w": torch.tensor(float(at))} for at in (1, 10, 100, 1000, 10_000))
    plain = DynaFed(expert_steps=3)
    assert float(plain.target(path, 1, generator(0))["w"]) == 1000 * 10
    method = DynaFed(expert_steps=3, least_averaged=2)
    drawn = {round(float(method.target(path, 1, generator(0, d))["w"])) for d in range(400)}
    ahead = (100, 1000, 10_000)  # the three after the start
    twos, threes = (product(ahead, repeat=count) for count in (2, 3))
    assert drawn == {round(sum(p) / 2) for p in twos} | {round(sum(p) / 3) for p in threes}


def test_clients_may_step_by_adam() -> None:
    world, values = pictures(), {**SMALL, "rule": "adam", "lr": 0.01}
    engine, _ = played(DynaFed(**values), world, rounds=1)
    plain, _ = played(DynaFed(**{**SMALL, "lr": 0.01}), world, rounds=1)
    ends = [e.states[SERVER].weights["head.weight"] for e in (engine, plain)]
    assert not torch.equal(*ends)
    with pytest.raises(BadValue, match="momentum must be 0"):
        DynaFed(rule="adam", momentum=0.9)
    with pytest.raises(BadValue, match="least_averaged must be at most expert_steps"):
        DynaFed(least_averaged=4, expert_steps=3)


def test_the_released_preset_distils_twenty_five_weights_with_the_first() -> None:
    # The path begins with the weights before round 1 and is distilled once it is longer than that.
    assert DynaFed(**DynaFed.presets["released"]).path_rounds + 1 == 25
