"""FedDualMatch: the radius in closed form, FedDM as its limit, and what the server adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Inbox, Weights
from fedstill.core.errors import BadValue
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.engines.play.in_process import InProcess
from fedstill.methods.feddm import Down as FedDMDown
from fedstill.methods.feddm import FedDM
from fedstill.methods.feddualmatch import Down, FedDualMatch, Global, Up
from fedstill.models import MLP
from fedstill.parts import balls
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.fine_tuning import FineTuning
from fedstill.parts.matching import distance, grad, gradient_distance, loss_on, union
from fedstill.parts.synthetic_sets import from_noise
from worlds import World, engine_for, finished, pictures, played

PLAIN: dict[str, Any] = {
    "augmentation": "none", "tune_augmentation": "none", "steps": 2, "real_batch": 8,
    "per_class": 2, "samplings": 2, "sampling_steps": 2, "tune_epochs": 2, "tune_batch": 1000,
}  # fmt: skip


def start_of(method: Any, world: World) -> Weights:
    weights: Weights = engine_for(method, world).node(SERVER, 0, "look").state.weights
    return weights


def sent(method: FedDualMatch, world: World, client: str = "c1", radius: float = 5.0) -> Up:
    engine = engine_for(method, world)
    mail = Inbox({SERVER: Down(start_of(method, world), radius)})
    message = engine.play(method.synthesize, 1, {client: mail})[client].message
    assert isinstance(message, Up)
    return message


def trained(method: FedDualMatch, world: World, *ups: Up) -> Global:
    engine = engine_for(method, world)
    mail = Inbox({f"c{i}": up for i, up in enumerate(ups)})
    engine.play(method.train, 1, {SERVER: mail})
    state = engine.states[SERVER]
    assert isinstance(state, Global)
    return state


# The radius

LINEAR = MLP((2,), 2, hidden=())
ORIGIN = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}


def points(*examples: tuple[float, float, int]) -> Batch:
    return Batch(
        torch.tensor([[a, b] for a, b, _ in examples]), torch.tensor([y for *_, y in examples])
    )


def test_the_radius_is_the_longest_gap_between_a_clients_gradient_and_that_of_all() -> None:
    # At the origin softmax is a half, and the gradient of class 0 at x is ∓x/2 for the two rows of
    # the weights and ∓1/2 for the biases; class 1 has the opposite sign.
    first, second = points((1.0, 0.0, 0)), points((0.0, 3.0, 1), (0.0, 1.0, 1))
    # The mean gradient of row 0, as (weights, bias):
    #   first  (-1/2, 0, -1/2), second (0, 1, 1/2), all ((first + 2 second) / 3).
    # first - all = 2/3 (first - second) = 2/3 (-1/2, -1, -1); second - all is half as long.
    # Both rows count: twice the square.
    expected = 2 / 3 * (2 * (1 / 4 + 1 + 1)) ** 0.5
    method = FedDualMatch(radius_lr=1.0)
    assert method.radius(LINEAR, ORIGIN, [first, second]) == pytest.approx(expected)
    assert method.radius(LINEAR, ORIGIN, [second, first]) == pytest.approx(expected)
    tenth = FedDualMatch(radius_lr=0.1)
    assert tenth.radius(LINEAR, ORIGIN, [first, second]) == pytest.approx(expected / 10)


def test_the_radius_is_kept_within_its_bounds() -> None:
    first, second = points((1.0, 0.0, 0)), points((0.0, 3.0, 1))
    assert FedDualMatch().radius(LINEAR, ORIGIN, [first, first]) == 1e-3
    assert FedDualMatch(radius_lr=100.0).radius(LINEAR, ORIGIN, [first, second]) == 5.0
    narrow = FedDualMatch(first_radius=0.2, lowest_radius=0.1)
    assert narrow.radius(LINEAR, ORIGIN, [first, second]) == 0.2
    assert narrow.radius(LINEAR, ORIGIN, [first, first]) == 0.1


def test_by_the_rate_of_the_proofs_the_radius_follows_the_data() -> None:
    # On images the gap of gradients is far above 5, the first radius: with η = 1 nothing adapts.
    world, rng = pictures(), generator(0, "far apart")
    start, model = start_of(FedDualMatch(), world), world.server_model
    labels = torch.zeros(4, dtype=torch.long)
    for factor in (30.0, 60.0):
        sets = [
            Batch(factor * torch.randn(4, 1, 8, 8, generator=rng), labels + c) for c in range(3)
        ]
        hot = {name: 20 * tensor for name, tensor in start.items()}
        gap = FedDualMatch(highest_radius=1e9).radius(model, hot, sets)
        assert gap > 5 and FedDualMatch().radius(model, hot, sets) == 5
        theory = FedDualMatch(**FedDualMatch.presets["theory"])
        assert theory.radius(model, hot, sets) == pytest.approx(1e-3 * gap)


def test_the_highest_radius_bounds_in_place_of_the_first() -> None:
    first, second = points((1.0, 0.0, 0)), points((0.0, 3.0, 1))
    wide = FedDualMatch(radius_lr=100.0, highest_radius=7.0)
    assert wide.radius(LINEAR, ORIGIN, [first, second]) == 7.0
    with pytest.raises(BadValue, match="highest_radius must be at least lowest_radius"):
        FedDualMatch(lowest_radius=0.5, highest_radius=0.1)


def test_clients_work_with_the_radius_of_the_round_before() -> None:
    method, heard = FedDualMatch(**PLAIN), []

    class Ear:
        def carry(self, message: Any, sender: str, round: int, step: str) -> Any:
            if isinstance(message, Down):
                heard.append(message.radius)
            return message

    _, log = played(method, pictures(), rounds=3, meddling=[Ear()])
    found = [row.value for row in log.metrics if row.name == "radius"]
    assert heard == pytest.approx([5.0, *found[:2]])
    assert all(1e-3 <= radius <= 5 for radius in found)


def test_networks_lie_on_the_sphere_of_the_radius_that_was_sent() -> None:
    world, method = pictures(), FedDualMatch()
    centre, client = start_of(method, world), engine_for(method, world).node("c0", 1, "synthesize")
    for radius in (0.01, 5.0):
        network = balls.networks(client, centre, radius)(3)
        gap = torch.cat([(network[name] - centre[name]).flatten() for name in centre])
        assert float(gap.double().norm()) == pytest.approx(radius, rel=1e-3)


# The limit


@pytest.mark.parametrize("start", ["noise", "real"])
def test_one_layer_all_at_once_and_squared_uploads_what_feddm_uploads(start: Any) -> None:
    world = pictures()
    common: dict[str, Any] = {"per_class": 3, "steps": 4, "pixel_lr": 0.3, "real_batch": 8}
    ours = FedDualMatch(
        **common, outputs="features", distance="squared", deep_first=False, samplings=0, start=start
    )
    theirs = FedDM(**common, outputs="features", radius=5.0, start=start)
    mail = Inbox({SERVER: FedDMDown(start_of(theirs, world))})
    for client in world.clients:
        up = engine_for(theirs, world).play(theirs.synthesize, 1, {client: mail})[client].message
        mine = sent(ours, world, client)
        assert torch.equal(mine.images, up.images) and torch.equal(mine.labels, up.labels)


def test_images_are_sorted_by_class_and_only_of_classes_held() -> None:
    world, method = pictures(), FedDualMatch(**PLAIN)
    assert sent(method, world, "c0").labels.tolist() == [0, 0, 1, 1]
    assert sent(method, world, "c1").labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_swept_step_is_an_update_for_each_layer_and_their_deeper_ones() -> None:
    # One swept step on two stages: the second alone, then both; without momentum two plain runs.
    world, base = pictures(), {**PLAIN, "steps": 1, "pixel_momentum": 0.0, "pixel_lr": 0.3}
    client = engine_for(FedDualMatch(), world).node("c1", 1, "synthesize")
    centre = start_of(FedDualMatch(), world)
    begin = from_noise(client, [0, 1, 2], 2)
    networks = balls.networks(client, centre, 5.0)
    for outputs in ("features", "stages"):
        one = Matching(1, 0.3, 0.0, 8, "none", outputs, "norm")
        begin = finished(one.matched(client, begin, networks))
    swept = sent(FedDualMatch(**base, sweep=True), world)
    assert torch.allclose(swept.images, begin.flat()[0], atol=1e-6)


def test_order_layers_and_distance_change_what_is_sent() -> None:
    world, base = pictures(), {**PLAIN, "steps": 4}
    made = [
        sent(FedDualMatch(**base, **values), world).images
        for values in (
            {},
            {"deep_first": False},
            {"sweep": True},
            {"distance": "squared"},
            {"outputs": "features"},
        )
    ]
    assert all(not torch.equal(made[0], other) for other in made[1:])


# The server


def uploads(world: World) -> list[Up]:
    rng = generator(0, "uploads")
    return [
        Up(torch.randn(4, 1, 8, 8, generator=rng), torch.tensor(labels))
        for labels in ([0, 0, 1, 1], [1, 1, 2, 2])
    ]


def test_without_samplings_the_server_tunes_on_the_uploaded_sets_alone() -> None:
    world = pictures()
    values = {**PLAIN, "samplings": 0, "tune_epochs": 1}
    method = FedDualMatch(**values, tuning="sgd", tune_lr=0.3)
    ups, start, model = uploads(world), start_of(method, world), world.server_model
    x, y = torch.cat([up.images for up in ups]), torch.cat([up.labels for up in ups])
    grads = torch.func.grad(lambda w: cross_entropy(model(w, x), y))(start)
    for name, reached in trained(method, world, *ups).weights.items():
        assert torch.allclose(reached, start[name] - 0.3 * grads[name], atol=1e-6)


@pytest.mark.parametrize("samplings", [1, 2])
def test_the_server_tunes_on_the_sets_and_on_copies_with_a_matched_gradient(samplings: int) -> None:
    world = pictures()
    values = {**PLAIN, "samplings": samplings, "sampling_steps": 1, "tune_epochs": 1}
    method = FedDualMatch(**values, tuning="sgd", tune_lr=0.3)
    ups, start, model = uploads(world), start_of(method, world), world.server_model
    sets = [Batch(up.images, up.labels) for up in ups]
    radius = method.radius(model, start, sets)
    ball = balls.networks(engine_for(method, world).node(SERVER, 1, "train"), start, radius)
    copies = sets
    for sampling in range(samplings):  # each copy goes on, against the gradient of all sets
        network = ball(sampling)
        target = grad(loss_on(model, union(sets)), network)

        def apart(images: Tensor, y: Tensor, at: Weights = network, to: Weights = target) -> Tensor:
            return gradient_distance(grad(loss_on(model, Batch(images, y)), at), to)

        copies = [Batch(x - 0.1 * torch.func.grad(apart)(x, y), y) for x, y in copies]
    both = union([*sets, *copies])
    grads = torch.func.grad(lambda w: cross_entropy(model(w, both.x), both.y))(start)
    state = trained(method, world, *ups)
    assert state.radius == pytest.approx(radius)
    for name, reached in state.weights.items():
        assert torch.allclose(reached, start[name] - 0.3 * grads[name], atol=1e-6)


def test_the_server_stays_in_the_ball_it_is_told_to() -> None:
    world, values = pictures(), {**PLAIN, "tune_lr": 0.5, "radius_lr": 0.01}
    ups = uploads(world)
    start = start_of(FedDualMatch(), world)

    def moved(**more: Any) -> tuple[float, float]:
        state = trained(FedDualMatch(**values, **more), world, *ups)
        return float(distance(state.weights, start)), state.radius

    assert moved()[0] > 1
    far, radius = moved(tune_within="ball")
    assert far == pytest.approx(radius, rel=1e-4) and radius < 0.5
    assert moved(tune_within="first_ball", first_radius=0.7)[0] == pytest.approx(0.7, rel=1e-4)


@pytest.mark.parametrize("tuning", ["adam", "sgd"])
def test_decay_and_falling_rate_of_tuning_are_torchs(tuning: Any) -> None:
    world, ups = pictures(), uploads(pictures())
    method = FedDualMatch(
        **{**PLAIN, "samplings": 0, "tune_epochs": 4}, tuning=tuning, tune_lr=0.1,
        tune_weight_decay=0.3, tune_fall="halfway",
    )  # fmt: skip
    weights = {
        name: tensor.clone().requires_grad_() for name, tensor in start_of(method, world).items()
    }
    kind = torch.optim.Adam if tuning == "adam" else torch.optim.SGD
    optimizer = kind(weights.values(), lr=0.1, weight_decay=0.3)
    x, y = torch.cat([up.images for up in ups]), torch.cat([up.labels for up in ups])
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 2 else 0.01
        optimizer.zero_grad()
        cross_entropy(world.server_model(weights, x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, reached in trained(method, world, *ups).weights.items():
        if not name.startswith("conv") or not name.endswith("bias"):  # no slope before a norm
            assert torch.allclose(reached, weights[name], atol=1e-4)


def test_an_image_may_weigh_as_many_examples_as_it_stands_for() -> None:
    world = pictures()
    method = FedDualMatch(**PLAIN, client_weight="examples")
    up = sent(method, world, "c2")  # 7, 5 and 11 examples, two images each
    assert up.counts is not None and up.counts.tolist() == [3.5, 3.5, 2.5, 2.5, 5.5, 5.5]
    assert sent(FedDualMatch(**PLAIN), world, "c2").counts is None
    values = {**PLAIN, "samplings": 0, "tune_epochs": 1}
    by_count = FedDualMatch(**values, tuning="sgd", tune_lr=0.3, client_weight="examples")
    start, model = start_of(method, world), world.server_model

    def loss(weights: Weights) -> Tensor:
        losses = cross_entropy(model(weights, up.images), up.labels, reduction="none")
        return (losses * up.counts).sum() / 23  # the weights' sum: 7 + 5 + 11

    grads = torch.func.grad(loss)(start)
    for name, reached in trained(by_count, world, up).weights.items():
        assert torch.allclose(reached, start[name] - 0.3 * grads[name], atol=1e-6)


def test_one_network_a_round_is_that_of_the_first_step() -> None:
    world, values = pictures(), {**PLAIN, "steps": 1}
    fresh, kept = FedDualMatch(**values), FedDualMatch(**values, networks="round")
    assert torch.equal(sent(fresh, world).images, sent(kept, world).images)
    longer = {**PLAIN, "steps": 3}
    client = engine_for(fresh, world).node("c1", 1, "synthesize")
    first = balls.networks(client, start_of(fresh, world), 5.0)(0)
    matching = Matching(3, 1.0, 0.5, 8, "none", "stages", "norm", True)
    made = finished(matching.matched(client, from_noise(client, [0, 1, 2], 2), lambda _: first))
    found = sent(FedDualMatch(**longer, networks="round"), world).images
    assert torch.allclose(found, made.flat()[0], atol=1e-6)


def test_matched_copies_never_leave_the_server() -> None:
    world = pictures()
    _, log = played(FedDualMatch(**PLAIN), world, rounds=1)
    size = sum(tensor.numel() for tensor in world.server_model.init(0).values())
    assert sum(row.floats for row in log.messages if row.direction == "down") == size + 1
    pairs = 2 + 3 + 3  # classes held by the clients
    assert sum(row.floats for row in log.messages if row.direction == "up") == pairs * 2 * 64


def taken(method: FedDualMatch, world: World) -> list[list[int]]:
    """How many images each batch of each tuning has."""
    sizes: list[list[int]] = []

    class Spy(InProcess):
        def _run(self, loop: Any, node: Any) -> Any:
            if isinstance(loop.carry[0], dict) and "head.weight" in loop.carry[0]:
                sizes.append([len(batch.y) for batch in loop.batches])
            return super()._run(loop, node)

    mail = Inbox({f"c{i}": up for i, up in enumerate(uploads(world))})
    engine_for(method, world, Spy).play(method.train, 1, {SERVER: mail})
    return sizes


def test_tuning_is_counted_in_epochs_or_in_batches() -> None:
    world, values = pictures(), {**PLAIN, "tune_batch": 6}  # sixteen images: 6, 6 and 4
    assert taken(FedDualMatch(**values), world) == [[6, 6, 4] * 2]
    assert taken(FedDualMatch(**values, tune_steps=2), world) == [[6, 6]]
    assert taken(FedDualMatch(**values, tune_steps=7), world) == [[6, 6, 4, 6, 6, 4, 6]]


def test_as_many_batches_as_the_epochs_have_come_to_the_same_weights() -> None:
    world, values = pictures(), {**PLAIN, "tune_batch": 6, "tune_augmentation": "flip_scale"}
    epochs = trained(FedDualMatch(**values, tuning="sgd"), world, *uploads(world))
    batches = trained(FedDualMatch(**values, tuning="sgd", tune_steps=6), world, *uploads(world))
    for name, reached in epochs.weights.items():
        assert torch.equal(reached, batches.weights[name])


def test_interleaved_tuning_is_divided_over_the_samplings() -> None:
    world, values = pictures(), {**PLAIN, "samplings": 3, "tune_batch": 8, "tune_epochs": 7}
    assert taken(FedDualMatch(**values, interleave=True), world) == [[8] * 4] * 3
    swift = FedDualMatch(**values, tune_steps=10, interleave=True)
    assert taken(swift, world) == [[8] * 3] * 3
    assert taken(FedDualMatch(**values, tune_steps=2, interleave=True), world) == [[8]] * 3


def test_interleaved_tuning_has_other_draws_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world, parts, tuned = pictures(), [], FineTuning.tuned

    async def noted(self: Any, *given: Any) -> Any:
        parts.append(given[4:])
        return await tuned(self, *given)

    monkeypatch.setattr(FineTuning, "tuned", noted)
    values = {**PLAIN, "samplings": 3}
    trained(FedDualMatch(**values, interleave=True), world, *uploads(world))
    trained(FedDualMatch(**values), world, *uploads(world))
    assert parts == [((0, 3),), ((1, 3),), ((2, 3),), ()]


def test_one_client_alone_can_be_learnt_from() -> None:
    world, method = pictures(), FedDualMatch(**PLAIN)
    state = trained(method, world, uploads(world)[0])
    assert state.radius == method.lowest_radius  # its gradient is that of all
    assert all(torch.isfinite(tensor).all() for tensor in state.weights.values())


# Values


def test_the_defaults_are_those_of_the_paper() -> None:
    method = FedDualMatch()
    assert (method.steps, method.pixel_lr, method.start) == (200, 1.0, "noise")
    assert (method.outputs, method.distance, method.deep_first) == ("stages", "norm", True)
    assert (method.samplings, method.sampling_steps, method.sampling_lr) == (10, 10, 0.1)
    assert (method.tune_epochs, method.tune_lr, method.tuning) == (500, 1e-3, "adam")
    assert (method.sweep, method.tune_steps) == (False, 0)
    assert (method.first_radius, method.lowest_radius) == (5.0, 1e-3)


def test_values_that_contradict_each_other_are_told_together() -> None:
    with pytest.raises(BadValue) as error:
        FedDualMatch(interleave=True, samplings=0, lowest_radius=6.0, augmentation="flop")
    assert len(error.value.faults) == 3
    with pytest.raises(BadValue, match="sweep needs deep_first"):
        FedDualMatch(sweep=True, deep_first=False)
    with pytest.raises(BadValue, match="tune_steps = -1"):
        FedDualMatch(tune_steps=-1)


def test_the_union_keeps_the_order_of_the_sets() -> None:
    both = union([points((1.0, 2.0, 0)), points((3.0, 4.0, 1))])
    assert both.x.tolist() == [[1, 2], [3, 4]] and both.y.tolist() == [0, 1]
