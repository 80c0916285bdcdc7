"""How one set is split over clients: pure functions from labels to rows. No loading.

Every function returns one sorted int64 array of rows per client; no row appears twice. All rows
are used, except where `dirichlet_prior` and `classes_per_client` say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError, unknown
from fedstill.data.sites import Collection, ImageSet, Site

Rows = NDArray[np.int64]
RETRIES = 10_000  # a try draws proportions only, so that thousands take a second or two


def iid(labels: Rows, *, clients: int, seed: int) -> list[Rows]:
    """Shuffled and divided evenly; sizes differ by one at most."""
    _check_clients(clients, len(labels))
    order = _generator(seed).permutation(len(labels))
    return _sorted(np.array_split(order, clients))


def dirichlet_label(
    labels: Rows,
    *,
    clients: int,
    alpha: float,
    seed: int,
    min_size: int = 10,
    retries: int = RETRIES,
) -> list[Rows]:
    """Each class is divided over the clients by a Dirichlet draw (NIID-Bench, Li et al. 2022).

    Clients that already hold their even share get nothing of the next classes. Everything is
    drawn again until every client has `min_size` examples.
    """
    _check_clients(clients, len(labels), min_size)
    _check_positive("alpha", alpha)
    rng = _generator(seed)
    counts = np.bincount(labels)
    for _ in range(_checked_count("retries", retries)):
        cuts = _dirichlet_cuts(counts, clients, alpha, rng)
        sizes = np.diff(cuts, axis=1).sum(0)
        if sizes.min() >= min_size:
            break
    else:
        raise DataError(
            f"no Dirichlet draw in {retries} tries gave every one of {clients} clients "
            f"{min_size} examples out of {len(labels)} at alpha {alpha:g}; "
            "raise alpha, lower clients or min_size, or allow more retries"
        )
    # Sizes do not depend on who gets which example: shuffling once, after the tries, is the same.
    shares: list[list[Rows]] = [[] for _ in range(clients)]
    for label, class_cuts in enumerate(cuts):
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client in range(clients):
            shares[client].append(rows[class_cuts[client] : class_cuts[client + 1]])
    return _sorted([np.concatenate(share) for share in shares])


def _dirichlet_cuts(counts: Rows, clients: int, alpha: float, rng: np.random.Generator) -> Rows:
    """Where each class is cut: [class, client + 1], first 0, last the class's size."""
    even_share = counts.sum() / clients
    held = np.zeros(clients, np.int64)
    cuts = np.zeros((len(counts), clients + 1), np.int64)
    for label, count in enumerate(counts):
        draw = rng.dirichlet(np.full(clients, alpha))
        open_draw = np.where(held < even_share, draw, 0.0)
        # At tiny alpha the whole draw may lie with clients that are full; it is then kept.
        chosen = open_draw if open_draw.sum() > 0 else draw
        shares = np.cumsum(chosen / chosen.sum())[:-1]
        cuts[label, 1:-1] = np.minimum(np.floor(shares * count), count)
        cuts[label, -1] = count
        held += np.diff(cuts[label])
    return cuts


def dirichlet_prior(
    labels: Rows,
    *,
    clients: int,
    alpha: float,
    seed: int,
    allow_missing_classes: bool = False,
) -> list[Rows]:
    """Each client draws class shares from a Dirichlet and samples by them (FedDyn).

    All clients get floor(n / clients) examples, without replacement and in random turns; the
    remainder of that division goes to nobody. Where a client's classes are used up it takes
    from what is left.
    """
    _check_clients(clients, len(labels))
    _check_positive("alpha", alpha)
    rng = _generator(seed)
    counts = np.bincount(labels)
    priors = rng.dirichlet(np.full(len(counts), alpha), size=clients)  # [client, class]
    quota = len(labels) // clients
    turns = rng.permutation(np.repeat(np.arange(clients), quota))
    drawn = _classes_by_turn(turns, priors, counts, rng)
    result = _dealt_by_turn(labels, turns, drawn, clients, rng)
    _check_classes_held(labels, result, allow_missing_classes, "raise alpha or lower clients")
    return result


def _classes_by_turn(
    turns: Rows, priors: NDArray[np.float64], counts: Rows, rng: np.random.Generator
) -> Rows:
    """The class taken at each turn, by the prior of the client whose turn it is."""
    left = counts.copy()
    steps = _open_priors(priors, left).cumsum(1)
    chances = rng.random(len(turns))
    drawn = np.empty(len(turns), np.int64)
    for turn, (client, chance) in enumerate(zip(turns.tolist(), chances.tolist(), strict=True)):
        reach = steps[client]
        label = int(reach.searchsorted(chance * reach[-1], side="right"))
        drawn[turn] = label
        left[label] -= 1
        if left[label] == 0 and left.any():
            steps = _open_priors(priors, left).cumsum(1)
    return drawn


