"""Synthetic sets: where they start, the matching gradient in closed form, and what is drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import worlds
from fedstill.core import Data, Node, Pool, Record, Weights, trees
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.methods.desa import DeSA
from fedstill.models import MLP, ConvNet
from fedstill.parts import augment
from fedstill.parts.augment import augmentations, image_size, strategy_faults
from fedstill.parts.distribution_matching import (
    Iteration,
    Matching,
    class_means,
    distances,
    packed,
    real_rows,
    stage_count,
)
from fedstill.parts.synthetic_batches import training_batches
from fedstill.parts.synthetic_sets import (
    SyntheticSet,
    class_statistics,
    from_common_noise,
    from_noise,
    from_real,
    from_released_statistics,
    from_statistics,
    held_classes,
    mean_over_holders,
    released_statistics,
    scaled,
)
from fedstill.parts.warm_up import Kept, plain_network, warmed_up
from worlds import finished

LINEAR = MLP((1, 2, 3), 4, hidden=())  # features are the pixels, logits a linear map of them
SHAPE = (1, 2, 3)


def pictures(counts: list[int], shape: tuple[int, ...] = SHAPE) -> Data:
    """So many examples of each class; every pixel of example i is about i."""
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    order = torch.randperm(len(labels), generator=generator(0, "order"))
    noise = 0.1 * torch.randn(len(labels), *shape, generator=generator(0, "pictures"))
    place = torch.arange(len(labels)).float().reshape(-1, *[1] * len(shape))
    return Data.of(place + noise, labels[order])


def node(
    id: str = "c0", data: Data | None = None, round: int = 1, model: MLP | ConvNet = LINEAR
) -> Node[None]:
    return Node(id, round, None, model=model, data=data, step="synthesize")


def network() -> Weights:
    return LINEAR.init(0)


def still(images: Tensor) -> augment.Draws:
    """Draws that change nothing."""
    return augment.draw(generator(0), "none", groups=len(images), image=SHAPE[1:])


def grad(matching: Matching, images: Tensor, share: Tensor, real: Tensor) -> Tensor:
    """The gradient of the matching loss on images, real examples being equally weighted."""
    equal = torch.full(real.shape[:2], 1 / real.shape[1])
    emphasis = torch.ones(2 if matching.outputs == "both" else 1)
    batch = Iteration(real, equal, network(), emphasis, still(images), "none")
    aim = matching.aim(LINEAR.train(), batch, share)
    return torch.func.grad(
        lambda x: matching.objective(LINEAR.train(), x, aim, images_share=share)
    )(images)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "some", *shape))


def test_the_gradient_of_feature_matching_is_twice_the_difference_of_means_over_n() -> None:
    images, real = some(3, 4, *SHAPE), some(3, 9, *SHAPE)
    found = grad(Matching(outputs="features"), images, torch.full((3, 4), 1 / 4), real)
    gap = images.mean(1) - real.mean(1)  # [class, ...]
    expected = (2 * gap / 4).unsqueeze(1).expand(images.shape)
    assert torch.allclose(found, expected, atol=1e-6)


def test_the_gradient_of_logit_matching_is_pulled_back_through_the_linear_map() -> None:
    images, real = some(2, 5, *SHAPE), some(2, 7, *SHAPE)
    found = grad(Matching(outputs="logits"), images, torch.full((2, 5), 1 / 5), real)
    jacobian = network()["head.weight"]  # [logit, pixel]
    gap = (images.mean(1) - real.mean(1)).flatten(1)  # the bias cancels
    expected = 2 * gap @ jacobian.T @ jacobian / 5  # [class, pixel]
    assert torch.allclose(found, expected.reshape(2, 1, *SHAPE).expand(images.shape), atol=1e-6)


def test_matching_both_outputs_adds_the_two_gradients() -> None:
    images, real, share = some(2, 5, *SHAPE), some(2, 7, *SHAPE), torch.full((2, 5), 1 / 5)
    parts = [grad(Matching(outputs=o), images, share, real) for o in ("features", "logits")]
    both = grad(Matching(outputs="both"), images, share, real)
    assert torch.allclose(both, parts[0] + parts[1], atol=1e-6)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_packing_keeps_every_example_and_finds_its_output_again(counts: list[int]) -> None:
    share = torch.zeros(len(counts), 40)
    for row, count in enumerate(counts):
        share[row, :count] = 1 / count
    packing = packed(share)
    if packing is None:
        assert sum(counts) > 40 * len(counts) * 0.75
        return
    held = torch.nonzero(share.flatten()).flatten()
    assert len(packing.kept) <= min(share.numel() * 7 / 8, sum(counts) * 1.25)
    assert len(set(packing.kept.tolist())) == len(packing.kept)
    numbers = packing.number.flatten()[held]
    assert torch.equal(packing.kept[numbers], held)


@pytest.mark.parametrize("outputs", ["both", "stages and logits"])
def test_empty_places_that_are_left_out_change_nothing(outputs: Any) -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=4)
    images, real = some(3, 2, 1, 8, 8), some(3, 16, 1, 8, 8)
    share = torch.zeros(3, 16)
    for row, count in enumerate((16, 3, 1)):
        share[row, :count] = 1 / count
    matching = Matching(outputs=outputs)
    draws = augment.draw(generator(0), "rotate", groups=3, image=(8, 8))
    whole = Iteration(
        real, share, model.init(0), torch.ones(2 if outputs == "both" else 3), draws, "rotate"
    )
    found = packed(share)
    assert found is not None and len(found.kept) < 24
    equal = torch.full((3, 2), 0.5)
    aims = [matching.aim(model, batch, equal) for batch in (whole, whole._replace(packing=found))]
    grads = [
        torch.func.grad(lambda x, aim=aim: matching.objective(model, x, aim, equal))(images)
        for aim in aims
    ]
    assert torch.allclose(*grads, atol=1e-6) and grads[0].abs().max() > 0.01


def test_a_class_with_fewer_images_has_its_own_n_and_empty_places_no_gradient() -> None:
    images, real = some(2, 4, *SHAPE), some(2, 6, *SHAPE)
    share = torch.tensor([[1 / 4] * 4, [1 / 2, 1 / 2, 0, 0]])
    found = grad(Matching(outputs="features"), images, share, real)
    gaps = [images[0].mean(0) - real[0].mean(0), images[1, :2].mean(0) - real[1].mean(0)]
    assert torch.allclose(found[0], (2 * gaps[0] / 4).expand(4, *SHAPE), atol=1e-6)
    assert torch.allclose(found[1, :2], (2 * gaps[1] / 2).expand(2, *SHAPE), atol=1e-6)
    assert not found[1, 2:].any()


def test_the_distance_is_summed_over_features_classes_and_outputs() -> None:
    left = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [1.0]])]
    right = [torch.zeros(2, 2), torch.tensor([[0.0], [3.0]])]
    assert float(distances(left, right, "squared").sum()) == 1 + 4 + 9 + 16 + 1 + 4


def test_class_means_are_weighted_by_shares() -> None:
    outputs = torch.tensor([[[2.0], [4.0], [99.0]], [[6.0], [99.0], [99.0]]])
    share = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert class_means([outputs], share)[0].tolist() == [[3], [6]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("images", "features"), [(1, 1), (50, 2048), (37, 70)])
def test_class_means_of_a_kernel_are_those_of_the_operations(images: int, features: int) -> None:
    pytest.importorskip("fedstill.kernels.class_means")
    outputs = torch.randn(3, images, features, generator=generator(0)).requires_grad_()
    share, told = torch.rand(3, images, generator=generator(1)), torch.ones(3, features)
    expected = (outputs * share.unsqueeze(2)).sum(1)
    (grad,) = torch.autograd.grad(expected, outputs, told)
    here = outputs.detach().cuda().requires_grad_()
    (found,) = class_means([here], share.cuda())
    assert torch.allclose(found.cpu(), expected, atol=1e-5)
    assert torch.equal(torch.autograd.grad(found, here, told.cuda())[0].cpu(), grad)


def test_one_step_of_matching_moves_images_by_the_closed_form() -> None:
    data = pictures([3, 0, 5, 0])
    client = node(data=data)
    start = from_real(client, [0, 2], 2)
    matching = Matching(steps=1, lr=0.3, real_batch=64, augmentation="none", outputs="features")
    made = finished(matching.matched(client, start, lambda step: network()))
    for row, label in enumerate([0, 2]):
        real = data.all().x[data.labels == label].mean(0)
        gap = start.images[row].mean(0) - real
        assert torch.allclose(made.images[row], start.images[row] - 0.3 * 2 * gap / 2, atol=1e-5)
    assert torch.equal(made.share, start.share) and torch.equal(made.classes, start.classes)


def test_matching_brings_class_means_together() -> None:
    model = ConvNet((1, 8, 8), 3, depth=1, width=4)
    data = pictures([20, 20, 20], (1, 8, 8))
    data = Data.of((data.all().x - 30) / 30, data.labels)
    client = node(data=data, model=model)
    start = from_noise(client, [0, 1, 2], 4)
    matching = Matching(steps=60, lr=0.5, augmentation="none", outputs="features")
    made = finished(matching.matched(client, start, lambda step: model.init(0)))

    def distance(images: Tensor) -> float:
        real = torch.stack([data.all().x[data.labels == c] for c in range(3)])
        seen = [matching.seen(model, model.init(0), x) for x in (real, images)]
        return float(distances(*([out[0].mean(1)] for out in seen), "squared").sum())

    assert distance(made.images) < 0.1 * distance(start.images)


def test_the_network_of_a_step_is_asked_for_by_its_number() -> None:
    client, asked = node(data=pictures([2, 2, 2, 2])), []

    def drawn(step: int) -> Weights:
        asked.append(step)
        return network()

    start = from_noise(client, [0, 1], 1)
    finished(Matching(steps=4, augmentation="none").matched(client, start, drawn))
    assert asked == [0, 1, 2, 3]


# Which outputs are matched


def test_two_hundred_steps_over_three_outputs_are_67_67_and_66_from_the_deep_end() -> None:
    matching = Matching(steps=200, deep_first=True)
    every = [tuple(matching.emphasis(step, 3)) for step in range(200)]
    assert every == [(0, 0, 1)] * 67 + [(0, 1, 1)] * 67 + [(1, 1, 1)] * 66


def test_a_sweep_goes_from_the_deep_end_to_all_outputs_in_every_step() -> None:
    matching = Matching(steps=2, deep_first=True, sweep=True)
    turn = [[0, 0, 1], [0, 1, 1], [1, 1, 1]]
    assert [matching.emphasis(update, 3) for update in range(6)] == turn * 2


def test_the_updates_of_a_sweep_share_their_steps_draws() -> None:
    client = node(data=pictures([9, 9, 0, 0], (1, 8, 8)), model=ConvNet((1, 8, 8), 4, 2, 2))
    start = from_noise(client, [0, 1], 2)
    asked: list[int] = []

    def network(step: int) -> dict[str, Tensor]:
        asked.append(step)
        return client.model.init(step)

    matching = Matching(
        steps=3, real_batch=4, augmentation="color_crop", outputs="stages", deep_first=True
    )
    plain = matching.iterations(client, start.classes.tolist(), network)
    swept = replace(matching, sweep=True).iterations(client, start.classes.tolist(), network)
    assert (len(plain), len(swept)) == (3, 6)
    for update in range(6):
        mine, step = swept[update], plain[update // 2]
        assert torch.equal(mine.real, step.real) and mine.only == step.only
        assert all(map(torch.equal, trees.tensors(mine.draws), trees.tensors(step.draws)))
    assert asked == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_a_sweep_over_one_output_is_the_plain_order() -> None:
    client = node(data=pictures([9, 9, 0, 0], (1, 8, 8)), model=ConvNet((1, 8, 8), 4, 2, 2))
    start = from_noise(client, [0, 1], 2)
    made = [
        finished(
            Matching(steps=3, real_batch=4, deep_first=True, sweep=sweep).matched(
                client, start, lambda step: client.model.init(step)
            )
        ).images
        for sweep in (False, True)
    ]
    assert torch.equal(*made) and not torch.equal(made[0], start.images)


def test_without_an_order_all_outputs_count_at_every_step() -> None:
    matching = Matching(steps=7)
    assert {tuple(matching.emphasis(step, 3)) for step in range(7)} == {(1, 1, 1)}


def test_fewer_steps_than_outputs_end_without_the_shallow_ones() -> None:
    matching = Matching(steps=2, deep_first=True)
    assert [matching.emphasis(step, 3) for step in range(2)] == [[0, 0, 1], [0, 1, 1]]


def test_an_output_that_does_not_count_has_no_part_in_the_gradient() -> None:
    model = ConvNet((1, 8, 8), 3, depth=2, width=2)
    images, real = some(1, 3, 1, 8, 8), some(1, 5, 1, 8, 8)
    weights, share = model.init(0), torch.full((1, 3), 1 / 3)

    def gradient(outputs: Any, emphasis: list[float]) -> Tensor:
        draws = augment.draw(generator(0), "none", groups=1, image=(8, 8))
        equal = torch.full((1, 5), 1 / 5)
        batch = Iteration(real, equal, weights, torch.tensor(emphasis), draws, "none")
        matching = Matching(outputs=outputs)
        aim = matching.aim(model, batch, share)
        return torch.func.grad(lambda x: matching.objective(model, x, aim, images_share=share))(
            images
        )

    deep = gradient("stages", [0.0, 1.0])
    assert torch.allclose(deep, gradient("features", [1.0]), atol=1e-6)
    every = gradient("stages", [1.0, 1.0])
    assert torch.allclose(every, deep + gradient("stages", [1.0, 0.0]), atol=1e-6)


def test_stages_are_the_pooled_maps_and_logits_may_follow() -> None:
    model = ConvNet((1, 8, 8), 3, depth=3, width=2)
    images, weights = some(2, 4, 1, 8, 8), model.init(0)
    maps = model.stages(weights, images.flatten(0, 1))
    assert [tuple(m.shape) for m in maps] == [(8, 2, 4, 4), (8, 2, 2, 2), (8, 2, 1, 1)]
    seen = Matching(outputs="stages").seen(model, weights, images)
    assert len(seen) == stage_count(model) == 3
    for out, pooled in zip(seen, maps, strict=True):
        assert torch.equal(out, pooled.reshape(2, 4, -1))
    more = Matching(outputs="stages and logits").seen(model, weights, images)
    assert torch.equal(more[3], model(weights, images.flatten(0, 1)).reshape(2, 4, 3))


def test_the_norm_is_the_root_of_the_squared_distance_and_has_a_slope_at_zero() -> None:
    left, right = [torch.tensor([[3.0, 4.0], [1.0, 1.0]])], [torch.tensor([[0.0, 0.0], [1.0, 1.0]])]
    assert distances(left, right, "squared").tolist() == [[25, 0]]
    assert distances(left, right, "norm")[0].tolist() == pytest.approx([5, 1e-6])
    grads = torch.func.grad(lambda x: distances([x], right, "norm").sum())(left[0])
    assert grads[0].tolist() == pytest.approx([3 / 5, 4 / 5])  # of unit length
    assert grads[1].tolist() == [0, 0]


# Where a set starts


def test_class_statistics_are_over_all_pixels_of_a_class_and_channel() -> None:
    # Three images of two channels and two pixels.
    x = torch.tensor([1.0, 3, 0, 0, 5, 7, 4, 4, 9, 9, 9, 9]).reshape(3, 2, 1, 2)
    mean, std = class_statistics(Data.of(x, torch.tensor([2, 2, 0])), [0, 2], 4)
    assert mean.tolist() == [[9, 9], [4, 2]]
    # Of 1, 3, 5, 7 the squares around 4 are 9, 1, 1, 9; of 0, 0, 4, 4 all are 4.
    assert std.flatten().tolist() == pytest.approx([0, 0, 5**0.5, 2])


def test_statistics_are_those_of_normalised_pixels() -> None:
    stored = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    data = Pool(stored, torch.tensor([1, 1]), torch.tensor(0.5), torch.tensor(0.25)).all()
    mean, std = class_statistics(data, [1], 2)
    assert (float(mean), float(std)) == (0, 2)  # -2 and 2


def test_a_start_from_statistics_is_noise_scaled_by_them() -> None:
    data = pictures([5, 0, 8, 0])
    noise, made = (f(node(data=data), [0, 2], 3) for f in (from_noise, from_statistics))
    mean, std = class_statistics(data, [0, 2], 4)
    for row in range(2):
        assert torch.allclose(made.images[row], noise.images[row] * std[row] + mean[row])
    assert torch.equal(made.share, noise.share) and made.classes.tolist() == [0, 2]


def test_noise_is_scaled_by_class_and_channel() -> None:
    noise = torch.ones(2, 3, 2, 1, 1)
    made = scaled(noise, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0]] * 2))
    assert made[:, 0].flatten().tolist() == [11, 22, 13, 24]
    assert torch.equal(made[:, 0], made[:, 2])


def test_means_are_taken_over_the_holders_of_a_class() -> None:
    rows = [torch.tensor([[2.0], [8.0]]), torch.tensor([[4.0]])]
    found = mean_over_holders(
        rows, [torch.tensor([0, 3]), torch.tensor([0])], torch.tensor([[9.0], [9.0], [9.0], [9.0]])
    )
    assert found.flatten().tolist() == [3, 9, 9, 8]


def test_held_classes_are_those_with_examples() -> None:
    assert held_classes(node(data=pictures([2, 0, 1, 0]))) == [0, 2]


# Warm-up


class Shelf:
    """A store in memory that writes down what it was asked."""

    def __init__(self) -> None:
        self.kept: dict[str, Record] = {}
        self.asked: list[str] = []

    def key(self, made_by: str) -> str:
        return made_by

    def find(self, key: str, kind: type[Any]) -> Any:
        self.asked.append(key)
        return self.kept.get(key)

    def keep(self, key: str, record: Record) -> None:
        assert key not in self.kept
        self.kept[key] = record


def warm(cache: Shelf | None = None, matching: Matching | None = None, **changes: Any) -> Any:
    """The set that a client warms up; changes are those of its surroundings."""
    given: dict[str, Any] = {"data": pictures([6, 4, 0, 0]), "model": LINEAR, "seed": 0, **changes}
    start, per_class = given.pop("start", "statistics"), given.pop("per_class", 2)
    under = given.pop("under", None)
    client = Node(given.pop("id", "c0"), 0, None, step="warm_up", cache=cache, **given)
    matching = matching or Matching(steps=3, lr=0.1, real_batch=3)
    return finished(warmed_up(client, matching, start, per_class, under))


def test_a_warm_up_that_was_kept_equals_a_fresh_one_bit_for_bit() -> None:
    shelf = Shelf()
    fresh, made, found = warm(), warm(shelf), warm(shelf)
    for one, two, three in zip(fresh, made, found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert shelf.asked == [*shelf.kept] * 2  # once for each warm-up
    (kept,) = shelf.kept.values()
    assert isinstance(kept, Kept) and kept.key == shelf.asked[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"data": pictures([6, 5, 0, 0])},
        {"data": Data.of(pictures([6, 4, 0, 0]).all().x + 1e-3, pictures([6, 4, 0, 0]).labels)},
        {"matching": Matching(steps=4, lr=0.1, real_batch=3)},
        {"matching": Matching(steps=3, lr=0.2, real_batch=3)},
        {"matching": Matching(steps=3, lr=0.1, real_batch=3, augmentation="flip")},
        {"start": "noise"},
        {"per_class": 3},
        {"model": MLP(SHAPE, 4, hidden=(2,))},
        {"under": ConvNet(SHAPE, 4, depth=1, width=2)},
        {"seed": 1},
        {"id": "c1"},
    ],
    ids=str,
)
def test_other_data_settings_networks_and_seeds_are_kept_under_other_keys(changes: Any) -> None:
    shelf = Shelf()
    warm(shelf)
    warm(shelf, **changes)
    assert len(shelf.kept) == 2


def test_a_whole_number_is_the_same_setting_as_its_float() -> None:
    shelf = Shelf()
    warm(shelf, Matching(steps=2, lr=1, real_batch=3))
    warm(shelf, Matching(steps=2, lr=1.0, real_batch=3))
    assert len(shelf.kept) == 1


def test_the_networks_of_a_warm_up_are_the_same_for_all_and_differ_from_step_to_step() -> None:
    seen: dict[str, list[Weights]] = {}

    class Spy(Matching):
        async def matched(self, node: Any, start: Any, network: Any, *others: Any) -> Any:
            seen[node.id] = [network(step) for step in range(3)]
            return start

    for id in ("c0", "c1"):
        warm(matching=Spy(steps=3), id=id)
    for one, other in zip(seen["c0"], seen["c1"], strict=True):
        assert torch.equal(one["head.weight"], other["head.weight"])
    assert not torch.equal(seen["c0"][0]["head.weight"], seen["c0"][1]["head.weight"])


# Networks of another kind than the node's own


@pytest.mark.parametrize(
    ("shape", "depth"),
    [((3, 32, 32), 3), ((1, 28, 28), 3), ((3, 8, 9), 3), ((3, 7, 32), 2), ((1, 2, 3), 1)],
)
def test_the_plain_network_for_an_image_has_three_blocks_or_as_many_as_can_be_pooled(
    shape: tuple[int, ...], depth: int
) -> None:
    made = plain_network(MLP(shape, 4))
    assert made == ConvNet(shape, 4, depth=depth, width=128, norm="instance")
    assert made.initial()


def test_the_plain_network_for_a_vector_has_three_linear_layers() -> None:
    assert plain_network(MLP((5,), 4), width=6) == MLP((5,), 4, hidden=(6, 6, 6))
    with pytest.raises(BadValue, match=r"or for vectors, not for inputs of shape \(5, 2\)"):
        plain_network(MLP((5, 2), 4))


def test_a_set_matched_under_convnets_does_not_depend_on_the_nodes_own_network() -> None:
    shape = (1, 8, 8)
    own, under = MLP(shape, 3), plain_network(MLP(shape, 3), width=4)
    matching = Matching(steps=3, lr=0.5, real_batch=4, outputs="stages and logits", deep_first=True)
    made = [
        warm(matching=matching, model=model, under=under, data=pictures([6, 4, 5], shape)).images
        for model in (own, under)
    ]
    assert torch.equal(*made)
    client = node(data=pictures([6, 4, 5], shape), model=own)
    first = matching.iterations(client, [0, 1, 2], lambda step: under.init(0), under)[0]
    assert first.emphasis.shape == (4,)  # three blocks and the logits


def test_images_that_start_from_examples_are_examples_of_their_class_and_none_twice() -> None:
    data = pictures([7, 3, 0, 1])
    made = from_real(node(data=data), [0, 1, 3], 5)
    images, labels = made.flat()
    assert labels.tolist() == [0] * 5 + [1] * 3 + [3]
    x, y = data.all()
    places = [[i for i in range(len(x)) if torch.equal(x[i], image)] for image in images]
    assert [len(found) for found in places] == [1] * 9
    assert len({found[0] for found in places}) == 9
    assert [int(y[found[0]]) for found in places] == labels.tolist()


def test_shares_of_a_start_are_equal_and_sum_to_one() -> None:
    made = from_real(node(data=pictures([7, 3, 0, 1])), [0, 1, 3], 5)
    expected = [[1 / 5] * 5, [1 / 3] * 3 + [0, 0], [1, 0, 0, 0, 0]]
    assert torch.allclose(made.share, torch.tensor(expected))
    assert torch.allclose(from_noise(node(), [1, 2], 4).share, torch.full((2, 4), 1 / 4))


def test_another_round_or_client_starts_from_other_examples() -> None:
    data = pictures([50, 50, 50, 50])
    first = from_real(node(data=data), [0, 1], 3).images
    assert torch.equal(first, from_real(node(data=data), [0, 1], 3).images)
    assert not torch.equal(first, from_real(node(data=data, round=2), [0, 1], 3).images)
    assert not torch.equal(first, from_real(node("c1", data), [0, 1], 3).images)


def test_a_start_from_noise_does_not_see_the_data() -> None:
    one = from_noise(node(data=pictures([3, 3, 0, 0])), [0, 1], 4)
    other = from_noise(node(data=pictures([9, 1, 0, 0])), [0, 1], 4)
    assert torch.equal(one.images, other.images)
    assert one.images.shape == (2, 4, *SHAPE)


def test_a_flat_set_leaves_empty_places_out() -> None:
    images = torch.arange(6.0).reshape(2, 3, 1)
    share = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    flat, labels = SyntheticSet(images, share, torch.tensor([4, 7])).flat()
    assert flat.flatten().tolist() == [0, 1, 5]
    assert labels.tolist() == [4, 4, 7]


# Real batches


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    size=st.integers(1, 14),
    steps=st.integers(1, 7),
)
def test_real_batches_hold_own_examples_of_the_class_and_none_twice(
    counts: list[int], size: int, steps: int
) -> None:
    data, classes = pictures(counts), list(range(len(counts)))
    rows, share = real_rows(data, classes, size, steps, generator(0), len(counts))
    assert rows.shape[:2] == (steps, len(classes)) and rows.shape[1:] == share.shape
    assert torch.allclose(share.sum(1), torch.ones(len(classes)))
    for at, c in enumerate(classes):
        expected = min(size, counts[c])
        real = share[at] > 0
        assert int(real.sum()) == expected
        assert torch.allclose(share[at][real], torch.tensor(1 / expected))
        for step in range(steps):
            taken = rows[step, at][real]
            assert len(set(taken.tolist())) == expected
            assert (data.labels[taken] == c).all()


def test_a_small_class_is_taken_whole_at_every_step() -> None:
    data = pictures([20, 3])
    rows, share = real_rows(data, [0, 1], 8, 5, generator(0), 2)
    whole = set(data.by_class(2)[1].tolist())
    assert all(set(rows[step, 1][share[1] > 0].tolist()) == whole for step in range(5))


def test_a_large_class_is_gone_through_before_it_is_shuffled_again() -> None:
    data = pictures([12, 1])
    rows, _ = real_rows(data, [0], 4, 6, generator(0), 2)
    whole = sorted(data.by_class(2)[0].tolist())
    assert sorted(rows[:3].flatten().tolist()) == whole
    assert sorted(rows[3:].flatten().tolist()) == whole


def test_real_batches_are_cut_from_orders_drawn_one_after_another() -> None:
    data = pictures([9, 3])
    rows, _ = real_rows(data, [0, 1], 4, 3, generator(0), 2)
    rng = generator(0)
    orders = [torch.randperm(9, generator=rng)[:8] for _ in range(2)]  # two batches of four each
    own = data.by_class(2)[0]
    assert torch.equal(rows[:, 0], own[torch.cat(orders)].reshape(-1, 4)[:3])


def test_places_are_a_power_of_two_up_to_the_batch_so_that_clients_are_alike() -> None:
    places = [
        real_rows(pictures([n]), [0], 10, 1, generator(0), 1)[0].shape[2] for n in range(1, 13)
    ]
    assert places == [1, 2, 4, 4, 8, 8, 8, 8, 10, 10, 10, 10]


# Augmentation


def operations_of(client: Node[None], steps: int = 40) -> list[str]:
    matching = Matching(steps=steps)
    return [it.only for it in matching.iterations(client, [0, 1], lambda step: network())]


def test_clients_do_the_same_operation_at_the_same_step_each_in_its_own_way() -> None:
    clients = [node(id, pictures([3, 3, 3, 3])) for id in ("c0", "c1")]
    assert operations_of(clients[0]) == operations_of(clients[1])
    assert set(operations_of(clients[0])) == set(augment.OPERATIONS)
    one, other = (Matching(steps=40).iterations(c, [0, 1], lambda step: network()) for c in clients)
    assert any(
        not torch.equal(a.draws.color, b.draws.color) for a, b in zip(one, other, strict=True)
    )


def test_operations_change_from_round_to_round() -> None:
    data = pictures([3, 3, 3, 3])
    assert operations_of(node(data=data)) != operations_of(node(data=data, round=2))


def test_an_augmentation_draws_what_it_names() -> None:
    drawn = augmentations(
        generator(1), generator(2), "flip_rotate", 30, groups=2, image=(8, 8), per_image=5
    )
    assert len(drawn) == 30
    assert {name for name, _ in drawn} == {"flip", "rotate"}
    for name, draws in drawn:
        assert draws.rotate.shape == (2, 5, 1)
        assert bool(draws.rotate.any()) == (name == "rotate")
        assert {augment.OPERATIONS[place] for place in draws.operation.tolist()} == {name}


def test_all_operations_at_once_are_drawn_where_they_are_asked_for() -> None:
    drawn = augmentations(
        generator(1), generator(2), "flip_rotate", 30, groups=2, image=(8, 8), per_image=5,
        mode="multi",
    )  # fmt: skip
    assert [name for name, _ in drawn] == ["flip_rotate"] * 30
    for _, draws in drawn:
        assert draws.operation.tolist() == [-1, -1]
        assert draws.rotate.all() and draws.rotate.abs().max() <= math.radians(15)
        assert (draws.scale == 1).all() and not draws.crop.any()
    flips = torch.stack([draws.flip for _, draws in drawn])
    assert set(flips.unique().tolist()) == {-1.0, 1.0}
    images = some(2, 5, 1, 8, 8)
    for name, draws in drawn:
        one = draws._replace(rotate=torch.zeros_like(draws.rotate))
        turned = augment.apply(augment.apply(images, one), draws._replace(flip=draws.flip.abs()))
        assert torch.allclose(augment.apply(images, draws, only=name), turned, atol=1e-5)


def test_without_augmentation_nothing_is_drawn() -> None:
    drawn = augmentations(generator(1), generator(2), "none", 3, groups=2, image=(8, 8))
    assert [name for name, _ in drawn] == ["none"] * 3
    x = some(2, 4, 1, 8, 8)
    assert all(torch.equal(augment.apply(x, draws), x) for _, draws in drawn)


def test_a_wrong_strategy_is_a_fault_of_its_field() -> None:
    assert strategy_faults("augmentation", "color_flip") == []
    (line,) = strategy_faults("server_augmentation", "flop")
    assert line.startswith("server_augmentation: unknown augmentation 'flop'; did you mean 'flip'?")


# Training


def test_every_epoch_of_training_sees_every_image_once_with_its_weight() -> None:
    data = pictures([4, 3])
    weight = torch.arange(7.0)
    batches = training_batches(node(), data, weight, 3, 2, augment.DEFAULT)
    assert [len(batch.y) for batch in batches] == [3, 3, 1] * 2
    x = data.all().x
    for epoch in (batches[:3], batches[3:]):
        seen = [float(w) for batch in epoch for w in batch.weight]
        assert sorted(seen) == list(range(7))
        for batch in epoch:
            places = batch.weight.long()
            assert torch.equal(batch.x, x[places]) and torch.equal(batch.y, data.labels[places])


def test_each_image_of_a_training_batch_is_changed_in_its_own_way() -> None:
    data = Data.of(some(1, 8, 8).expand(6, 1, 8, 8), torch.zeros(6, dtype=torch.long))
    batches = training_batches(
        node(model=ConvNet((1, 8, 8), 3, depth=1, width=2)), data, torch.ones(6), 6, 1, "color"
    )
    changed = batches[0].augmented()
    assert changed.shape == (6, 1, 8, 8)
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 6


def test_the_parts_of_a_training_have_orders_and_augmentations_of_their_own() -> None:
    data, model = pictures([9], (1, 8, 8)), ConvNet((1, 8, 8), 3, depth=1, width=2)
    client, weight = node(model=model), torch.arange(9.0)
    parts = [
        training_batches(client, data, weight, 9, 1, "color", *part)[0] for part in ((), (0,), (1,))
    ]
    assert torch.equal(parts[0].weight, parts[1].weight)
    assert torch.equal(parts[0].draws.color, parts[1].draws.color)
    assert not torch.equal(parts[0].weight, parts[2].weight)
    assert not torch.equal(parts[0].draws.color, parts[2].draws.color)


def test_training_without_augmentation_leaves_images_as_they_are() -> None:
    batches = training_batches(node(), pictures([4]), torch.ones(4), 2, 1, "none")
    assert all(torch.equal(batch.augmented(), batch.x) for batch in batches)


def test_a_vector_is_not_augmented() -> None:
    assert image_size(MLP((4,), 2)) is None
    assert image_size(MLP((3, 8, 9), 2)) == (8, 9)
    drawn = augmentations(
        generator(0, "choice"), generator(0, "own"), "color_crop", 3, groups=2, image=None
    )
    assert [only for only, _ in drawn] == ["none"] * 3
    x = torch.arange(24.0).reshape(2, 3, 4)  # [class, vector, feature]
    assert torch.equal(augment.apply(x, drawn[0][1], only="none"), x)


def test_iterations_can_be_stacked() -> None:
    client = node(data=pictures([3, 3, 3, 3]))
    made = Matching(steps=3, augmentation="flip").iterations(client, [0, 1], lambda step: network())
    assert trees.shape(made[0]) == trees.shape(made[1])


def test_means_are_matched_in_evaluation_mode_whatever_a_loop_asks_for() -> None:
    model = ConvNet((1, 8, 8), 4, depth=2, width=4, norm="batch")
    client = node(data=pictures([3, 3, 3, 3], model.shape), model=model)
    matching = Matching(steps=1, augmentation="none", outputs="both")
    (step,) = matching.iterations(client, [0, 1], lambda step: model.init(5), model)
    start = from_noise(client, [0, 1], 2)
    notes: Weights = {}
    aim = matching.aim(model.train(notes), step, start.share)
    still, real = model.evaluating, step.real.flatten(0, 1)
    features = still.features(step.network, real)
    for target, seen in zip(
        aim.targets, (features, still.head(step.network, features)), strict=True
    ):
        means = (seen.reshape(2, -1, seen.shape[1]) * step.share.unsqueeze(-1)).sum(1)
        assert torch.allclose(target, means, atol=1e-6)
    loss = matching.objective(model.train(notes), start.images, aim, start.share)
    assert torch.equal(loss, matching.objective(model, start.images, aim, start.share))
    assert notes == {}


def test_a_common_start_is_the_same_for_all_place_by_place() -> None:
    world = worlds.pictures()
    first, second = (
        worlds.engine_for(DeSA(), world).node(c, 0, "synthesize") for c in ("c0", "c1")
    )
    left = from_common_noise(first, [0, 1], 3)
    right = from_common_noise(second, [0, 1, 2], 3)
    assert torch.equal(left.images, right.images[:2])
    later = from_common_noise(second, [2], 3)
    assert torch.equal(later.images[0], right.images[2])
    assert later.classes.tolist() == [2]
    assert later.share.flatten().tolist() == pytest.approx([1 / 3] * 3)
    assert float(right.images.std()) == pytest.approx(1, abs=0.1)
    own = from_noise(first, [0, 1], 3)
    assert not torch.equal(own.images, left.images)


def test_a_set_may_start_from_the_released_statistics() -> None:
    client = node(data=pictures([3, 5, 2, 4]))
    made, noise = from_released_statistics(client, [0, 2], 6), from_noise(client, [0, 2], 6)
    mean, std = released_statistics(client.data, [0, 2], 4)
    assert torch.equal(made.images, scaled(noise.images, mean, std))
    assert made.classes.tolist() == [0, 2]


def test_released_statistics_divide_by_all_images() -> None:
    # Class 0 has the pixels 1 and 3 in one image of four: mean 4/8, mean of squares 10/8.
    x = torch.tensor([[1.0, 3.0], [5.0, 5.0], [0.0, 2.0], [4.0, 4.0]]).reshape(4, 1, 1, 2)
    data = Data.of(x, torch.tensor([0, 1, 1, 1]))
    mean, std = released_statistics(data, [0, 1], 2)
    assert mean.flatten().tolist() == pytest.approx([4 / 8, 20 / 8])
    spread = [(10 / 8 - 0.25) ** 0.5, ((25 + 25 + 4 + 16 + 16) / 8 - 6.25) ** 0.5]
    assert std.flatten().tolist() == pytest.approx(spread)
