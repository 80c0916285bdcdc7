"""Every data set by name, each with what loads it, and the one door to all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedstill.core.errors import BadValue, DataError, unknown
from fedstill.core.names import Names, function_fault
from fedstill.data.corrupted import OPTIONS, cifar10c
from fedstill.data.datasets import NAMED_SETS, NamedSet, named_set
from fedstill.data.embedded import embedded_digits
from fedstill.data.federations import DIGITS_CLIENTS, digits, office
from fedstill.data.folders import Reading, own_data
from fedstill.data.partitioned import divided
from fedstill.data.partitions import Partition
from fedstill.data.public import PREFIX, PUBLIC_SETS, PublicSet, public_set
from fedstill.data.sites import (
    Collection,
    LabelledSet,
    Statistics,
    held_out,
    normalised_by,
    plain,
    pooled,
)

Loader = Callable[..., LabelledSet | Collection]
"""Takes `data_dir`, `size` and `channels`, as far as it wants, and its options, all by keyword."""
COMMON = ("data_dir", "size", "channels")


@dataclass(frozen=True)
class Entry:
    """A data set: what loads it, and what a person wants to know before.

    A set of one's own is entered with a function that gives a Collection, or a LabelledSet that a
    partition then splits:

        DATASETS["wards"] = entry_of(my_function)
    """

    kind: str  # embedded, file, composed, public, own
    description: str
    loader: Loader
    files: tuple[str, ...] = ()  # needed in data_dir
    shape: tuple[int, ...] | None = None  # channel, height, width without size and channels
    counts: tuple[int, int] | None = None  # train and test examples where known
    options: tuple[str, ...] = ()  # what `load` takes besides its named arguments


def entry_of(loader: Loader, kind: str = "own code") -> Entry:
    """An entry for a function: its first line of documentation, its keywords as options."""
    known = inspect.signature(loader).parameters
    description = (inspect.getdoc(loader) or loader.__name__).partition("\n")[0]
    return Entry(kind, description, loader, options=tuple(k for k in known if k not in COMMON))


def _colour(loader: Callable[..., Collection], name: str) -> Loader:
    """A loader of a federation that is in colour as it is."""

    def load(*, data_dir: Any, size: Any, channels: int | None, **options: Any) -> Collection:
        if channels not in (None, 3):
            raise DataError(f"{name} has 3 channels, but channels is {channels!r}; leave it out")
        return loader(data_dir=data_dir, size=size, **options)

    return load


_embedded = cache(embedded_digits)  # drawn once for all methods of a recipe; nobody writes to it


def _digits5(*, data_dir: Any, size: int | None) -> Collection:
    return _embedded(16 if size is None else size)


def _own(
    *,
    data_dir: str | Path | None,
    size: int | None,
    channels: int | None,
    clients: Any = None,
    **options: Any,
) -> Collection:
    """Own data; a relative path counts from data_dir where that is given."""
    reading = Reading(
        size=size,
        channels=channels,
        test_share=options.get("test_share", 0.2),
        seed=options.get("split_seed", 0),
        on_broken=options.get("on_broken", "stop"),
        white=options.get("white", 65535),
    )
    clients = {} if clients is None else clients
    if not isinstance(clients, Mapping):
        raise DataError(f"clients must be a table of names and paths, but is {clients!r}")
    given: dict[str, Any] = {key: plain(options[key]) for key in ("mean", "std") if key in options}
    if "class_names" in options:
        given["class_names"] = tuple(map(str, options["class_names"]))
    places = {str(client): Path(data_dir or ".") / path for client, path in clients.items()}
    return own_data(places, reading, **given)


def _file_entry(name: str, table: NamedSet) -> Entry:
    loader = partial(named_set, name)
    return Entry("file", table.description, loader, table.files, table.shape, table.published)


def _public_entry(name: str, table: PublicSet) -> Entry:
    text = f"{name} through torchvision; fetched only with download = true"
    loader = partial(public_set, PREFIX + name)
    return Entry("public", text, loader, (), table.shape, table.published, ("download",))


DATASETS: dict[str, Entry] = {
    "digits5": Entry(
        "embedded",
        "five domains of small digits, nothing to download; one client per domain",
        _colour(_digits5, "digits5"),
        shape=(3, 16, 16),
        counts=(1500, 747),
    ),
    **{name: _file_entry(name, table) for name, table in NAMED_SETS.items()},
    "DIGITS": Entry(
        "composed",
        "MNIST, SVHN, USPS, SynthDigits (a surrogate) and MNIST-M, one client each",
        _colour(digits, "DIGITS"),
        files=tuple(file for name in DIGITS_CLIENTS.values() for file in NAMED_SETS[name].files),
        shape=(3, 32, 32),
        options=("style", "percent", "split_seed", "mnist_m_crop", "usps_blur"),
    ),
    "OFFICE": Entry(
        "composed",
        "Office-Caltech-10, one client each for Amazon, Caltech, DSLR and Webcam",
        _colour(office, "OFFICE"),
        files=NAMED_SETS["office-caltech10"].files,
        shape=(3, 32, 32),
        counts=NAMED_SETS["office-caltech10"].published,
        options=("split_seed",),
    ),
    "cifar10c": Entry(
        "composed",
        "CIFAR-10's test images in 19 corruptions made here, three clients for each kind",
        _colour(cifar10c, "cifar10c"),
        files=NAMED_SETS["cifar10"].test_files,
        shape=(3, 32, 32),
        counts=(855_000, 95_000),
        options=OPTIONS,
    ),
    **{PREFIX + name: _public_entry(name, table) for name, table in PUBLIC_SETS.items()},
    "own": Entry(
        "own",
        "your own images: for each client a folder of class folders or an .npz file",
        _own,
        options=(
            "clients",
            "class_names",
            "test_share",
            "split_seed",
            "mean",
            "std",
            "on_broken",
            "white",
        ),
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
    normalise: tuple[Statistics, Statistics] | None = None,
    **options: Any,
) -> Collection:
    """Everybody's data, for any name in DATASETS.

    With a partition the set, or all clients' data together, is split by it. Without one a
    federation keeps its clients, and a single set becomes one client that holds everything. With
    `hold_out` that share of the training examples takes the place of the test sets. `normalise` is
    a mean and a std for everybody in place of those of the set: ((0.0,), (1.0,)) leaves pixels as
    numbers in 0..1.
    """
    common = {"data_dir": data_dir, "size": size, "channels": channels}
    found = _called(name, entry_named(name), common, options)
    if isinstance(found, LabelledSet):
        found = divided(found, partition, seed)
    elif partition is not None:
        found = divided(pooled(found), partition, seed)
    if normalise is not None:
        found = normalised_by(found, *normalise)
    return found if hold_out is None else held_out(found, hold_out, seed)


FILES = (".npz", ".npy", ".csv", ".tsv", ".parquet", ".pkl", ".pt", ".h5", ".zip")  # no names


def _fault(value: Any) -> str | None:
    wanted = "a function that gives a Collection or a LabelledSet"
    return None if isinstance(value, Entry) else function_fault(wanted)(value)


SET_NAMES: Names[Entry | Loader] = Names("data set", DATASETS, "fedstill.datasets", _fault)
"""Besides our own: entries and functions of installed plug-ins and of files of one's own."""


