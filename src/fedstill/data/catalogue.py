"""Every data set by name, and the one door to all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError, unknown
from fedstill.data.corrupted import OPTIONS, cifar10c
from fedstill.data.datasets import NAMED_SETS, NamedSet, named_set
from fedstill.data.embedded import embedded_digits
from fedstill.data.federations import DIGITS_CLIENTS, digits, office
from fedstill.data.folders import Reading, own_data
from fedstill.data.partitioned import divided
from fedstill.data.partitions import Partition
from fedstill.data.public import PREFIX, PUBLIC_SETS, PublicSet, public_set
from fedstill.data.sites import Collection, held_out, pooled


@dataclass(frozen=True)
class Entry:
    """What a person wants to know before loading a set."""

    kind: str  # embedded, file, composed, public, own
    description: str
    files: tuple[str, ...] = ()  # needed in data_dir
    shape: tuple[int, int, int] | None = None  # channel, height, width without size and channels
    counts: tuple[int, int] | None = None  # train and test examples where known
    options: tuple[str, ...] = ()  # what `load` takes besides its named arguments


def _file_entry(table: NamedSet) -> Entry:
    return Entry("file", table.description, table.files, table.shape, table.published)


def _public_entry(name: str, table: PublicSet) -> Entry:
    text = f"{name} through torchvision; fetched only with download = true"
    return Entry("public", text, (), table.shape, table.published, ("download",))


DATASETS: dict[str, Entry] = {
    "digits5": Entry(
        "embedded",
        "five domains of small digits, nothing to download; one client per domain",
        shape=(3, 16, 16),
        counts=(1500, 747),
    ),
    **{name: _file_entry(table) for name, table in NAMED_SETS.items()},
    "DIGITS": Entry(
        "composed",
        "MNIST, SVHN, USPS, SynthDigits (a surrogate) and MNIST-M, one client each",
        files=tuple(file for name in DIGITS_CLIENTS.values() for file in NAMED_SETS[name].files),
        shape=(3, 32, 32),
        options=("style", "percent", "split_seed"),
    ),
    "OFFICE": Entry(
        "composed",
        "Office-Caltech-10, one client each for Amazon, Caltech, DSLR and Webcam",
        files=NAMED_SETS["office-caltech10"].files,
        shape=(3, 32, 32),
        counts=NAMED_SETS["office-caltech10"].published,
    ),
    "cifar10c": Entry(
        "composed",
        "CIFAR-10's test images in 19 corruptions made here, three clients for each kind",
        files=NAMED_SETS["cifar10"].test_files,
        shape=(3, 32, 32),
        counts=(855_000, 95_000),
        options=OPTIONS,
    ),
    **{PREFIX + name: _public_entry(name, table) for name, table in PUBLIC_SETS.items()},
    "own": Entry(
        "own",
        "your own images: for each client a folder of class folders or an .npz file",
        options=("clients", "class_names", "test_share", "split_seed", "mean", "std"),
    ),
}


def load(
    name: str,
    *,
    data_dir: str | Path | None = None,
    size: int | None = None,
    channels: int | None = None,
    partition: Partition | Mapping[str, object] | None = None,
    seed: int = 0,
    hold_out: float | None = None,
    **options: Any,
) -> Collection:
    """Everybody's data, for any name in DATASETS.

    With a partition the set, or all clients' data together, is split by it. Without one a
    federation keeps its clients, and a single set becomes one client that holds everything. With
    `hold_out` that share of the training examples takes the place of the test sets.
    """
    found = _loaded(name, data_dir, size, channels, partition, seed, options)
    return found if hold_out is None else held_out(found, hold_out, seed)


def _loaded(
    name: str,
    data_dir: str | Path | None,
    size: int | None,
    channels: int | None,
    partition: Partition | Mapping[str, object] | None,
    seed: int,
    options: dict[str, Any],
) -> Collection:
    if name not in DATASETS:
        raise DataError(unknown("data set", name, DATASETS))
    entry = DATASETS[name]
    for option in options:
        if option not in entry.options:
            raise DataError(unknown(f"option of {name}", option, entry.options))
    if entry.kind == "file":
        found = named_set(name, data_dir=data_dir, size=size, channels=channels)
        return divided(found, partition, seed)
    if entry.kind == "public":
        found = public_set(name, data_dir=data_dir, size=size, channels=channels, **options)
        return divided(found, partition, seed)
    collection = _federation(name, data_dir, size, channels, options)
    return collection if partition is None else divided(pooled(collection), partition, seed)


_embedded = cache(embedded_digits)  # drawn once for all methods of a recipe; nobody writes to it


def _federation(
    name: str,
    data_dir: str | Path | None,
    size: int | None,
    channels: int | None,
    options: dict[str, Any],
) -> Collection:
    if name == "own":
        return _own(data_dir, size, channels, options)
    if channels not in (None, 3):
        raise DataError(f"{name} has 3 channels, but channels is {channels!r}; leave it out")
    if name == "digits5":
        return _embedded(16 if size is None else size)
    if name == "DIGITS":
        return digits(data_dir=data_dir, size=size, **options)
    if name == "cifar10c":
        return cifar10c(data_dir=data_dir, size=size, **options)
    return office(data_dir=data_dir, size=size)


def _own(
    data_dir: str | Path | None, size: int | None, channels: int | None, options: dict[str, Any]
) -> Collection:
    """Own data; a relative path counts from data_dir where that is given."""
    reading = Reading(
        size=size,
        channels=channels,
        test_share=options.get("test_share", 0.2),
        seed=options.get("split_seed", 0),
    )
    clients = options.get("clients", {})
    if not isinstance(clients, Mapping):
        raise DataError(f"clients must be a table of names and paths, but is {clients!r}")
    given = {key: tuple(options[key]) for key in ("class_names", "mean", "std") if key in options}
    places = {str(client): Path(data_dir or ".") / path for client, path in clients.items()}
    return own_data(places, reading, **given)
