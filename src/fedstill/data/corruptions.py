"""Nineteen corruptions of small photographs in five severities, made from uint8 images.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019. The values are those of the 32x32 version, CIFAR-10-C. The draws are
our own, so images agree with the published ones in law and not pixel by pixel. `frost` blends in
photographs there; here it blends in a texture that is drawn from the seed: a surrogate.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError, unknown
from fedstill.data import filters
from fedstill.data.filters import Floats
from fedstill.data.optional import optional

SIDE = 32  # pixels; the published values belong to this size
SHAPE = (3, SIDE, SIDE)
SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 500  # images treated at once, each chunk with draws of its own
GREY = np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]  # of red, green and blue
WATER = np.array([175 / 255, 238 / 255, 238 / 255], np.float32)[:, None, None]
MUD = np.array([63 / 255, 42 / 255, 20 / 255], np.float32)[:, None, None]
ICE = np.array([0.82, 0.91, 1.0])[:, None, None]
FROST_TEXTURES, FROST_SIDE = 5, 160

Rng = np.random.Generator
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Kind:
    """How images 0..1 are changed, and the values of each severity."""

    change: Callable[..., Floats]
    values: tuple[tuple[float, ...], ...]  # by severity
    rounded: bool = False  # to the nearest byte; else cut off, as published


def corrupted(images: Bytes, kind: str, severity: int, *, seed: int = 0) -> Bytes:
    """The images [image, 3, 32, 32] corrupted; the same seed, kind and severity give the same."""
    if kind not in KINDS:
        raise DataError(unknown("corruption", kind, KINDS))
    check_severity(severity)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != SHAPE:
        raise DataError(
            f"corruptions are defined for uint8 images [image, 3, {SIDE}, {SIDE}], "
            f"but these are {images.dtype} {list(images.shape)}"
        )
    table = KINDS[kind]
    result = np.empty_like(images)
    for start in range(0, len(images), CHUNK):
        part = as_floats(images[start : start + CHUNK])
        rng = generator(seed, kind, severity, start)
        changed = table.change(part, rng, *table.values[severity - 1])
        result[start : start + CHUNK] = as_pixels(changed, rounded=table.rounded)
    return result


def check_severity(severity: int) -> None:
    """Raise unless it is one of the five."""
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise DataError(f"severity must be a whole number in 1..5, but is {severity!r}")


def generator(seed: int, *names: object) -> Rng:
    """Draws for a purpose: a function of the seed and the names alone."""
    digest = sha256(repr((seed, *names)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def as_pixels(images: Floats, *, rounded: bool = False) -> Bytes:
    """Values 0..1 as bytes.

    The small addend keeps a whole number whole where a sum ends in its last bit below it.
    """
    addend = np.float32(0.5 if rounded else 1e-3)
    pixels: Bytes = np.floor(images.clip(0, 1) * np.float32(255) + addend).astype(np.uint8)
    return pixels


def as_floats(pixels: Bytes) -> Floats:
    """Bytes as values 0..1."""
    return pixels.astype(np.float32) / np.float32(255)


def highest(images: Floats, axes: tuple[int, ...]) -> Floats:
    """The largest value along some axes, which stay with length 1."""
    found: Floats = images.max(axes, keepdims=True)
    return found


def gaussian_noise(x: Floats, rng: Rng, scale: float) -> Floats:
    """Normal noise on every value."""
    return x + np.float32(scale) * rng.standard_normal(x.shape, np.float32)


def shot_noise(x: Floats, rng: Rng, photons: float) -> Floats:
    """Every value a count of so many photons at full light."""
    return (rng.poisson(x * photons) / photons).astype(np.float32)


def impulse_noise(x: Floats, rng: Rng, amount: float) -> Floats:
    """A share of all values is replaced, half of them by 0 and half by 1."""
    chance = rng.random(x.shape, np.float32)
    salted = np.where(chance < amount / 2, np.float32(1), x)
    return np.where((chance >= amount / 2) & (chance < amount), np.float32(0), salted)


def speckle_noise(x: Floats, rng: Rng, scale: float) -> Floats:
    """Normal noise in proportion to each value."""
    return x * (1 + np.float32(scale) * rng.standard_normal(x.shape, np.float32))


def gaussian_blur(x: Floats, rng: Rng, sigma: float) -> Floats:
    """A Gaussian blur; the edge pixel is repeated."""
    return filters.on_both_axes(filters.gaussian_weights(SIDE, sigma), x)


def defocus_blur(x: Floats, rng: Rng, radius: float, softness: float) -> Floats:
    """A disk as kernel, its rim softened."""
    return filters.convolved(x, disk(radius, softness))


def disk(radius: float, softness: float) -> NDArray[np.float64]:
    """A kernel of five by five pixels that sums to 1: a disk, blurred with three by three."""
    steps = np.arange(-2, 3)
    inside = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float64)
    side = np.exp(-0.5 * (np.arange(-1, 2) / softness) ** 2)
    side /= side.sum()
    weights = np.array([np.convolve(row, side, "same") for row in np.eye(5)])
    blurred: NDArray[np.float64] = weights @ (inside / inside.sum()) @ weights.T
    return blurred


def glass_blur(x: Floats, rng: Rng, sigma: float, rounds: int) -> Floats:
    """Blurred, pixels taken from a neighbour above or to the left, and blurred again.

    The published program means to exchange two pixels; as written it overwrites one by the
    other, and because of its order always by a neighbour that is not yet changed.
    """
    weights = filters.gaussian_weights(SIDE, sigma)
    x = as_floats(as_pixels(filters.on_both_axes(weights, x)))
    image, place = np.arange(len(x))[:, None, None], np.arange(2, SIDE)
    for _ in range(rounds):
        up, left = rng.integers(0, 2, (2, len(x), SIDE - 2, SIDE - 2))
        rows, columns = place[:, None] - up, place - left
        taken = x.transpose(0, 2, 3, 1)[image, rows, columns]  # [image, row, column, channel]
        x = x.copy()
        x[:, :, 2:, 2:] = taken.transpose(0, 3, 1, 2)
    return filters.on_both_axes(weights, x)


def motion_blur(x: Floats, rng: Rng, radius: int, sigma: float) -> Floats:
    """Drawn out in a direction within 45 degrees of the level."""
    angles = rng.uniform(-45, 45, len(x))
    return filters.motion_blurred(x, angles, radius=radius, sigma=sigma)


def zoom_blur(x: Floats, rng: Rng, most: float) -> Floats:
    """The mean of the image and of itself enlarged by 1.00, 1.01 and so on."""
    factors = np.arange(1, most, 0.01)
    total = x.copy()
    shared: dict[bytes, tuple[filters.Weights, int]] = {}  # several factors give the same pixels
    for factor in factors:
        weights = filters.zoom_weights(SIDE, float(factor))
        _, times = shared.get(weights.tobytes(), (weights, 0))
        shared[weights.tobytes()] = (weights, times + 1)
    for weights, times in shared.values():
        total += np.float32(times) * filters.on_both_axes(weights, x)
    return total / np.float32(len(factors) + 1)


def snow(
    x: Floats, rng: Rng, mean: float, spread: float, zoom: float, least: float,
    radius: int, sigma: float, kept: float,
) -> Floats:  # fmt: skip
    """Flakes that fall in two opposite directions over a whitened image."""
    layer = rng.normal(mean, spread, (len(x), SIDE, SIDE)).astype(np.float32)
    layer = filters.on_both_axes(filters.zoom_weights(SIDE, zoom), layer)
    layer = np.where(layer < least, np.float32(0), layer)
    flakes = as_floats(as_pixels(layer[:, None]))
    angles = rng.uniform(-135, -45, len(x))
    flakes = filters.motion_blurred(flakes, angles, radius=radius, sigma=sigma)
    flakes = as_floats(as_pixels(flakes, rounded=True))
    grey = (GREY * x).sum(1, keepdims=True)
    white = np.maximum(x, np.float32(1.5) * grey + np.float32(0.5))
    pale: Floats = np.float32(kept) * x + np.float32(1 - kept) * white
    return pale + flakes + flakes[:, :, ::-1, ::-1]


def frost(x: Floats, rng: Rng, kept: float, added: float) -> Floats:
    """A piece of one of the textures laid over the image."""
    which = rng.integers(0, FROST_TEXTURES, len(x))
    down, across = rng.integers(0, FROST_SIDE - SIDE, (2, len(x), 1, 1))
    rows = down + np.arange(SIDE)[:, None]
    columns = across + np.arange(SIDE)
    pieces: Floats = frost_textures().transpose(0, 2, 3, 1)[which[:, None, None], rows, columns]
    return np.float32(kept) * x + np.float32(added) * pieces.transpose(0, 3, 1, 2)


@cache
def frost_textures() -> Floats:
    """Pale blue crystals [texture, 3, 160, 160]: bright ridges of noise drawn out in directions.

    They stand in for the photographs of the published set and, like these, are always the same.
    """
    frequency = np.fft.fftfreq(FROST_SIDE)
    radius = np.hypot(frequency[:, None], frequency)
    rng = generator(0, "frost", "textures")
    made = []
    for _ in range(FROST_TEXTURES):
        crystals = np.zeros((FROST_SIDE, FROST_SIDE))
        for direction in rng.uniform(0, np.pi, 5):
            along = frequency[:, None] * np.sin(direction) + frequency * np.cos(direction)
            aside = frequency * np.sin(direction) - frequency[:, None] * np.cos(direction)
            noise = np.fft.fft2(rng.standard_normal(crystals.shape))
            band = np.exp(-((along / 0.02) ** 2) - ((aside / 0.12) ** 2))
            field = np.real(np.fft.ifft2(noise * band))
            ridges = np.exp(-np.abs(field / field.std()) * 2.5)  # bright where the field is zero
            crystals = np.maximum(crystals, rng.uniform(0.6, 1.0) * ridges)
        noise = np.fft.fft2(rng.standard_normal(crystals.shape))
        cloud = np.real(np.fft.ifft2(noise * np.exp(-((radius / 0.02) ** 2))))
        patches = 1 / (1 + np.exp(-1.5 * cloud / cloud.std()))
        made.append(ICE * (0.25 + 0.75 * crystals * (0.35 + 0.65 * patches)))
    return np.stack(made).astype(np.float32)


def fog(x: Floats, rng: Rng, thickness: float, decay: float) -> Floats:
    """Clouds added, and all of it brought back to the image's range."""
    brightest = highest(x, (1, 2, 3))
    clouds = filters.plasma(rng, len(x), SIDE, decay)[:, None]
    return (x + np.float32(thickness) * clouds) * brightest / (brightest + np.float32(thickness))


