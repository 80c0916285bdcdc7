"""Public data: inputs of any set in the shape of a federation's, without their labels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.catalogue import load
from fedstill.data.embedded import SIZES
from fedstill.data.images import Inputs, recoloured, resized, statistics
from fedstill.data.sites import Collection, Statistics, described_inputs, images_of, plain

PURPOSE = 0x7075626C6963  # keeps this draw apart from those of the partition under the same seed


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Images or vectors that everybody holds; whatever labels they had are not kept."""

    name: str
    inputs: Inputs  # as in Examples
    mean: Statistics | None  # as in Site
    std: Statistics | None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        """In one line, as that of a federation."""
        shape = "x".join(map(str, self.inputs.shape[1:]))
        return f"<Unlabelled {self.name}: {len(self)} inputs of {shape}>"

    def digest(self) -> str:
        """The sha256 of everything a run can see, as hex; the name is left out."""
        normalisation = plain(self.mean), plain(self.std)
        digest = hashlib.sha256(repr((self.inputs.shape, normalisation)).encode())
        if self.inputs.dtype != np.uint8:
            digest.update(described_inputs(self.inputs))
        digest.update(np.ascontiguousarray(self.inputs).data)
        return digest.hexdigest()


def public_images(
    name: str,
    shape: tuple[int, ...],
    *,
    count: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
    **options: Any,
) -> Unlabelled:
    """The train part of a set from the catalogue, or `count` images of it drawn by the seed.

    Images are brought to `shape` (channels, height, width) and normalised by their own mean and
    deviation, so that all parties see the same numbers.
    """
    if len(shape) != 3:
        raise DataError(
            f"public images have no form for clients with {shape[0]} features; hand vectors over "
            "in Python, with fedstill.unlabelled"
        )
    channels, height, width = shape
    size = height if height == width else None
    if name == "digits5" and size not in SIZES:  # drawn in these alone; others are made of them
        size = max(SIZES)
    found = load(name, data_dir=data_dir, size=size, **options)
    whole = sum(map(len, found.sites))
    if count is not None and count > whole:
        raise DataError(f"count is {count}, but {name} has {whole} images; ask for at most {whole}")
    images = recoloured(_sized(name, _chosen(name, found, count, seed), height, width), channels)
    mean, std = statistics(images)
    form = "x".join(map(str, shape))
    note = f"public: {len(images)} of {whole} images of {name} as {form}, without labels"
    return Unlabelled(name, images, mean, std, (note, *found.notes))


def _chosen(name: str, found: Collection, count: int | None, seed: int) -> NDArray[np.uint8]:
    """All clients' training images behind each other, or some of them in that order."""
    images = np.concatenate([images_of(name, site.pool)[site.rows] for site in found.sites])
    if count is None:
        return images
    rng = np.random.Generator(np.random.PCG64([seed, PURPOSE]))
    return images[np.sort(rng.permutation(len(images))[:count])]


def _sized(name: str, images: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if images.shape[2:] == (height, width):
        return images
    if height != width:
        raise DataError(
            f"images of {name} have {images.shape[2]}x{images.shape[3]} pixels and can be brought "
            f"to a square only, but the clients' images have {height}x{width}; give data.size"
        )
    return resized(images, height)
