"""Layers of networks whose kernels are particular about what they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedstill.core import algebra
from fedstill.core.model import batch_norm
from fedstill.core.seeds import generator
from fedstill.models.conv4 import Conv4

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("given", [False, True])
def test_a_stack_of_maps_is_normalised_as_each_alone(device: str, channels: int, given: bool):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, channels, 6, 6, generator=rng).to(device)  # [client, example, …]
    weight, bias, mean = torch.randn(3, 2, channels, generator=rng).to(device)

    def normalised(x, weight, bias, mean):
        statistics = (mean, weight.square() + 1) if given else (None, None)
        return batch_norm(x, *statistics, weight, bias)

    stacked = vmap(normalised)(x, weight, bias, mean)
    for client in range(2):
        alone = normalised(x[client], weight[client], bias[client], mean[client])
        assert torch.allclose(stacked[client], alone, atol=1e-5)
    if not given:  # of the batch: no mean is left but the bias
        assert torch.allclose(stacked.mean((1, 3, 4)), bias, atol=1e-5)


def test_a_single_value_is_zero_when_it_is_normalised_by_itself() -> None:
    x, weight, bias = torch.tensor([[5.0, -7.0]]), torch.tensor([2.0, 3.0]), torch.tensor([0.5, 1])
    assert batch_norm(x, None, None, weight, bias).tolist() == [[0.5, 1.0]]
    assert batch_norm(x[..., None, None], None, None, weight, bias).flatten().tolist() == [0.5, 1.0]
    assert batch_norm(x, None, None, None, None).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("norm", ["batch", "static"])
def test_a_last_batch_of_one_image_trains_where_maps_are_single_points(norm: Any) -> None:
    model = Conv4((1, 8, 8), 3, widths=(2, 2, 2, 2), norm=norm)  # 8x8, 4x4, 2x2, 1x1
    weights, x = model.init(0), torch.randn(1, 1, 8, 8, generator=generator(0))
    notes: dict[str, Tensor] = {}
    logits = model.train(notes)(weights, x)
    assert torch.isfinite(logits).all()
    if norm == "static":
        assert torch.equal(model(weights, x), logits)
        model.recording(notes)(weights, x)
        assert notes["norm3.running_var"].tolist() == [0.0, 0.0]
    else:  # of one value there is nothing to note
        assert {*notes} == {f"norm{i}.running_{of}" for i in range(3) for of in ("mean", "var")}
    grad = torch.func.grad(lambda w: model.train()({**weights, **w}, x).square().sum())(
        algebra.parameters(weights)
    )
    assert all(torch.isfinite(tensor).all() for tensor in grad.values())
