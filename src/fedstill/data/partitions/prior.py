"""Label skew as FedDyn has it: every client has class shares of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedstill.core.ranges import Count, Positive
from fedstill.data.partitions.partition import (
    Partition,
    Rows,
    check_classes_held,
    check_clients,
    generator,
    in_order,
)


@dataclass(frozen=True)
class DirichletPrior(Partition):
    """Each client draws class shares from a Dirichlet and samples by them (FedDyn).

    All clients get floor(n / clients) examples, without replacement and in random turns; the
    remainder of that division goes to nobody. Where a client's classes are used up it takes
    from what is left.
    """

    clients: Count
    alpha: Positive
    allow_missing_classes: bool = False

    def split(self, labels: Rows, seed: int) -> list[Rows]:
        """The rows of every client."""
        check_clients(self.clients, len(labels))
        rng = generator(seed)
        counts = np.bincount(labels)
        priors = rng.dirichlet(np.full(len(counts), self.alpha), size=self.clients)
        quota = len(labels) // self.clients
        turns = rng.permutation(np.repeat(np.arange(self.clients), quota))
        drawn = _classes_by_turn(turns, priors, counts, rng)
        result = _dealt_by_turn(labels, turns, drawn, self.clients, rng)
        if not self.allow_missing_classes:
            check_classes_held(labels, result, "raise alpha or lower clients")
        return result


def _classes_by_turn(
    turns: Rows, priors: NDArray[np.float64], counts: Rows, rng: np.random.Generator
) -> Rows:
    """The class taken at each turn, by the prior [client, class] of the client whose turn it is."""
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
    return in_order([taken[turns == client] for client in range(clients)])
