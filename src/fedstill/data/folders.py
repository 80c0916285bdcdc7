"""A user's own data: for each client a folder of class folders, or an `.npz` file.

A client's folder holds one folder of images per class, or `train` and `test` with such folders
each. Without them, and without test arrays in a file, a fixed stratified part becomes the test set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.archives import names_in, read_part, words
from fedstill.data.datasets import shaped
from fedstill.data.images import (
    as_bytes,
    matching_statistics,
    resized,
    statistics,
    stratified_split,
)
from fedstill.data.optional import optional
from fedstill.data.sites import Collection, Examples, Site, merged, whole_site

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # eight bits a channel or less
DEEP = ("I;16", "I;16B", "I;16L", "I")  # grey, sixteen bits
LEFT_BEHIND = ("__macosx", "@eadir", "thumbs.db", "desktop.ini")  # by archives and systems
MOST_NAMED = 20  # files in a message
LAYOUTS = (
    "folders of images named by class, or train and test with such folders each, or an .npz file"
)


TEST_ARRAYS = {"test_labels", "test_images", "test_images_webp", "test_features"}


@dataclass(frozen=True)
class Reading:
    """How images are read and split."""

    size: int | None = None  # pixels a side; None: all images must have one size already
    channels: int | None = None  # None: 3 for folders, as stored for files
    test_share: float = 0.2  # where a client brings no test set
    seed: int = 0  # of that split
    on_broken: str = "stop"  # or "skip": leave out image files that cannot be read
    white: int = 65535  # what becomes 255 in pictures of sixteen bits

    def __post_init__(self) -> None:
        for name, value in (("test_share", self.test_share), ("split_seed", self.seed)):
            whole = name == "split_seed"
            number = isinstance(value, int if whole else (int, float)) and value is not True
            if not (number and (value >= 0 if whole else 0 < value < 1)):
                wanted = "a whole number from 0 on" if whole else "a number between 0 and 1"
                raise DataError(f"{name} must be {wanted}, but is {value!r}")
        if self.on_broken not in ("stop", "skip"):
            raise DataError(f"on_broken must be stop or skip, but is {self.on_broken!r}")
        if isinstance(self.white, bool) or not isinstance(self.white, int) or self.white < 1:
            raise DataError(f"white must be a whole number above 0, but is {self.white!r}")


@dataclass(frozen=True, eq=False)
class Finds:
    """What was met on the way through image files."""

    broken: list[str] = field(default_factory=list)  # a line for each file that cannot be read
    passed_over: Counter[str] = field(default_factory=Counter)  # endings that are not images
    deep: list[int] = field(default_factory=list)  # the largest value of each picture of 16 bits

    def check(self, reading: Reading) -> None:
        """Raise with all files that cannot be read, unless they are to be left out."""
        if self.broken and reading.on_broken == "stop":
            lines = [f"- {line}" for line in self.broken[:MOST_NAMED]]
            more = len(self.broken) - len(lines)
            them = "it" if len(self.broken) == 1 else "them"
            files = _count(len(self.broken), "image file")
            raise DataError(
                f"{files} cannot be read; repair or remove {them}, "
                f'or set data.options.on_broken = "skip" to leave {them} out:\n'
                + "\n".join([*lines, *([f"- and {more} more"] if more else [])])
            )

    def notes(self, reading: Reading) -> tuple[str, ...]:
        """What a reader must know of the files."""
        notes = []
        if self.broken:
            first = "; ".join(self.broken[:3])
            count = _count(len(self.broken), "image file")
            notes.append(f"{count} that cannot be read left out: {first}")
        if self.passed_over:
            endings = ", ".join(f"{end} ({n})" for end, n in sorted(self.passed_over.items()))
            notes.append(f"files that are not read as images were passed over: {endings}")
        if self.deep:
            largest = max(self.deep)
            notes.append(
                f"{_count(len(self.deep), 'picture')} of 16 bits became 8 bits, "
                f"{reading.white} as 255; the largest value is {largest}"
                + (f": white = {largest} would keep more" if largest < reading.white // 2 else "")
            )
        return tuple(notes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class Labelled:
    """A client's examples with labels that count its own class names."""

    class_names: tuple[str, ...]
    train: Examples
    test: Examples | None


