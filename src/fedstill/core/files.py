"""Files that are there whole or not at all, also after a kill or a failure of the disk."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

Opener = Callable[[str, int], int]


@contextmanager
def replacing(path: Path | str, *, by_several: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` once it is complete and on the disk.

    Until then, and if anything fails, `path` is as it was. A kill leaves a draft beside it, which
    the next writer replaces. Where several processes may write it at once, say so: then each has
    a draft of its own.
    """
    path = Path(path)
    writer = f".{os.getpid()}" if by_several else ""
    with _drafted(path.with_name(f".{path.name}{writer}.draft"), path) as file:
        yield file


@contextmanager
def _drafted(draft: Path, path: Path, opener: Opener | None = None) -> Iterator[BinaryIO]:
    """A draft to write to, which becomes `path` when it is on the disk, and is gone otherwise."""
    try:
        with open(draft, "wb", opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path | str, data: bytes | str, *, by_several: bool = False) -> None:
    """Write a file: afterwards it is there whole, or as it was before. Text is UTF-8."""
    with replacing(path, by_several=by_several) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_lasting(path: Path | str, data: bytes | str, *, by_several: bool = False) -> None:
    """Write a file; when this returns, no failure of the power takes it back."""
    write_whole(path, data, by_several=by_several)
    sync_folder(Path(path).parent)


def write_secret(path: Path | str, data: bytes) -> None:
    """Write a new file that nobody else may read, whole and lasting; none is replaced."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)
    with _drafted(draft, path, _for_its_owner) as file:
        file.write(data)
    sync_folder(path.parent)


def _for_its_owner(path: str, flags: int) -> int:
    """Open a file that must be new, for nobody but its owner."""
    return os.open(path, flags | os.O_EXCL, 0o600)


def is_draft(name: str) -> bool:
    """Whether a file of this name is what a kill left of `replacing`."""
    return name.startswith(".") and name.endswith(".draft")


def write_through(path: Path | str, data: bytes) -> None:
    """Write a new file and return when it is on the disk."""
    with Path(path).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path | str) -> None:
    """Return when a folder's list of names is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def without_folder(name: str) -> str:
    """`mine.py:data` of `/where/it/lies/mine.py:data`, for tables; other texts stay."""
    place, _, last = name.rpartition(":")
    return f"{Path(place).name}:{last}" if place.endswith(".py") else name


def for_json(value: Any) -> Any:
    """A value that every reader of JSON takes: NaN and infinities become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): for_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return value
