"""Blocks of a ConvNet in a row, of which some images pass no gradient on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_references import rounded_block, rounded_first_block
from fedstill.core import gpu
from interpreted import needs_triton, noise, untouched
from roundings import near_on_the_whole

pytestmark = needs_triton
# inputs, height, width, paddings; blocks that follow see maps with even sides
IMAGES = (5, 8, 4, (1, 1))  # channels of which there are too many for the kernel of first blocks
FIRST = (3, 4, 8, (1, 1))
NETWORKS = [IMAGES, FIRST, (1, 2, 6, (3,))]
WIDTHS = (9, 17)


def rows() -> Any:
    return gpu.kernels("kernels.rows")


def weights(network: Any) -> list[list[Tensor]]:
    """Of each block: weights, scale and shift."""
    inputs, found = network[0], []
    for outputs, _ in zip(WIDTHS, network[3], strict=False):
        found.append(
            [
                noise(outputs, inputs, 3, 3, of="weight").requires_grad_(),
                noise(outputs, of="scale").requires_grad_(),
                noise(outputs, of="shift").requires_grad_(),
            ]
        )
        inputs = outputs
    return found


def flat(blocks: list[list[Tensor]]) -> list[Tensor]:
    return [one for block in blocks for one in block]


def in_a_row(
    x: Tensor, blocks: list[list[Tensor]], paddings: Any, first: Any, other: Any
) -> Tensor:
    """Maps of blocks, of which the first may be another."""
    for number, (block, padding) in enumerate(zip(blocks, paddings, strict=True)):
        x = (other if number else first)(x, *block, padding)
    return x


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize("resting", [0, 1])
def test_features_and_gradients_are_those_of_the_plain_operations_rounded(
    network: Any, resting: int
) -> None:
    *shape, paddings = network
    x, blocks = noise(3, *shape), weights(network)
    found, still = rows().features(x, blocks, paddings, resting)
    exact = [[one.detach().double().requires_grad_() for one in block] for block in blocks]
    first = rounded_block if network is IMAGES else rounded_first_block
    wanted = in_a_row(x.double(), exact, paddings, first, rounded_block).flatten(1)
    assert found.dtype == still.dtype == torch.float32 and not still.requires_grad
    moving = 3 - resting
    for one, other in ((found, wanted[:moving]), (still, wanted[moving:])):
        assert near_on_the_whole(one, other, roundings=1)
    told = noise(*reversed(found.shape), of="told").t()
    slopes = torch.autograd.grad(found, flat(blocks), told)
    hoped = torch.autograd.grad(wanted[:moving], flat(exact), told.double())
    for one, other in zip(slopes, hoped, strict=True):
        assert near_on_the_whole(one, other, roundings=1)
    assert untouched(x, *(one.detach() for one in flat(blocks)))


@pytest.mark.parametrize("network", [IMAGES, FIRST], ids=str)
def test_images_at_rest_change_no_bit_of_the_others(network: Any) -> None:
    *shape, paddings = network
    x, blocks = noise(3, *shape), weights(network)
    found, still = rows().features(x, blocks, paddings, 1)
    others = gpu.kernels("kernels.stacked_blocks")
    first = others if network is IMAGES else gpu.kernels("kernels.stacked_first")
    alone, rest = (
        others.in_single(in_a_row(one, blocks, paddings, first.block, others.block)).flatten(1)
        for one in (x[:2], x[2:])
    )
    assert torch.equal(found, alone) and torch.equal(still, rest)
    told = noise(*found.shape, of="told")
    pairs = (torch.autograd.grad(made, flat(blocks), told) for made in (found, alone))
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize("network", [IMAGES, FIRST], ids=str)
def test_where_all_images_rest_nobody_tells_weights_anything(network: Any) -> None:
    *shape, paddings = network
    x, blocks = noise(2, *shape), weights(network)
    found, still = rows().features(x, blocks, paddings, 2)
    assert found.shape == (0, still.shape[1]) and len(still) == 2
    slopes = torch.autograd.grad(found.sum(), flat(blocks))
    for slope, one in zip(slopes, flat(blocks), strict=True):
        assert slope.shape == one.shape and not slope.any()


def test_there_is_no_gradient_of_a_gradient() -> None:
    x, blocks = noise(1, *IMAGES[:3]), weights(IMAGES)
    found, _ = rows().features(x, blocks, IMAGES[3], 0)
    told = noise(*found.shape, of="told").requires_grad_()
    (slope,) = torch.autograd.grad(found, blocks[0][0], told, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()
