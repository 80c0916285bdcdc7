"""Federations made of several named sets, one client each, as papers use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError, unknown
from fedstill.data.datasets import DIGIT_NAMES, named_set, shaped
from fedstill.data.images import blurred, middle, stratified_split
from fedstill.data.sites import (
    Collection,
    Examples,
    LabelledSet,
    Site,
    images_of,
    merged,
    whole_site,
)

Pixels = NDArray[np.uint8]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std per channel

DIGITS_CLIENTS = {  # client: named set
    "MNIST": "mnist",
    "SVHN": "svhn",
    "USPS": "usps",
    "SynthDigits": "synthdigits",
    "MNIST-M": "mnist-m",
}
DIGITS_STYLES = ("desa", "fedlgd")
DESA_TRAIN = 7_438  # examples; FedBN cuts every train set to the size of USPS's
DESA_TEST_SHARE = 0.2
OFFICE_TEST_SHARE = 0.2  # of each domain, where it is split again
DESA_CROP = 28  # pixels of MNIST-M: FedBN's digits fill the frame as MNIST's do

# DeSA normalises each client by its own statistics (FedBN preprocessing).
DESA_STATISTICS: dict[str, Statistics] = {
    "MNIST": ((0.1307,) * 3, (0.3015,) * 3),
    "SVHN": ((0.4379, 0.4440, 0.4731), (0.1161, 0.1192, 0.1017)),
    "USPS": ((0.2473,) * 3, (0.2665,) * 3),
    "SynthDigits": ((0.4828, 0.4603, 0.4320), (0.1960, 0.1938, 0.1977)),
    "MNIST-M": ((0.4595, 0.4629, 0.4097), (0.1727, 0.1603, 0.1785)),
}
OFFICE_STATISTICS: dict[str, Statistics] = {
    "amazon": ((0.7794, 0.7764, 0.7790), (0.3221, 0.3223, 0.3208)),
    "caltech": ((0.6369, 0.6255, 0.6251), (0.3293, 0.3310, 0.3329)),
    "dslr": ((0.4794, 0.4545, 0.3985), (0.2193, 0.2052, 0.2138)),
    "webcam": ((0.6096, 0.6205, 0.6177), (0.2617, 0.2667, 0.2660)),
}


def digits(
    *,
    data_dir: str | Path | None,
    style: str = "desa",
    size: int | None = None,
    percent: float = 100,
    split_seed: int = 0,
    mnist_m_crop: int | None = None,
    usps_blur: float = 0.0,
) -> Collection:
    """DIGITS: MNIST, SVHN, USPS, SynthDigits and MNIST-M, one client each.

    `desa`: 3x32x32, 80/20 split of the merged sets, train parts cut to 7438, of which `percent`
    is kept. `fedlgd`: 3x28x28, the sets' own splits, mean and std 0.5. Of MNIST-M's 32x32 pixels
    the middle `mnist_m_crop` are kept before it is resized: 28 for `desa`, whose federation has
    digits as large as MNIST's, all for `fedlgd`; 0 keeps all. `usps_blur` is the deviation in
    pixels of a Gaussian that smooths USPS; with 0.75 it is the release of libsvm.
    """
    if style not in DIGITS_STYLES:
        raise DataError(unknown("style of DIGITS", style, DIGITS_STYLES))
    if style == "fedlgd" and percent != 100:
        raise DataError(
            f"percent belongs to style 'desa', but style is 'fedlgd' and it is {percent}"
        )
    sites: list[Site] = []
    notes: list[str] = []
    for client, name in DIGITS_CLIENTS.items():
        image_set = named_set(name, data_dir=data_dir)
        if client == "MNIST-M" and (side := middle_side(image_set, style, mnist_m_crop)):
            image_set = cropped(image_set, side)
        if client == "USPS" and usps_blur != 0:
            image_set = smoothed(image_set, usps_blur)
        if style == "desa":
            site = desa_site(client, image_set, size or 32, percent, split_seed)
        else:
            site = fedlgd_site(client, image_set, size or 28)
        sites.append(site)
        notes.extend(image_set.notes)
        notes.append(f"{client}: {len(site)} train and {len(site.test)} test examples")
    return Collection(f"DIGITS ({style})", tuple(sites), DIGIT_NAMES, tuple(notes))


def middle_side(image_set: LabelledSet, style: str, asked: int | None) -> int:
    """How many pixels of the middle of MNIST-M are kept; 0 for all of them.

    Ganin's release has digits in the middle 28 of 32 pixels; a smaller file has been cut already.
    """
    if asked is not None:
        return asked
    wider = images_of(image_set.name, image_set.train).shape[-1] > DESA_CROP
    return DESA_CROP if style == "desa" and wider else 0


def cropped(image_set: LabelledSet, side: int) -> LabelledSet:
    """A set of images with the middle of each only, and a note of it."""
    note = f"the middle {side}x{side} pixels of each image"
    return changed(image_set, partial(middle, side=side), note)


def smoothed(image_set: LabelledSet, deviation: float) -> LabelledSet:
    """A set of images under a Gaussian of so many pixels, and a note of it."""
    note = f"smoothed by a Gaussian of {deviation} pixels"
    return changed(image_set, partial(blurred, deviation=deviation), note)


def changed(image_set: LabelledSet, change: Callable[[Pixels], Pixels], note: str) -> LabelledSet:
    """A set whose images, of both parts, are changed, and a note of how."""
    train, test = (
        Examples(change(images_of(image_set.name, part)), part.labels)
        for part in (image_set.train, image_set.test)
    )
    notes = (*image_set.notes, f"{image_set.name}: {note}")
    return replace(image_set, train=train, test=test, notes=notes)


def desa_site(
    client: str, image_set: LabelledSet, size: int, percent: float, split_seed: int
) -> Site:
    """A DIGITS client as DeSA has it: own split, cut, own normalisation."""
    if not 0 < percent <= 100:
        raise DataError(f"percent must lie in 0..100 and above 0, but is {percent!r}")
    everything = merged([image_set.train, image_set.test])
    train, test = stratified_split(everything.labels, test_share=DESA_TEST_SHARE, seed=split_seed)
    kept = train[: min(len(train), DESA_TRAIN)]
    kept = kept[: max(1, int(DESA_TRAIN * percent / 100))]
    mean, std = DESA_STATISTICS[client]
    return whole_site(
        client,
        shaped(everything.take(kept), size, 3),
        shaped(everything.take(test), size, 3),
        mean=mean,
        std=std,
    )


def fedlgd_site(client: str, image_set: LabelledSet, size: int) -> Site:
    """A DIGITS client as FedLGD has it: the set's own split, pixels from -1 to 1."""
    train, test = (shaped(part, size, 3) for part in (image_set.train, image_set.test))
    return whole_site(client, train, test, mean=(0.5,) * 3, std=(0.5,) * 3)


