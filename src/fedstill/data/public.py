"""The usual public sets by name through torchvision, where that is installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError, unknown
from fedstill.data.datasets import checked_folder
from fedstill.data.images import matching_statistics, resized, statistics, with_channels
from fedstill.data.optional import optional
from fedstill.data.sites import Examples, LabelledSet

PREFIX = "torchvision:"


@dataclass(frozen=True)
class PublicSet:
    """How torchvision's class of that name is asked for its two parts."""

    train: dict[str, object]  # arguments for the train part
    test: dict[str, object]
    shape: tuple[int, int, int] | None  # channel, height, width; None: images differ, give size
    published: tuple[int, int]
    mean: tuple[float, ...] | None = None  # None: computed from the train part
    std: tuple[float, ...] | None = None
    more: dict[str, object] = field(default_factory=dict)  # arguments for both parts


BY_FLAG: tuple[dict[str, object], dict[str, object]] = ({"train": True}, {"train": False})
BY_WORD: tuple[dict[str, object], dict[str, object]] = ({"split": "train"}, {"split": "test"})

PUBLIC_SETS: dict[str, PublicSet] = {
    "MNIST": PublicSet(*BY_FLAG, (1, 28, 28), (60_000, 10_000), (0.1307,), (0.3081,)),
    "FashionMNIST": PublicSet(*BY_FLAG, (1, 28, 28), (60_000, 10_000), (0.2861,), (0.3530,)),
    "KMNIST": PublicSet(*BY_FLAG, (1, 28, 28), (60_000, 10_000)),
    "EMNIST": PublicSet(*BY_FLAG, (1, 28, 28), (112_800, 18_800), more={"split": "balanced"}),
    "USPS": PublicSet(*BY_FLAG, (1, 16, 16), (7_291, 2_007), (0.2473,), (0.2665,)),
    "CIFAR10": PublicSet(
        *BY_FLAG,
        (3, 32, 32),
        (50_000, 10_000),
        (0.4914, 0.4822, 0.4465),
        (0.2023, 0.1994, 0.2010),
    ),
    "CIFAR100": PublicSet(
        *BY_FLAG,
        (3, 32, 32),
        (50_000, 10_000),
        (0.5071, 0.4866, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "SVHN": PublicSet(
        *BY_WORD,
        (3, 32, 32),
        (73_257, 26_032),
        (0.4377, 0.4438, 0.4728),
        (0.1980, 0.2010, 0.1970),
    ),
    "STL10": PublicSet(*BY_WORD, (3, 96, 96), (5_000, 8_000)),
    "Food101": PublicSet(
        *BY_WORD, None, (75_750, 25_250), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    ),
}


def public_set(
    name: str,
    *,
    data_dir: str | Path | None,
    size: int | None = None,
    channels: int | None = None,
    download: bool = False,
) -> LabelledSet:
    """The set `torchvision:NAME` from `data_dir`; fetched only where `download` says so."""
    word = name.removeprefix(PREFIX)
    if word not in PUBLIC_SETS:
        raise DataError(unknown("torchvision set", word, PUBLIC_SETS))
    table = PUBLIC_SETS[word]
    if table.shape is None and size is None:
        raise DataError(f"{name} has images of many sizes; give size, for example 64")
    folder = checked_folder(name, data_dir)
    made_by = _torchvision_class(name, word)
    parts: list[Examples] = []
    class_names: tuple[str, ...] = ()
    for arguments in (table.train, table.test):
        part = _opened(name, made_by, folder, {**table.more, **arguments, "download": download})
        parts.append(_examples(name, part, size, channels))
        class_names = class_names or tuple(str(word) for word in getattr(part, "classes", ()))
    train, test = parts
    present = int(max(train.labels.max(initial=0), test.labels.max(initial=0))) + 1
    own_mean, own_std = statistics(train.inputs)
    return LabelledSet(
        name=name,
        train=train,
        test=test,
        class_names=class_names or tuple(str(number) for number in range(present)),
        mean=matching_statistics(table.mean or own_mean, train.shape[0]),
        std=matching_statistics(table.std or own_std, train.shape[0]),
    )


def _torchvision_class(name: str, word: str) -> Any:
    datasets = optional("torchvision.datasets", needed_for=name, install="fedstill[torchvision]")
    made_by = getattr(datasets, word, None)
    if made_by is None:
        raise DataError(f"the installed torchvision has no set {word}; a newer one may have it")
    return made_by


def _opened(name: str, made_by: Any, folder: Path, arguments: dict[str, object]) -> Any:
    try:
        return made_by(root=str(folder), **arguments)
    except (RuntimeError, OSError, ValueError) as fault:
        remedy = (
            "the download did not work"
            if arguments["download"]
            else "put its files there, or set download to fetch them"
        )
        raise DataError(f"{name} is not in data_dir {folder} ({fault}); {remedy}") from fault


def _examples(name: str, part: Any, size: int | None, channels: int | None) -> Examples:
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for image, label in part:
        pixels = np.asarray(image, np.uint8)
        stacked = pixels[None, None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)[None]
        images.append(stacked if size is None else resized(stacked, size))
        labels.append(int(label))
    if not images:
        raise DataError(f"{name}: torchvision gave no images")
    together = np.concatenate(images)
    together = together if channels is None else with_channels(together, channels)
    return Examples(np.ascontiguousarray(together), np.array(labels, np.int64))
