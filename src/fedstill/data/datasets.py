"""Named real sets, read from a folder of `.npz` files. Nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError, unknown
from fedstill.data.archives import FORM, Arrays, checked_labels, read_part, words
from fedstill.data.images import (
    matching_statistics,
    resized,
    statistics,
    with_channels,
)
from fedstill.data.sites import Examples, LabelledSet, images_of, merged

Numbers = NDArray[np.int64]
DIGIT_NAMES = tuple(str(digit) for digit in range(10))
FASHION_NAMES = (
    "T-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
)
CIFAR10_NAMES = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"
OFFICE_NAMES = (
    "backpack, bike, calculator, headphones, keyboard, laptop, monitor, mouse, mug, projector"
)
EXTRA_KEYS = ("class_names", "domain_names")


@dataclass(frozen=True)
class NamedSet:
    """Where a set lies, what it should look like, and how it is normalised."""

    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    shape: tuple[int, int, int]  # channel, height, width, as stored
    published: tuple[int, int]  # train and test examples of the complete set
    class_names: tuple[str, ...]
    mean: tuple[float, ...] | None  # None: computed from the train part
    std: tuple[float, ...] | None
    description: str
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are needed."""
        return tuple(dict.fromkeys(self.train_files + self.test_files))


def _named(
    file: str,
    shape: tuple[int, int, int],
    published: tuple[int, int],
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None,
    description: str,
    *,
    class_names: str = ", ".join(DIGIT_NAMES),
    notes: tuple[str, ...] = (),
) -> NamedSet:
    mean, std = normalisation or (None, None)
    names = tuple(class_names.split(", "))
    return NamedSet((file,), (file,), shape, published, names, mean, std, description, notes)


NAMED_SETS: dict[str, NamedSet] = {
    "mnist": _named(
        "mnist.npz",
        (1, 28, 28),
        (60_000, 10_000),
        ((0.1307,), (0.3081,)),
        "MNIST, handwritten digits",
    ),
    "fashion-mnist": _named(
        "fashion-mnist.npz",
        (1, 28, 28),
        (60_000, 10_000),
        ((0.2861,), (0.3530,)),
        "Fashion-MNIST, pieces of clothing",
        class_names=FASHION_NAMES,
    ),
    "usps": _named(
        "usps.npz",
        (1, 16, 16),
        (7_291, 2_007),
        ((0.2473,), (0.2665,)),
        "USPS, handwritten digits from envelopes",
    ),
    "svhn": _named(
        "svhn.npz",
        (3, 32, 32),
        (73_257, 26_032),
        ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        "SVHN, cropped house numbers; the digit 0 has label 0",
    ),
    "mnist-m": _named(
        "mnist-m.npz",
        (3, 32, 32),
        (59_001, 9_001),
        ((0.4595, 0.4629, 0.4097), (0.1727, 0.1603, 0.1785)),
        "MNIST-M, MNIST blended with photographs (Ganin, 32x32 release)",
        notes=("mnist-m: the 59001/9001 release; others differ in size",),
    ),
    "synthdigits": _named(
        "synthdigits-surrogate.npz",
        (3, 32, 32),
        (8_000, 2_000),
        ((0.4828, 0.4603, 0.4320), (0.1960, 0.1938, 0.1977)),
        "a surrogate for SynthDigits, digits in many fonts; not the original",
        notes=(
            "synthdigits: a surrogate, not the original SynthDigits; "
            "accuracies are not comparable with published ones",
        ),
    ),
    "office-caltech10": _named(
        "office-caltech10.npz",
        (3, 64, 64),
        (2_027, 506),
        None,
        "Office-Caltech-10, four domains in one set",
        class_names=OFFICE_NAMES,
        notes=("office-caltech10: no split is official; an own 80/20 split is used",),
    ),
    "acrima": _named(
        "acrima.npz",
        (3, 64, 64),
        (564, 141),
        ((0.7238, 0.3767, 0.1002), (0.1001, 0.1057, 0.0503)),
        "ACRIMA, fundus crops with and without glaucoma",
        class_names="normal, glaucoma",
        notes=("acrima: no split is official; an own 80/20 split by image is used",),
    ),
    "cifar10": NamedSet(
        train_files=("cifar10-train-a.npz", "cifar10-train-b.npz"),
        test_files=("cifar10-test.npz",),
        shape=(3, 32, 32),
        published=(50_000, 10_000),
        class_names=tuple(CIFAR10_NAMES.split(", ")),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        description="CIFAR-10, small photographs",
    ),
}


