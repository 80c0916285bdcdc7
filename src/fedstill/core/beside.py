"""Work of the host beside other work of the host, in threads of its own; no draws.

What takes most of a draw holds no lock of Python, so two draws from different generators run at
once. Each is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

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


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "fedstill-beside")
