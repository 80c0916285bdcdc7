"""Arithmetic on stacks of small images: blurs, zooms, warps, edges. Numpy alone, no kinds.

Images are float32 [image, channel, height, width] with values 0..1, layers [image, height, width].
A blur or zoom that treats rows and columns alike is a square matrix of weights, applied to both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = NDArray[np.float32]  # [after, before]
Flags = NDArray[np.bool_]
TANGENT = float(np.tan(np.pi / 8))  # of 22.5 degrees, between two of the four directions of an edge


def on_both_axes(weights: Weights, images: Floats) -> Floats:
    """Rows and columns mixed by the same weights."""
    mixed: Floats = np.matmul(np.matmul(weights, images), weights.T)
    return mixed


def folded(places: NDArray[np.int64], size: int, *, twice: bool) -> NDArray[np.int64]:
    """Places outside 0..size-1 mirrored inwards; with `twice` the edge pixel is repeated."""
    if twice:
        around = places % (2 * size)
        return np.minimum(around, 2 * size - 1 - around)
    around = places % (2 * size - 2)
    return np.minimum(around, 2 * size - 2 - around)


def gaussian_weights(
    size: int, sigma: float, *, truncate: float = 4.0, mirrored: bool = False
) -> Weights:
    """A Gaussian cut at `truncate` deviations; beyond the edge its pixel, or the mirrored image."""
    reach = int(truncate * sigma + 0.5)
    steps = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (steps / sigma) ** 2) if reach else np.ones(1)
    kernel /= kernel.sum()
    places = np.arange(size)[:, None] + steps
    places = folded(places, size, twice=True) if mirrored else places.clip(0, size - 1)
    weights = np.zeros((size, size))
    np.add.at(weights, (np.arange(size)[:, None], places), kernel)
    return weights.astype(np.float32)


def zoom_weights(size: int, factor: float) -> Weights:
    """The middle enlarged by `factor` with linear interpolation between its outermost pixels."""
    before = int(np.ceil(size / factor))
    after = round(before * factor)
    cut = (after - size) // 2
    start = (size - before) // 2
    places = (np.arange(size) + cut) * ((before - 1) / (after - 1))
    low = np.minimum(np.floor(places).astype(np.int64), before - 2)
    share = places - low
    weights = np.zeros((size, size))
    weights[np.arange(size), start + low] = 1 - share
    weights[np.arange(size), start + low + 1] += share
    return weights.astype(np.float32)


def box_weights(before: int, after: int) -> Weights:
    """Every new pixel the mean of the old ones whose centres it covers, or the nearest one."""
    step = before / after
    reach = 0.5 * max(step, 1.0)
    centres = (np.arange(after) + 0.5) * step
    low = (centres - reach + 0.5).astype(np.int64)
    high = (centres + reach + 0.5).astype(np.int64).clip(max=before)
    places = np.arange(before)
    weights = ((places >= low[:, None]) & (places < high[:, None])).astype(np.float64)
    covered: Weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return covered


def convolved(images: Floats, kernel: NDArray[np.float64]) -> Floats:
    """Correlation with a small odd kernel; the image is mirrored without repeating its edge."""
    reach = len(kernel) // 2
    margin = [(0, 0)] * (images.ndim - 2) + [(reach, reach)] * 2
    wide = np.pad(images, margin, mode="reflect")
    height, width = images.shape[-2:]
    result = np.zeros_like(images)
    for (row, column), weight in np.ndenumerate(kernel):
        if weight:
            result += np.float32(weight) * wide[..., row : row + height, column : column + width]
    return result


def motion_blurred(
    images: Floats, angles: NDArray[np.float64], *, radius: int, sigma: float
) -> Floats:
    """Each image drawn out in its own direction (degrees) with one half of a Gaussian.

    Taps lie on whole pixels; beyond the edge its pixel is repeated.
    """
    steps = np.arange(2 * radius + 1)
    kernel = np.exp(-0.5 * (steps / sigma) ** 2)
    kernel /= kernel.sum()
    turn = np.deg2rad(angles)
    across = np.ceil(steps * np.cos(turn)[:, None] - 0.5).astype(np.int64)  # [image, tap]
    down = np.ceil(steps * np.sin(turn)[:, None] - 0.5).astype(np.int64)
    count, channels, height, width = images.shape
    pixels = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).reshape(-1, channels)
    first = np.arange(count)[:, None, None] * (height * width)
    result = np.zeros_like(pixels)
    for tap in np.flatnonzero(kernel > 1e-5):
        rows = (np.arange(height) + down[:, tap, None]).clip(0, height - 1)
        columns = (np.arange(width) + across[:, tap, None]).clip(0, width - 1)
        places = first + rows[:, :, None] * width + columns[:, None, :]
        result += np.float32(kernel[tap]) * pixels[places.reshape(-1)]
    return np.ascontiguousarray(
        result.reshape(count, height, width, channels).transpose(0, 3, 1, 2)
    )


def sampled(images: Floats, rows: Floats, columns: Floats, *, twice: bool) -> Floats:
    """Images read at any places [image, height, width], linearly interpolated and mirrored."""
    count, channels, height, width = images.shape
    pixels = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).reshape(-1, channels)
    first = np.arange(count)[:, None, None] * (height * width)
    top, left = np.floor(rows), np.floor(columns)
    result = np.zeros((rows.size, channels), np.float32)
    for below in (0, 1):
        for beside in (0, 1):
            weight = np.abs(1 - below - (rows - top)) * np.abs(1 - beside - (columns - left))
            row = folded(top.astype(np.int64) + below, height, twice=twice)
            column = folded(left.astype(np.int64) + beside, width, twice=twice)
            places = (first + row * width + column).reshape(-1)
            result += weight.reshape(-1, 1).astype(np.float32) * pixels[places]
    return np.ascontiguousarray(
        result.reshape(count, *rows.shape[1:], channels).transpose(0, 3, 1, 2)
    )


def plasma(rng: np.random.Generator, count: int, size: int, decay: float) -> Floats:
    """Clouds between 0 and 1 by the diamond-square method; `size` is a power of two."""
    heights = np.zeros((count, size, size))
    step, wibble = size, 100.0

    def around(total: NDArray[np.float64]) -> NDArray[np.float64]:
        return total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, 1)
        heights[:, half::step, half::step] = around(pairs + np.roll(pairs, -1, 2))
        centres, corners = heights[:, half::step, half::step], heights[:, ::step, ::step]
        beside = centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2)
        heights[:, ::step, half::step] = around(beside)
        below = centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1)
        heights[:, half::step, ::step] = around(below)
        step, wibble = half, wibble / decay
    heights -= heights.min((1, 2), keepdims=True)
    heights /= heights.max((1, 2), keepdims=True)
    return heights.astype(np.float32)


def edges(layers: Floats, low: float, high: float) -> Flags:
    """Canny's edges of layers with values 0..255: thinned, strong, or touching a strong one."""
    across, down = _sobel(layers)
    strength = np.abs(across) + np.abs(down)
    around = np.pad(strength, ((0, 0), (1, 1), (1, 1)))
    height, width = layers.shape[1:]

    def neighbour(row: int, column: int) -> Floats:
        return around[:, 1 + row : 1 + row + height, 1 + column : 1 + column + width]

    flat = np.abs(down) < TANGENT * np.abs(across)
    steep = np.abs(down) > np.abs(across) / TANGENT
    same = across * down >= 0
    level = (strength > neighbour(0, -1)) & (strength >= neighbour(0, 1))
    upright = (strength > neighbour(-1, 0)) & (strength >= neighbour(1, 0))
    falling = (strength > neighbour(-1, -1)) & (strength > neighbour(1, 1))
    rising = (strength > neighbour(-1, 1)) & (strength > neighbour(1, -1))
    slanted = np.where(same, falling, rising)
    ridge = (strength > low) & np.where(flat, level, np.where(steep, upright, slanted))
    found = ridge & (strength > high)
    while True:
        grown = ridge & _grown(found)
        if (grown == found).all():
            return found
        found = grown


