"""Other systems' own code, in its folder, with stand-ins for packages it names and does not use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock

from work import Work


class StandIn(ModuleType):
    """A module that has every name, for an import whose names are not called here."""

    __path__: ClassVar[list[str]] = []

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # which torch's compiler asks for

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # a package that is there and broken, e.g. for another torch
        return False
    return True


def stood_in(names: Sequence[str]) -> list[str]:
    """Those of these packages that are not here; each import of them is given a stand-in."""
    absent = [name for name in names if not importable(name)]
    for name in absent:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if end == len(parts) or not importable(whole):
                sys.modules[whole] = StandIn(whole)
    return absent


def folder(work: Work, *parts: str) -> Path:
    """A folder of the repository's copy."""
    if work.code is None:
        raise SystemExit("this system needs its repository; see --code")
    found = Path(work.code).joinpath(*parts)
    if not found.is_dir():
        raise SystemExit(f"{found} is not there; own_code.py says which repository belongs there")
    return found


@contextmanager
def searched(*folders: Path) -> Iterator[None]:
    """Imports look into these folders first; what was found there is forgotten afterwards."""
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(path) for path in folders]
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if any(origin.startswith(str(path)) for path in folders):
                del sys.modules[name]
