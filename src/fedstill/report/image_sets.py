"""Synthetic images of a round as they are kept beside a run: bytes by party, class and number."""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import RunFolderError
from fedstill.core.files import replacing

MOST_NUMBERS = 1_000_000  # of one round, whatever the size and number of images
LARGEST_SIDE = 64  # pixels; a larger image is thinned out
MOST_BYTES = 1 << 28  # of a file once it is unpacked; what is written here has far fewer
_FILE = re.compile(r"round-(\d+)\.npz")


@dataclass(frozen=True)
class ImageSet:
    """The images of one party."""

    node: str
    images: NDArray[np.uint8]  # [class, image, height, width, channel]
    there: NDArray[np.bool_]  # [class, image]


def kept(stacks: Mapping[str, NDArray[np.float64]]) -> list[ImageSet]:
    """Images in [0, 1], NaN where absent, as bytes; as many of each as a round has room for.

    stacks: [class, image, height, width, channel] by party. Small images of the first parties
    come whole; otherwise fewer of each class, then fewer parties are kept.
    """
    thin = {node: _thinned(stack) for node, stack in stacks.items()}
    of_one = [math.prod(stack.shape) // stack.shape[1] for stack in thin.values()]
    parties = max(1, _fitting(of_one))
    most = max(1, MOST_NUMBERS // max(1, sum(of_one[:parties])))
    found = []
    for node, stack in list(thin.items())[:parties]:
        some = stack[:, :most]
        there = np.asarray(np.isfinite(some).all(axis=(2, 3, 4)), dtype=np.bool_)
        pixels = np.round(255 * np.nan_to_num(some)).clip(0, 255).astype(np.uint8)
        found.append(ImageSet(node, pixels, there))
    return found


def write(folder: Path, round: int, sets: list[ImageSet]) -> Path:
    """One file for a round."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{round:05d}.npz"
    arrays: dict[str, NDArray[np.generic]] = {
        "nodes": np.array([each.node for each in sets], dtype=np.str_)
    }
    for number, each in enumerate(sets):
        arrays |= {f"images-{number}": each.images, f"there-{number}": each.there}
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    return path


def rounds(folder: Path) -> dict[int, Path]:
    """The files of a folder by round."""
    files = folder.glob("round-*.npz") if folder.is_dir() else ()
    named = {path: _FILE.fullmatch(path.name) for path in files}
    return dict(sorted((int(match[1]), path) for path, match in named.items() if match))


def read(path: Path) -> list[ImageSet]:
    """The images of a round; a file of another form is refused, and nothing in it is run."""
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as found:
            names = [str(name) for name in found["nodes"]]
            sets = [
                ImageSet(name, found[f"images-{number}"], found[f"there-{number}"])
                for number, name in enumerate(names)
            ]
    except (
        OSError, ValueError, KeyError, EOFError, MemoryError, NotImplementedError,
        zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise RunFolderError(f"{path} holds no synthetic images: {error}") from error
    for each in sets:
        images, there = each.images, each.there
        if images.dtype != np.uint8 or images.ndim != 5 or images.shape[4] not in (1, 3):
            raise RunFolderError(
                f"{path}: images of {each.node} are bytes of the form class, image, height, width, "
                f"channel; found {images.dtype} of the shape {list(images.shape)}"
            )
        if there.dtype != np.bool_ or there.shape != images.shape[:2]:
            raise RunFolderError(f"{path}: which images of {each.node} are there is not said")
    return sets


def _check_size(path: Path) -> None:
    """A file may have come from anybody: what it takes unpacked is known before it is unpacked."""
    with zipfile.ZipFile(path) as packed:
        size = sum(part.file_size for part in packed.infolist())
    if size > MOST_BYTES:
        raise ValueError(f"{size} bytes once it is unpacked, the limit is {MOST_BYTES}")


def mosaic(images: NDArray[np.uint8]) -> bytes:
    """Images without gaps as a PNG file: a row of it for each class."""
    classes, count, height, width, channels = images.shape
    rows = images.swapaxes(1, 2).reshape(classes * height, count * width * channels)
    return png(rows, count * width, channels)


def png(rows: NDArray[np.uint8], width: int, channels: int) -> bytes:
    """A PNG file of rows of bytes, grey or in colour."""
    colour = {1: 0, 3: 2}[channels]
    header = struct.pack(">IIBBBBB", width, len(rows), 8, colour, 0, 0, 0)
    lines = np.concatenate([np.zeros((len(rows), 1), np.uint8), rows], axis=1)
    written = BytesIO(b"")
    written.write(b"\x89PNG\r\n\x1a\n")
    for kind, content in (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ):
        written.write(struct.pack(">I", len(content)) + kind + content)
        written.write(struct.pack(">I", zlib.crc32(kind + content)))
    return written.getvalue()


def _thinned(stack: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every second pixel, or third, where an image is large."""
    step = -(-max(stack.shape[2:4]) // LARGEST_SIDE)
    return stack[:, :, ::step, ::step]


def _fitting(of_one: list[int]) -> int:
    """How many parties have room with one image of each class."""
    total = 0
    for number, size in enumerate(of_one):
        total += size
        if total > MOST_NUMBERS:
            return number
    return len(of_one)
