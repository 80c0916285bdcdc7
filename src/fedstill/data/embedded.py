"""Five domains of digits that need no download: four made from real handwriting, one drawn.

The 1797 handwritten 8x8 digits of scikit-learn (Alpaydin and Kaynak, UCI 1998) are dealt to four
domains. No handwritten digit appears in two domains, nor in train and test. The fifth domain is
drawn from the strokes in `glyphs`. Everything follows from SEED, and only uniform draws are used,
so that the bytes are the same with every version of numpy.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.glyphs import Typeface, segments, typefaces
from fedstill.data.images import as_bytes
from fedstill.data.optional import optional
from fedstill.data.sites import Collection, Examples, Site, whole_site

SEED = 1797  # fixed for good: a new value is a new benchmark
SIDE = 32  # everything is drawn at this size; 16 is its average over 2x2 pixels
SIZES = (16, 32)
DOMAINS = ("plain", "inverted", "blended", "cluttered", "font")
HANDWRITTEN = DOMAINS[:4]
CLASS_NAMES = tuple(str(digit) for digit in range(10))

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Handwriting:
    """Handwritten digits as they come: ink in 0..1, [example, 8, 8]."""

    ink: Floats
    labels: Integers

    def take(self, rows: Integers) -> Handwriting:
        """The digits at `rows`."""
        return Handwriting(self.ink[rows], self.labels[rows])


def embedded_digits(size: int = 16) -> Collection:
    """One client per domain, 300 training and about 150 test examples each, 3 x size x size."""
    if size not in SIZES:
        raise DataError(f"digits5 is made in sizes 16 and 32, but size is {size!r}")
    hands = handwriting()
    sites = []
    for domain, rows in zip(HANDWRITTEN, dealt(hands.labels, len(HANDWRITTEN)), strict=True):
        mine = hands.take(rows)
        parts = []
        # The share of every third card is the test part: 299 or 300 train, 149 or 150 test.
        first, second, test = dealt(mine.labels, 3)
        for name, part in (("train", np.sort(np.r_[first, second])), ("test", test)):
            parts.append(drawn(domain, name, mine.take(part), size))
        sites.append(whole_site(domain, *parts))
    sites.append(font_site(size))
    note = "digits5: four domains from scikit-learn's 8x8 digits, one drawn; a small benchmark"
    return Collection("digits5", tuple(sites), CLASS_NAMES, (note,))


def handwriting() -> Handwriting:
    """The digits that come with scikit-learn."""
    table = digits_file()
    if table is None:
        datasets = optional(
            "sklearn.datasets", needed_for="the embedded digits", install="scikit-learn"
        )
        raw = datasets.load_digits()
        table = np.column_stack([raw.data, raw.target])
    ink = table[:, :64].reshape(-1, 8, 8) / 16.0
    return Handwriting(ink, table[:, 64].astype(np.int64))


def digits_file() -> Floats | None:
    """[digit, 64 numbers and the label] as scikit-learn has them in a file, if it lies there.

    Importing that library takes seconds, and nothing else of it is needed.
    """
    try:
        found = find_spec("sklearn")
    except ValueError:  # it is hidden
        return None
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            with gzip.open(path, "rt", encoding="ascii") as file:
                return np.loadtxt(file, delimiter=",", dtype=np.float64)
    return None


def dealt(labels: Integers, hands: int) -> list[Integers]:
    """Rows dealt like cards, class by class after shuffling, so that every hand is stratified."""
    shuffle = uniform(generator("deal", hands), len(labels)).argsort(kind="stable")
    ordered = shuffle[labels[shuffle].argsort(kind="stable")].astype(np.int64)
    return [np.sort(ordered[hand::hands]) for hand in range(hands)]


def drawn(domain: str, part: str, digits: Handwriting, size: int) -> Examples:
    """The pictures of one handwritten domain and part."""
    rng = generator(domain, part)
    ink = placed(digits.ink, rng)
    if domain == "plain":
        pictures = coloured(ink)
    elif domain == "inverted":
        pictures = coloured(1.0 - ink)
    elif domain == "blended":
        pictures = np.abs(textures(len(ink), rng) - coloured(ink))
    else:
        pictures = cluttered(ink, digits.ink, rng)
    return Examples(stored(pictures, size), digits.labels)


def placed(ink: Floats, rng: np.random.Generator) -> Floats:
    """Ink [example, 8, 8] enlarged smoothly to SIDE, a little moved and scaled."""
    count = len(ink)
    scale = between(rng, 0.84, 0.98, count) * SIDE / 8  # pixels of the picture per pixel of ink
    slack = (SIDE - 8 * scale) / 2
    left, top = SIDE / 2 + slack * between(rng, -0.8, 0.8, (2, count))
    grid = np.arange(SIDE) + 0.5
    x = (grid[None, :] - left[:, None]) / scale[:, None] + 4.0  # [example, SIDE], in ink pixels
    y = (grid[None, :] - top[:, None]) / scale[:, None] + 4.0
    across, down = cubic_weights(x), cubic_weights(y)
    wide = (ink[:, :, None, :] * across[:, None, :, :]).sum(3)  # [example, 8, SIDE]
    enlarged = (down[:, :, :, None] * wide[:, None, :, :]).sum(2)  # [example, SIDE, SIDE]
    # A gentle S-curve gives strokes back the edge that enlarging took from them.
    steep = np.clip(1.35 * enlarged - 0.12, 0.0, 1.0)
    crisp: Floats = steep * steep * (3.0 - 2.0 * steep)
    return crisp


def cubic_weights(positions: Floats) -> Floats:
    """Weights [example, SIDE, 8] of the eight ink pixels at each position (Catmull-Rom)."""
    distance = np.abs(positions[:, :, None] - (np.arange(8) + 0.5))
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))


def textures(count: int, rng: np.random.Generator) -> Floats:
    """Coloured backgrounds [example, 3, SIDE, SIDE]: patches, stripes and grain.

    Every channel stays away from middle grey, where a blended digit could not be seen.
    """
    dark = uniform(rng, (count, 3, 1, 1)) < 0.5
    base = np.where(dark, 0.18, 0.82)
    patches = smooth_noise(rng, (count, 3), 5)
    pitch = between(rng, 0.25, 0.9, (2, count, 1, 1, 1)) * np.where(
        uniform(rng, (2, count, 1, 1, 1)) < 0.5, -1.0, 1.0
    )
    grid = np.arange(SIDE, dtype=np.float64)
    angle = pitch[0] * grid[:, None] + pitch[1] * grid + between(rng, 0, 6.28, (count, 3, 1, 1))
    grain = smooth_noise(rng, (count, 3), SIDE // 2)
    texture: Floats = np.clip(base + 0.16 * patches + 0.08 * np.sin(angle) + 0.07 * grain, 0.0, 1.0)
    return texture


def smooth_noise(rng: np.random.Generator, shape: tuple[int, ...], cells: int) -> Floats:
    """Noise in -1..1 on a coarse lattice, interpolated to [*shape, SIDE, SIDE]."""
    lattice = between(rng, -1.0, 1.0, (*shape, cells + 1, cells + 1))
    position = (np.arange(SIDE) + 0.5) * cells / SIDE
    low = position.astype(np.int64)
    share = position - low
    rows = lattice[..., low, :] * (1 - share)[:, None] + lattice[..., low + 1, :] * share[:, None]
    smooth: Floats = rows[..., low] * (1 - share) + rows[..., low + 1] * share
    return smooth


def cluttered(ink: Floats, pieces: Floats, rng: np.random.Generator) -> Floats:
    """A tinted digit among noise, stray lines and bits of other digits of the same part."""
    count = len(ink)
    background = 0.22 + 0.12 * smooth_noise(rng, (count, 1), 4)
    mess = np.zeros((count, SIDE, SIDE))
    for _ in range(4):
        mess = np.maximum(mess, fragments(pieces, rng) * between(rng, 0.6, 1.0, (count, 1, 1)))
    for _ in range(2):
        mess = np.maximum(mess, stray_lines(count, rng) * between(rng, 0.6, 1.0, (count, 1, 1)))
    tint = between(rng, 0.2, 1.0, (count, 3, 1, 1))
    digit_tint = between(rng, 0.65, 1.0, (count, 3, 1, 1))
    # A digit pushes the clutter aside, as paint on a wall would: it stays readable.
    halo = 1.0 - 0.8 * widened(ink)
    pictures = background + (mess * halo)[:, None] * tint * 0.75
    pictures = pictures * (1.0 - ink[:, None]) + ink[:, None] * digit_tint
    grain = between(rng, -0.2, 0.2, (count, 3, SIDE, SIDE))
    return np.clip(pictures + grain, 0.0, 1.0)


def fragments(pieces: Floats, rng: np.random.Generator) -> Floats:
    """For each picture, some other digit pushed so far to the side that only a part shows."""
    count = len(pieces)
    # Adding 1..count-1 never lands on the picture's own digit.
    others = 1 + (uniform(rng, count) * (count - 1)).astype(np.int64)
    whole = placed(pieces[(np.arange(count) + others) % count], rng)
    shifts = between(rng, 0.5, 0.8, count) * SIDE
    sides = (uniform(rng, count) * 4).astype(np.int64)
    along = (between(rng, -0.5, 0.5, count) * SIDE).astype(np.int64)
    moved = np.zeros_like(whole)
    for row, (side, far, by) in enumerate(zip(sides, shifts.astype(np.int64), along, strict=True)):
        down, right = ((far, by), (-far, by), (by, far), (by, -far))[side]
        moved[row] = shifted(whole[row], int(down), int(right))
    return moved


def shifted(picture: Floats, down: int, right: int) -> Floats:
    """The picture moved by whole pixels, empty where nothing came from."""
    height, width = picture.shape
    result = np.zeros_like(picture)
    result[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = picture[
        max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return result


def stray_lines(count: int, rng: np.random.Generator) -> Floats:
    """One straight line across each picture, about two pixels wide."""
    ends = between(rng, 0.0, SIDE, (count, 2, 2))
    grid = np.arange(SIDE) + 0.5
    along, offset = ends[:, 1] - ends[:, 0], ends[:, 0]
    length = np.sqrt((along * along).sum(1)) + 1e-6
    distance = np.abs(
        along[:, 0, None, None] * (grid[None, :, None] - offset[:, 1, None, None])
        - along[:, 1, None, None] * (grid[None, None, :] - offset[:, 0, None, None])
    )
    lines: Floats = np.clip(1.8 - distance / length[:, None, None], 0.0, 1.0)
    return lines


def widened(ink: Floats) -> Floats:
    """Ink spread by two pixels in all directions."""
    padded = np.pad(ink, ((0, 0), (2, 2), (2, 2)))
    rows = np.max([padded[:, step : step + SIDE] for step in range(5)], axis=0)
    spread: Floats = np.max([rows[:, :, step : step + SIDE] for step in range(5)], axis=0)
    return spread


def font_site(size: int) -> Site:
    """The drawn domain: 30 training and 15 test pictures of each digit."""
    parts = []
    for part, per_class in (("train", 30), ("test", 15)):
        rng = generator("font", part)
        labels = np.repeat(np.arange(10, dtype=np.int64), per_class)
        ink = written(labels, rng)
        below, above = contrasting(len(labels), rng)
        shade = 0.10 * smooth_noise(rng, (len(labels), 3), 2)
        pictures = np.clip(below + shade, 0, 1) * (1 - ink[:, None]) + above * ink[:, None]
        parts.append(Examples(stored(pictures, size), labels))
    return whole_site("font", *parts)


def written(labels: Integers, rng: np.random.Generator) -> Floats:
    """The ink [example, SIDE, SIDE] of each label in a random typeface, size and place."""
    faces = list(typefaces().values())
    strokes = [[segments(glyph) for glyph in face.glyphs] for face in faces]
    which = np.arange(len(labels)) % len(faces)  # every digit meets every typeface
    chances = uniform(rng, (len(labels), 7))
    ink = np.empty((len(labels), SIDE, SIDE))
    for row, (label, face, chance) in enumerate(zip(labels, which, chances, strict=True)):
        ends, radius = posed(strokes[face][label], faces[face], chance)
        ink[row] = inked(ends, radius, faces[face])
    return ink


def posed(ends: Floats, face: Typeface, chance: Floats) -> tuple[Floats, float]:
    """The pieces of a glyph in pixels, and the pen's radius, from seven numbers in 0..1."""
    height = SIDE * (0.58 + 0.22 * chance[0])
    width = height * (0.62 + 0.22 * chance[1])
    x = (ends[..., 0] - 0.5) * width
    y = (ends[..., 1] - 0.5) * height
    x = x - (face.slant + 0.3 * (chance[2] - 0.5)) * y
    turn = 0.42 * (chance[3] - 0.5)  # about 12 degrees either way
    cosine, sine = np.cos(turn), np.sin(turn)
    room = SIDE * 0.5 - height * 0.5
    across = SIDE * 0.5 + cosine * x - sine * y + 1.2 * room * (chance[4] - 0.5)
    down = SIDE * 0.5 + sine * x + cosine * y + 1.2 * room * (chance[5] - 0.5)
    radius = 1.1 + 1.0 * float(chance[6]) + (0.7 if face.hollow else 0.0)
    return np.stack([across, down], axis=-1), radius


