"""The memory of the host: how much there is, and what is freed is kept; no tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Names and numbers of malloc.h in the GNU C library.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGE = 32 * 2**20  # bytes of a block that the system gives and gets back by itself
_SHARERS = [1]  # processes that take from the same memory; see shared_by


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


@contextmanager
def shared_by(processes: int) -> Iterator[None]:
    """Leave the same part of the host's memory to each of some processes."""
    before = _SHARERS[0]
    _SHARERS[0] = processes
    try:
        yield
    finally:
        _SHARERS[0] = before


def memory_left() -> int | None:
    """Bytes that this process may still take, as far as the system tells."""
    found = [left for left in (_of_the_machine(), _of_the_group()) if left is not None]
    return min(found) // _SHARERS[0] if found else None


def _of_the_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _of_the_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Where a container has a limit of its own."""
    try:
        limit, used = (int((folder / f"memory.{of}").read_text()) for of in ("max", "current"))
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(parts["inactive_file"]))  # files can be read again
    except (OSError, ValueError, KeyError):  # none, or "max"
        return None


def _function(name: str) -> Callable[..., Any] | None:
    """A function of the C library, if there is one."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