def _open_priors(priors: NDArray[np.float64], left: Rows) -> NDArray[np.float64]:
    """Priors over the classes that are left; by what is left where nothing else remains."""
    usable = np.where(left > 0, priors, 0.0)
    # Below this the running sums could round to a class that is used up.
    exhausted = usable.sum(1) < 1e-12
    usable[exhausted] = left / left.sum()
    share: NDArray[np.float64] = usable / usable.sum(1, keepdims=True)
    return share


def _dealt_by_turn(
    labels: Rows, turns: Rows, drawn: Rows, clients: int, rng: np.random.Generator
) -> list[Rows]:
    """Rows for each client, given whose turn it was and which class was taken."""
    taken = np.empty(len(turns), np.int64)
    for label in np.unique(drawn):
        rows = rng.permutation(np.flatnonzero(labels == label))
        wanted = drawn == label
        taken[wanted] = rows[: wanted.sum()]
    return _sorted([taken[turns == client] for client in range(clients)])


def classes_per_client(
    labels: Rows,
    *,
    clients: int,
    classes: int,
    seed: int,
    allow_missing_classes: bool = False,
) -> list[Rows]:
    """Each client holds exactly `classes` classes; a class is divided evenly over its holders.

    Classes are given out so that their numbers of holders differ by one at most. With fewer than
    C / classes clients some classes go to nobody, which must be allowed.
    """
    _check_clients(clients, len(labels))
    present = np.unique(labels)
    if not 1 <= _checked_count("classes", classes) <= len(present):
        raise DataError(f"classes must lie in 1..{len(present)} (those present), but is {classes}")
    rng = _generator(seed)
    holds = np.zeros((clients, len(present)), bool)
    for client in range(clients):
        # Fewest holders first, ties by lot.
        order = np.lexsort((rng.random(len(present)), holds.sum(0)))
        holds[client, order[:classes]] = True
    shares: list[list[Rows]] = [[] for _ in range(clients)]
    for column, label in enumerate(present):
        holders = np.flatnonzero(holds[:, column])
        rows = rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(holders):
            raise DataError(
                f"class {label} has {len(rows)} examples for {len(holders)} clients; "
                "lower clients or classes"
            )
        for holder, part in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            shares[holder].append(part)
    result = _sorted([np.concatenate(share) for share in shares])
    _check_classes_held(labels, result, allow_missing_classes, "raise clients or classes")
    return result


def quantity_skew(
    labels: Rows,
    *,
    clients: int,
    beta: float,
    seed: int,
    min_size: int = 10,
    retries: int = RETRIES,
) -> list[Rows]:
    """Clients' sizes follow a Dirichlet draw; labels are mixed evenly."""
    _check_clients(clients, len(labels), min_size)
    _check_positive("beta", beta)
    rng = _generator(seed)
    for _ in range(_checked_count("retries", retries)):
        shares = np.cumsum(rng.dirichlet(np.full(clients, beta)))[:-1]
        cuts = np.minimum(np.floor(shares * len(labels)), len(labels)).astype(np.int64)
        if np.diff(cuts, prepend=0, append=len(labels)).min() >= min_size:
            return _sorted(np.split(rng.permutation(len(labels)), cuts))
    raise DataError(
        f"no Dirichlet draw in {retries} tries gave every one of {clients} clients {min_size} "
        f"examples out of {len(labels)} at beta {beta:g}; "
        "raise beta, lower clients or min_size, or allow more retries"
    )


def domains(domain_of: Rows) -> list[Rows]:
    """One client for each domain that occurs, in the order of their numbers."""
    _check_clients(1, len(domain_of))
    return [np.flatnonzero(domain_of == domain).astype(np.int64) for domain in np.unique(domain_of)]


class Partition(Protocol):
    """A description of a split; its fields are the keys of a recipe's partition table."""

    by_domain: ClassVar[bool]  # split reads the domain of each example instead of its label

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        ...


@dataclass(frozen=True)
class Iid:
    """Evenly and at random."""

    clients: int
    by_domain: ClassVar[bool] = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        return iid(labels, clients=self.clients, seed=seed)


@dataclass(frozen=True)
class Dirichlet:
    """Every class divided by a Dirichlet draw."""

    clients: int
    alpha: float
    min_size: int = 10
    retries: int = RETRIES
    by_domain: ClassVar[bool] = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        return dirichlet_label(
            labels,
            clients=self.clients,
            alpha=self.alpha,
            seed=seed,
            min_size=self.min_size,
            retries=self.retries,
        )


@dataclass(frozen=True)
class DirichletPrior:
    """Every client with class shares of its own and as many examples as the others."""

    clients: int
    alpha: float
    allow_missing_classes: bool = False
    by_domain: ClassVar[bool] = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        return dirichlet_prior(
            labels,
            clients=self.clients,
            alpha=self.alpha,
            seed=seed,
            allow_missing_classes=self.allow_missing_classes,
        )


