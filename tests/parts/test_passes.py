"""Batches shown together say what they say apart."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import Weights
from fedstill.core.seeds import generator
from fedstill.models import AlexNet, ConvNet
from fedstill.parts import passes
from fedstill.parts.passes import all_seen, features_at_rest

SHAPE = (1, 8, 8)
ALONE = [ConvNet(SHAPE, 3, depth=1, width=4), AlexNet(SHAPE, 3, width=4)]
MIXED = ConvNet(SHAPE, 3, depth=1, width=4, norm="batch")
FIRST, SECOND, THIRD = (
    torch.randn(count, *SHAPE, generator=generator(count, "images")) for count in (5, 3, 2)
)
NONE = FIRST[:0]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "plain_on_gpu", lambda *tensors: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("model", ALONE, ids=lambda model: model.title)
def test_one_pass_over_both_gives_what_each_gives_alone(
    model: ConvNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, shown = model.init(0), []
    plain = type(model).features

    def watched(self: ConvNet, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        shown.append(len(x))
        return plain(self, weights, x)

    monkeypatch.setattr(type(model), "features", watched)
    features, first, second, resting = all_seen(model, weights, FIRST, SECOND, NONE)
    assert shown == [8] and len(resting) == 0
    assert torch.allclose(features, plain(model, weights, FIRST), atol=1e-6)
    assert torch.allclose(first, model(weights, FIRST), atol=1e-6)
    assert torch.allclose(second, model(weights, SECOND), atol=1e-6)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("model", ALONE, ids=lambda model: model.title)
def test_what_rests_beside_others_has_its_own_features_and_no_gradient(model: ConvNet) -> None:
    weights = {name: tensor.requires_grad_() for name, tensor in model.init(0).items()}
    features, first, second, resting = all_seen(model, weights, FIRST, SECOND, THIRD)
    assert not resting.requires_grad and len(resting) == 2
    assert torch.allclose(resting, model.features(weights, THIRD), atol=1e-6)
    assert torch.allclose(second, model(weights, SECOND), atol=1e-6)
    alone = model.features(weights, FIRST).sum() + model(weights, FIRST).sum()
    found, wanted = (
        torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        for loss in (features.sum() + first.sum(), alone)
    )
    assert all(torch.allclose(*both, atol=1e-4) for both in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_network_that_mixes_examples_sees_the_batches_apart() -> None:
    weights, notes, alone = MIXED.init(0), {}, {}  # type: ignore[var-annotated]
    features, first, second, resting = all_seen(MIXED.train(notes), weights, FIRST, SECOND, THIRD)
    assert torch.equal(features, MIXED.train(alone).features(weights, FIRST))
    assert torch.equal(first, MIXED.train()(weights, FIRST))
    assert torch.equal(second, MIXED.train()(weights, SECOND))
    assert torch.equal(resting, MIXED.train().features(weights, THIRD))
    assert all(torch.equal(notes[name], alone[name]) for name in alone)  # of the first alone


def test_a_cpu_sees_the_batches_apart_and_gets_the_very_same() -> None:
    model = ALONE[0]
    weights = model.init(0)
    features, first, second, resting = all_seen(model, weights, FIRST, SECOND, THIRD)
    assert torch.equal(features, model.features(weights, FIRST))
    assert torch.equal(first, model(weights, FIRST))
    assert torch.equal(second, model(weights, SECOND))
    assert torch.equal(resting, model.features(weights, THIRD))


def test_examples_at_rest_leave_no_notes() -> None:
    weights, notes, alone = MIXED.init(0), {}, {}  # type: ignore[var-annotated]
    both = torch.cat([FIRST, THIRD])
    found, still = MIXED.train(notes).features_beside(weights, both, resting=2)
    assert torch.equal(found, MIXED.train(alone).features(weights, FIRST))
    assert torch.equal(still, MIXED.train().features(weights, THIRD))
    assert all(torch.equal(notes[name], alone[name]) for name in alone)


def test_features_at_rest_pass_no_gradient_on() -> None:
    model = ALONE[0]
    weights = {name: tensor.requires_grad_() for name, tensor in model.init(0).items()}
    made = features_at_rest(model, weights, FIRST)
    assert not made.requires_grad
    assert torch.equal(made, model.features(weights, FIRST).detach())
