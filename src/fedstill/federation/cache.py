"""A folder of results worth keeping between runs, by key; no knowledge of what they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypeVar

from fedstill.core.errors import DataError, WireError
from fedstill.core.records import Record
from fedstill.wire import codec

R = TypeVar("R", bound=Record)


class FolderCache:
    """One file for each record, named by its key; the record carries its key too.

    A file that is broken, or that carries another key than its name, is refused: somebody put it
    there, and it is not overwritten.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.found = 0
        self.made = 0

    def key(self, made_by: str) -> str:
        """The key of what is made so; how it is rounded, an engine adds."""
        return hashlib.sha256(made_by.encode()).hexdigest()

    def find(self, key: str, kind: type[R]) -> R | None:
        """The record of a key, or None.

        A folder that could not take the record is refused here: before it is made, not after.
        """
        path = self._path(key)
        if not path.exists():
            self._prepare()
            return None
        try:
            record = codec.load(path, kind)
        except (WireError, OSError) as error:
            raise DataError(
                f"{path} is not a {kind.__name__} that fedstill kept ({error}); "
                "delete it, or choose another folder with run.cache_dir"
            ) from error
        if getattr(record, "key", key) != key:
            raise DataError(
                f"{path} was made from other data or settings (its key is {record.key[:16]}…); "  # type: ignore[attr-defined]
                "delete it, or choose another folder with run.cache_dir"
            )
        self.found += 1
        return record

    def keep(self, key: str, record: Record) -> None:
        """Put a record under its key; a key that is there already stays as it is."""
        path = self._path(key)
        if path.exists():
            return
        self._prepare()
        try:
            codec.save(record, path)
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from error
        self.made += 1

    def _prepare(self) -> None:
        """Make the folder; refuse one that cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error.strerror or str(error)) from error
        if not os.access(self.folder, os.W_OK):
            raise self._refusal("no permission to write")

    def _refusal(self, why: str) -> DataError:
        return DataError(
            f"cannot keep a result in {self.folder}: {why}; "
            "choose another folder with run.cache_dir"
        )

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
