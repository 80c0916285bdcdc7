"""Pools of many networks at once are the framework's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.seeds import generator
from fedstill.core.stacked_layers import as_one, picked

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NETWORKS = 3


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(3, "numbers", *shape), dtype=torch.float64)


def test_of_each_window_the_number_is_picked_that_was_the_largest() -> None:
    """Two windows; what is left over of five columns is in none."""
    maps = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]])
    assert picked(maps, torch.tensor([[1, 2]])).tolist() == [[2.0, 8.0]]


@needs_a_gpu
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 3)])
def test_pools_on_a_gpu_are_the_frameworks_to_the_bit(size: tuple[int, int]) -> None:
    """Ties, and what is not a number, among them; and gradients of gradients."""
    maps = (noise(NETWORKS, 2, 5, *size) * 2).round().float().cuda()
    maps[0, 0, 0, 0, 1] = float("nan")
    rows = noise(NETWORKS, 2, 5, size[0] // 2, size[1] // 2).float().cuda()

    def loss(scale: Tensor, maps: Tensor, rows: Tensor) -> Tensor:
        return (F.max_pool2d(scale * maps, 2).sin() * rows).nansum()

    def penalty(scale: Tensor, maps: Tensor, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            (told,) = torch.autograd.grad(
                loss(scale, maps.nan_to_num(), rows), [scale], create_graph=True
            )
        return told.square().sum()

    scales = noise(NETWORKS, 5, *size).abs().float().cuda() + 1
    for objective in (loss, penalty):
        many = torch.func.vmap(torch.func.grad_and_value(objective))
        wanted = many(scales, maps, rows)
        with as_one():
            found = many(scales, maps, rows)
        for one, other in zip(wanted, found, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert objective is penalty or torch.equal(one.nan_to_num(), other.nan_to_num())
