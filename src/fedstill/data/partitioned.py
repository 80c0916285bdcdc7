"""A set split over clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstill.core import ranges
from fedstill.core.errors import DataError
from fedstill.data.partitions import PARTITIONS, Partition, Rows, Split, described
from fedstill.data.partitions.partition import check_disjoint, checked_rows
from fedstill.data.sites import Collection, LabelledSet, Site


def partitioned(
    image_set: LabelledSet, partition: Partition, seed: int, client_name: str = "client-{i}"
) -> Collection:
    """The set split over clients, who share pool, test set and normalisation.

    `{i}` in `client_name` becomes the client's number with leading zeros, so that names sort in
    the order of the clients. Clients of a split by domain carry the domain's name, and those of a
    file the names in it.
    """
    split = partition.split(_split_by(image_set, partition), seed)
    parts = _checked(partition, _named(image_set, partition, split, client_name), image_set)
    sites = tuple(
        Site(name, image_set.train, rows, image_set.test, image_set.mean, image_set.std)
        for name, rows in parts.items()
    )
    unused = len(image_set.train) - sum(map(len, parts.values()))
    notes = (f"{unused} training examples were given to nobody by {partition}",) if unused else ()
    return Collection(image_set.name, sites, image_set.class_names, (*image_set.notes, *notes))


def _split_by(image_set: LabelledSet, partition: Partition) -> Rows:
    """What the partition reads: labels, or domains."""
    if not getattr(partition, "by_domain", False):
        return image_set.train.labels
    if image_set.domains is None:
        raise DataError(
            f"{image_set.name} has a single domain, so it cannot be split by domains; "
            f"use another partition: {', '.join(sorted(set(PARTITIONS) - {'domains'}))}"
        )
    return image_set.domains


def _named(
    image_set: LabelledSet, partition: Partition, split: Split, client_name: str
) -> Mapping[str, Rows]:
    """Every client's rows by its name."""
    if isinstance(split, Mapping):
        return split
    by_domain = getattr(partition, "by_domain", False)
    if by_domain and image_set.domains is not None and image_set.domain_names:
        names = [image_set.domain_names[domain] for domain in np.unique(image_set.domains)]
        return dict(zip(names, split, strict=True))
    if "{i}" not in client_name:
        raise DataError(f"client_name must contain {{i}} for the number, but is {client_name!r}")
    digits = max(2, len(str(len(split) - 1)))
    return {client_name.replace("{i}", f"{i:0{digits}d}"): rows for i, rows in enumerate(split)}


def _checked(
    partition: Partition, parts: Mapping[str, Rows], image_set: LabelledSet
) -> dict[str, Rows]:
    """The split, if every row exists and belongs to one client; a rule of one's own may err."""
    where = type(partition).__name__
    found = {
        name: checked_rows(f"{where}: client {name!r}", rows, len(image_set.train))
        for name, rows in parts.items()
    }
    check_disjoint(where, found)
    return found


def divided(
    whole: LabelledSet, partition: Partition | Mapping[str, object] | None, seed: int
) -> Collection:
    """The set split by a partition, which a table may describe; without one, one client has all."""
    if partition is None:
        rows = np.arange(len(whole.train), dtype=np.int64)
        site = Site("all", whole.train, rows, whole.test, whole.mean, whole.std)
        return Collection(whole.name, (site,), whole.class_names, whole.notes)
    if isinstance(partition, Mapping):
        partition = described(partition)
    if isinstance(partition, type):
        raise DataError(
            f"partition must be an object, not the class {partition.__name__}; write "
            f"{partition.__name__}(…)"
        )
    if isinstance(partition, str) or not callable(getattr(partition, "split", None)):
        raise DataError(
            f"partition must be a partition such as Dirichlet(10, 0.5), but is {partition!r}; "
            f"known: {', '.join(sorted(kind.__name__ for kind in PARTITIONS.values()))}"
        )
    plain = int(seed) if isinstance(seed, np.integer) else seed
    if wrong := ranges.fault("seed", plain, ranges.Whole):
        raise DataError(f"{wrong}, so that the same split can be made again")
    return partitioned(whole, partition, plain)