def office(
    *, data_dir: str | Path | None, size: int | None = None, split_seed: int | None = None
) -> Collection:
    """OFFICE: Amazon, Caltech, DSLR and Webcam of Office-Caltech-10, one client each.

    No split is official: by default it is that of the file. With a `split_seed` each domain is
    put together again and a fifth of every class is drawn for its test set.
    """
    image_set = named_set("office-caltech10", data_dir=data_dir, size=size or 32)
    if image_set.domains is None or image_set.test_domains is None:
        raise DataError(
            "OFFICE needs train_domains, test_domains and domain_names in office-caltech10.npz"
        )
    if set(image_set.domain_names) != set(OFFICE_STATISTICS):
        raise DataError(
            f"OFFICE needs the domains {', '.join(OFFICE_STATISTICS)}, "
            f"but office-caltech10.npz has {', '.join(image_set.domain_names)}"
        )
    sites = []
    for number, name in enumerate(image_set.domain_names):
        train = _of_domain(image_set.train, image_set.domains == number)
        test = _of_domain(image_set.test, image_set.test_domains == number)
        if split_seed is not None:
            train, test = drawn_again(train, test, split_seed)
        mean, std = OFFICE_STATISTICS[name]
        sites.append(whole_site(name, train, test, mean=mean, std=std))
    counts = tuple(f"{site.name}: {len(site)} train and {len(site.test)} test" for site in sites)
    notes = (*image_set.notes, *counts)
    return Collection("OFFICE", tuple(sites), image_set.class_names, notes)


def drawn_again(train: Examples, test: Examples, seed: int) -> tuple[Examples, Examples]:
    """Another split of the same examples: a fifth of every class is for testing."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"split_seed must be a whole number, 0 or more, but is {seed!r}")
    everything = merged([train, test])
    learnt, tested = stratified_split(everything.labels, test_share=OFFICE_TEST_SHARE, seed=seed)
    return everything.take(learnt), everything.take(tested)


def _of_domain(
    examples: Examples, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> Examples:
    return examples.take(np.flatnonzero(chosen).astype(np.int64))
