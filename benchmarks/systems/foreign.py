"""Other systems' own code, in its folder, with stand-ins for packages it names and does not use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
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


class Within(MetaPathFinder, Loader):
    """Whatever is imported from inside a stand-in is one too."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        parent = sys.modules.get(name.rpartition(".")[0])
        return ModuleSpec(name, self) if isinstance(parent, StandIn) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(Within())


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
        theirs = {name for name in set(sys.modules) - known if lies_in(sys.modules[name], folders)}
        inner = {name for name in sys.modules if theirs & set(parents(name))}
        for name in theirs | inner:
            del sys.modules[name]


def lies_in(module: ModuleType, folders: Sequence[Path]) -> bool:
    """Whether a module, or a package without a file of its own, comes from one of these folders."""
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(place.startswith(str(folder)) for place in places for folder in folders)


def parents(name: str) -> list[str]:
    """The packages that a module is within."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
