"""The memory of the host: how much there is, and what is freed is kept; no tensors."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

# Names and numbers of malloc.h in the GNU C library.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
NEVER = -1
LARGE = 32 * 2**20  # bytes; blocks above have pages of their own, unless none may have them
MAPPED = 65536  # blocks with pages of their own at most, if the library is not told otherwise
SELDOM = 0.1  # seconds between two looks at what is left
_LOOKED = [0.0]  # when it was looked last
_SHARERS = [1]  # processes that take from the same memory; see shared_by


@contextmanager
def memory_kept() -> Iterator[None]:
    """Let freed memory stay with the process until the end.

    Every round frees about what the next one takes, and every step of training the maps of the
    one before. Handed back to the system, each page of it is asked for and filled with zeros again,
    which takes longer than to average it. The GNU C library can be told so; where there is
    another, nothing happens. The price are gaps: up to twice the memory was seen, see `room_made`.
    """
    options, trim = _function("mallopt"), _function("malloc_trim")
    if options is None or trim is None:
        yield
        return
    options(MMAP_THRESHOLD, LARGE)
    options(MMAP_MAX, 0)
    options(TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        _as_usual(options, trim)


def room_made() -> None:
    """Keep nothing from here on, if the system has less left than this process has taken.

    It may be called as often as one likes: it looks from time to time.
    """
    now = time.monotonic()
    if now - _LOOKED[0] < SELDOM:
        return
    _LOOKED[0] = now
    left = memory_left()
    options, trim = _function("mallopt"), _function("malloc_trim")
    if options and trim and left is not None and left < _taken():
        _as_usual(options, trim)


def _as_usual(options: Callable[..., Any], trim: Callable[..., Any]) -> None:
    options(MMAP_MAX, MAPPED)
    options(TRIM_THRESHOLD, 2 * LARGE)  # where the library's own rule ends for such blocks
    trim(0)


def _taken() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * mmap.PAGESIZE


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
    found = [left for left in (_of_the_machine(), _of_the_groups()) if left is not None]
    return min(found) // _SHARERS[0] if found else None


def _of_the_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError, IndexError):
        return None


class Words(NamedTuple):
    """What a version of control groups calls what it tells of memory."""

    limit: str
    used: str
    files: str  # of what is used, those that can be read again


NEWER = Words("memory.max", "memory.current", "inactive_file")
OLDER = Words("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _of_the_groups(
    root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Where a container, or a job on a shared machine, has a limit of its own.

    The process is in a group of each kind, and a group has the limits of those around it too. A
    container may be told names of groups that it does not see; its own is then the outermost.
    """
    found: list[int | None] = []
    with suppress(OSError, ValueError):
        for line in mine.read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            words, top = (OLDER, root / "memory") if kinds else (NEWER, root)
            own = top / name.lstrip("/")
            around = [each for each in (own, *own.parents) if each.is_relative_to(top)]
            found += [_of_the_group(folder, words) for folder in around]
    return min((left for left in found if left is not None), default=None)


def _of_the_group(folder: Path, words: Words) -> int | None:
    try:
        limit, used = (int((folder / name).read_text()) for name in (words.limit, words.used))
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(parts[words.files]))
    except (OSError, ValueError, KeyError):  # none, or "max"
        return None


def _function(name: str) -> Callable[..., Any] | None:
    """A function of the C library, if there is one."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
