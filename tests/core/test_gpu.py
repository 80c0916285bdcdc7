"""What reaches a device."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.gpu import sent

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_host_the_very_same_tensor_is_sent() -> None:
    numbers = torch.arange(5)
    assert sent(numbers, "cpu") is numbers


@NEEDS_GPU
@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_a_gpu_gets_the_numbers_whatever_becomes_of_the_hosts_own(count: int) -> None:
    numbers = torch.arange(count)
    found = [sent(numbers + shift, "cuda") for shift in range(20)]  # sources are free at once
    for shift, there in enumerate(found):
        assert torch.equal(there.cpu(), numbers + shift)
    assert sent(found[0], "cuda") is found[0]