def own_data(
    clients: Mapping[str, str | Path],
    reading: Reading | None = None,
    *,
    class_names: tuple[str, ...] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Collection:
    """One client per entry of `clients`; classes are the sorted union unless they are given."""
    reading = reading or Reading()
    if not clients:
        raise DataError(
            "own data needs the option clients, a table of names and paths, e.g. "
            '{ north = "north.npz" }, but it is empty'
        )
    finds = Finds()
    read = {name: labelled(name, Path(path), reading, finds) for name, path in clients.items()}
    finds.check(reading)
    known = class_names or common_class_names(read)
    sites = []
    for name, data in read.items():
        train, test = with_test(renamed(name, data, known), reading)
        if not len(test):
            raise DataError(
                f"client {name} has {len(train)} images and no class with two, so that none is "
                "left to test on; add images, or train and test folders"
            )
        own_mean, own_std = statistics(train.inputs)
        channels = train.shape[0]
        sites.append(
            whole_site(
                name,
                train,
                test,
                mean=own_mean if mean is None else matching_statistics(tuple(mean), channels),
                std=own_std if std is None else matching_statistics(tuple(std), channels),
            )
        )
    unused = () if class_names else _unused(known, sites)
    return Collection("own", tuple(sites), tuple(known), (*finds.notes(reading), *unused))


def _unused(known: tuple[str, ...], sites: Sequence[Site]) -> tuple[str, ...]:
    """A note of classes that nobody has, such as 0 where labels were counted from 1."""
    parts = [part for site in sites for part in (site.pool, site.test)]
    held = {label for part in parts for label in np.unique(part.labels).tolist()}
    names = [name for number, name in enumerate(known) if number not in held]
    return (f"no example has label {', '.join(names)}",) if names else ()


def labelled(name: str, path: Path, reading: Reading, finds: Finds) -> Labelled:
    """What lies at a client's path."""
    if path.is_dir():
        return from_folder(name, path, reading, finds)
    if path.suffix == ".npz" and path.is_file():
        return from_archive(path, reading)
    if not path.exists():
        raise DataError(f"client {name}: there is nothing at {path}{_counted_from(path)}")
    raise DataError(f"client {name}: {path} is neither a folder nor an .npz file; use {LAYOUTS}")


def _counted_from(path: Path) -> str:
    """Where a path leads that is not whole, and what would change that."""
    if path.is_absolute():
        return ""
    return f" in {Path.cwd()}; paths count from there, or from data.data_dir"


def common_class_names(read: Mapping[str, Labelled]) -> tuple[str, ...]:
    """The union of the clients' class names, sorted; numbers sort as numbers."""
    numbered = {name: all(c.isdecimal() for c in data.class_names) for name, data in read.items()}
    if len(set(numbered.values())) > 1:
        with_numbers = ", ".join(name for name, yes in numbered.items() if yes)
        with_words = ", ".join(name for name, yes in numbered.items() if not yes)
        raise DataError(
            f"class names must agree, but {with_numbers} has numbers and {with_words} has words; "
            "name the folders alike, or add class_names to the .npz files"
        )
    union = {name for data in read.values() for name in data.class_names}
    if all(numbered.values()):
        return tuple(sorted(union, key=lambda name: (int(name), name)))
    return tuple(sorted(union))


def renamed(name: str, data: Labelled, known: tuple[str, ...]) -> Labelled:
    """The client's data with labels that count `known`."""
    strange = [word for word in data.class_names if word not in known]
    if strange:
        raise DataError(
            f"client {name} has classes that are not among class_names: {', '.join(strange)}; "
            f"known: {', '.join(known)}"
        )
    numbers = np.array([known.index(word) for word in data.class_names], np.int64)
    train = Examples(data.train.inputs, numbers[data.train.labels])
    test = None if data.test is None else Examples(data.test.inputs, numbers[data.test.labels])
    return Labelled(known, train, test)


def with_test(data: Labelled, reading: Reading) -> tuple[Examples, Examples]:
    """Train and test examples; a client without a test set gives a part of its own."""
    if data.test is not None:
        return data.train, data.test
    train, test = stratified_split(
        data.train.labels, test_share=reading.test_share, seed=reading.seed
    )
    return data.train.take(np.sort(train)), data.train.take(np.sort(test))


def from_archive(path: Path, reading: Reading) -> Labelled:
    """A client's `.npz` file, with or without test arrays and class names."""
    train, extra = read_part(path, "train", ("class_names",))
    test = None
    if TEST_ARRAYS & {*names_in(path)}:
        test = read_part(path, "test")[0]
    parts = [part for part in (train, test) if part is not None]
    present = int(max(part.labels.max(initial=-1) for part in parts)) + 1
    if "class_names" in extra:
        names = words(path, "class_names", extra["class_names"])
    else:
        names = tuple(str(number) for number in range(present))
    if present > len(names):
        raise DataError(f"{path}: labels must lie in 0..{len(names) - 1}, but {present - 1} came")
    formed = [shaped(part, reading.size, reading.channels, str(path)) for part in parts]
    return Labelled(names, formed[0], formed[1] if test is not None else None)


def from_folder(name: str, folder: Path, reading: Reading, finds: Finds) -> Labelled:
    """A client's folder, in either layout."""
    inside = subfolders(folder)
    split = {"train", "test"} & set(inside)
    if not split:
        class_names = checked_classes(name, folder)
        return Labelled(class_names, images_below(name, folder, class_names, reading, finds), None)
    if set(inside) != {"train", "test"}:
        raise DataError(
            f"client {name}: {folder} must hold train and test and no other folder, "
            f"or only class folders, but holds {', '.join(inside)}"
        )
    both = [checked_classes(name, folder / part) for part in ("train", "test")]
    class_names = tuple(sorted({*both[0], *both[1]}))
    train, test = (
        images_below(name, folder / part, class_names, reading, finds) for part in ("train", "test")
    )
    return Labelled(class_names, train, test)


def checked_classes(name: str, folder: Path) -> tuple[str, ...]:
    """The class folders inside a folder, of which there must be some."""
    inside = tuple(subfolders(folder))
    if not inside:
        raise DataError(
            f"client {name}: {folder} has no class folders, so its layout is unknown; use {LAYOUTS}"
        )
    return inside


def subfolders(folder: Path) -> list[str]:
    """Names of the folders inside, sorted, without hidden ones."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not is_hidden(p))


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is hidden, or one that archives and systems leave behind."""
    return path.name.startswith(".") or path.name.lower() in LEFT_BEHIND


def images_below(
    name: str, folder: Path, class_names: tuple[str, ...], reading: Reading, finds: Finds
) -> Examples:
    """All images in the class folders, in the order of classes and file names."""
    library = optional("PIL.Image", needed_for="reading image files", install="fedstill[images]")
    parts: list[Examples] = []
    for label, class_name in enumerate(class_names):
        for path in image_files(folder / class_name, finds):
            image = read_image(library, path, reading, finds)
            if image is None:
                continue
            if parts and image.shape != parts[0].inputs.shape:
                raise DataError(
                    f"client {name}: {path} has {image.shape[3]} x {image.shape[2]} pixels, but "
                    f"those before have {parts[0].shape[2]} x {parts[0].shape[1]}; give size"
                )
            parts.append(Examples(image, np.array([label], np.int64)))
    if not parts:
        finds.check(reading)
        raise DataError(
            f"client {name}: {folder} has no images in its class folders; "
            f"known endings: {', '.join(SUFFIXES)}"
        )
    return merged(parts)


def image_files(folder: Path, finds: Finds) -> list[Path]:
    """The image files in a class folder, sorted; none where a client lacks the class."""
    if not folder.is_dir():
        return []
    images = []
    for path in sorted(path for path in folder.iterdir() if not is_hidden(path)):
        if path.suffix.lower() in SUFFIXES:
            images.append(path)
        elif path.is_file():
            finds.passed_over[path.suffix.lower() or path.name] += 1
    return images


def read_image(
    library: Any, path: Path, reading: Reading, finds: Finds
) -> NDArray[np.uint8] | None:
    """One image as [1, channel, height, width]; None, and a line in `finds`, where it is broken."""
    mode = {None: "RGB", 1: "L", 3: "RGB"}.get(reading.channels)
    if mode is None:
        raise DataError(f"channels must be 1 or 3, but is {reading.channels!r}")
    try:
        with library.open(path) as image:
            if image.mode in DEEP:
                pixels = _of_sixteen_bits(np.asarray(image), mode, reading, finds)
            elif image.mode in MODES:
                pixels = np.asarray(image.convert(mode), np.uint8)
            else:
                finds.broken.append(
                    f"{path} has pixels of mode {image.mode}, but eight bits a channel are read "
                    f"({', '.join(MODES)}), or sixteen bits of grey; convert it first"
                )
                return None
    except (OSError, EOFError, SyntaxError, ValueError, library.DecompressionBombError) as fault:
        finds.broken.append(f"{path} cannot be read as an image ({fault})")
        return None
    stacked = pixels[None, None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)[None]
    return stacked if reading.size is None else resized(stacked, reading.size)


def _of_sixteen_bits(
    levels: NDArray[Any], mode: str, reading: Reading, finds: Finds
) -> NDArray[np.uint8]:
    """Grey levels scaled to bytes, in three channels where colour is asked for."""
    if levels.min() < 0 or levels.max() > 65535:
        raise ValueError(f"its levels reach from {levels.min()} to {levels.max()}, not 0 to 65535")
    finds.deep.append(int(levels.max()))
    grey = as_bytes(levels.astype(np.float64) * (255 / reading.white))
    return grey if mode == "L" else np.repeat(grey[..., None], 3, axis=2)
