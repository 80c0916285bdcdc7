"""Files that are there whole or not at all, also after a kill or a failure of the disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_DRAFT = re.compile(r"\..+\.\d+\.draft")


@contextmanager
def replacing(path: Path | str) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` once it is complete and on the disk.

    Until then, and if anything fails, `path` is as it was. A kill leaves a draft beside it.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
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


def write_whole(path: Path | str, data: bytes | str) -> None:
    """Write a file: afterwards it is there whole, or as it was before. Text is UTF-8."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def is_draft(name: str) -> bool:
    """Whether a file of this name is what a kill left of `replacing`."""
    return _DRAFT.fullmatch(name) is not None


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
