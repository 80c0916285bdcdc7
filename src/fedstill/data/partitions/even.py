"""Splits that mix the labels evenly: clients of one size, and clients of very different size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstill.core.errors import DataError
from fedstill.core.ranges import Count, Positive
from fedstill.data.partitions.partition import (
    RETRIES,
    Partition,
    Rows,
    check_clients,
    generator,
    in_order,
)


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled and divided evenly; sizes differ by one at most."""

    clients: Count

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels))
        return in_order(np.array_split(generator(seed).permutation(len(labels)), self.clients))


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Clients' sizes follow a Dirichlet draw; labels are mixed evenly."""

    clients: Count
    beta: Positive
    min_size: Count = 10
    retries: Count = RETRIES

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels), self.min_size)
        rng = generator(seed)
        for _ in range(self.retries):
            shares = np.cumsum(rng.dirichlet(np.full(self.clients, self.beta)))[:-1]
            cuts = np.minimum(np.floor(shares * len(labels)), len(labels)).astype(np.int64)
            if np.diff(cuts, prepend=0, append=len(labels)).min() >= self.min_size:
                return in_order(np.split(rng.permutation(len(labels)), cuts))
        raise DataError(
            f"no Dirichlet draw in {self.retries} tries gave every one of {self.clients} clients "
            f"{self.min_size} examples out of {len(labels)} at beta {self.beta:g}; "
            "raise beta, lower clients or min_size, or allow more retries"
        )