def spatter(
    x: Floats, rng: Rng, mean: float, spread: float, sigma: float, least: float,
    strength: float, mud: bool,
) -> Floats:  # fmt: skip
    """Drops of water (the lower severities) or of mud."""
    layer = rng.normal(mean, spread, (len(x), SIDE, SIDE)).astype(np.float32)
    liquid = filters.on_both_axes(filters.gaussian_weights(SIDE, sigma), layer)
    liquid = np.where(liquid < least, np.float32(0), liquid)
    if mud:
        cover = (liquid > least).astype(np.float32)
        cover = filters.on_both_axes(filters.gaussian_weights(SIDE, strength), cover)
        cover = np.where(cover < 0.8, np.float32(0), cover)[:, None]
        return x + cover * (MUD - x)
    drops = shaded(as_pixels(liquid).astype(np.float32))
    most = highest(drops, (1, 2))
    drops = np.divide(drops, most, out=np.zeros_like(drops), where=most > 0)
    return x + np.float32(strength) * drops[:, None] * WATER


def shaded(liquid: Floats) -> Floats:
    """Drops 0..255 lit from one corner: a relief of the distance to their rims."""
    box, lit = np.full((3, 3), 1 / 9), np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], np.float64)
    distance = filters.distance_to(filters.edges(liquid, 50, 150), 20)
    levels = np.floor(filters.convolved(distance, box) + np.float32(1e-3)).astype(np.int64)
    relief = filters.convolved(filters.equalised(levels), lit).clip(0, 255)
    lighted: Floats = liquid * np.rint(filters.convolved(relief, box))
    return lighted


