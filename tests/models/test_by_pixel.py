"""By pixel and in half precision a network says what it says, and its gradients are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core.model import Model
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models import by_pixel
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.preresnet import PreResNet18
from fedstill.models.resnet import ResNet18

NETWORKS = [
    Conv4((1, 16, 16), 5, (4, 8, 8, 12)),
    Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="batch"),
    Conv4((3, 16, 16), 5, (8, 8, 8, 16)).narrowed(0.5, scaler=True),
    Conv4((3, 20, 18), 5, (4, 8, 8, 12), last_pool=True),
    PreResNet18((3, 16, 16), 5, (4, 8, 8, 12)),
    AlexNet((1, 28, 28), 5, 8),
]
BY_KERNELS = [  # instance norm by pixel, alone, with what is added to it, and of large maps
    Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="instance"),
    PreResNet18((3, 32, 32), 5, (4, 8, 8, 12), norm="instance"),
    ResNet18((3, 16, 16), 5),
    ResNet18((1, 72, 80), 5, stem="imagenet"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(3))


def told(model: Model) -> tuple[list[Tensor], dict[str, Tensor], Weights]:
    """Maps, gradients of images and weights, and notes, from one pass."""
    weights = {name: t.to(DEVICE) for name, t in model.init(1).items()}
    moving = {name: t.requires_grad_() for name, t in weights.items() if "running" not in name}
    x = noise(6, *model.shape).to(DEVICE).requires_grad_()
    notes: Weights = {}
    learning = model.train(notes)
    maps = learning.stages(weights | moving, x)
    logits = learning.head(weights, maps[-1].flatten(1))
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(6, device=DEVICE) % 5)
    wanted = {"x": x, **moving}
    grads = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return [one.detach() for one in maps], dict(zip(wanted, grads, strict=True)), notes


@pytest.mark.parametrize("model", NETWORKS + BY_KERNELS, ids=repr)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_pass_and_its_gradient_are_those_of_the_plain_operations(
    model: Model, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("fedstill.models.by_pixel.pass_will_do", lambda x: half)
    maps, grads, notes = told(model)
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    exact_maps, exact, exact_notes = told(model)
    deep = model in BY_KERNELS  # norms over few pixels, one after another: roundings add up
    for one, other in zip(maps, exact_maps, strict=True):
        assert one.dtype == torch.float32
        if half and deep:
            assert float((one - other).norm()) <= 0.1 * float(other.norm())
        else:
            assert torch.allclose(one, other, atol=0.02 if half else 1e-3 if deep else 1e-4)
    floor = 1e-3 if half else 1e-5  # of sums that are nothing but rounding
    # Where roundings add up, a ReLU at its kink may fall to the other side.
    most = (0.5 if deep else 0.15) if half else (0.02 if deep else 1e-3)
    for name, other in exact.items():
        one, size = grads[name], float(other.norm())
        assert one.dtype == torch.float32 and one.is_contiguous()
        assert float((one - other).norm()) <= most * size + floor, name
    assert notes.keys() == exact_notes.keys()
    for name, other in exact_notes.items():
        assert torch.allclose(notes[name], other, atol=0.01 if half else 1e-4)


@pytest.mark.parametrize("model", BY_KERNELS, ids=repr)
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_gradients_of_gradients_pass_through_instance_norm_by_pixel(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def bent() -> Tensor:
        weights = {n: t.to(DEVICE).requires_grad_() for n, t in model.init(1).items()}
        x = noise(3, *model.shape).to(DEVICE).requires_grad_()
        loss = model(weights, x).square().sum()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        length = torch.stack([slope.square().sum() for slope in slopes]).sum()
        return torch.autograd.grad(length, x)[0]

    found = bent()
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    exact = bent()
    assert float((found - exact).norm()) <= 0.1 * float(exact.norm())


def test_other_norms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr("fedstill.models.by_pixel.pass_will_do", lambda x: True)
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="group")
    found = told(model)[0]
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    assert all(torch.equal(one, other) for one, other in zip(found, told(model)[0], strict=True))


def test_evaluation_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr("fedstill.core.precision.half_will_do", lambda x: True)
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12))
    weights, x = model.init(0), noise(4, 3, 16, 16)
    with torch.no_grad():
        found = model(weights, x)
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    with torch.no_grad():
        exact = model(weights, x)
    assert torch.allclose(found, exact, rtol=0, atol=1e-6)  # half precision is off by 1e-3


@pytest.mark.parametrize("model", [*NETWORKS, *BY_KERNELS, ConvNet((3, 32, 32), 5, width=24)])
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_evaluation_by_pixel_gives_the_logits_of_the_plain_operations(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("fedstill.core.precision._now", "half")
    weights = {name: t.to(DEVICE) for name, t in model.init(1).items()}
    x = noise(6, *model.shape).to(DEVICE)
    with torch.no_grad():
        found = model(weights, x)
        monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
        monkeypatch.setattr("fedstill.core.gpu.plain_on_gpu", lambda *tensors: False)
        exact = model(weights, x)
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", [*NETWORKS, *BY_KERNELS, ConvNet((3, 32, 32), 5, width=24)])
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_evaluation_in_half_precision_throughout_is_the_unrounded_one_but_for_rounding(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    weights = {name: t.to(DEVICE) for name, t in model.init(1).items()}
    x = noise(6, *model.shape).to(DEVICE)
    with torch.no_grad():
        exact = model(weights, x)
        monkeypatch.setattr("fedstill.core.precision._now", "half_throughout")
        found = model(weights, x)
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert float((found - exact).norm()) <= 0.1 * float(exact.norm())


def test_the_constant_before_a_static_norm_counts_for_nothing() -> None:
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12))
    weights = model.init(1)
    moved = {n: t + 7 if n == "conv0.bias" else t for n, t in weights.items()}
    assert torch.equal(model(weights, noise(4, 3, 16, 16)), model(moved, noise(4, 3, 16, 16)))


def test_images_and_weights_enter_half_precision_with_zeros_after_their_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_pixel, "plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr(by_pixel, "pass_will_do", lambda x: True)
    images, weight = noise(2, 3, 6, 5).requires_grad_(), noise(4, 3, 3, 3).requires_grad_()
    weights, x, _ = by_pixel.entered({"conv": weight}, images, first="conv", norm="none")
    for one, other in ((images, x), (weight, weights["conv"])):
        assert other.dtype == torch.float16 and other.shape[1] == 8
        assert other.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(other[:, :3], one.half()) and not other[:, 3:].any()
        told = noise(*other.shape).half()
        (slope,) = torch.autograd.grad(other, one, told)
        assert slope.dtype == torch.float32 and slope.is_contiguous()
        assert torch.equal(slope * by_pixel.GAIN, told[:, :3].float())


def test_no_constant_before_a_static_norm_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    entered = by_pixel.entered

    def noted(weights: Weights, *args: Any, **options: Any) -> Any:
        names.extend(weights)
        return entered(weights, *args, **options)

    monkeypatch.setattr("fedstill.models.conv4.entered", noted)
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12))
    model(model.init(1), noise(4, 3, 16, 16))
    assert "conv0.weight" in names and not any(f"conv{block}.bias" in names for block in range(4))


def test_who_takes_half_precision_says_so() -> None:
    assert all(model.takes_half for model in NETWORKS)
    assert not Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="group").takes_half
    assert not MLP((4,), 3).takes_half