def named_set(
    name: str,
    *,
    data_dir: str | Path | None,
    size: int | None = None,
    channels: int | None = None,
) -> LabelledSet:
    """The set of that name from `data_dir`, resized and with grey repeated if asked."""
    if name not in NAMED_SETS:
        raise DataError(unknown("data set", name, NAMED_SETS))
    table = NAMED_SETS[name]
    folder = checked_folder(name, data_dir)
    _check_files(name, folder, table.files)
    train, extra = _part(folder, table.train_files, "train")
    test, extra_of_test = _part(folder, table.test_files, "test")
    for part, examples, files in (
        ("train", train, table.train_files),
        ("test", test, table.test_files),
    ):
        _check_against_table(f"{folder / files[0]} ({part})", examples, table)
    _check_class_names(folder / table.files[0], extra, table)
    train, test = (shaped(examples, size, channels) for examples in (train, test))
    mean, std = normalisation(table, train)
    path = folder / table.files[0]
    domains = _domain_numbers(path, "train", extra, len(train))
    return LabelledSet(
        name=name,
        train=train,
        test=test,
        class_names=table.class_names,
        mean=mean,
        std=std,
        notes=(*table.notes, *_subset_notes(name, table, len(train), len(test))),
        domains=domains,
        domain_names=() if domains is None else words(path, "domain_names", extra["domain_names"]),
        test_domains=_domain_numbers(path, "test", extra_of_test, len(test)),
    )


def test_part(name: str, *, data_dir: str | Path | None) -> Examples:
    """The test examples of a named set alone; the files of its train part may be missing."""
    table = NAMED_SETS[name]
    folder = checked_folder(name, data_dir)
    _check_files(name, folder, table.test_files)
    test, extra = _part(folder, table.test_files, "test")
    _check_against_table(f"{folder / table.test_files[0]} (test)", test, table)
    _check_class_names(folder / table.test_files[0], extra, table)
    return test


def _check_files(name: str, folder: Path, files: tuple[str, ...]) -> None:
    for file in files:
        if not (folder / file).is_file():
            raise DataError(
                f"{name} needs the file {folder / file}, which is not there; "
                f"data_dir is {folder}: put {file} there; {FORM}"
            )


def checked_folder(name: str, data_dir: str | Path | None) -> Path:
    """The data folder, if it was named and is there."""
    if data_dir is None:
        raise DataError(
            f"{name} is read from files, but data_dir is not set; "
            f"set it, or --data-dir on the command line, to the folder that holds them; {FORM}"
        )
    folder = Path(data_dir)
    if not folder.is_dir():
        raise DataError(f"{name}: data_dir must be a folder, but {folder} is not one")
    return folder


def normalisation(table: NamedSet, train: Examples) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The published mean and std, or those of the train part where none are published."""
    if table.mean is None or table.std is None:
        return statistics(train.inputs)
    channels = train.shape[0]
    return matching_statistics(table.mean, channels), matching_statistics(table.std, channels)


def _part(folder: Path, files: tuple[str, ...], part: str) -> tuple[Examples, Arrays]:
    read = [read_part(folder / file, part, (*EXTRA_KEYS, f"{part}_domains")) for file in files]
    if len(read) == 1:
        return read[0]
    shapes = {file: examples.shape for file, (examples, _) in zip(files, read, strict=True)}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{folder}: the parts of a set must have one shape, but have {shapes}")
    return merged([examples for examples, _ in read]), {}


def _check_against_table(where: str, examples: Examples, table: NamedSet) -> None:
    images_of(where, examples)
    if examples.shape[0] != table.shape[0]:
        raise DataError(
            f"{where}: images must have {table.shape[0]} channels, but have {examples.shape[0]}"
        )
    classes = len(table.class_names)
    if examples.labels.max() >= classes:
        raise DataError(
            f"{where}: labels must lie in 0..{classes - 1}, "
            f"but {examples.labels.max()} is among them"
        )


def _check_class_names(path: Path, extra: Arrays, table: NamedSet) -> None:
    if "class_names" not in extra:
        return
    present = words(path, "class_names", extra["class_names"])
    if present != table.class_names:
        raise DataError(
            f"{path}: class_names must be {', '.join(table.class_names)}, "
            f"but are {', '.join(present)}"
        )


def _domain_numbers(path: Path, part: str, extra: Arrays, length: int) -> Numbers | None:
    key = f"{part}_domains"
    if key not in extra:
        return None
    if "domain_names" not in extra:
        raise DataError(f"{path} has {key} but no array domain_names; {FORM}")
    numbers = checked_labels(path, key, extra[key])
    names = words(path, "domain_names", extra["domain_names"])
    if len(numbers) != length or numbers.max() >= len(names):
        raise DataError(
            f"{path}: {key} must hold {length} numbers in 0..{len(names) - 1}, "
            f"but holds {len(numbers)} up to {numbers.max(initial=0)}"
        )
    return numbers


def shaped(
    examples: Examples, size: int | None, channels: int | None, where: str = "the set"
) -> Examples:
    """The examples resized and with grey repeated, where that is asked for."""
    if size is None and channels is None:
        return examples
    images = images_of(where, examples)
    images = images if size is None else resized(images, size)
    images = images if channels is None else with_channels(images, channels)
    return Examples(images, examples.labels)


def _subset_notes(name: str, table: NamedSet, train: int, test: int) -> tuple[str, ...]:
    if (train, test) == table.published:
        return ()
    return (
        f"{name}: a subset, {train} of {table.published[0]} train "
        f"and {test} of {table.published[1]} test examples",
    )
