"""Label skew by hand: every client with a few classes only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstill.core.errors import DataError
from fedstill.core.ranges import Count
from fedstill.data.partitions.partition import (
    Partition,
    Rows,
    check_classes_held,
    check_clients,
    generator,
    in_order,
)


@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """Each client holds exactly `classes` classes; a class is divided evenly over its holders.

    Classes are given out so that their numbers of holders differ by one at most. With fewer than
    C / classes clients some classes go to nobody, which must be allowed.
    """

    clients: Count
    classes: Count
    allow_missing_classes: bool = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels))
        present = np.unique(labels)
        if self.classes > len(present):
            raise DataError(
                f"classes must lie in 1..{len(present)} (those present), but is {self.classes}"
            )
        rng = generator(seed)
        holds = np.zeros((self.clients, len(present)), bool)
        for client in range(self.clients):
            # Fewest holders first, ties by lot.
            order = np.lexsort((rng.random(len(present)), holds.sum(0)))
            holds[client, order[: self.classes]] = True
        shares: list[list[Rows]] = [[] for _ in range(self.clients)]
        for column, label in enumerate(present):
            holders = np.flatnonzero(holds[:, column])
            rows = rng.permutation(np.flatnonzero(labels == label))
            if len(rows) < len(holders):
                raise DataError(
                    f"class {label} has {len(rows)} examples for {len(holders)} clients; "
                    "lower clients or classes"
                )
            pieces = np.array_split(rows, max(len(holders), 1))
            for holder, piece in zip(holders, pieces, strict=False):
                shares[holder].append(piece)
        result = in_order([np.concatenate(share) for share in shares])
        if not self.allow_missing_classes:
            check_classes_held(labels, result, "raise clients or classes")
        return result
