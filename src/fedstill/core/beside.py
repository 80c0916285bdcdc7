"""Work of the host beside other work of the host, in threads of its own; no draws.

What takes most of a draw holds no lock of Python, so draws from different generators run at once.
Each is what it would be alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

HANDS = 12  # threads that share a work of many parts, at most

T = TypeVar("T")


def begun(work: Callable[[], T], device: torch.device | str) -> Callable[[], T]:
    """A work that is begun now; what is returned waits for it and gives what it returned.

    Only where a GPU waits meanwhile: else there is nothing to win, and processes that are split in
    two must not have threads. What it asks of the GPU it asks in the caller's stream.
    """
    if torch.device(device).type != "cuda":
        found = work()
        return lambda: found
    stream = torch.cuda.current_stream(device) if torch.cuda.is_available() else None

    def here() -> T:
        with torch.cuda.stream(stream):
            return work()

    return _threads().submit(here).result


def at_once(works: Sequence[Callable[[], object]], device: torch.device | str) -> None:
    """Do works of the host that need nothing of one another; in threads where a GPU waits.

    They may be asked for by a work that was `begun`, and must not ask for others themselves.
    """
    if len(works) < 2 or torch.device(device).type != "cuda":
        for work in works:
            work()
        return
    for done in [_hands().submit(work) for work in works]:
        done.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "fedstill-beside")


@cache
def _hands() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(HANDS, os.cpu_count() or 1), "fedstill-hands")