@dataclass(frozen=True)
class ClassesPerClient:
    """Every client with a few classes only."""

    clients: int
    classes: int
    allow_missing_classes: bool = False
    by_domain: ClassVar[bool] = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        return classes_per_client(
            labels,
            clients=self.clients,
            classes=self.classes,
            seed=seed,
            allow_missing_classes=self.allow_missing_classes,
        )


@dataclass(frozen=True)
class QuantitySkew:
    """Clients of very different size with the same mix of labels."""

    clients: int
    beta: float
    min_size: int = 10
    retries: int = RETRIES
    by_domain: ClassVar[bool] = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        return quantity_skew(
            labels,
            clients=self.clients,
            beta=self.beta,
            seed=seed,
            min_size=self.min_size,
            retries=self.retries,
        )


@dataclass(frozen=True)
class Domains:
    """One client per domain of the set; nothing is drawn."""

    by_domain: ClassVar[bool] = True

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client, where `labels` are the numbers of the domains."""
        return domains(labels)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet-prior": DirichletPrior,
    "classes-per-client": ClassesPerClient,
    "quantity": QuantitySkew,
    "domains": Domains,
}


def described(table: Mapping[str, object]) -> Partition:
    """The partition a recipe's table asks for: `kind` names it, the other keys are its fields."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in PARTITIONS:
        raise DataError(unknown("partition kind", str(kind), PARTITIONS))
    made_by = PARTITIONS[kind]
    known = fields(made_by)  # type: ignore[arg-type]
    given = {key: value for key, value in table.items() if key != "kind"}
    for key in given:
        if key not in {field.name for field in known}:
            raise DataError(unknown(f"key of partition {kind}", key, [f.name for f in known]))
    try:
        return made_by(**given)
    except TypeError as fault:
        needed = ", ".join(field.name for field in known)
        raise DataError(f"partition {kind} needs more than it was given: {needed}") from fault


def partitioned(
    image_set: ImageSet, partition: Partition, seed: int, client_name: str = "client-{i}"
) -> Collection:
    """The set split over clients, who share pool, test set and normalisation.

    `{i}` in `client_name` becomes the client's number with leading zeros, so that names sort in
    the order of the clients. Clients of a split by domain carry the domain's name.
    """
    split = partition.split(_split_by(image_set, partition), seed)
    names = _client_names(image_set, partition, len(split), client_name)
    sites = tuple(
        Site(name, image_set.train, rows, image_set.test, image_set.mean, image_set.std)
        for name, rows in zip(names, split, strict=True)
    )
    unused = len(image_set.train) - sum(len(rows) for rows in split)
    notes = (f"{unused} training examples were given to nobody by {partition}",) if unused else ()
    return Collection(image_set.name, sites, image_set.class_names, (*image_set.notes, *notes))


def _split_by(image_set: ImageSet, partition: Partition) -> Rows:
    """What the partition reads: labels, or domains."""
    if not partition.by_domain:
        return image_set.train.labels
    if image_set.domains is None:
        raise DataError(
            f"{image_set.name} has a single domain, so it cannot be split by domains; "
            f"use another partition: {', '.join(sorted(set(PARTITIONS) - {'domains'}))}"
        )
    return image_set.domains


def _client_names(
    image_set: ImageSet, partition: Partition, clients: int, client_name: str
) -> list[str]:
    if partition.by_domain and image_set.domains is not None and image_set.domain_names:
        return [image_set.domain_names[domain] for domain in np.unique(image_set.domains)]
    if "{i}" not in client_name:
        raise DataError(f"client_name must contain {{i}} for the number, but is {client_name!r}")
    digits = max(2, len(str(clients - 1)))
    return [client_name.replace("{i}", f"{client:0{digits}d}") for client in range(clients)]


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _sorted(parts: list[Rows]) -> list[Rows]:
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def _checked_count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise DataError(f"{name} must be a whole number above 0, but is {value!r}")
    return int(value)


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{name} must be a number above 0, but is {value!r}")
    if not math.isfinite(value) or value <= 0:
        raise DataError(f"{name} must be finite and above 0, but is {value!r}")


def _check_clients(clients: int, examples: int, min_size: int = 1) -> None:
    needed = _checked_count("clients", clients) * _checked_count("min_size", min_size)
    if needed > examples:
        each = "one example" if min_size == 1 else f"{min_size} examples"
        raise DataError(
            f"{clients} clients with at least {each} each need {needed} examples, "
            f"but there are {examples}; lower clients{'' if min_size == 1 else ' or min_size'}"
        )


def _check_classes_held(labels: Rows, parts: list[Rows], allowed: bool, remedy: str) -> None:
    held = np.unique(labels[np.concatenate(parts)])
    missing = np.setdiff1d(labels, held)
    if len(missing) and not allowed:
        noun = "class" if len(missing) == 1 else "classes"
        raise DataError(
            f"no client holds {noun} {', '.join(map(str, missing))}; "
            f"{remedy}, or set allow_missing_classes"
        )
