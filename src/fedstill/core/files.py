"""Files that are there whole or not at all, also after a kill or a failure of the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path | str, *, by_several: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` once it is complete and on the disk.

    Until then, and if anything fails, `path` is as it was. A kill leaves a draft beside it, which
    the next writer replaces. Where several processes may write it at once, say so: then each has
    a draft of its own.
    """
    path = Path(path)
    writer = f".{os.getpid()}" if by_several else ""
    draft = path.with_name(f".{path.name}{writer}.draft")
    try:
        with draft.open("wb") as file:
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


def write_secret(path: Path | str, data: bytes) -> None:
    """Write a new file that nobody else may read, whole or not at all; none is replaced."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


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
