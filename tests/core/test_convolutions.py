"""A convolution as a matrix product has the values and gradients of a convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.convolutions import as_products


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1}, {"padding": (3, 1)}, {"stride": 2}, {"stride": (2, 1), "padding": 2},
     {"dilation": 2}, {"groups": 2}, {"padding": "same"}],
)  # fmt: skip
def test_gradients_of_single_examples_are_those_of_a_convolution(options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, 9, 8, generator=rng)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, 3, generator=rng)
    bias = torch.randn(6, generator=rng)

    def loss(weights: tuple[Tensor, Tensor], example: Tensor) -> Tensor:
        return F.conv2d(example.unsqueeze(0), *weights, **options).square().sum()

    each = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(None, 0))
    (want, wanted_bias), losses = each((weight, bias), x)
    with as_products():
        (found, found_bias), again = each((weight, bias), x)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found_bias, wanted_bias, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(again, losses, rtol=1e-4, atol=1e-3)


def test_outside_nothing_has_changed() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with as_products():
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before