def brightness(x: Floats, rng: Rng, more: float) -> Floats:
    """The value of HSV raised."""
    value = highest(x, (1,))
    raised = np.minimum(value + np.float32(more), 1)
    ratio = np.divide(raised, value, out=np.ones_like(value), where=value > 0)
    changed: Floats = np.where(value > 0, x * ratio, raised)
    return changed


def contrast(x: Floats, rng: Rng, factor: float) -> Floats:
    """Every channel drawn towards its mean."""
    mean: Floats = x.mean((2, 3), keepdims=True)
    return (x - mean) * np.float32(factor) + mean


def saturate(x: Floats, rng: Rng, factor: float, more: float) -> Floats:
    """The saturation of HSV changed; grey counts as red without saturation."""
    value = highest(x, (1,))
    depth: Floats = value - x.min(1, keepdims=True)
    saturation = np.divide(depth, value, out=np.zeros_like(value), where=value > 0)
    wanted = (saturation * np.float32(factor) + np.float32(more)).clip(0, 1)
    ratio = np.divide(wanted, saturation, out=np.zeros_like(value), where=saturation > 0)
    red = np.array([0, 1, 1], np.float32)[:, None, None]  # what red lacks of white
    less: Floats = np.where(saturation > 0, (value - x) * ratio, value * wanted * red)
    return value - less


