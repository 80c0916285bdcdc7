"""What a partition is, and the checks that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedstill.core import ranges
from fedstill.core.errors import DataError

Rows = NDArray[np.int64]
Split = Sequence[Rows] | Mapping[str, Rows]  # by place, or by the names of the clients
RETRIES = 10_000  # a try draws proportions only, so that thousands take a second or two


@dataclass(frozen=True)
class Partition(ABC):
    """A rule by which one set is split over clients; its fields are the keys of a recipe's table.

    Subclass it, write fields whose hints say their ranges, and `split`:

        @dataclass(frozen=True)
        class FirstComeFirstServed(Partition):
            clients: Count

            def split(self, labels: Rows, seed: int) -> list[Rows]:
                return np.array_split(np.arange(len(labels)), self.clients)
    """

    by_domain: ClassVar[bool] = False  # `split` reads the domain of each example, not its label

    def __post_init__(self) -> None:
        faults = ranges.faults(self)
        if faults:
            raise DataError(f"{type(self).__name__}: {'; '.join(faults)}")

    @abstractmethod
    def split(self, labels: Rows, seed: int) -> Split:
        """The rows of every client, sorted; by client name where the rule knows the names.

        Nothing is loaded, and no generator is used but those made from the seed.
        """


def generator(seed: int) -> np.random.Generator:
    """What a split draws from; seeds of all machines give the same numbers."""
    return np.random.Generator(np.random.PCG64(seed))


def in_order(parts: Sequence[Rows]) -> list[Rows]:
    """Every client's rows, sorted."""
    return [np.sort(part).astype(np.int64, copy=False) for part in parts]


def check_clients(clients: int, examples: int, min_size: int = 1) -> None:
    """Raise where there are too few examples for so many clients."""
    needed = clients * min_size
    if needed > examples:
        each = "one example" if min_size == 1 else f"{min_size} examples"
        raise DataError(
            f"{clients} clients with at least {each} each need {needed} examples, "
            f"but there are {examples}; lower clients{'' if min_size == 1 else ' or min_size'}"
        )


def check_classes_held(labels: Rows, parts: Sequence[Rows], remedy: str) -> None:
    """Raise where a class of the set is with nobody."""
    held = np.unique(labels[np.concatenate(parts)])
    missing = np.setdiff1d(labels, held)
    if len(missing):
        noun = "class" if len(missing) == 1 else "classes"
        raise DataError(
            f"no client holds {noun} {', '.join(map(str, missing))}; "
            f"{remedy}, or set allow_missing_classes"
        )


def checked_rows(where: str, rows: object, examples: int) -> Rows:
    """The rows of one client as int64, if they are whole numbers of examples that exist."""
    try:
        found = np.asarray(rows)
    except ValueError as fault:
        raise DataError(f"{where} must have a list of rows, but it is ragged") from fault
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise DataError(
            f"{where} must have a list of whole numbers, the rows of its training examples, "
            f"but has {str(rows)[:60]}"
        )
    if not len(found):
        raise DataError(f"{where} has no rows; give it some, or leave the client out")
    if found.min() < 0 or found.max() >= examples:
        raise DataError(
            f"{where}: rows must lie in 0..{examples - 1} (the set's training examples), "
            f"but reach from {found.min()} to {found.max()}"
        )
    return found.astype(np.int64, copy=False)


def check_disjoint(where: str, parts: Mapping[str, Rows]) -> None:
    """Raise where a row stands twice, with one client or with two."""
    if not parts:
        raise DataError(f"{where} names no client; at least one is needed")
    rows = np.concatenate(list(parts.values()))
    found, counts = np.unique(rows, return_counts=True)
    if len(found) < len(rows):
        row = int(found[counts > 1][0])
        holders = [name for name, mine in parts.items() if (mine == row).any()]
        raise DataError(
            f"{where}: a training example belongs to one client and once, but row {row} "
            f"stands {counts.max()} times, with {', '.join(holders)}"
        )
