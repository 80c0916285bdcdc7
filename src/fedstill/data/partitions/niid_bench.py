"""NIID-Bench: the very draws of that public generator, by NumPy's older random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstill.core.errors import DataError
from fedstill.core.ranges import Count, Positive, Whole
from fedstill.data.partitions.partition import (
    RETRIES,
    Partition,
    Rows,
    check_clients,
    in_order,
)


@dataclass(frozen=True)
class NIIDBench(Partition):
    """Dirichlet's law, drawn as NIID-Bench draws it after `numpy.random.seed(seed + offset)`.

    With the labels in their official order a client holds the examples that it holds there; so a
    paper's own split can be had where its seed is known.
    """

    clients: Count
    alpha: Positive
    min_size: Count = 10
    offset: Whole = 0  # added to the seed
    retries: Count = RETRIES
    shuffle_each_try: bool = False  # draw an order of rows even of a try that fails, as DFRD does

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels), self.min_size)
        rng = np.random.RandomState(seed + self.offset)
        for _ in range(self.retries):
            held = self._drawn(labels, rng)
            if min(map(len, held)) >= self.min_size:
                return in_order(held)
            if self.shuffle_each_try:  # no row moves to another client, but the next draws change
                for rows in held:
                    rng.shuffle(rows)
        raise DataError(
            f"no draw of NIID-Bench in {self.retries} tries gave every one of {self.clients} "
            f"clients {self.min_size} examples out of {len(labels)} at alpha {self.alpha:g}; "
            "raise alpha, lower clients or min_size, or allow more retries"
        )

    def _drawn(self, labels: Rows, rng: np.random.RandomState) -> list[Rows]:
        """One try: class by class a shuffle, then a Dirichlet draw over clients not yet full."""
        held: list[Rows] = [np.zeros(0, np.int64) for _ in range(self.clients)]
        even_share = len(labels) / self.clients
        for label in range(int(labels.max()) + 1):
            rows = np.flatnonzero(labels == label)
            rng.shuffle(rows)
            draw = rng.dirichlet(np.repeat(self.alpha, self.clients))
            room = draw * np.array([len(rows) < even_share for rows in held])
            # Where the whole draw lies with clients that are full, NIID-Bench divides by zero.
            shares = room / room.sum() if room.sum() > 0 else draw
            cuts = (np.cumsum(shares) * len(rows)).astype(int)[:-1]
            pieces = np.split(rows, cuts)
            held = [np.concatenate(both) for both in zip(held, pieces, strict=True)]
        return held
