"""Reading `.npz` files of images or feature vectors without trusting them.

Keys: `train_images`, `test_images` (uint8 or floats, [N, H, W] or [N, H, W, C]) and `train_labels`,
`test_labels` (whole numbers [N]). Instead of images a file may hold `<key>_webp`, the bytes of
one lossless WebP picture with all images side by side, and `<key>_shape`, [N, H, W, C]; or feature
vectors, `train_features` and `test_features` (floats [N, F]).
"""

from __future__ import annotations

import io
import threading
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.images import LARGEST_SIDE, Inputs, channels_first, finite
from fedstill.data.optional import optional
from fedstill.data.sites import Examples

LARGEST_ARRAY = 4 * 2**30  # bytes; a file that declares more is refused before memory is taken
FORM = (
    "such a file holds train_images (uint8 or floats, [N, H, W] or [N, H, W, 3]) and train_labels "
    "(integers [N] from 0), and the same for test"
)

Arrays = dict[str, NDArray[np.generic]]

# NumPy reads headers with `ast`, which fails in two threads at once before Python 3.11.8.
_one_at_a_time = threading.Lock()


def read_part(path: Path, part: str, extra: Iterable[str] = ()) -> tuple[Examples, Arrays]:
    """The `train` or `test` examples of a file, and those of the `extra` keys that it has."""
    images, features, labels = f"{part}_images", f"{part}_features", f"{part}_labels"
    wanted = {images, f"{images}_webp", f"{images}_shape", features, labels, *extra}
    arrays = read_arrays(path, wanted)
    if labels not in arrays:
        raise DataError(f"{path} has no array {labels}, but {_held(path)}; {FORM}")
    inputs: Inputs
    if images in arrays:
        inputs = channels_first(checked_images(path, images, arrays[images]))
    elif f"{images}_webp" in arrays:
        inputs = channels_first(unfolded(path, images, arrays))
    elif features in arrays:
        inputs = checked_features(path, features, arrays[features])
    else:
        raise DataError(
            f"{path} has neither {images} nor {images}_webp nor {features}, but {_held(path)}; "
            f"{FORM}"
        )
    truth = checked_labels(path, labels, arrays[labels])
    if len(inputs) != len(truth):
        key = features if inputs.ndim == 2 else images
        raise DataError(
            f"{path}: {key} and {labels} must have the same length, "
            f"but have {len(inputs)} and {len(truth)}"
        )
    rest = {key: arrays[key] for key in extra if key in arrays}
    return Examples(inputs, truth), rest


def read_arrays(path: Path, wanted: set[str]) -> Arrays:
    """The wanted arrays that the file has, after all their headers were found acceptable."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        with _one_at_a_time:
            present = check_headers(path, wanted)
            with np.load(path, allow_pickle=False) as archive:
                return {key: archive[key] for key in present}
    except DataError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as fault:
        raise DataError(
            f"{path} is not a whole .npz file ({fault}); it may be cut off or of another kind, "
            f"fetch it again; {FORM}"
        ) from fault


def names_in(path: Path) -> list[str]:
    """The names of a file's arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole .npz file") from error


def _held(path: Path) -> str:
    """The names of a file's arrays, those of many cut short."""
    names = names_in(path)
    return ", ".join(names[:8]) + (", …" if names[8:] else "") if names else "nothing"


def check_headers(path: Path, wanted: set[str]) -> list[str]:
    """The wanted keys that are present, raising where one declares what must not be loaded."""
    present = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            if key not in wanted:
                continue
            with archive.open(member) as stream:
                shape, dtype = declared(stream)
            if dtype.hasobject:
                raise DataError(
                    f"{path}: {key} holds Python objects, which are never loaded; store numbers"
                )
            needed = int(np.prod(shape, dtype=object)) * dtype.itemsize
            if needed > LARGEST_ARRAY or needed > member.file_size:
                raise DataError(
                    f"{path}: {key} declares shape {list(shape)}, {needed} bytes, but at most "
                    f"{LARGEST_ARRAY} are allowed and the file holds {member.file_size}"
                )
            present.append(key)
    return present


