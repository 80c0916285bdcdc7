"""Data in memory made a federation: pooled and split, or one set for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

import numpy as np

from fedstill.core.errors import DataError
from fedstill.data.arrays import (
    Channels,
    Given,
    as_array,
    as_inputs,
    as_labels,
    common_classes,
    numbered,
)
from fedstill.data.foreign import Columns, given, inputs_of
from fedstill.data.images import Inputs, matching_statistics, statistics, stratified_split
from fedstill.data.partitioned import divided
from fedstill.data.partitions import Partition
from fedstill.data.sites import Collection, Examples, LabelledSet, Site, Statistics
from fedstill.data.unlabelled import Unlabelled

Normalise = Literal["auto"] | None | tuple[Any, Any]
TEST_SEED = 0  # tests stay the same whatever the seed of the split, so that seeds can be compared


def split(
    x: Any,
    y: Any = None,
    *,
    test: Any = None,
    test_share: float = 0.2,
    partition: Partition | Mapping[str, object] | None = None,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
    normalise: Normalise = "auto",
    channels: Channels | None = None,
    image: str | None = None,
    label: str | None = None,
    name: str = "arrays",
) -> Collection:
    """One set, split over clients by a partition; they share its test part and normalisation.

        data = fedstill.split(x, y, partition=fedstill.Dirichlet(10, alpha=0.5))
        data = fedstill.split(x, y, test=(x_test, y_test), partition=fedstill.Iid(5), seed=1)
        data = fedstill.split(CIFAR10(…), test=CIFAR10(…, train=False), partition=…)
        data = fedstill.split(load_dataset("mnist"), partition=…)          # Hugging Face

    `x` is an array, a tensor or a list of them: images as bytes or floats, [n, height, width],
    [n, height, width, channel] or [n, channel, height, width] (say `channels="last"` or `"first"`
    where the shape does not tell), or feature vectors [n, feature]. `y` are whole numbers or
    texts. Instead of both, a data set of torch (map-style, items (x, y)) or of Hugging Face
    (`image` and `label` name its columns where they are not found), or a table with `train` and
    `test` of either.

    Without `test` a stratified `test_share` is set aside, the same for every `seed`. Without a
    partition there is one client. `normalise` is "auto" (by the mean and deviation of each channel
    or feature of the train part), None, or a pair (mean, std) for bytes as numbers in 0..1.
    """
    reading = Reading(channels, Columns(image, label))
    source, own_test = _parted("x", (x, y) if y is not None else x)
    if own_test is not None and test is not None:
        raise DataError("x brings a test part of its own and test is another; give one of them")
    test = own_test if own_test is not None else test
    train = reading.part("train", source)
    tests = None if test is None else reading.part("test", test)
    names, notes = reading.classes([train, *([tests] if tests else [])], class_names)
    examples, own = _with_test("the set", train, tests, names, test_share)
    mean, std = _normalisation(normalise, examples.inputs)
    told = (
        *_unused("x", x),
        *dict.fromkeys(reading.notes),
        *notes,
        *_untaught([examples], [own], names),
    )
    whole = LabelledSet(name, examples, own, names, mean, std, told)
    return divided(whole, partition, seed)


def clients(
    data: Mapping[str, Any],
    *,
    test: Any = None,
    test_share: float = 0.2,
    class_names: Sequence[str] | None = None,
    normalise: Normalise = "auto",
    channels: Channels | None = None,
    image: str | None = None,
    label: str | None = None,
    name: str = "clients",
) -> Collection:
    """One set for each client, with tests of its own or a common one.

        data = fedstill.clients({"ward-a": (x_a, y_a), "ward-b": (x_b, y_b)})
        data = fedstill.clients({"ward-a": (x, y, x_test, y_test), "ward-b": tables})
        data = fedstill.clients({"ward-a": a_data_set, "ward-b": another}, test=(x_test, y_test))

    What a client's examples may be is said at `split`. A client without tests sets `test_share`
    of its own aside, unless `test` is given, which is then everybody's. With `normalise="auto"`
    each client normalises by its own mean and deviation.
    """
    if not isinstance(data, Mapping) or not data:
        raise DataError(
            "clients must be a table of names and examples, such as {'ward-a': (x, y)}, "
            f"but is {type(data).__name__}{'' if data else ' without entries'}"
        )
    reading = Reading(channels, Columns(image, label))
    sources = {str(client): _parted(f"client {client}", own) for client, own in data.items()}
    both = [client for client, (_, own) in sources.items() if own is not None]
    if test is not None and both:
        raise DataError(
            f"tests of their own are with {', '.join(both)}, and test is everybody's; "
            "give one or the other"
        )
    trains = {c: reading.part(f"client {c}", train) for c, (train, _) in sources.items()}
    tests = {
        c: reading.part(f"client {c} (test)", own)
        for c, (_, own) in sources.items()
        if own is not None
    }
    common = None if test is None else reading.part("test", test)
    every = [*trains.values(), *tests.values(), *([common] if common else [])]
    names, notes = reading.classes(every, class_names)
    shared = None if common is None else common.examples(names)
    sites = []
    for client, train in trains.items():
        if shared is None:
            examples, mine = _with_test(
                f"client {client}", train, tests.get(client), names, test_share
            )
        else:
            examples, mine = train.examples(names), shared
        mean, std = _normalisation(normalise, examples.inputs)
        rows = np.arange(len(examples), dtype=np.int64)
        sites.append(Site(client, examples, rows, mine, mean, std))
    untaught = _untaught([s.pool for s in sites], [s.test for s in sites], names)
    unused = [note for client, own in data.items() for note in _unused(f"client {client}", own)]
    told = (*unused, *dict.fromkeys(reading.notes), *notes, *untaught)
    return Collection(name, tuple(sites), names, told)


def unlabelled(
    x: Any,
    *,
    normalise: Normalise = "auto",
    channels: Channels | None = None,
    image: str | None = None,
    name: str = "public",
) -> Unlabelled:
    """Inputs without labels that everybody holds, for methods with public data.

        public = fedstill.unlabelled(x)      # in the shape of the clients' inputs

    `x` is an array, a tensor or a list of them, or a data set as `split` takes it, whose labels
    are left out.
    """
    found, place = inputs_of("x", x, Columns(image))
    inputs, notes = as_inputs("x", found, channels or place)
    mean, std = _normalisation(normalise, inputs)
    return Unlabelled(name, inputs, mean, std, notes)


@dataclass(frozen=True, eq=False)
class Source:
    """Examples whose labels are still those of their source."""

    name: str
    inputs: Inputs
    labels: Any  # int64 or texts
    class_names: tuple[str, ...] | None

    def examples(self, names: tuple[str, ...]) -> Examples:
        """The examples with labels that count these names."""
        labels = self.labels if self.class_names == names else self.words()
        return Examples(self.inputs, numbered(self.name, labels, names))

    def words(self) -> Any:
        """The labels as texts where the source names its classes, else as they are."""
        if self.class_names is None or self.labels.dtype.kind == "U":
            return self.labels
        return np.array(self.class_names)[numbered(self.name, self.labels, self.class_names)]


@dataclass(frozen=True, eq=False)
class Reading:
    """How sources are read, and what was guessed on the way."""

    channels: Channels | None
    columns: Columns
    notes: list[str] = field(default_factory=list)

    def part(self, name: str, source: Any) -> Source:
        """One source's inputs and labels."""
        found: Given = given(name, source, self.columns)
        inputs, notes = as_inputs(f"{name}: x", found.x, self.channels or found.channels)
        self.notes.extend(notes)
        labels = as_labels(f"{name}: y", found.y, len(inputs))
        return Source(name, inputs, labels, found.class_names)

    def classes(
        self, parts: Sequence[Source], known: Sequence[str] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of all classes, in order, and notes."""
        told = {part.class_names for part in parts if part.class_names is not None}
        counted = all(part.labels.dtype.kind != "U" for part in parts)
        if known is None and counted and len(told) == 1:
            return told.pop(), ()
        return common_classes([part.words() for part in parts], known)


def _parted(name: str, source: Any) -> tuple[Any, Any]:
    """A train part and a test part or None, from a table of both, four arrays, or one set."""
    if isinstance(source, Mapping):
        if "train" not in source:
            raise DataError(
                f"{name} must have 'train' and may have 'test', "
                f"but has {', '.join(map(str, source)) or 'nothing'}; columns are given as a pair "
                "of arrays, inputs and labels: (x, y)"
            )
        return source["train"], source.get("test")
    if isinstance(source, str | PathLike):
        raise DataError(
            f"{name} must be arrays or a data set, but is the path {str(source)!r}; image files "
            "and .npz files are read by fedstill.load('own', data_dir=…, clients={…})"
        )
    if isinstance(source, tuple) and len(source) == 4:
        return source[:2], source[2:]
    if isinstance(source, tuple) and len(source) != 2:
        raise DataError(
            f"{name} must be (x, y) or (x, y, x_test, y_test), but has {len(source)} parts"
        )
    halves = source if isinstance(source, tuple) else ()
    pairs = [half for half in halves if isinstance(half, tuple) and len(half) == 2]
    if len(pairs) == 2 and all(np.ndim(part) for pair in pairs for part in pair):
        raise DataError(
            f"{name} is two pairs; write (x, y, x_test, y_test), or {{'train': …, 'test': …}}"
        )
    return source, None


def _unused(name: str, source: Any) -> tuple[str, ...]:
    """A note on parts of a table, such as `validation`, from which nothing is read."""
    if not isinstance(source, Mapping):
        return ()
    parts = ", ".join(str(part) for part in source if part not in ("train", "test"))
    return (f"{name}: train and test alone are read, not {parts}",) if parts else ()


def _untaught(
    trains: Sequence[Examples], tests: Sequence[Examples], names: Sequence[str]
) -> tuple[str, ...]:
    """A note on classes that tests ask for and no training example has."""
    taught, asked = (
        {int(label) for part in parts for label in np.unique(part.labels)}
        for parts in (trains, tests)
    )
    alone = ", ".join(names[label] for label in sorted(asked - taught))
    return (f"in tests alone, without a training example: class {alone}",) if alone else ()


def _with_test(
    who: str, train: Source, test: Source | None, names: tuple[str, ...], share: float
) -> tuple[Examples, Examples]:
    """Train and test examples; without tests a stratified share is set aside."""
    everything = train.examples(names)
    if test is not None:
        return everything, test.examples(names)
    kept, aside = stratified_split(everything.labels, test_share=share, seed=TEST_SEED)
    if not len(aside):
        raise DataError(
            f"{who} has {len(everything)} examples and no class with two, so that none is left "
            "to test on; give test examples"
        )
    return everything.take(np.sort(kept)), everything.take(np.sort(aside))


def _normalisation(wish: Normalise, inputs: Inputs) -> tuple[Statistics | None, Statistics | None]:
    """Mean and deviation as they were asked for; one number stands for all channels or features."""
    if wish is None:
        return None, None
    if isinstance(wish, str) and wish == "auto":
        return statistics(inputs)
    if not isinstance(wish, (tuple, list)) or len(wish) != 2:
        raise DataError(f"normalise must be 'auto', None or a pair (mean, std), but is {wish!r}")
    mean, std = (
        matching_statistics(tuple(np.ravel(as_array("normalise", value)).astype(float).tolist()), n)
        for value, n in ((wish[0], inputs.shape[1]), (wish[1], inputs.shape[1]))
    )
    return mean, std
