"""Arithmetic on stored images: size, channels, statistics. No files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError

Inputs = NDArray[np.uint8] | NDArray[np.float32]  # images, or vectors of features
CHUNK = 2048  # images treated at once, so that float copies stay small
FEW = 128  # images resized at once; what comes between stays in a processor's cache
LARGEST_SIDE = 1024  # pixels; larger requests are taken for mistakes
WIDEST_BLUR = 8.0  # pixels
LUMINANCE = np.array([0.299, 0.587, 0.114])  # of red, green and blue


def as_bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Values in 0..255 rounded to bytes, ties upwards.

    The small addend makes a tie round the same way on machines whose sums differ in the last bit.
    """
    bounded = np.clip(values, 0.0, 255.0)
    bounded += 0.5 + 1e-6
    return bounded.astype(np.uint8)  # cuts off what is behind the point


def resized(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Images [example, channel, height, width] brought to size x size, bilinear, antialiased.

    The aspect ratio is not kept.
    """
    check_size(size)
    count, channels, height, width = images.shape
    if (height, width) == (size, size):
        return images
    down, across = resampling(height, size), resampling(width, size)
    result = np.empty((count, channels, size, size), np.uint8)
    for start in range(0, count, FEW):
        part = images[start : start + FEW].astype(np.float64)
        # One product of tall matrices: products of many small ones take ten times as long.
        wide = (part.reshape(-1, width) @ across.T).reshape(-1, height, size)
        turned = np.ascontiguousarray(wide.swapaxes(1, 2)).reshape(-1, height)  # rows are columns
        found = as_bytes(turned @ down.T).reshape(-1, channels, size, size)
        result[start : start + FEW] = found.swapaxes(2, 3)
    return result


def middle(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The middle side x side pixels of images [example, channel, height, width]."""
    height, width = images.shape[2:]
    if isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= min(height, width):
        raise DataError(
            f"the middle of images of {height}x{width} pixels can be 1 to {min(height, width)} "
            f"pixels wide, but {side!r} was asked for"
        )
    top, left = (height - side) // 2, (width - side) // 2
    return images[:, :, top : top + side, left : left + side]


def blurred(images: NDArray[np.uint8], deviation: float) -> NDArray[np.uint8]:
    """Images under a Gaussian of `deviation` pixels, cut at four times that; dark outside."""
    number = isinstance(deviation, (int, float)) and not isinstance(deviation, bool)
    if not number or not 0 < deviation <= WIDEST_BLUR:
        raise DataError(
            f"a blur's deviation must be above 0 and at most {WIDEST_BLUR:g} pixels, "
            f"but is {deviation!r}"
        )
    down, across = (spreading(side, deviation) for side in images.shape[2:])
    result = np.empty_like(images)
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK].astype(np.float64)
        result[start : start + CHUNK] = as_bytes(down @ part @ across.T)
    return result


def spreading(side: int, deviation: float) -> NDArray[np.float64]:
    """How much of each pixel [after, before] a Gaussian brings to each; the rest is lost."""
    reach = int(4 * deviation + 0.5)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    distance = np.abs(np.arange(side)[:, None] - np.arange(side)[None, :])
    weights: NDArray[np.float64] = np.exp(-0.5 * (distance / deviation) ** 2) / kernel.sum()
    return np.where(distance <= reach, weights, 0.0)


def resampling(before: int, after: int) -> NDArray[np.float64]:
    """The weights [after, before] of a triangle filter, as wide as the step when shrinking."""
    step = before / after
    reach = max(step, 1.0)
    centres = (np.arange(after) + 0.5) * step
    distance = np.abs(np.arange(before)[None, :] + 0.5 - centres[:, None]) / reach
    weights = np.maximum(1.0 - distance, 0.0)
    normalised: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return normalised


def check_size(size: int) -> None:
    """Raise unless `size` is a sensible side in pixels."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST_SIDE:
        raise DataError(f"size must be a whole number in 1..{LARGEST_SIDE}, but is {size!r}")


def with_channels(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Images with the asked number of channels; grey is repeated, colour is never made grey."""
    if channels not in (1, 3):
        raise DataError(f"channels must be 1 or 3, but is {channels!r}")
    present = images.shape[1]
    if present == channels:
        return images
    if present == 1:
        return np.repeat(images, channels, axis=1)
    raise DataError(
        f"images with {present} channels cannot be given {channels}; "
        "leave channels out or ask for 3"
    )


