"""Names of a recipe and what they stand for: ours, installed plug-ins, and code of one's own.

A name is looked up in a visible table first, then among the entry points of installed packages
(group `fedstill.methods` and so on). A reference says where the code lies: `package.module:Class`
or `path/file.py:Class`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedstill.core.errors import BadValue, unknown

T = TypeVar("T")

_INSTALLED_ALONE: ContextVar[bool] = ContextVar("_INSTALLED_ALONE", default=False)
REFERENCE = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")
OURS = "fedstill"


@dataclass(frozen=True)
class Listed:
    """One line of a listing: a name, where it comes from, and what it stands for or why not."""

    name: str
    source: str  # fedstill, or the package of a plug-in
    value: Any = None
    fault: str | None = None


@dataclass(frozen=True)
class Names(Generic[T]):
    """What names of one kind stand for.

    `fault` says in a few words why a thing is not of this kind ("is not a Method"), or None.

        NAMES = Names("method", METHODS, "fedstill.methods", fault)
        NAMES["fedavg"], NAMES["their-plug-in"], NAMES["mine.py:Mine"]
    """

    kind: str
    table: Mapping[str, T]
    group: str
    fault: Callable[[Any], str | None]
    _referred: dict[Any, str] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, name: str) -> T:
        """What a name stands for; an error in one line where it stands for nothing."""
        if not isinstance(name, str):
            raise BadValue(unknown(self.kind, str(name), self.known()))
        if name in self.table:
            return self.table[name]
        if is_reference(name):
            return self._checked(name, name, referred(name))
        plug_in = plug_ins(self.group).get(name)
        if plug_in is None:
            raise BadValue(self._unknown(name))
        return self._loaded(plug_in)

    def _unknown(self, name: str) -> str:
        """What is wrong with a name that stands for nothing."""
        if name.endswith(".py"):
            return f"{name} is a file; say which {self.kind} in it is meant, as {name}:NAME"
        return unknown(self.kind, name, self.known())

    def wrong(self, name: Any) -> str | None:
        """What is wrong with a name, or None."""
        try:
            self[name]
        except BadValue as error:
            return error.faults[0]
        return None

    def plug_in(self, name: str) -> EntryPoint | None:
        """The plug-in that a name stands for, not loaded; None where it is ours or nobody's."""
        return None if name in self.table else plug_ins(self.group).get(name)

    def known(self) -> list[str]:
        """Every name but references, ours first; nothing is loaded."""
        return [*self.table, *(name for name in plug_ins(self.group) if name not in self.table)]

    def listed(self) -> Iterator[Listed]:
        """Everything by name, plug-ins loaded; one that is broken says why."""
        for name, value in self.table.items():
            yield Listed(name, OURS, value)
        for name, plug_in in plug_ins(self.group).items():
            source = plug_in.dist.name if plug_in.dist else "a plug-in"
            if name in self.table:
                wrong = f"the name is fedstill's own; {plug_in.value} is not reached by it"
                yield Listed(name, source, fault=wrong)
                continue
            try:
                yield Listed(name, source, self._loaded(plug_in))
            except BadValue as error:
                yield Listed(name, source, fault=error.faults[0])

    def name_of(self, value: Any) -> str:
        """The name by which a thing is found again: in the table, as it was asked for, or where
        its code lies."""
        for name, ours in self.table.items():
            if ours is value:
                return name
        if value in self._referred:
            return self._referred[value]
        return f"{value.__module__}:{value.__qualname__}"

    def _loaded(self, plug_in: EntryPoint) -> T:
        where = f"plug-in {plug_in.name!r}" + (f" of {plug_in.dist.name}" if plug_in.dist else "")
        try:
            value = plug_in.load()
        except Exception as error:
            raise BadValue(f"{where} cannot be loaded: {_said(error)}") from error
        return self._checked(plug_in.name, where, value)

    def _checked(self, name: str, where: str, value: Any) -> T:
        wrong = self.fault(value)
        if wrong:
            raise BadValue(f"{where} {wrong}")
        if name not in self.table:
            self._referred.setdefault(value, name)
        made: T = value
        return made