def entry_named(name: str) -> Entry:
    """The entry of that name, or an error with the nearest one."""
    try:
        found = SET_NAMES[name]
    except BadValue as error:
        place = Path(str(name))
        if name and (place.suffix in FILES or place.is_dir()):
            kind = "folder" if place.is_dir() else "file"
            raise DataError(
                f"{name} is a {kind}, not the name of a data set; files of yours are the set 'own' "
                "with the option clients, for each client a folder of images or an .npz file; "
                "tables and other arrays go through fedstill.split in Python"
            ) from error
        raise DataError(error.faults[0]) from error
    return found if isinstance(found, Entry) else entry_of(found)


def _called(
    name: str, entry: Entry, common: Mapping[str, Any], options: Mapping[str, Any]
) -> LabelledSet | Collection:
    """What the entry's loader gives for these options."""
    for option in options:
        if option not in entry.options:
            raise DataError(unknown(f"option of {name}", option, entry.options))
    takes = inspect.signature(entry.loader).parameters
    unused = [key for key, value in common.items() if key not in takes and value is not None]
    if unused:
        raise DataError(f"{name} takes no {' and no '.join(unused)}; leave it out")
    given = {  # what was not said is left to the loader's own default, if it has one
        key: value
        for key, value in common.items()
        if key in takes and (value is not None or takes[key].default is inspect.Parameter.empty)
    }
    found = entry.loader(**given, **options)
    if not isinstance(found, (LabelledSet, Collection)):
        raise DataError(
            f"{name} must give a Collection or a LabelledSet (see fedstill.split and "
            f"fedstill.clients), but gave a {type(found).__name__}"
        )
    return found
