"""The memory of the host: kept while a run lasts, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fedstill.engines import host

ROUNDS = """
import resource, torch
from contextlib import nullcontext
from fedstill.engines.host import memory_kept

def pages_of_a_round() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**18) for _ in range(40)]  # 40 MiB, ten thousand pages
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with {context}():
    print(*(pages_of_a_round() for _ in range(4)))
"""


def pages(context: str) -> list[int]:
    """New pages of memory in each of four equal rounds, in a process of its own."""
    code = ROUNDS.format(context=context)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(number) for number in said.stdout.split()]


@pytest.mark.skipif(host._function("mallopt") is None, reason="another C library")
def test_a_round_uses_the_memory_of_the_one_before() -> None:
    first, *_, last = pages("memory_kept")
    assert last < first / 10
    assert min(pages("nullcontext")) > first / 2  # or else there is nothing to keep


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: None) -> object:
        return object()

    monkeypatch.setattr(host.ctypes, "CDLL", missing)
    with host.memory_kept():
        assert torch.ones(3).sum() == 3


def test_a_failure_passes_through() -> None:
    with pytest.raises(KeyError), host.memory_kept():
        raise KeyError("inside")
