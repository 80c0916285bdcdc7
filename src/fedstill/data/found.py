"""What lies in a folder of a user's own data: which clients there are, and of which form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fedstill.core.errors import DataError
from fedstill.data.archives import names_in
from fedstill.data.folders import LAYOUTS, SUFFIXES, is_hidden
from fedstill.data.optional import optional

LOOKED_AT = 200  # images whose sizes are compared
LARGE = 64  # pixels a side, from which on an image is brought to SMALL unless told otherwise
SMALL = 32


@dataclass(frozen=True)
class Found:
    """Clients' names and their paths below a folder, as the data set `own` takes them."""

    folder: Path
    clients: dict[str, str]
    vectors: bool = False  # feature vectors in place of images
    size: int | None = None  # pixels a side that images should be brought to


def found_at(place: Path) -> Found:
    """The clients at a path: one that is a file or a folder of classes, or all in a folder."""
    if _is_client(place):
        folder, clients = place.parent, {place.stem if place.is_file() else place.name: place.name}
    else:
        inside = sorted(place.iterdir()) if place.is_dir() else []
        folder = place
        paths = [path for path in inside if _is_client(path)]
        stems = Counter(path.stem if path.is_file() else path.name for path in paths)
        plain = {path: path.is_file() and stems[path.stem] == 1 for path in paths}
        clients = {path.stem if plain[path] else path.name: path.name for path in paths}
    if not clients:
        raise DataError(f"there is no client at {place}; for each there must be {LAYOUTS}")
    paths = [folder / name for name in clients.values()]
    vectors = any(_has_features(path) for path in paths if path.is_file())
    return Found(folder, clients, vectors, _size([path for path in paths if path.is_dir()]))


def _is_client(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".npz"
    if not path.is_dir() or is_hidden(path):
        return False
    below = [child for child in path.iterdir() if child.is_dir()]
    if any(child.name == "train" for child in below):
        below = [child for child in (path / "train").iterdir() if child.is_dir()]
    return any(_is_image(file) for child in below for file in child.iterdir())


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not is_hidden(path)


def _has_features(path: Path) -> bool:
    return "train_features" in names_in(path)


def _size(folders: list[Path]) -> int | None:
    """What images are brought to if they are large or of several sizes; None where they fit."""
    if not folders:
        return None
    library = optional("PIL.Image", needed_for="reading image files", install="fedstill[images]")
    sizes = set()
    for folder in folders:
        for path in islice(filter(_is_image, folder.rglob("*")), LOOKED_AT):
            try:
                with library.open(path) as image:
                    sizes.add(image.size)
            except (OSError, ValueError, library.DecompressionBombError):  # named when it is read
                continue
    one_size = len(sizes) <= 1 and all(side <= LARGE for sides in sizes for side in sides)
    return None if one_size else SMALL
