"""What a method's code holds outside of memories: variables of modules and classes, defaults.

Whatever is kept there from step to step is neither saved nor the same at every site.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from fedstill.core.method import Method
from fedstill.core.torch_internals import writes_into

DEEP = 4  # containers within containers that are looked at
LONG = 1000  # entries of a container that are looked at
LARGE = 2**20  # bytes of an array beyond which it is not looked into
PLAIN = (int, float, complex, str, bytes, bool, type(None))

Marks = Mapping[str, Any]


def held_outside(method: Method) -> Marks:
    """By name a mark of each variable, which is another one when the variable has changed."""
    return {name: _mark(value, DEEP) for name, value in _variables(method)}


def changed(before: Marks, after: Marks) -> list[str]:
    """The names of variables that are not what they were."""
    names = {**before, **after}
    return [n for n in names if n not in before or n not in after or before[n] != after[n]]


def _variables(method: Method) -> Iterator[tuple[str, Any]]:
    """Those of the method's classes, of modules that are not ours, and what functions keep."""
    seen: set[type] = set()
    modules = {kind.__module__ for kind in type(method).__mro__}
    for name in sorted(name for name in modules if not _is_ours(name)):
        module = sys.modules.get(name)
        for variable, value in list(vars(module).items()) if module else []:
            if variable.startswith("__") or isinstance(value, ModuleType):
                continue
            if isinstance(value, type) and value.__module__ == name:
                yield from _of_class(value, seen)
            elif isinstance(value, FunctionType) and value.__module__ == name:
                yield from _of_function(value, f"{variable} of {name}")
            else:
                yield f"{variable} of {name}", value
    for kind in type(method).__mro__:
        yield from _of_class(kind, seen)


def _of_class(kind: type, seen: set[type]) -> Iterator[tuple[str, Any]]:
    if kind in seen or not inspect.isclass(kind) or kind.__module__ == "builtins":
        return
    seen.add(kind)
    for variable, value in list(vars(kind).items()):
        act = getattr(value, "act", value)  # of a step, what it does
        if isinstance(act, FunctionType):
            yield from _of_function(act, f"{kind.__qualname__}.{variable}")
        elif not variable.startswith("_") or not variable.endswith("_"):
            yield f"{kind.__qualname__}.{variable}", value


def _of_function(function: Callable[..., Any], name: str) -> Iterator[tuple[str, Any]]:
    """What a function keeps from call to call: defaults, attributes, variables around it."""
    assert isinstance(function, FunctionType)
    yield f"a default of {name}", (function.__defaults__, function.__kwdefaults__)
    yield from ((f"{name}.{key}", value) for key, value in vars(function).items() if key[0] != "_")
    around = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for variable, cell in around:
        if variable != "__class__":
            yield f"{variable}, which {name} sees", _content(cell)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _mark(value: Any, deep: int) -> Any:
    """Something comparable that differs when a value has changed, as far as can be seen."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), writes_into(value), value.shape
    if isinstance(value, np.ndarray) and value.dtype != object:
        return id(value), value.shape, value.tobytes() if value.nbytes <= LARGE else None
    if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
        own = () if isinstance(value, (tuple, frozenset)) else id(value)
        return own, len(value), _marks(value, deep - 1) if deep else ()
    if deep and not callable(value) and not _is_ours(type(value).__module__):
        try:
            return id(value), _marks(vars(value), deep - 1)
        except TypeError:
            pass
    return id(value)


def _marks(values: Any, deep: int) -> tuple[Any, ...]:
    if isinstance(values, dict):
        first = list(values.items())[:LONG]
        return tuple((_mark(key, deep), _mark(value, deep)) for key, value in first)
    return tuple(_mark(value, deep) for value in list(values)[:LONG])


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("fedstill", "torch", "numpy")
