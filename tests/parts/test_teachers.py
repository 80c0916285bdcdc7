"""Teachers asked together say what each says alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core import Weights
from fedstill.core.seeds import generator
from fedstill.models import ConvNet
from fedstill.parts.teachers import Ensemble, has_statistics

SMALL, WIDE = (ConvNet((1, 8, 8), 3, depth=1, width=width, norm="batch") for width in (2, 4))
MODELS = [SMALL, WIDE, SMALL, WIDE, SMALL]


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=generator(0, "images"))


def weights(models: list[ConvNet]) -> list[Weights]:
    some = [model.init(place) for place, model in enumerate(models)]
    for place, each in enumerate(some):  # statistics of their own
        rng = generator(place)
        each["norm0.running_mean"] = torch.randn(each["norm0.running_mean"].shape, generator=rng)
        each["norm0.running_var"] = 1 + torch.rand(each["norm0.running_var"].shape, generator=rng)
    return some


def test_teachers_of_two_architectures_in_turn_are_asked_in_two_passes() -> None:
    ensemble, own, x = Ensemble.of(MODELS), weights(MODELS), images()
    assert [places for _, places in ensemble.groups] == [(0, 2, 4), (1, 3)]
    said = ensemble.logits(ensemble.stacked(own), x)
    for place, model in enumerate(MODELS):
        assert torch.allclose(said[place], model(own[place], x), atol=1e-6)


def test_gaps_are_the_distances_of_the_norms_from_their_statistics() -> None:
    ensemble, own, x = Ensemble.of(MODELS), weights(MODELS), images()
    said, gaps = ensemble.logits_and_gaps(ensemble.stacked(own), x)
    assert torch.allclose(said, ensemble.logits(ensemble.stacked(own), x), atol=1e-6)
    for place, each in enumerate(own):
        maps = torch.nn.functional.conv2d(
            x, each["conv0.weight"], each["conv0.bias"], padding=1
        )  # what the only norm sees
        mean, var = maps.mean((0, 2, 3)), maps.var((0, 2, 3), unbiased=False)
        by_hand = (mean - each["norm0.running_mean"]).norm()
        by_hand = by_hand + (var - each["norm0.running_var"]).norm()
        assert float(gaps[place]) == pytest.approx(float(by_hand), rel=1e-5)


def test_gradients_reach_the_images_through_logits_and_gaps() -> None:
    ensemble = Ensemble.of(MODELS)
    stacks = ensemble.stacked(weights(MODELS))

    def loss(x: Tensor, which: int) -> Tensor:
        return ensemble.logits_and_gaps(stacks, x)[which].sum()

    for which in (0, 1):
        grad = torch.func.grad(lambda x, which=which: loss(x, which))(images())
        assert torch.isfinite(grad).all() and grad.abs().sum() > 0


def test_networks_without_batch_norm_have_no_gap() -> None:
    model = ConvNet((1, 8, 8), 3, depth=1, width=2)
    ensemble, own = Ensemble.of([model, model]), [model.init(0), model.init(1)]
    assert not any(map(has_statistics, own))
    assert has_statistics(SMALL.init(0))
    _, gaps = ensemble.logits_and_gaps(ensemble.stacked(own), images())
    assert gaps.tolist() == [0, 0]
