"""The memory of the host: kept while a run lasts, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fedstill.engines import allocator as host
from fedstill.engines.loops import stacks
from fedstill.engines.play import in_process
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.methods import FedAvg
from fedstill.testing import worlds

ROUNDS = """
import resource, torch
from fedstill.engines.allocator import memory_kept

def new_pages() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**20 // 4 * MIB) for _ in range(BLOCKS)]  # ten thousand pages and more
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with memory_kept():
    print(*(new_pages() for _ in range(12)))
"""


@pytest.mark.skipif(host._function("mallopt") is None, reason="another C library")
@pytest.mark.parametrize(("blocks", "size"), [(40, 1), (5, 40)])
def test_a_round_uses_the_memory_of_the_one_before(blocks: int, size: int) -> None:
    rounds = ROUNDS.replace("BLOCKS", str(blocks)).replace("MIB", str(size))
    said = subprocess.run([sys.executable, "-c", rounds], capture_output=True, check=True)
    first, *_, last = map(int, said.stdout.split())
    assert last < first / 10


GAPS = """
import torch
from fedstill.engines import allocator

with allocator.memory_kept():
    held = [torch.ones(2**22) for _ in range(40)]  # 16 MiB each
    ending = torch.ones(2**22)
    del held  # what comes before the end of the heap stays taken
    before = allocator._taken()
    allocator.memory_left = lambda: LEFT
    allocator.room_made()
    print((before - allocator._taken()) // 2**20)
    before = allocator._taken()
    torch.ones(2**28)  # 1 GiB, more than any gap
    print((allocator._taken() - before) // 2**20)
"""


@pytest.mark.skipif(host._function("malloc_trim") is None, reason="another C library")
@pytest.mark.parametrize(("left", "given_back"), [("1", True), ("10**15", False), ("None", False)])
def test_what_is_kept_is_handed_back_where_little_is_left(left: str, given_back: bool) -> None:
    gaps = GAPS.replace("LEFT", left)
    said = subprocess.run([sys.executable, "-c", gaps], capture_output=True, check=True)
    handed, kept = map(int, said.stdout.split())
    assert (handed > 600) == given_back
    assert (kept < 100) == given_back


@pytest.mark.parametrize("engine", [InProcess, Batched])
def test_every_engine_looks_at_what_is_left_in_each_step(
    engine: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[None] = []
    for place in (in_process, stacks):
        monkeypatch.setattr(place, "room_made", lambda: looked.append(None))
    worlds.played(FedAvg(round_steps=7), worlds.vectors(), 1, engine)
    assert len(looked) >= 7


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_functions(name: None) -> object:
        return object()

    monkeypatch.setattr(host.ctypes, "CDLL", without_the_functions)
    with host.memory_kept():
        host.room_made()
        assert torch.ones(3).sum() == 3


def test_a_failure_passes_through() -> None:
    with pytest.raises(KeyError), host.memory_kept():
        raise KeyError("inside")
