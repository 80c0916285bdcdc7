"""What a class or a function says, to be compared with what it said before; nothing is executed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def text_of(code: Any) -> str | None:
    """The text of a class or function, else of its functions, else what Python made of it.

    Python finds the text of a function in a notebook, but not of a class there.
    """
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        pass
    if isinstance(code, FunctionType):
        defaults = _said(code.__defaults__), _said(code.__kwdefaults__)
        return repr([*_compiled(code.__code__), *defaults])
    return "\n".join(_members(code)) if isinstance(code, type) else None


def _members(kind: type) -> Iterator[str]:
    """The texts of a class's functions, in the order of their names, and its values."""
    for name, value in sorted(vars(kind).items()):
        functions = _functions(value)
        for act in functions:
            yield f"{name}: {text_of(act)}"
        if not (functions or name.startswith("__")):
            yield f"{name} = {_said(value)}"


def _said(value: Any) -> str:
    """A value as every process writes it: what has no such text, such as a function, by its name.

    Of an object of another kind this is the name of its class.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_said(key)}: {_said(held)}' for key, held in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_said, value))})"
    if isinstance(value, (set, frozenset)):  # its order is another in another process
        return f"{type(value).__name__}({', '.join(sorted(map(_said, value)))})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _functions(value: Any) -> list[Callable[..., Any]]:
    """The functions of a member: of a method, a property, or what was decorated."""
    if isinstance(value, property):
        value = value.fget
    found = getattr(value, "__wrapped__", getattr(value, "act", value))
    found = getattr(found, "__func__", found)
    return [found] if isinstance(found, FunctionType) else []


def _compiled(code: CodeType) -> Iterator[Any]:
    """A function's instructions, names and constants, those of inner functions too."""
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        else:
            yield _said(constant)
