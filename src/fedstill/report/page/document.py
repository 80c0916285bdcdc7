"""The report as one file: template, style, script and values; nothing is asked of any host."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any


def document(values: Mapping[str, Any], *, live: bool = False) -> str:
    """An HTML page of some values.

    Values stand in it as JSON that no browser takes for markup, and the script makes text of
    them, never elements. The policy lets nothing run but this very script and asks nobody; only
    a `live` page may ask its own server for news.
    """
    style, script = (_part(name) for name in ("report.css", "report.js"))
    policy = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "img-src data:",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        *(["connect-src 'self'"] if live else []),
    ]
    filled = {
        "POLICY": "; ".join(policy),
        "TITLE": escape(f"{values['title']} · fedstill"),
        "STYLE": style,
        "CONTENT": embedded({**values, "live": live}),
        "SCRIPT": script,
    }
    places = re.split(r"%%([A-Z]+)%%", _part("report.html"))
    return "".join(filled[part] if number % 2 else part for number, part in enumerate(places))


def embedded(values: Mapping[str, Any]) -> str:
    """JSON without a character that could end the script it stands in."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _part(name: str) -> str:
    return (files("fedstill.report.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode("ascii")
