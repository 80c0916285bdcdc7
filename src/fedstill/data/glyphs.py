"""Digits drawn from strokes: our own small vector fonts, so that no font file is needed.

A glyph is a list of strokes, a stroke a list of points (x, y) in a unit box, y downwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Stroke = list[tuple[float, float]]
Glyph = list[Stroke]


@dataclass(frozen=True)
class Typeface:
    """How a style draws the ten digits."""

    glyphs: tuple[Glyph, ...]
    slant: float = 0.0  # extra shift to the right at the top, in box widths
    contrast: float = 0.0  # 0: all strokes alike; 1: level strokes vanish
    hollow: bool = False  # only the rim of the strokes is inked


def segments(glyph: Glyph) -> NDArray[np.float64]:
    """All straight pieces of a glyph as [piece, end, coordinate]."""
    pieces = [pair for stroke in glyph for pair in pairwise(stroke)]
    return np.array(pieces, np.float64)


def typefaces() -> dict[str, Typeface]:
    """The styles by name."""
    return {
        "sans": Typeface(sans()),
        "serif": Typeface(serif(), contrast=0.45),
        "segment": Typeface(seven_segment()),
        "slanted": Typeface(slanted(), slant=0.3),
        "outline": Typeface(sans(), hollow=True),
        "dots": Typeface(dot_matrix()),
    }


def arc(
    centre: tuple[float, float], radii: tuple[float, float], start: float, stop: float
) -> Stroke:
    """A piece of an ellipse; angles in degrees, 0 to the right, growing downwards."""
    pieces = max(3, int(abs(stop - start) / 24 + 0.5))
    angles = np.linspace(start, stop, pieces + 1) * (np.pi / 180)
    x, y = centre[0] + radii[0] * np.cos(angles), centre[1] + radii[1] * np.sin(angles)
    return list(zip(x.tolist(), y.tolist(), strict=True))


def sans() -> tuple[Glyph, ...]:
    """Plain upright digits."""
    six = [
        arc((0.5, 0.69), (0.31, 0.29), 0, 360),
        [(0.72, 0.03), (0.47, 0.16), (0.28, 0.40), (0.19, 0.69)],
    ]
    return (
        [arc((0.5, 0.5), (0.32, 0.48), 0, 360)],
        [[(0.30, 0.22), (0.54, 0.02), (0.54, 0.98)]],
        [[*arc((0.5, 0.29), (0.31, 0.27), -170, 35), (0.18, 0.98), (0.84, 0.98)]],
        [
            arc((0.46, 0.26), (0.29, 0.24), -150, 90),
            arc((0.46, 0.74), (0.34, 0.25), -90, 150),
        ],
        [[(0.64, 0.98), (0.64, 0.02), (0.12, 0.68), (0.90, 0.68)]],
        [[(0.78, 0.02), (0.28, 0.02), *arc((0.48, 0.67), (0.33, 0.31), -135, 145)]],
        six,
        [[(0.16, 0.02), (0.84, 0.02), (0.42, 0.98)]],
        [arc((0.5, 0.26), (0.26, 0.24), 0, 360), arc((0.5, 0.75), (0.32, 0.25), 0, 360)],
        turned(six),
    )


def serif() -> tuple[Glyph, ...]:
    """The plain digits with feet and flags."""
    feet: dict[int, Glyph] = {
        1: [[(0.30, 0.98), (0.78, 0.98)]],
        2: [[(0.84, 0.98), (0.86, 0.82)], [(0.19, 0.24), (0.30, 0.28)]],
        3: [[(0.20, 0.12), (0.24, 0.26)], [(0.15, 0.86), (0.22, 0.72)]],
        4: [[(0.44, 0.98), (0.84, 0.98)]],
        5: [[(0.78, 0.02), (0.80, 0.14)], [(0.18, 0.86), (0.26, 0.74)]],
        6: [[(0.72, 0.03), (0.74, 0.16)]],
        7: [[(0.16, 0.02), (0.14, 0.18)], [(0.30, 0.98), (0.56, 0.98)]],
        9: [[(0.28, 0.97), (0.26, 0.84)]],
    }
    return tuple([*glyph, *feet.get(digit, [])] for digit, glyph in enumerate(sans()))


def slanted() -> tuple[Glyph, ...]:
    """Digits as many people write them: a crossed 7, an open 4, a bare 1, a straight 9."""
    glyphs = list(sans())
    glyphs[1] = [[(0.52, 0.02), (0.50, 0.98)]]
    glyphs[4] = [
        [(0.34, 0.02), (0.18, 0.58), (0.88, 0.58)],
        [(0.66, 0.28), (0.62, 0.98)],
    ]
    glyphs[7] = [
        [(0.16, 0.04), (0.84, 0.04), (0.44, 0.98)],
        [(0.36, 0.50), (0.82, 0.50)],
    ]
    glyphs[9] = [
        arc((0.48, 0.28), (0.30, 0.26), 0, 360),
        [(0.78, 0.26), (0.72, 0.98)],
    ]
    return tuple(glyphs)


def seven_segment() -> tuple[Glyph, ...]:
    """Digits of a pocket calculator."""
    left, right, top, middle, bottom, gap = 0.18, 0.82, 0.02, 0.5, 0.98, 0.06
    bars: dict[str, Stroke] = {
        "a": [(left + gap, top), (right - gap, top)],
        "b": [(right, top + gap), (right, middle - gap)],
        "c": [(right, middle + gap), (right, bottom - gap)],
        "d": [(left + gap, bottom), (right - gap, bottom)],
        "e": [(left, middle + gap), (left, bottom - gap)],
        "f": [(left, top + gap), (left, middle - gap)],
        "g": [(left + gap, middle), (right - gap, middle)],
    }
    lit = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
    return tuple([bars[bar] for bar in digit] for digit in lit)


def dot_matrix() -> tuple[Glyph, ...]:
    """Digits of a five by seven display, each dot a stroke of almost no length."""
    digits = (
        "01110 10001 10011 10101 11001 10001 01110",
        "00100 01100 00100 00100 00100 00100 01110",
        "01110 10001 00001 00110 01000 10000 11111",
        "11110 00001 00001 01110 00001 00001 11110",
        "00010 00110 01010 10010 11111 00010 00010",
        "11111 10000 11110 00001 00001 10001 01110",
        "00110 01000 10000 11110 10001 10001 01110",
        "11111 00001 00010 00100 00100 01000 01000",
        "01110 10001 10001 01110 10001 10001 01110",
        "01110 10001 10001 01111 00001 00010 01100",
    )
    return tuple([*dots(digit.split())] for digit in digits)


def dots(rows: list[str]) -> Iterable[Stroke]:
    """A tiny stroke for every 1 in the rows."""
    for y, row in enumerate(rows):
        for x, mark in enumerate(row):
            if mark == "1":
                across, down = 0.16 + 0.17 * x, 0.04 + 0.153 * y
                yield [(across, down), (across + 0.01, down)]


def turned(glyph: Glyph) -> Glyph:
    """The glyph upside down: a six becomes a nine."""
    return [[(1.0 - x, 1.0 - y) for x, y in stroke] for stroke in glyph]