def inked(ends: Floats, radius: float, face: Typeface) -> Floats:
    """How much ink [SIDE, SIDE] a round pen leaves that follows the pieces."""
    start, along = ends[:, 0], ends[:, 1] - ends[:, 0]
    grid = np.arange(SIDE) + 0.5
    x = grid[None, None, :] - start[:, 0, None, None]
    y = grid[None, :, None] - start[:, 1, None, None]
    dx, dy = along[:, 0, None, None], along[:, 1, None, None]
    squared = dx * dx + dy * dy + 1e-9
    reached = np.clip((x * dx + y * dy) / squared, 0.0, 1.0)
    distance = np.sqrt((x - reached * dx) ** 2 + (y - reached * dy) ** 2)
    pen = radius * (1.0 - face.contrast * np.abs(dx) / np.sqrt(squared))
    outside = (distance - pen).min(0)  # below 0 inside the stroke
    edge = np.abs(outside + 0.2) - 0.75 if face.hollow else outside
    ink: Floats = np.clip(0.5 - edge, 0.0, 1.0)
    return ink


def contrasting(count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Two colours [example, 3, 1, 1] each, one dark and one light, in either order."""
    dark = between(rng, 0.0, 0.38, (count, 3, 1, 1))
    light = between(rng, 0.58, 1.0, (count, 3, 1, 1))
    swap = uniform(rng, (count, 1, 1, 1)) < 0.5
    return np.where(swap, light, dark), np.where(swap, dark, light)


def coloured(grey: Floats) -> Floats:
    """Grey pictures [example, SIDE, SIDE] with three equal channels."""
    return np.repeat(grey[:, None], 3, axis=1)


def stored(pictures: Floats, size: int) -> NDArray[np.uint8]:
    """Pictures in 0..1 as bytes at `size`; the small ones average the large ones in integers."""
    full = as_bytes(255.0 * pictures)
    if size == SIDE:
        return full
    count, channels = full.shape[:2]
    blocks = full.reshape(count, channels, size, 2, size, 2).astype(np.uint16)
    sums = blocks.sum((3, 5), dtype=np.uint16)
    averaged: NDArray[np.uint8] = ((sums + 2) // 4).astype(np.uint8)
    return averaged


def generator(*purpose: object) -> np.random.Generator:
    """The random numbers for one purpose, the same every time."""
    words = [SEED, *" ".join(map(str, purpose)).encode()]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def uniform(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
    """Uniform numbers in 0..1."""
    return rng.random(shape)


def between(
    rng: np.random.Generator, low: float, high: float, shape: int | tuple[int, ...]
) -> Floats:
    """Uniform numbers in low..high."""
    return low + (high - low) * rng.random(shape)