def recoloured(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Images with one channel or three: grey is repeated, colour becomes its luminance.

    Luminance is 0.299 red + 0.587 green + 0.114 blue (ITU-R BT.601).
    """
    if images.shape[1] != 3 or channels != 1:
        return with_channels(images, channels)
    result = np.empty((len(images), 1, *images.shape[2:]), np.uint8)
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK].astype(np.float64)
        result[start : start + CHUNK, 0] = as_bytes(np.tensordot(part, LUMINANCE, axes=(1, 0)))
    return result


def matching_statistics(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """A mean or std for `channels` channels; the value of a grey set is repeated."""
    return values * channels if len(values) == 1 else values


def statistics(inputs: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of each channel or feature; of bytes as numbers in 0..1, from exact sums.

    What is constant gets std 1, so that dividing by it is always allowed.
    """
    if not inputs.size:
        raise DataError("mean and std of no inputs are undefined; at least one is needed")
    found = [
        _of_bytes(inputs[:, i]) if inputs.dtype == np.uint8 else _of_floats(inputs[:, i])
        for i in range(inputs.shape[1])
    ]
    return tuple(mean for mean, _ in found), tuple(std for _, std in found)


def _of_bytes(pixels: NDArray[np.generic]) -> tuple[float, float]:
    levels = np.arange(256, dtype=np.int64)
    counts = np.zeros(256, np.int64)
    for start in range(0, len(pixels), CHUNK):
        counts += np.bincount(pixels[start : start + CHUNK].reshape(-1), minlength=256)
    total, squares = int((counts * levels).sum()), int((counts * levels**2).sum())
    variance = (pixels.size * squares - total**2) / pixels.size**2
    return total / pixels.size / 255, variance**0.5 / 255 if variance > 0 else 1.0


def _of_floats(values: NDArray[np.generic]) -> tuple[float, float]:
    wide = values.astype(np.float64)
    mean, std = float(wide.mean()), float(wide.std())
    return mean, std if std > 1e-9 * abs(mean) else 1.0  # below is rounding


def finite(name: str, values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Numbers as single precision, if every one is finite there."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32, copy=False)
    good = np.isfinite(found).reshape(len(found), -1).all(1)
    if not good.all():
        row = int(np.argmin(good))
        raise DataError(
            f"{name} must be finite in single precision, but {np.count_nonzero(~good)} of "
            f"{len(found)} examples are not, the first at {row}; replace or leave them out"
        )
    return found


def channels_first(images: Inputs) -> Inputs:
    """Images [example, height, width] or [..., channel] as [example, channel, height, width]."""
    if images.ndim == 3:
        return images[:, None]
    return images.transpose(0, 3, 1, 2).copy()


def stratified_split(
    labels: NDArray[np.int64], *, test_share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows for train and test, both shuffled, with every class divided by `test_share`.

    The whole test part has `test_share` of all rows, to the nearest. A class with two examples or
    more has at least one on either side; a single example trains.
    """
    if not 0 < test_share < 1:
        raise DataError(f"test_share must lie between 0 and 1, but is {test_share!r}")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    chosen = np.zeros(len(labels), bool)
    for label, wanted in zip(classes, _apportioned(counts, test_share), strict=True):
        rows = order[labels[order] == label]
        # From the end: the head of what remains is then a fair sample of all classes.
        chosen[rows[len(rows) - wanted :]] = True
    return order[~chosen[order]], order[chosen[order]]


def _apportioned(counts: NDArray[np.int64], share: float) -> list[int]:
    """`share` of each count in whole numbers that add up to `share` of all, largest rest first."""
    exact = counts * share
    whole = np.floor(exact).astype(np.int64)
    missing = int(share * counts.sum() + 0.5) - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:missing]] += 1
    bounded = np.minimum(np.maximum(whole, 1), counts - 1)
    return [int(value) for value in bounded]
