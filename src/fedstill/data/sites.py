"""Who holds which examples: the records every other module of this package makes or reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.images import Inputs, matching_statistics, statistics, stratified_split

Statistics = tuple[float, ...]  # one number for each channel, or for each feature


@dataclass(frozen=True, eq=False)
class Examples:
    """Images or feature vectors as they are stored, each with one label."""

    inputs: Inputs  # images as bytes or floats, or vectors as floats; axes as in INPUT_FORMS
    labels: NDArray[np.int64]  # [example]

    def __post_init__(self) -> None:
        check_inputs("inputs", self.inputs)
        if self.labels.dtype != np.int64 or self.labels.ndim != 1:
            raise DataError(
                "labels must be int64 [example], "
                f"but came as {self.labels.dtype} {list(self.labels.shape)}"
            )
        if len(self.inputs) != len(self.labels):
            raise DataError(
                "inputs and labels must have the same length, "
                f"but there are {len(self.inputs)} inputs and {len(self.labels)} labels"
            )
        if len(self.labels) and self.labels.min() < 0:
            raise DataError(f"labels count from 0, but {self.labels.min()} is among them")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image, or the number of features."""
        return self.inputs.shape[1:]

    def take(self, rows: NDArray[np.int64]) -> Examples:
        """The examples at `rows`, copied, in that order."""
        return Examples(self.inputs[rows], self.labels[rows])

    def digest(self) -> str:
        """The sha256 of shape, inputs and labels, as hex."""
        digest = hashlib.sha256(described_inputs(self.inputs))
        digest.update(np.ascontiguousarray(self.inputs).data)
        digest.update(np.ascontiguousarray(self.labels.astype("<i8")).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class LabelledSet:
    """One named set with its train and test part, not yet split over clients."""

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    mean: Statistics | None  # as in Site
    std: Statistics | None
    notes: tuple[str, ...] = ()
    domains: NDArray[np.int64] | None = None  # [train example]; where the set has several domains
    domain_names: tuple[str, ...] = ()
    test_domains: NDArray[np.int64] | None = None  # [test example]

    def __post_init__(self) -> None:
        _check_same_shape(self.name, self.train, self.test)
        _check_normalisation(self.name, self.train, self.mean, self.std)
        for part, examples in (("train", self.train), ("test", self.test)):
            _check_labels(f"{self.name} ({part})", examples.labels, len(self.class_names))
        if self.domains is not None and len(self.domains) != len(self.train):
            raise DataError(
                f"{self.name}: domains must name one domain for each of the {len(self.train)} "
                f"training examples, but there are {len(self.domains)}"
            )


@dataclass(frozen=True, eq=False, slots=True)  # there may be thousands
class Site:
    """One client's data, before any tensor."""

    name: str
    pool: Examples  # sites of one partition share the very same pool
    rows: NDArray[np.int64]  # which examples of the pool this client trains on
    test: Examples  # sites of one partition share the very same test set
    mean: Statistics | None  # of this client, for bytes as numbers in 0..1; None: not normalised
    std: Statistics | None

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int64 or self.rows.ndim != 1:
            raise DataError(
                f"{self.name}: rows must be int64 [row], "
                f"but came as {self.rows.dtype} {list(self.rows.shape)}"
            )
        if len(self.rows) and not 0 <= self.rows.min() <= self.rows.max() < len(self.pool):
            raise DataError(
                f"{self.name}: rows must lie in 0..{len(self.pool) - 1}, "
                f"but reach from {self.rows.min()} to {self.rows.max()}"
            )
        _check_same_shape(self.name, self.pool, self.test)
        _check_normalisation(self.name, self.pool, self.mean, self.std)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The labels of the training rows."""
        return self.pool.labels[self.rows]

    def counts(self, classes: int) -> NDArray[np.int64]:
        """How many training rows each class has."""
        return np.bincount(self.labels, minlength=classes).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Collection:
    """Everybody's data."""

    name: str
    sites: tuple[Site, ...]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what a reader must know before comparing numbers
    held_out: int = 0  # training examples that stand in place of the test sets

    def __repr__(self) -> str:
        """In one line: arrays of all clients would fill a screen."""
        clients, train = len(self.sites), sum(map(len, self.sites))
        tests = {id(site.test): len(site.test) for site in self.sites}
        return (
            f"<Collection {self.name}: {clients} {'client' if clients == 1 else 'clients'}, "
            f"{train} examples to train on, {sum(tests.values())} to test on, "
            f"{self.classes} {'class' if self.classes == 1 else 'classes'}, "
            f"inputs of {'x'.join(map(str, self.shape))}>"
        )

    def _repr_html_(self) -> str:
        """For a notebook: examples by client and class, the first twenty clients."""
        names = (*self.class_names, "in all", "test")
        rows = []
        for site in self.sites[:20]:
            counts = site.counts(len(self.class_names)).tolist()
            cells = "".join(f"<td>{n}</td>" for n in (*counts, sum(counts), len(site.test)))
            rows.append(f"<tr><th>{escape(site.name)}</th>{cells}</tr>")
        more = f"<p>and {len(self.sites) - 20} more clients</p>" if len(self.sites) > 20 else ""
        head = "".join(f"<th>{escape(name)}</th>" for name in ("client", *names))
        title = f"<caption>{escape(self.name)}: examples by class</caption>"
        return f"<table>{title}<tr>{head}</tr>{''.join(rows)}</table>{more}"

    def __post_init__(self) -> None:
        if not self.sites:
            raise DataError(f"{self.name} has no client; at least one is needed")
        names = [site.name for site in self.sites]
        if len(set(names)) != len(names):
            raise DataError(f"{self.name}: client names must differ, but are {', '.join(names)}")
        first, tests = self.sites[0], set()
        for site in self.sites:
            if site.pool.shape != first.pool.shape:
                images = len(site.pool.shape) == len(first.pool.shape) == 3
                remedy = "; bring arrays to one shape, files by size and channels" if images else ""
                raise DataError(
                    f"{self.name}: all clients need {'images' if images else 'inputs'} of one "
                    f"shape, but {first.name} has {first.pool.shape} and {site.name} has "
                    f"{site.pool.shape}{remedy}"
                )
            if site.pool.inputs.dtype != first.pool.inputs.dtype:
                raise DataError(
                    f"{self.name}: all clients need inputs of one type, but {first.name} has "
                    f"{first.pool.inputs.dtype} and {site.name} has {site.pool.inputs.dtype}"
                )
            _check_labels(site.name, site.labels, self.classes)
            if id(site.test) not in tests:  # clients of one partition share it
                _check_labels(f"{site.name} (test)", site.test.labels, self.classes)
                tests.add(id(site.test))

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of every image, or the number of features."""
        return self.sites[0].pool.shape

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def digest(self) -> str:
        """The sha256 over everything a run can see, as hex; notes are left out."""
        known: dict[int, str] = {}

        def of(examples: Examples) -> str:
            if id(examples) not in known:
                known[id(examples)] = examples.digest()
            return known[id(examples)]

        digest = hashlib.sha256(repr((self.name, self.class_names)).encode())
        for site in self.sites:
            normalisation = plain(site.mean), plain(site.std)
            parts = (site.name, of(site.pool), of(site.test), normalisation, len(site))
            digest.update(repr(parts).encode())
            digest.update(np.ascontiguousarray(site.rows.astype("<i8")).data)
        return digest.hexdigest()


def whole_site(
    name: str,
    train: Examples,
    test: Examples,
    *,
    mean: Statistics | None = None,
    std: Statistics | None = None,
) -> Site:
    """A client that trains on all of `train`, normalised by its own statistics unless given."""
    if mean is None or std is None:
        own_mean, own_std = statistics(train.inputs)
        mean, std = mean or own_mean, std or own_std
    return Site(name, train, np.arange(len(train), dtype=np.int64), test, mean, std)


def pooled(collection: Collection) -> LabelledSet:
    """All clients' data merged into one set with one normalisation, each client a domain."""
    sites = collection.sites
    train = merged([site.pool.take(site.rows) for site in sites])
    tests = list({id(site.test): site.test for site in sites}.values())
    mean, std = None, None
    if any(site.mean is not None for site in sites):
        mean, std = statistics(train.inputs)
    noted = (f"the data of {len(sites)} clients was merged",) if len(sites) > 1 else ()
    return LabelledSet(
        name=collection.name,
        train=train,
        test=merged(tests),
        class_names=collection.class_names,
        mean=mean,
        std=std,
        notes=(*collection.notes, *noted),
        domains=np.repeat(np.arange(len(sites), dtype=np.int64), [len(site) for site in sites]),
        domain_names=tuple(site.name for site in sites),
    )


def held_out(collection: Collection, share: float, seed: int) -> Collection:
    """A part of everybody's training examples in place of the test sets, which stay unseen.

    For choosing settings: what is chosen on test sets cannot be reported on them. Each client sets
    aside `share` of every class. Clients that share one test set share what all of them set aside.
    """
    if not 0 < share < 1:
        raise DataError(f"hold_out must lie between 0 and 1, but is {share!r}")
    split = [
        stratified_split(site.labels, test_share=share, seed=seed) for site in collection.sites
    ]
    aside: dict[int, dict[int, tuple[Examples, list[NDArray[np.int64]]]]] = {}
    for site, (_, rows) in zip(collection.sites, split, strict=True):
        pools = aside.setdefault(id(site.test), {})
        pools.setdefault(id(site.pool), (site.pool, []))[1].append(site.rows[rows])
    # In the order of the pool, not client by client: networks that go by the statistics of a batch
    # would see the classes of one client after those of another.
    tests = {
        test: merged([pool.take(np.sort(np.concatenate(rows))) for pool, rows in pools.values()])
        for test, pools in aside.items()
    }
    sites = tuple(
        replace(site, rows=np.sort(site.rows[rows]), test=tests[id(site.test)])
        for site, (rows, _) in zip(collection.sites, split, strict=True)
    )
    count = sum(map(len, tests.values()))
    if not count:
        raise DataError(
            f"hold_out = {share:g} sets nothing aside, since no client has two examples of a class "
            "or enough of them; hold out more"
        )
    notes = [f"scored on {count} training examples held out, not on the test set"]
    if unscored := [site.name for site in sites if not len(site.test)]:
        shown = ", ".join(unscored[:5]) + (", …" if unscored[5:] else "")
        notes.append(f"nothing could be held out of {shown}: no score is theirs")
    return replace(collection, sites=sites, notes=(*collection.notes, *notes), held_out=count)


def normalised_by(collection: Collection, mean: Statistics, std: Statistics) -> Collection:
    """The same clients, all normalised by one mean and std; one number stands for all channels."""
    channels = collection.shape[0]
    mean, std = (matching_statistics(plain(each) or (), channels) for each in (mean, std))
    sites = tuple(replace(site, mean=mean, std=std) for site in collection.sites)
    return replace(collection, sites=sites)


def merged(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, one part after the other."""
    if len(parts) == 1:
        return parts[0]
    images = np.concatenate([part.inputs for part in parts])
    return Examples(images, np.concatenate([part.labels for part in parts]))


def check_inputs(name: str, inputs: Inputs) -> None:
    """Raise unless these are images or vectors in a form that is stored."""
    kind = str(inputs.dtype), inputs.ndim
    if kind not in INPUT_FORMS:
        raise DataError(
            f"{name} must be {', or '.join(INPUT_FORMS.values())}, "
            f"but came as {inputs.dtype} {list(inputs.shape)}"
        )


INPUT_FORMS = {
    ("uint8", 4): "images, uint8 [example, channel, height, width]",
    ("float32", 4): "images, float32 [example, channel, height, width]",
    ("float32", 2): "feature vectors, float32 [example, feature]",
}


def images_of(name: str, examples: Examples) -> NDArray[np.uint8]:
    """The inputs, if they are images as bytes, which can be resized and recoloured."""
    if examples.inputs.dtype != np.uint8:
        raise DataError(
            f"{name} holds {examples.inputs.dtype} {list(examples.inputs.shape)}, but images as "
            "bytes (uint8) are needed; only these are resized, recoloured and read by name"
        )
    return examples.inputs.astype(np.uint8, copy=False)


def described_inputs(inputs: Inputs) -> bytes:
    """What a digest says of inputs before their content: the shape, and the type if not bytes."""
    kind = "" if inputs.dtype == np.uint8 else f"{inputs.dtype} "
    return f"{kind}{inputs.shape!r}".encode()


def plain(values: Statistics | None) -> Statistics | None:
    """A mean or std as plain floats, whatever numbers it came as; one is for all channels."""
    return None if values is None else tuple(map(float, np.ravel(values)))


def _check_same_shape(name: str, train: Examples, test: Examples) -> None:
    if train.shape != test.shape:
        raise DataError(
            f"{name}: train and test inputs must have one shape, "
            f"but train has {train.shape} and test has {test.shape}"
        )
    if train.inputs.dtype != test.inputs.dtype:
        raise DataError(
            f"{name}: train and test inputs must have one type, "
            f"but train has {train.inputs.dtype} and test has {test.inputs.dtype}"
        )


def _check_normalisation(
    name: str, examples: Examples, mean: Statistics | None, std: Statistics | None
) -> None:
    if mean is None and std is None:
        return
    if mean is None or std is None:
        raise DataError(f"{name}: give mean and std, or neither of them")
    count = examples.shape[0]
    if len(mean) != count or len(std) != count:
        each = "channels" if len(examples.shape) == 3 else "features"
        raise DataError(
            f"{name}: mean and std need one value for each of {count} {each}, "
            f"but have {len(mean)} and {len(std)}"
        )
    if not all(np.isfinite(mean)) or not all(np.isfinite(std)) or min(std) <= 0:
        raise DataError(
            f"{name}: mean and std must be finite and std above 0, but are {mean} and {std}"
        )


def _check_labels(name: str, labels: NDArray[np.int64], classes: int) -> None:
    if len(labels) and labels.max() >= classes:
        raise DataError(
            f"{name}: labels must lie in 0..{classes - 1} for {classes} classes, "
            f"but {labels.max()} is among them"
        )