def declared(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype that a stored array says it has."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"array format {version} is not known")
    return shape, dtype


def checked_images(path: Path, key: str, images: NDArray[np.generic]) -> Inputs:
    """The images, if they are bytes or finite floats in a form that is known."""
    known = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    if not (images.dtype == np.uint8 or images.dtype.kind == "f") or not known or not images.size:
        raise DataError(
            f"{path}: {key} must be uint8 or floats, [N, H, W] or [N, H, W, 3], and not empty, "
            f"but is {images.dtype} {list(images.shape)}"
        )
    if max(images.shape[1:3]) > LARGEST_SIDE:
        raise DataError(
            f"{path}: {key} may have up to {LARGEST_SIDE} pixels a side, "
            f"but has {list(images.shape[1:3])}"
        )
    if images.dtype == np.uint8:
        return images.astype(np.uint8, copy=False)
    return finite(f"{path}: {key}", images)


def checked_features(path: Path, key: str, features: NDArray[np.generic]) -> NDArray[np.float32]:
    """Feature vectors, if they are finite floats."""
    if features.dtype.kind != "f" or features.ndim != 2 or not features.size:
        raise DataError(
            f"{path}: {key} must be floats [N, features] and not empty, "
            f"but is {features.dtype} {list(features.shape)}"
        )
    return finite(f"{path}: {key}", features)


def checked_labels(path: Path, key: str, labels: NDArray[np.generic]) -> NDArray[np.int64]:
    """The labels as int64, if they are whole numbers from 0 on."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        advice = (
            "; store np.unique(labels, return_inverse=True)[1], and the words as class_names"
            if labels.dtype.kind in "US"
            else ""
        )
        raise DataError(
            f"{path}: {key} must be whole numbers [N], but is {labels.dtype} "
            f"{list(labels.shape)}{advice}"
        )
    truth = labels.astype(np.int64)
    if len(truth) and truth.min() < 0:
        raise DataError(f"{path}: {key} must count from 0, but has {truth.min()}")
    return truth


def unfolded(path: Path, key: str, arrays: Arrays) -> NDArray[np.uint8]:
    """The images of a WebP mosaic, whose size is compared with the declared shape first."""
    count, height, width, channels = declared_shape(path, key, arrays)
    library = optional("PIL.Image", needed_for=f"{path.name}", install="fedstill[images]")
    try:
        sheet = library.open(io.BytesIO(arrays[f"{key}_webp"].tobytes()), formats=["WEBP"])
        check_mosaic(path, key, sheet.size, (count, height, width))
        pixels = np.asarray(sheet.convert("RGB"))
    except (OSError, EOFError, ValueError, library.DecompressionBombError) as fault:
        if isinstance(fault, DataError):
            raise
        raise DataError(f"{path}: {key}_webp is not a whole WebP picture ({fault})") from fault
    columns = pixels.shape[1] // width
    rows = pixels.reshape(-1, height, columns, width, channels).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(-1, height, width, channels)[:count])


def declared_shape(path: Path, key: str, arrays: Arrays) -> tuple[int, int, int, int]:
    """The four numbers beside a mosaic, within limits."""
    declared_as = arrays.get(f"{key}_shape")
    if declared_as is None:
        raise DataError(f"{path} has {key}_webp but no array {key}_shape; {FORM}")
    if declared_as.shape != (4,) or not np.issubdtype(declared_as.dtype, np.integer):
        raise DataError(
            f"{path}: {key}_shape must be four whole numbers, "
            f"but is {declared_as.dtype} {list(declared_as.shape)}"
        )
    count, height, width, channels = (int(value) for value in declared_as)
    sides = 1 <= height <= LARGEST_SIDE and 1 <= width <= LARGEST_SIDE
    if count < 1 or not sides or channels != 3:
        raise DataError(
            f"{path}: {key}_shape must be [N, H, W, 3] with N from 1 and sides in "
            f"1..{LARGEST_SIDE}, but is {[count, height, width, channels]}"
        )
    if count * height * width * channels > LARGEST_ARRAY:
        raise DataError(
            f"{path}: {key}_shape declares {count * height * width * channels} bytes, "
            f"but at most {LARGEST_ARRAY} are allowed"
        )
    return count, height, width, channels


def check_mosaic(path: Path, key: str, size: tuple[int, int], shape: tuple[int, int, int]) -> None:
    """Raise unless a picture of `size` (width, height) holds just the declared images."""
    count, height, width = shape
    columns, rows = size[0] // width, size[1] // height
    fits = size == (columns * width, rows * height) and columns > 0
    if not fits or rows != -(-count // columns):
        raise DataError(
            f"{path}: {key}_webp has {size[0]} x {size[1]} pixels, "
            f"which does not hold the declared {count} images of {width} x {height}"
        )


def words(path: Path, key: str, names: NDArray[np.generic]) -> tuple[str, ...]:
    """An array of names as a tuple, no name twice."""
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: {key} must be text [N], but is {names.dtype}")
    result = tuple(str(name) for name in names)
    if len(set(result)) != len(result):
        raise DataError(f"{path}: {key} must not name anything twice, but is {', '.join(result)}")
    return result
