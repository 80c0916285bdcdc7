"""Kernels for a stack of ConvNets against the same network in single precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models import convnet
from fedstill.models.convnet import ConvNet

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MEMBERS = 3


def stack(model: ConvNet, device: str = "cuda") -> Weights:
    """Weights of some networks, along a first axis; no norm is at its start."""
    drawn = [model.init(seed) for seed in range(MEMBERS)]
    weights = {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}
    return {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator(7))).to(device)
        if name.startswith("norm")
        else tensor.to(device)
        for name, tensor in weights.items()
    }


def images(model: ConvNet, count: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    x = torch.randn(MEMBERS, count, *model.shape, generator=generator(0))
    y = torch.randint(model.classes, (MEMBERS, count), generator=generator(1))
    return x.to(device), y.to(device)


def grads(model: ConvNet, weights: Weights, x: Tensor, y: Tensor, dims: Any = (0, 0)) -> Any:
    """Gradients of weights and images, and the stages."""

    def loss(weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = model.stages(weights, x)
        return F.cross_entropy(model(weights, x), y) + maps[0].square().mean(), maps

    taken = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    return torch.func.vmap(taken, in_dims=(*dims, 0))(weights, x, y)


@pytest.fixture
def precisely(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A switch between half precision and exact products."""

    def use(precision: str) -> None:
        monkeypatch.setattr("fedstill.core.precision._now", precision)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    return use


@needs_a_gpu
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 16, 16), (8, 16, 16)])
@pytest.mark.parametrize("width", [12, 32, 128])
@pytest.mark.parametrize("shared", ["nothing", "images", "weights"])
def test_gradients_of_a_stack_are_those_of_single_precision_rounded(
    shape: tuple[int, ...], width: int, shared: str, precisely: Any
) -> None:
    model = ConvNet(shape, 10, depth=3, width=width)
    weights, (x, y) = stack(model), images(model, 5)
    dims: Any = (0, 0)
    if shared == "images":
        x, dims = x[0], (0, None)
    if shared == "weights":
        weights, dims = {name: tensor[0] for name, tensor in weights.items()}, (None, 0)
    precisely("half")
    (rough, of_x), maps = grads(model, weights, x, y, dims)
    precisely("single")
    (exact, of_exact), stages = grads(model, weights, x, y, dims)
    for one, other in zip(maps, stages, strict=True):
        assert not torch.equal(one, other) and torch.allclose(one, other, atol=0.02)
    for name, other in (exact | {"x": of_exact}).items():
        one = (rough | {"x": of_x})[name]
        assert one.shape == other.shape and one.dtype == other.dtype
        assert float((one - other).norm()) <= 0.15 * float(other.norm()) + 1e-6, name


@needs_a_gpu
def test_the_kernels_give_the_same_bits_twice(precisely: Any) -> None:
    model = ConvNet((3, 32, 32), 10, width=32)
    weights, (x, y) = stack(model), images(model, 10)
    precisely("half")
    (one, of_one), _ = grads(model, weights, x, y)
    (other, of_other), _ = grads(model, weights, x, y)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(of_one, of_other)


@needs_a_gpu
def test_a_stack_is_recorded_in_a_graph(precisely: Any) -> None:
    model = ConvNet((3, 16, 16), 10, depth=2, width=16)
    weights, (x, y) = stack(model), images(model, 4)
    precisely("half")
    (expected, _), _ = grads(model, weights, x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found, _), _ = grads(model, weights, x, y)
    graph.replay()
    for name in ("conv0.weight", "conv1.weight", "norm0.weight", "norm1.bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)


@needs_a_gpu
def test_a_gradient_of_a_gradient_is_taken_without_them(precisely: Any) -> None:
    model = ConvNet((3, 8, 8), 4, depth=2, width=8)
    weights, (x, y) = stack(model), images(model, 3)

    def slope_length(x: Tensor, weights: Weights, y: Tensor) -> Tensor:
        found = torch.func.grad(lambda moved: F.cross_entropy(model(moved, x), y))(weights)
        return torch.stack([one.square().sum() for one in found.values()]).sum()

    second = torch.func.vmap(torch.func.grad(slope_length))
    precisely("half")
    rough = second(x, weights, y)
    precisely("single")
    assert torch.allclose(rough, second(x, weights, y), rtol=0.02, atol=1e-4)


def test_only_gradients_of_a_stack_are_handed_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nests of transforms count as a stack, told on a CPU by what is asked of tensors."""
    seen: list[bool] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    model = ConvNet((3, 8, 8), 4, depth=2, width=4)

    def loss(weights: Weights, x: Tensor) -> Tensor:
        seen.append(model._in_fours and convnet._stacked_on_gpu(x, *weights.values()))
        return F.linear(x.flatten(1), weights["head.weight"][:, :1].expand(-1, 192)).sum()

    weights, (x, _) = stack(model, "cpu"), images(model, 3, "cpu")
    grad, vmap = torch.func.grad, torch.func.vmap
    vmap(grad(loss))(weights, x)
    vmap(grad(loss), in_dims=(0, None))(weights, x[0])
    assert seen == [True, True]
    seen.clear()
    vmap(loss)(weights, x)
    grad(lambda weights: vmap(loss)(weights, x).sum())(weights)
    vmap(grad(lambda weights, x: grad(loss, argnums=1)(weights, x).sum()))(weights, x)
    one = {name: tensor[0] for name, tensor in weights.items()}
    grad(loss)(one, x[0])
    vmap(vmap(grad(lambda weights, x: loss(weights, x[None])), in_dims=(None, 0)))(weights, x)
    held = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    vmap(grad(loss))(held, x)
    assert seen == [False] * 6


@needs_a_gpu
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (8, 16, 16)])
@pytest.mark.parametrize("width", [12, 128])
def test_images_at_rest_beside_others_change_nothing_of_them(
    shape: tuple[int, ...], width: int, precisely: Any
) -> None:
    model = ConvNet(shape, 5, width=width)
    precisely("half")
    weights = {name: t[0].clone().requires_grad_() for name, t in stack(model).items()}
    x = images(model, 9)[0][0]
    found, still = model.features_beside(weights, x, resting=4)
    alone, rest = model.features(weights, x[:5]), model.features(weights, x[5:])
    assert torch.equal(found, alone) and torch.equal(still, rest)
    assert found.requires_grad and not still.requires_grad
    told = torch.randn(found.shape, generator=generator(2)).to(found.device)
    one, other = (
        torch.autograd.grad(made, list(weights.values()), told, materialize_grads=True)
        for made in (found, alone)
    )
    assert all(torch.equal(*both) for both in zip(one, other, strict=True))
