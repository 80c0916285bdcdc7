"""Libraries that are imported only where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedstill.core.errors import DataError


def optional(module: str, *, needed_for: str, install: str) -> Any:
    """The module, or an error that says what needs it and how to install it."""
    try:
        return import_module(module)
    except ImportError as missing:
        library = module.partition(".")[0]
        raise DataError(
            f"{needed_for} needs {library}, which cannot be imported ({missing}); "
            f"pip install '{install}'"
        ) from missing
