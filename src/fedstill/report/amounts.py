"""Amounts as people read them."""

from __future__ import annotations

_STEPS = ("", "k", "M", "G", "T", "P")


def human_bytes(size: float) -> str:
    """A size in decimal units: `12.3 MB`."""
    return _human(size, "B")


def human_floats(number: float) -> str:
    """A number of floats: `320 k`, `1.87 M`."""
    return _human(number, "")


def _human(value: float, unit: str) -> str:
    step = 0
    # 999.5 would be printed as 1000 with three digits: it belongs to the next step.
    while abs(value) >= 999.5 and step < len(_STEPS) - 1:
        value, step = value / 1000, step + 1
    digits = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
    return f"{digits} {_STEPS[step]}{unit}".strip()


def human_time(seconds: float) -> str:
    """`1.5 s`, `2 min`, `3 h`, `4 d`: a time in the largest unit that leaves it above one."""
    if seconds != seconds:
        return "-"
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
