"""Layers of networks whose kernels are particular about what they are given."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from fedstill.core.model import batch_norm

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
