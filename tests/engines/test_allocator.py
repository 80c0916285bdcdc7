"""The memory of the host: kept while a run lasts, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fedstill.engines import allocator as host

ROUNDS = """
import resource, torch
from fedstill.engines.allocator import memory_kept

def new_pages() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**18) for _ in range(40)]  # 40 MiB, ten thousand pages
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with memory_kept():
    print(*(new_pages() for _ in range(4)))
"""


@pytest.mark.skipif(host._function("mallopt") is None, reason="another C library")
def test_a_round_uses_the_memory_of_the_one_before() -> None:
    said = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, check=True)
    first, *_, last = map(int, said.stdout.split())
    assert last < first / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_functions(name: None) -> object:
        return object()

    monkeypatch.setattr(host.ctypes, "CDLL", without_the_functions)
    with host.memory_kept():
        assert torch.ones(3).sum() == 3


def test_a_failure_passes_through() -> None:
    with pytest.raises(KeyError), host.memory_kept():
        raise KeyError("inside")