def _sobel(layers: Floats) -> tuple[Floats, Floats]:
    wide = np.pad(layers, ((0, 0), (1, 1), (1, 1)), mode="edge")
    smooth_down = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]
    smooth_across = wide[:, :, :-2] + 2 * wide[:, :, 1:-1] + wide[:, :, 2:]
    return (
        smooth_down[:, :, 2:] - smooth_down[:, :, :-2],
        smooth_across[:, 2:] - smooth_across[:, :-2],
    )


def _grown(flags: Flags) -> Flags:
    """Every pixel that is set or has a set neighbour, corners included."""
    wide = np.pad(flags, ((0, 0), (1, 1), (1, 1)))
    tall = wide[:, :-2] | wide[:, 1:-1] | wide[:, 2:]
    grown: Flags = tall[:, :, :-2] | tall[:, :, 1:-1] | tall[:, :, 2:]
    return grown


def distance_to(flags: Flags, most: int) -> Floats:
    """How far each pixel is from the nearest set one, `most` at the farthest."""
    height, width = (np.arange(n, dtype=np.int16) for n in flags.shape[1:])
    far = np.where(flags, 0, 4 * most**2).astype(np.int16)
    down = (height[:, None] - height) ** 2  # [from, to]
    along = (far[:, :, None, :] + down[:, :, None]).min(1)  # [image, to, column]
    across = (width[:, None] - width) ** 2
    both = (along[:, :, :, None] + across).min(2)
    distance: Floats = np.minimum(np.sqrt(both.astype(np.float32)), np.float32(most))
    return distance


def equalised(levels: NDArray[np.int64]) -> Floats:
    """Layers of whole levels 0..255 spread so that every level between is equally frequent."""
    count, pixels = len(levels), levels[0].size
    flat = levels.reshape(count, -1)
    shifted = flat + 256 * np.arange(count)[:, None]
    histogram = np.bincount(shifted.reshape(-1), minlength=256 * count).reshape(count, 256)
    lowest = histogram[np.arange(count), flat.min(1)]
    above = histogram.cumsum(1) - lowest[:, None]
    scale = 255 / np.maximum(pixels - lowest, 1)
    table = np.rint(above * scale[:, None]).clip(0, 255)
    # A layer of one level has nothing to spread and stays as it is.
    table = np.where((lowest == pixels)[:, None], np.arange(256), table)
    result = np.take_along_axis(table, flat, 1).astype(np.float32)
    return result.reshape(levels.shape)
