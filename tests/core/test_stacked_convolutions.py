"""Convolutions of many networks as products say what they say one by one, and so do gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import stacked_convolutions
from fedstill.core.convolutions import Moves
from fedstill.core.seeds import generator
from fedstill.core.stacked_convolutions import as_products

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NETWORKS, IMAGES = 3, 2
WAYS: list[tuple[Any, Any, tuple[int, int]]] = [  # stride, padding, kernel
    (1, 0, (3, 3)),
    (1, 1, (3, 3)),
    (2, 1, (3, 3)),
    ((1, 2), (2, 0), (5, 3)),
]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1, "numbers", *shape), dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    """Whole numbers from -4 to 4."""
    rng = generator(2, "whole numbers", *shape)
    return torch.randint(-4, 5, shape, generator=rng).double()


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def weights_of(kernel: tuple[int, int]) -> list[Tensor]:
    return [noise(NETWORKS, 4, 3, *kernel), noise(NETWORKS, 4), noise(NETWORKS, 2, 4, 3, 3)]


def gradients(
    weights: list[Tensor], images: Tensor, stride: Any, padding: Any, *, common: bool
) -> list[Tensor]:
    """Of each network's loss by its weights, and the losses, under one vmap."""

    def loss(weights: list[Tensor], images: Tensor) -> Tensor:
        maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding).relu()
        return F.max_pool2d(F.conv2d(maps, weights[2]), 2).sin().sum()

    many = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(0, None if common else 0))
    found, losses = many(weights, images)
    return [*found, losses]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks each product was made for."""
    counted: list[int] = []
    plain = stacked_convolutions.convolutions

    def watched(x: Tensor, weight: Tensor, moves: Any) -> Tensor:
        counted.append(len(weight))
        return plain(x, weight, moves)

    monkeypatch.setattr(stacked_convolutions, "convolutions", watched)
    return counted


@pytest.mark.parametrize("common", [False, True], ids=["own images", "common images"])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_products_give_the_numbers_and_gradients_of_convolutions(
    stride: Any, padding: Any, kernel: tuple[int, int], common: bool, asked: list[int]
) -> None:
    weights, images = weights_of(kernel), noise(NETWORKS, IMAGES, 3, 10, 13)
    shown = images[0] if common else images
    plain = gradients(weights, shown, stride, padding, common=common)
    assert not asked
    with as_products():
        made = gradients(weights, shown, stride, padding, common=common)
    assert asked == [NETWORKS, NETWORKS]
    for one, other in zip(plain, made, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_a_single_network_and_other_convolutions_stay_as_they_are(asked: list[int]) -> None:
    images, weight = noise(2, 4, 5, 5), noise(4, 1, 3, 3)
    with as_products():
        alone = torch.func.grad(lambda w: F.conv2d(images, w, groups=4).sum())(weight)
        many = torch.func.vmap(
            torch.func.grad(lambda w: F.conv2d(images, w, groups=4).sum()), in_dims=0
        )(torch.stack([weight, weight]))
    assert torch.allclose(many, alone.expand(2, *alone.shape))
    assert not asked


def test_weights_that_all_networks_share_are_convolved_at_once(asked: list[int]) -> None:
    images, weight, scales = noise(NETWORKS, 2, 3, 6, 6), noise(4, 3, 3, 3), noise(NETWORKS)

    def loss(scale: Tensor, x: Tensor) -> Tensor:
        return (F.conv2d(x, weight) * scale).sum()

    with as_products():
        found = torch.func.vmap(torch.func.grad(loss))(scales, images)
    assert torch.allclose(found, F.conv2d(images.flatten(0, 1), weight).view(NETWORKS, -1).sum(1))
    assert not asked


@needs_a_gpu
@pytest.mark.parametrize("images", [1, 40])  # the latter's weights are sums of several parts
@pytest.mark.parametrize("outputs", [4, 70, 200])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_kernels_on_a_gpu_sum_whole_numbers_exactly(
    stride: Any, padding: Any, kernel: tuple[int, int], outputs: int, images: int
) -> None:
    """Factors from -4 to 4 lose no bits, and no sum of 16 · 40 · 130 is above 2 ** 24."""
    moves = Moves(pair(stride), pair(padding))
    x, weight = whole(NETWORKS, images, 3, 10, 13), whole(NETWORKS, outputs, 3, *kernel)
    made = stacked_convolutions.convolutions(x, weight, moves)
    grad, shape = whole(*made.shape), tuple(x.shape[1:])
    wanted = [
        made,
        stacked_convolutions.weight_gradients(grad, x, kernel, moves),
        stacked_convolutions.image_gradients(grad, weight, shape, moves),
    ]
    x, weight, grad = (tensor.float().cuda() for tensor in (x, weight, grad))
    found = [
        stacked_convolutions.convolutions(x, weight, moves),
        stacked_convolutions.weight_gradients(grad, x, kernel, moves),
        stacked_convolutions.image_gradients(grad, weight, shape, moves),
    ]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(other.double().cpu(), one)


@needs_a_gpu
@pytest.mark.parametrize("outputs", [4, 70])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_kernels_on_a_gpu_give_what_products_give_on_the_host(
    stride: Any, padding: Any, kernel: tuple[int, int], outputs: int
) -> None:
    """Of four products on the way each has two factors, each right to 2 ** -11 of itself.

    No kink lies in between: where a map is close to zero, rounding would turn a ReLU on or off.
    """
    weights = [noise(NETWORKS, outputs, 3, *kernel), noise(NETWORKS, outputs)]
    weights.append(noise(NETWORKS, 2, outputs, 3, 3) / outputs)
    images = noise(NETWORKS, IMAGES, 3, 10, 13)

    def loss(weights: list[Tensor], images: Tensor) -> Tensor:
        maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding)
        return F.conv2d(F.softplus(maps), weights[2]).square().mean()

    many = torch.func.vmap(torch.func.grad_and_value(loss, argnums=(0, 1)))
    (found, to_images), losses = many(weights, images)
    there = [tensor.float().cuda() for tensor in weights]
    with as_products():
        (made, made_images), made_losses = many(there, images.float().cuda())
        again, _ = many(there, images.float().cuda())
    for one, other in zip(
        [*found, to_images, losses], [*made, made_images, made_losses], strict=True
    ):
        apart = (other.double().cpu() - one).abs().max()
        assert apart < 4 * 2 * 2**-11 * one.abs().max()
    assert all(
        torch.equal(a, b) for a, b in zip([*again[0], again[1]], [*made, made_images], strict=True)
    )


@needs_a_gpu
def test_kernels_on_a_gpu_round_both_ways() -> None:
    """Factors that were cut off, not rounded, would make sums 0.07 % smaller in the mean."""
    moves = Moves((1, 1), (0, 0))
    x, weight = noise(NETWORKS, 8, 3, 10, 13).abs(), noise(NETWORKS, 70, 3, 3, 3).abs()
    made = stacked_convolutions.convolutions(x, weight, moves)
    grad = noise(*made.shape).abs()
    told = stacked_convolutions.weight_gradients(grad, x, (3, 3), moves)
    x, weight, grad = (tensor.float().cuda() for tensor in (x, weight, grad))
    found = stacked_convolutions.convolutions(x, weight, moves)
    assert abs(float((found.double().cpu() / made).mean()) - 1) < 1e-4
    found = stacked_convolutions.weight_gradients(grad, x, (3, 3), moves)
    assert abs(float((found.double().cpu() / told).mean()) - 1) < 1e-4


@needs_a_gpu
def test_what_is_not_a_number_is_none_after_kernels_on_a_gpu() -> None:
    moves = Moves((1, 1), (0, 0))
    x, weight = torch.ones(2, 1, 3, 4, 4).cuda(), torch.ones(2, 5, 3, 3, 3).cuda()
    x[1, 0, 0, 0, 0] = x.new_zeros(()) / 0  # as a GPU writes it: all bits set but the sign
    x[1, 0, 0, 3, 3] = float("inf")
    made = stacked_convolutions.convolutions(x, weight, moves)[1, 0, 0]
    assert made.isnan().tolist() == [[True, False], [False, False]]
    assert made[1, 1] == float("inf")
    assert made[0, 1] == 27
