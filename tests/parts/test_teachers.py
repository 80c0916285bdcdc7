"""Teachers asked together say what each says alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Model, Weights, precision
from fedstill.core.seeds import generator
from fedstill.models import Conv4, ConvNet, PreResNet18, ResNet18
from fedstill.models.by_pixel import _Turned
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


OF_HALVES = [
    Conv4((3, 16, 16), 4, widths=(4, 8, 8, 12)),
    Conv4((8, 16, 16), 4, widths=(4, 8, 8, 12), norm="batch"),
    PreResNet18((3, 16, 16), 4, widths=(4, 8, 8, 12)),
    ResNet18((1, 16, 16), 4, norm="batch"),
]


@pytest.mark.parametrize("model", OF_HALVES, ids=repr)
def test_weights_of_teachers_are_halved_once_for_all_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they would be in each. Tensors on the host are taken for a GPU's."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    monkeypatch.setattr("fedstill.models.by_pixel.kernels", lambda *given: None)
    x = torch.randn(4, *model.shape, generator=generator(0, "images")).requires_grad_()
    ensemble, own = Ensemble.of([model] * 2), [model.init(seed) for seed in range(2)]
    turn, casts = _Turned.forward, list[torch.Size]()

    def noted(ctx: Any, tensor: Tensor, dtype: torch.dtype, *others: Any) -> Tensor:
        if tensor.dtype != dtype:
            casts.append(tensor.shape)
        return turn(ctx, tensor, dtype, *others)

    with precision.using("half"):
        stacks = ensemble.stacked(own)
        halved = [tensor for each in stacks[0].halved for tensor in each.values()]
        assert halved and all(tensor.dtype == torch.float16 for tensor in halved)
        monkeypatch.setattr(_Turned, "forward", noted)
        found = ensemble.logits(stacks, x)
        assert casts == [x.shape] * 2
        wanted = torch.stack([model(weights, x) for weights in own])
        assert torch.equal(found, wanted) and found.dtype == torch.float32
        (slope,) = torch.autograd.grad(found.square().sum(), x)
        assert torch.equal(slope, torch.autograd.grad(wanted.square().sum(), x)[0])
        with torch.no_grad():  # nothing is rounded
            exact = ensemble.logits(stacks, x)
            assert torch.equal(exact, torch.stack([model(weights, x) for weights in own]))
            assert not torch.equal(exact, found)
    assert not any(ensemble.stacked(own)[0].halved)  # where nobody asks for it


def test_on_a_cpu_weights_of_teachers_are_as_they_are() -> None:
    with precision.using("half"):
        stacks = Ensemble.of(OF_HALVES[:1]).stacked([OF_HALVES[0].init(0)])
    assert stacks[0].halved == [{}]
