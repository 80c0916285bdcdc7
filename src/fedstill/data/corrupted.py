"""cifar10c: a federation of corrupted CIFAR-10 test images, as DeSA and FedLGD use it.

Both papers split each of the nineteen corruptions, in five severities, over three clients by a
Dirichlet draw over labels: 57 clients. The corruptions are made by `corruptions`, not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import DataError, unknown
from fedstill.data.corruptions import KINDS, SEVERITIES, SHAPE, check_severity, corrupted
from fedstill.data.datasets import NAMED_SETS, shaped, test_part
from fedstill.data.images import check_size
from fedstill.data.partitions import Dirichlet, Rows
from fedstill.data.partitions.partition import RETRIES
from fedstill.data.sites import Collection, Examples, Site, images_of, merged, whole_site

SPLITS = ("dirichlet", "severity")
TEST_SHARE = 10  # the last tenth of the images is tested on, in every corruption the same ones
NORMALISATION: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3}  # as in both papers: none


@dataclass(frozen=True)
class Wish:
    """Which corruptions of how many images, and how they are split over clients."""

    kinds: tuple[str, ...] = tuple(KINDS)
    severities: tuple[int, ...] = SEVERITIES
    images: int | None = None  # the first so many; all by default
    split: str = "dirichlet"  # or one client for each kind and severity
    clients_per_kind: int = 3
    beta: float = 2.0  # of the Dirichlet draw
    min_per_class: int | None = None  # train images of a client; a hundredth of `images` by default
    split_seed: int = 0
    corruption_seed: int = 0

    def __post_init__(self) -> None:
        for name in self.kinds:
            if not isinstance(name, str) or name not in KINDS:
                raise DataError(unknown("corruption", str(name), KINDS))
        for severity in self.severities:
            check_severity(severity)
        for name, values in (("kinds", self.kinds), ("severities", self.severities)):
            if not values or len(set(values)) < len(values):
                raise DataError(f"{name} must name at least one and each once, but is {values}")
        if self.split not in SPLITS:
            raise DataError(unknown("split of cifar10c", str(self.split), SPLITS))
        for name in ("images", "min_per_class", "split_seed", "corruption_seed"):
            _check_whole(name, getattr(self, name))
        _check_whole("clients_per_kind", self.clients_per_kind, least=1)
        number = isinstance(self.beta, (int, float)) and not isinstance(self.beta, bool)
        if not number or not 0 < self.beta < np.inf:
            raise DataError(f"beta must be a finite number above 0, but is {self.beta!r}")
        drawn = (self.clients_per_kind, self.beta, self.min_per_class)
        if self.split == "severity" and drawn != (3, 2.0, None):
            raise DataError(
                "clients_per_kind, beta and min_per_class belong to split 'dirichlet', "
                "but split is 'severity'; leave them out"
            )


OPTIONS = tuple(field.name for field in fields(Wish))


def cifar10c(*, data_dir: str | Path | None, size: int | None = None, **options: Any) -> Collection:
    """Corrupted CIFAR-10 test images; the first nine tenths train, the last tenth tests."""
    for key in ("kinds", "severities"):
        if key in options:
            options[key] = _as_tuple(key, options[key])
    if size is not None:
        check_size(size)
    return _made(None if data_dir is None else str(data_dir), size, Wish(**options))


@lru_cache(maxsize=1)  # made once for all methods of a recipe; nobody writes to it
def _made(data_dir: str | None, size: int | None, wish: Wish) -> Collection:
    test = test_part("cifar10", data_dir=data_dir)
    base = _first(test, wish.images)
    sites = [site for kind in wish.kinds for site in _sites(kind, base, size, wish)]
    notes = [
        "cifar10c: corruptions made here from CIFAR-10's test images: those of the published files "
        "in distribution, with other random numbers",
        f"cifar10c: {len(base)} images, of which the last {_tests(base)} are tested on, in "
        f"{len(wish.kinds)} kinds and {len(wish.severities)} severities",
    ]
    if "frost" in wish.kinds:
        notes.append("cifar10c: frost is a surrogate, drawn crystals instead of photographs")
    return Collection("cifar10c", tuple(sites), NAMED_SETS["cifar10"].class_names, tuple(notes))


def _first(test: Examples, images: int | None) -> Examples:
    if test.shape != SHAPE:
        raise DataError(f"cifar10c needs images of {SHAPE}, but those of cifar10 are {test.shape}")
    wanted = len(test) if images is None else images
    if not TEST_SHARE <= wanted <= len(test):
        raise DataError(f"images must lie in {TEST_SHARE}..{len(test)}, but is {wanted}")
    return test.take(np.arange(wanted, dtype=np.int64))


def _tests(base: Examples) -> int:
    return len(base) // TEST_SHARE


def _sites(kind: str, base: Examples, size: int | None, wish: Wish) -> Iterator[Site]:
    """The clients of one corruption."""

    def of(severity: int) -> Examples:
        images = corrupted(images_of("cifar10", base), kind, severity, seed=wish.corruption_seed)
        return shaped(Examples(images, base.labels), size, None)

    with ThreadPoolExecutor() as workers:
        parts = list(workers.map(of, wish.severities))
    rows = np.arange(len(base), dtype=np.int64)
    learnt, tested = rows[: -_tests(base)], rows[-_tests(base) :]
    if wish.split == "severity":
        for severity, part in zip(wish.severities, parts, strict=True):
            name = f"{kind}-s{severity}"
            yield whole_site(name, part.take(learnt), part.take(tested), **NORMALISATION)
        return
    train = merged([part.take(learnt) for part in parts])
    test = merged([part.take(tested) for part in parts])
    dealt = _dealt(kind, train.labels, len(base), wish)
    for number, mine in enumerate(proportional(train.labels, dealt, test.labels)):
        name = f"{kind}-{number + 1}"
        yield Site(name, train, dealt[number], test.take(mine), **NORMALISATION)


def _dealt(kind: str, labels: Rows, images: int, wish: Wish) -> list[Rows]:
    """Train rows of each client of a kind, drawn again until each has enough of every class."""
    least = images // 100 if wish.min_per_class is None else wish.min_per_class
    seeds = np.random.SeedSequence([wish.split_seed, list(KINDS).index(kind)])
    classes = np.unique(labels)
    split = Dirichlet(wish.clients_per_kind, wish.beta)
    for seed in seeds.generate_state(RETRIES // 10).tolist():
        rows = split.split(labels, seed)
        held = [np.bincount(labels[mine], minlength=classes.max() + 1) for mine in rows]
        if all(counts[classes].min() >= least for counts in held):
            return rows
    raise DataError(
        f"cifar10c: no Dirichlet draw in {RETRIES // 10} tries gave each of "
        f"{wish.clients_per_kind} clients {least} images of every class of {kind}; raise beta, or "
        "lower clients_per_kind or min_per_class"
    )


def proportional(labels: Rows, dealt: Sequence[Rows], others: Rows) -> list[Rows]:
    """Other examples dealt so that each class is divided as `dealt` divides it in `labels`."""
    result: list[list[Rows]] = [[] for _ in dealt]
    for label in np.unique(others):
        held = np.cumsum([np.count_nonzero(labels[rows] == label) for rows in dealt])
        rows = np.flatnonzero(others == label)
        share = held[:-1] / max(held[-1], 1)
        for client, part in enumerate(np.split(rows, np.rint(share * len(rows)).astype(np.int64))):
            result[client].append(part)
    return [np.sort(np.concatenate(parts)).astype(np.int64) for parts in result]


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise DataError(f"{name} must be a list, but is {value!r}")


def _check_whole(name: str, value: int | None, *, least: int = 0) -> None:
    wrong = isinstance(value, bool) or not isinstance(value, int) or value < least
    if value is not None and wrong:
        raise DataError(f"{name} must be a whole number from {least} on, but is {value!r}")
