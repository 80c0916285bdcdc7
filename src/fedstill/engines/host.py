"""The memory of the host: what is freed is kept for the next round; no knowledge of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Names and numbers of malloc.h in the GNU C library.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGE = 32 * 2**20  # bytes of a block that the system gives and gets back by itself


@contextmanager
def memory_kept() -> Iterator[None]:
    """Let freed memory stay with the process until the end.

    Every round frees about what the next one takes. Handed back to the system, each page of it is
    asked for and filled with zeros again, which takes longer than to average it. The GNU C library
    can be told so; where there is another, nothing happens.
    """
    options, trim = _function("mallopt"), _function("malloc_trim")
    if options is None or trim is None:
        yield
        return
    options(MMAP_THRESHOLD, LARGE)
    options(TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        options(TRIM_THRESHOLD, 2 * LARGE)  # where the library's own rule ends for such blocks
        trim(0)


def _function(name: str) -> Callable[..., Any] | None:
    """A function of the C library, if there is one."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
