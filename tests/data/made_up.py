"""Small files and sets that the tests of this folder use."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from fedstill.data.sites import Examples, LabelledSet


def image_set(labels, *, domains=None):
    """A set of 1x2x2 images with these training labels and one test example per class."""
    labels = np.asarray(labels, np.int64)
    classes = int(labels.max()) + 1
    pixels = np.arange(len(labels) * 4, dtype=np.int64) % 251
    train = Examples(pixels.astype(np.uint8).reshape(-1, 1, 2, 2), labels)
    test = Examples(np.zeros((classes, 1, 2, 2), np.uint8), np.arange(classes, dtype=np.int64))
    names = tuple(f"class {number}" for number in range(classes))
    return LabelledSet("made up", train, test, names, (0.5,), (0.5,), domains=domains)


def grey_file(path: Path, *, count=30, side=28, **changes):
    """A grey `.npz` file in the form of the real ones; `changes` replace or (None) drop arrays."""
    arrays = {}
    for part in ("train", "test"):
        levels = np.arange(count * side * side) % 256
        arrays[f"{part}_images"] = levels.astype(np.uint8).reshape(count, side, side)
        arrays[f"{part}_labels"] = (np.arange(count) % 10).astype(np.uint8)
    arrays.update(changes)
    np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def colour_pictures(count, side, seed=0):
    """Random colour images [N, H, W, 3]."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return rng.integers(0, 256, (count, side, side, 3)).astype(np.uint8)


def mosaic(images, columns=7):
    """The bytes of a lossless WebP picture with all images, `columns` a row."""
    count, height, width, channels = images.shape
    filler = np.zeros(((-count) % columns, height, width, channels), np.uint8)
    grid = np.concatenate([images, filler]).reshape(-1, columns, height, width, channels)
    sheet = grid.swapaxes(1, 2).reshape(-1, columns * width, channels)
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(sheet)).save(stream, "WEBP", lossless=True)
    return np.frombuffer(stream.getvalue(), np.uint8)


def colour_file(path: Path, *, count=30, side=8, classes=10, parts=("train", "test"), **changes):
    """A colour `.npz` file with WebP mosaics; `changes` replace or (None) drop arrays."""
    arrays = {}
    for seed, part in enumerate(parts):
        images = colour_pictures(count, side, seed)
        arrays[f"{part}_images_webp"] = mosaic(images)
        arrays[f"{part}_images_shape"] = np.array(images.shape, np.int32)
        arrays[f"{part}_labels"] = (np.arange(count) % classes).astype(np.uint8)
    arrays.update(changes)
    np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def picture(path: Path, *, side=8, level=100, colour=True):
    """One PNG file of a single colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (side, side, 3) if colour else (side, side)
    Image.fromarray(np.full(shape, level, np.uint8)).save(path)
    return path
