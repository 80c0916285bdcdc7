"""A block on a CPU gives what torch's single operations give, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core.seeds import generator
from fedstill.models import pooled_blocks
from fedstill.models.convnet import ConvNet
from fedstill.models.pooled_blocks import norm_relu_pool, unfolded

SHAPES = [(3, 5, 8, 8), (2, 4, 7, 6), (2, 4, 6, 9), (1, 1, 2, 2), (4, 3, 32, 32), (0, 3, 4, 4)]


def inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = generator(2)
    maps = torch.randn(*shape, generator=draw, dtype=torch.float64)
    scale, shift = torch.randn(2, shape[1], generator=draw, dtype=torch.float64)
    return maps, scale, shift


def wanting(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_block_is_its_operations(shape: tuple[int, ...]) -> None:
    given = inputs(*shape)
    with torch.no_grad():
        alone = norm_relu_pool(*given)
    trained = norm_relu_pool(*wanting(*given))
    assert torch.equal(alone, unfolded(*given)) and torch.equal(trained, alone)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_the_operations(shape: tuple[int, ...]) -> None:
    ours, theirs = wanting(*inputs(*shape)), wanting(*inputs(*shape))
    made, expected = norm_relu_pool(*ours), unfolded(*theirs)
    grad = torch.randn(made.shape, generator=generator(4), dtype=torch.float64)
    found = torch.autograd.grad(made, ours, grad)
    for one, other in zip(found, torch.autograd.grad(expected, theirs, grad), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_gradients_are_those_of_the_operations() -> None:
    def twice(block: object) -> list[Tensor]:
        maps, scale, shift = wanting(*inputs(2, 3, 6, 6))
        assert callable(block)
        slopes = torch.autograd.grad(
            block(maps, scale, shift).square().sum(), (maps, scale), create_graph=True
        )
        total = sum((slope.square().sum() for slope in slopes), torch.zeros(()))
        return list(torch.autograd.grad(total, (maps, scale, shift)))

    for one, other in zip(twice(norm_relu_pool), twice(unfolded), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("asked", [[0], [1], [2], [0, 2]], ids=str)
def test_only_what_is_asked_for_gets_a_gradient(asked: list[int]) -> None:
    ours, theirs = inputs(2, 3, 4, 4), inputs(2, 3, 4, 4)
    for index in asked:
        ours[index].requires_grad_()
        theirs[index].requires_grad_()
    norm_relu_pool(*ours).square().sum().backward()
    unfolded(*theirs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad)


def test_maps_in_another_order_and_what_is_no_number_are_taken_as_they_are() -> None:
    maps, scale, shift = inputs(2, 3, 6, 6)
    turned = maps.to(memory_format=torch.channels_last)
    assert torch.equal(norm_relu_pool(turned, scale, shift), norm_relu_pool(maps, scale, shift))
    maps[1, 2, 3, 3] = torch.nan
    made = norm_relu_pool(maps, scale, shift)
    assert made[1, 2].isnan().all() and made.isnan().sum() == made[1, 2].numel()


def test_a_convnet_computes_its_blocks_so_on_a_cpu_and_plainly_under_a_transform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = ConvNet((3, 8, 8), 4, depth=2, width=5)
    weights = network.init(0)
    x = torch.randn(6, 3, 8, 8, generator=generator(5))
    calls: list[Tensor] = []

    def counted(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        calls.append(maps)
        return norm_relu_pool(maps, scale, shift)

    monkeypatch.setattr(pooled_blocks, "norm_relu_pool", counted)
    alone = network(weights, x)
    assert len(calls) == 2
    stacked = torch.func.vmap(lambda one: network(weights, one))(x[:, None])
    assert len(calls) == 2
    torch.testing.assert_close(stacked[:, 0], alone, rtol=1e-4, atol=1e-5)
