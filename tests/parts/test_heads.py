"""Layers before the head: what they compute, how they start, and that the rest is untouched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedstill.core import trees
from fedstill.core.model import Model
from fedstill.core.seeds import generator
from fedstill.models import MLP, AlexNet, ConvNet
from fedstill.parts.heads import common_width, pooled, projected, with_features

SMALL: list[Model] = [
    MLP((6,), 3, hidden=(5,)),
    ConvNet((2, 8, 8), 3, depth=2, width=4),
    ConvNet((2, 8, 8), 3, depth=2, width=4, norm="batch"),
]


def images(model: Model, count: int, *names: int) -> Tensor:
    return torch.randn(count, *model.shape, generator=generator(3, *names))


def test_features_are_linear_relu_linear_of_the_features_below() -> None:
    base = MLP((6,), 3, hidden=(5,))
    model = projected(base, 4, 2)
    weights, x = model.init(0), images(base, 7)
    below = base.features(weights, x)
    hidden = (below @ weights["projection0.weight"].T + weights["projection0.bias"]).clamp(min=0)
    features = hidden @ weights["projection1.weight"].T + weights["projection1.bias"]
    assert torch.allclose(model.features(weights, x), features, atol=1e-6)
    assert features.min() < 0  # nothing is cut off after the last layer
    logits = features @ weights["head.weight"].T + weights["head.bias"]
    assert torch.allclose(model(weights, x), logits, atol=1e-6)


@pytest.mark.parametrize("base", SMALL, ids=repr)
def test_the_layers_below_start_as_they_do_without_a_projection(base: Model) -> None:
    plain, more = base.init(5), projected(base, 7).init(5)
    for name, tensor in plain.items():
        if not name.startswith("head."):
            assert torch.equal(more[name], tensor)
    assert more["projection0.weight"].shape == (7, base.feature_width)
    assert more["head.weight"].shape == (3, 7)
    assert list(more)[-2:] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("base", SMALL, ids=repr)
def test_stacked_networks_equal_the_networks_one_by_one(base: Model) -> None:
    learner = projected(base, 6, 4).train()
    weights = [learner.init(seed) for seed in range(2)]
    x = torch.stack([images(base, 3, client) for client in range(2)])
    slope = grad(lambda w, x: learner(w, x).square().mean())
    together = vmap(slope)(trees.stack(weights), x)
    for client in range(2):
        for name, alone in slope(weights[client], x[client]).items():
            assert torch.allclose(together[name][client], alone, atol=1e-5)


def test_statistics_below_are_noted_in_training_and_used_in_evaluation() -> None:
    base = SMALL[2]
    model, x = projected(base, 4), images(base, 9)
    weights = model.init(0)
    notes: dict[str, Tensor] = {}
    trained = model.train(notes).features(weights, x)
    assert {name.rsplit(".", 1)[1] for name in notes} == {"running_mean", "running_var"}
    assert not torch.equal(trained, model.train().evaluating.features(weights, x))
    assert torch.equal(model.features(weights, x), model.train().evaluating.features(weights, x))


def test_projected_networks_are_values_that_can_be_compared_and_hashed() -> None:
    base = SMALL[1]
    assert projected(base, 4) == projected(base.on("cpu"), 4)
    assert projected(base.train(), 4).evaluating == projected(base, 4)
    assert projected(base, 4) != projected(base, 5) != projected(SMALL[2], 5)
    assert len({projected(base, 4), projected(base, 4)}) == 1


def test_widths_are_those_of_the_papers() -> None:
    assert ConvNet((3, 32, 32), 10).feature_width == 2048
    assert AlexNet((3, 32, 32), 10).feature_width == 3072


def test_a_layer_is_added_only_where_widths_differ() -> None:
    narrow, wide = MLP((6,), 3, hidden=(5,)), MLP((6,), 3, hidden=(9,))
    assert common_width([narrow, narrow], 7) == 5
    assert common_width([narrow, MLP((6,), 3, hidden=(8, 5))], 7) == 5
    assert common_width([narrow, wide], 7) == 7
    assert with_features(narrow, 5) is narrow
    assert with_features(narrow, 7) == projected(narrow, 7)


def test_pooled_features_are_means_of_neighbours_and_add_nothing_to_learn() -> None:
    base = MLP((6,), 3, hidden=(8,))
    model = pooled(base, 4)
    weights, x = model.init(0), images(base, 5)
    below = base.features(weights, x)
    expected = torch.stack([below[:, 2 * i : 2 * i + 2].mean(1) for i in range(4)], 1)
    assert torch.allclose(model.features(weights, x), expected, atol=1e-6)
    plain = base.init(0)
    assert [name for name in weights if name not in plain] == []
    assert torch.equal(weights["layer0.weight"], plain["layer0.weight"])
    assert weights["head.weight"].shape == (3, 4)


def test_networks_of_other_widths_are_joined_by_a_layer_or_by_means() -> None:
    base = ConvNet((2, 8, 8), 3, depth=2, width=4)
    assert with_features(base, base.feature_width, "pooled") is base
    assert with_features(base, 5) == projected(base, 5)
    assert with_features(base, 5, "pooled") == pooled(base, 5)
    assert pooled(base, 5).feature_width == 5
