"""Tables as TOML text, which the standard library reads but does not write."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Any]) -> str:
    """Tables as TOML, nested ones after the plain values."""
    return "\n".join(_toml_lines(tables, ())) + "\n"


def _toml_lines(table: Mapping[str, Any], where: tuple[str, ...]) -> list[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lines = [f"[{'.'.join(map(_toml_key, where))}]"] if where and (plain or not nested) else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    for key, inner in nested.items():
        lines += (
            ["", *_toml_lines(inner, (*where, key))] if lines else _toml_lines(inner, (*where, key))
        )
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return _toml_text(str(value))


def _toml_text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
