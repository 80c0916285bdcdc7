"""By pixel and in half precision a network says what it says, and its gradients are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core.model import Model
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.mlp import MLP
from fedstill.models.preresnet import PreResNet18

NETWORKS = [
    Conv4((1, 16, 16), 5, (4, 8, 8, 12)),
    Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="batch"),
    Conv4((3, 16, 16), 5, (8, 8, 8, 16)).narrowed(0.5, scaler=True),
    PreResNet18((3, 16, 16), 5, (4, 8, 8, 12)),
    AlexNet((1, 28, 28), 5, 8),
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
    return maps, dict(zip(wanted, grads, strict=True)), notes


@pytest.mark.parametrize("model", NETWORKS, ids=repr)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_pass_and_its_gradient_are_those_of_the_plain_operations(
    model: Model, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("fedstill.models.by_pixel.half_will_do", lambda x: half)
    maps, grads, notes = told(model)
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    exact_maps, exact, exact_notes = told(model)
    for one, other in zip(maps, exact_maps, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, atol=0.02 if half else 1e-4)
    floor = 1e-3 if half else 1e-5  # of sums that are nothing but rounding
    for name, other in exact.items():
        one, size = grads[name], float(other.norm())
        assert one.dtype == torch.float32 and one.is_contiguous()
        assert float((one - other).norm()) <= (0.15 if half else 1e-3) * size + floor, name
    assert notes.keys() == exact_notes.keys()
    for name, other in exact_notes.items():
        assert torch.allclose(notes[name], other, atol=0.01 if half else 1e-4)


def test_other_norms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr("fedstill.models.by_pixel.half_will_do", lambda x: True)
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="group")
    found = told(model)[0]
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    assert all(torch.equal(one, other) for one, other in zip(found, told(model)[0], strict=True))


def test_evaluation_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr("fedstill.models.by_pixel.half_will_do", lambda x: True)
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12))
    weights, x = model.init(0), noise(4, 3, 16, 16)
    with torch.no_grad():
        found = model(weights, x)
    monkeypatch.setattr("fedstill.models.by_pixel.plain_on_gpu", lambda *tensors: False)
    with torch.no_grad():
        assert torch.equal(found, model(weights, x))


def test_the_constant_before_a_static_norm_counts_for_nothing() -> None:
    model = Conv4((3, 16, 16), 5, (4, 8, 8, 12))
    weights = model.init(1)
    moved = {n: t + 7 if n == "conv0.bias" else t for n, t in weights.items()}
    assert torch.equal(model(weights, noise(4, 3, 16, 16)), model(moved, noise(4, 3, 16, 16)))


def test_who_takes_half_precision_says_so() -> None:
    assert all(model.takes_half for model in NETWORKS)
    assert not Conv4((3, 16, 16), 5, (4, 8, 8, 12), norm="group").takes_half
    assert not MLP((4,), 3).takes_half