def subclass_fault(kind: type) -> Callable[[Any], str | None]:
    """What says that something is not a class of a kind."""

    def fault(value: Any) -> str | None:
        if isinstance(value, type) and issubclass(value, kind):
            return None
        return f"is {_what(value)}, not a subclass of {kind.__module__}.{kind.__qualname__}"

    return fault


def function_fault(wanted: str) -> Callable[[Any], str | None]:
    """What says that something is not a function of the wanted form."""

    def fault(value: Any) -> str | None:
        return None if callable(value) else f"is {_what(value)}, not {wanted}"

    return fault


def _what(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__name__}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _remedy(error: BaseException) -> str:
    """What to write where a class derived from one of ours lacks a word."""
    frozen = isinstance(error, TypeError) and "non-frozen dataclass from a frozen" in str(error)
    return "; write @dataclass(frozen=True) there" if frozen else ""


def plug_ins(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, none of them loaded."""
    return _plug_ins(group, tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache(maxsize=64)
def _plug_ins(group: str, path: tuple[tuple[str, int], ...]) -> Mapping[str, EntryPoint]:
    """The same for the folders of a search path as they are: every package is looked into once."""
    return {point.name: point for point in sorted(entry_points(group=group))}


def _changed(folder: str) -> int:
    """When something was last put into a folder or taken out of it; 0 where there is none."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def is_reference(name: str) -> bool:
    """Whether a name says where its code lies."""
    return REFERENCE.fullmatch(name) is not None


def short(name: str) -> str:
    """A name for people: of a reference, what stands behind the colon."""
    found = REFERENCE.fullmatch(name)
    return found["name"] if found else name


def absolute(name: str, folder: Path) -> str:
    """A reference to a file that means the same from everywhere; other texts stay."""
    found = REFERENCE.fullmatch(name)
    if found is None or not found["place"].endswith(".py"):
        return name
    path = Path(found["place"]).expanduser()
    return f"{(folder / path).resolve()}:{found['name']}"


@contextmanager
def installed_alone() -> Iterator[None]:
    """Meanwhile names stand for what is ours or installed as a plug-in; no reference is followed.

    For recipes that come from others: a reference may name any file that came along, and any
    function of Python, which a recipe then gives arguments to.
    """
    before = _INSTALLED_ALONE.set(True)
    try:
        yield
    finally:
        _INSTALLED_ALONE.reset(before)


def referred(reference: str) -> Any:
    """What a reference stands for; its code is run the first time it is asked for."""
    if _INSTALLED_ALONE.get():
        raise BadValue(
            f"{reference!r} says where code lies, and code does not travel: install it at every "
            "party as a plug-in and give its name"
        )
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise BadValue(f"{reference!r}: write it as package.module:Class or path/file.py:Class")
    place, name = found["place"], found["name"]
    value: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    for part in name.split("."):
        if not hasattr(value, part):
            public = (
                [n for n in vars(value) if not n.startswith("_")]
                if hasattr(value, "__dict__")
                else []
            )
            raise BadValue(f"{place}: " + unknown("name", part, public))
        value = getattr(value, part)
    return value


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadValue(f"{name} cannot be imported: {_said(error)}") from error


def _file(path: Path) -> ModuleType:
    """The module of a file, run once; equal paths give the same module, and so equal types."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise BadValue(f"no file {path}; a reference is path/file.py:Class")
    return _run(path)


class _AsItStands(SourceFileLoader):
    """Runs a file as it stands; bytecode of a moment ago would pass for that of an edited file."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError("no bytecode is kept")


@cache
def _run(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"fedstill_file_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItStands(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:  # last, so that a neighbour hides no package
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # hints are resolved by it while the file runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [at.lineno for at in extract_tb(error.__traceback__) if at.filename == str(path)]
        where = f" in line {lines[-1]}" if lines else ""
        raise BadValue(f"{path} cannot be run: {_said(error)}{where}{_remedy(error)}") from error
    return module
