"""What reaches a device, and which GPUs kernels are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedstill.core import gpu
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


OLD, NEW = [(6, 1), (7, 0), (7, 5)], [(8, 0), (8, 6), (9, 0), (12, 0)]


def there(index: int) -> Any:
    """As much of a tensor on a GPU as is looked at."""
    return SimpleNamespace(device=torch.device("cuda", index))


@pytest.mark.parametrize("known", [*OLD, *NEW], ids=str)
def test_kernels_are_for_gpus_that_are_new_enough(
    known: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_loaded", lambda module: module)
    monkeypatch.setattr(gpu, "_capability", [known, (9, 0)].__getitem__)
    wanted = None if known in OLD else "kernels.blocks"
    assert gpu.kernels("kernels.blocks", there(0)) == wanted
    assert gpu.kernels("kernels.blocks", there(1)) == "kernels.blocks"
    assert gpu.kernels("kernels.blocks", there(1), there(0)) == wanted
    assert gpu.kernels("kernels.blocks", torch.ones(1)) == "kernels.blocks"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for current, said in enumerate([wanted, "kernels.blocks"]):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert gpu.kernels("kernels.blocks") == said
        assert gpu.is_too_old(torch.device("cuda")) == (said is None)


def test_the_generation_of_a_gpu_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", {7: (7, 5)}.__getitem__)
    gpu._capability.cache_clear()
    assert gpu.capability(torch.device("cuda:7")) == (7, 5)
    gpu._capability.cache_clear()