def elastic_transform(x: Floats, rng: Rng, reach: float, sigma: float, jitter: float) -> Floats:
    """Three points moved and the image with them, then every pixel by a smooth field."""
    across, down = affine_places(rng, len(x), jitter)
    x = filters.sampled(x, down, across, twice=False)
    if not reach:
        return x
    field = rng.uniform(-1, 1, (2, len(x), SIDE, SIDE)).astype(np.float32)
    weights = filters.gaussian_weights(SIDE, sigma, truncate=3, mirrored=True)
    aside, below = np.float32(reach) * filters.on_both_axes(weights, field)
    place = np.arange(SIDE, dtype=np.float32)
    return filters.sampled(x, place[:, None] + below, place + aside, twice=True)


def affine_places(rng: Rng, count: int, jitter: float) -> tuple[Floats, Floats]:
    """Where each pixel of a warped image comes from: columns and rows [image, 32, 32]."""
    points = np.array([(26, 26), (26, 6), (6, 6)], np.float64)  # column, row
    moved = points + rng.uniform(-jitter, jitter, (count, 3, 2))
    ones = np.ones((count, 3, 1))
    # The map takes moved points back to where they were: [column, row, 1] @ back.
    back = np.linalg.solve(np.concatenate([moved, ones], 2), np.broadcast_to(points, moved.shape))
    row, column = np.mgrid[:SIDE, :SIDE]
    pixels = np.stack([column, row, np.ones_like(row)], -1).reshape(-1, 3)
    found = (pixels @ back).astype(np.float32).reshape(count, SIDE, SIDE, 2)
    return found[..., 0], found[..., 1]


def pixelate(x: Floats, rng: Rng, share: float) -> Floats:
    """Made smaller and large again, rounded to bytes after every direction."""
    small = int(SIDE * share)
    for before, after in ((SIDE, small), (small, SIDE)):
        weights = filters.box_weights(before, after)
        x = as_floats(as_pixels(x @ weights.T, rounded=True))
        x = as_floats(as_pixels(weights @ x, rounded=True))
    return x


def jpeg_compression(x: Floats, rng: Rng, quality: int) -> Floats:
    """Written as JPEG of some quality and read again."""
    pillow = optional(
        "PIL.Image", needed_for="the corruption jpeg_compression", install="fedstill[images]"
    )
    result = np.empty((len(x), SIDE, SIDE, 3), np.uint8)
    for number, image in enumerate(as_pixels(x, rounded=True).transpose(0, 2, 3, 1)):
        stream = io.BytesIO()
        pillow.fromarray(np.ascontiguousarray(image)).save(stream, "JPEG", quality=quality)
        result[number] = np.asarray(pillow.open(stream))
    return as_floats(result.transpose(0, 3, 1, 2))


def _one(*values: float) -> tuple[tuple[float, ...], ...]:
    return tuple((value,) for value in values)


KINDS: dict[str, Kind] = {
    "gaussian_noise": Kind(gaussian_noise, _one(0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": Kind(shot_noise, _one(500, 250, 100, 75, 50)),
    "impulse_noise": Kind(impulse_noise, _one(0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle_noise": Kind(speckle_noise, _one(0.06, 0.1, 0.12, 0.16, 0.2)),
    "defocus_blur": Kind(
        defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    ),  # radius, softness
    "glass_blur": Kind(
        glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
    ),  # sigma, rounds
    "motion_blur": Kind(
        motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)), rounded=True
    ),  # radius, sigma
    "zoom_blur": Kind(zoom_blur, _one(1.06, 1.11, 1.16, 1.21, 1.26)),
    "gaussian_blur": Kind(gaussian_blur, _one(0.4, 0.6, 0.7, 0.8, 1)),
    "snow": Kind(
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Kind(
        frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
    ),  # kept, added
    "fog": Kind(fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),  # thickness, decay
    "brightness": Kind(brightness, _one(0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": Kind(contrast, _one(0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": Kind(
        elastic_transform,
        (
            (0, 0, 0.08 * SIDE),
            (0.05 * SIDE, 0.2 * SIDE, 0.07 * SIDE),
            (0.08 * SIDE, 0.06 * SIDE, 0.06 * SIDE),
            (0.1 * SIDE, 0.04 * SIDE, 0.05 * SIDE),
            (0.1 * SIDE, 0.03 * SIDE, 0.03 * SIDE),
        ),
    ),  # reach, sigma, jitter
    "pixelate": Kind(pixelate, _one(0.95, 0.9, 0.85, 0.75, 0.65), rounded=True),
    "jpeg_compression": Kind(jpeg_compression, _one(80, 65, 58, 50, 40), rounded=True),
    "spatter": Kind(
        spatter,
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
    ),
    "saturate": Kind(saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
