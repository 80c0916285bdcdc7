"""Label skew as NIID-Bench has it: every class is divided by a Dirichlet draw."""

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
class Dirichlet(Partition):
    """Each class is divided over the clients by a Dirichlet draw (NIID-Bench, Li et al. 2022).

    Clients that already hold their even share get nothing of the next classes. Everything is
    drawn again until every client has `min_size` examples. The smaller `alpha`, the more unequal.
    """

    clients: Count
    alpha: Positive
    min_size: Count = 10
    retries: Count = RETRIES

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels), self.min_size)
        rng = generator(seed)
        counts = np.bincount(labels)
        for _ in range(self.retries):
            cuts = dirichlet_cuts(counts, self.clients, self.alpha, rng)
            if np.diff(cuts, axis=1).sum(0).min() >= self.min_size:
                return in_order(_dealt(labels, cuts, rng))
        raise DataError(
            f"no Dirichlet draw in {self.retries} tries gave every one of {self.clients} clients "
            f"{self.min_size} examples out of {len(labels)} at alpha {self.alpha:g}; "
            "raise alpha, lower clients or min_size, or allow more retries"
        )


def dirichlet_cuts(counts: Rows, clients: int, alpha: float, rng: np.random.Generator) -> Rows:
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


def _dealt(labels: Rows, cuts: Rows, rng: np.random.Generator) -> list[Rows]:
    """Every client's piece of every class.

    Sizes do not depend on who gets which example: shuffling once, after the tries, is the same.
    """
    shares: list[list[Rows]] = [[] for _ in range(cuts.shape[1] - 1)]
    for label, class_cuts in enumerate(cuts):
        rows = rng.permutation(np.flatnonzero(labels == label))
        for client, share in enumerate(shares):
            share.append(rows[class_cuts[client] : class_cuts[client + 1]])
    return [np.concatenate(share) for share in shares]
