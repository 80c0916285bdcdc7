"""Examples of several plans fetched at once; no order of their own.

A plan's batches are gathered when a step asks for them, a few launches for each. Many short loops
that run beside each other spend more time on that than on their steps. So the examples of all their
plans are gathered beforehand, one plan's behind the other's, and batches are slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fedstill.core.data import Batch, Batches, Plan, Pool, in_pools


@dataclass(frozen=True, eq=False)
class Fetched(Batches[Batch]):
    """The batches of one of several plans."""

    everything: Batch  # of all plans
    begins: Sequence[int]  # of each step there, and where the last one ends
    sizes: Sequence[int]  # of each step

    def __len__(self) -> int:
        return len(self.sizes)

    def at(self, step: int) -> Batch:
        x, y = self.everything
        here = slice(self.begins[step], self.begins[step + 1])
        return Batch(x[here], y[here])

    def ahead(self, step: int, count: int) -> Batch | None:
        sizes = self.sizes[step : step + count]
        if len(set(sizes)) != 1:
            return None
        x, y = self.everything
        here = slice(self.begins[step], self.begins[step + len(sizes)])
        shape = (len(sizes), sizes[0])
        return Batch(x[here].view(*shape, *x.shape[1:]), y[here].view(shape))


def fetched(plans: Sequence[Sequence[Any]], most: int) -> list[Sequence[Any]]:
    """The same batches, fetched at once where several plans read one pool and bytes suffice."""
    found = list(plans)
    readers: dict[int, list[int]] = {}
    for place, plan in enumerate(plans):
        if isinstance(plan, Plan) and len(plan.data.parts) == 1:
            readers.setdefault(id(plan.data.parts[0].pool), []).append(place)
    for places in readers.values():
        known = [plan for place in places if isinstance(plan := plans[place], Plan)]
        pool = known[0].data.parts[0].pool
        needed = bytes_each(pool) * sum(len(plan.order) for plan in known)
        if len(known) < 2 or needed > most:
            continue
        most -= needed
        rows = in_pools([plan.data.parts[0] for plan in known], [plan.order for plan in known])
        everything, first = pool.take(rows), 0
        for place, plan in zip(places, known, strict=True):
            begins = list(accumulate(plan.sizes, initial=first))
            found[place], first = Fetched(everything, begins, plan.sizes), begins[-1]
    return found


def bytes_each(pool: Pool) -> int:
    """Of an example as a batch holds it, with its label; stored bytes become four each."""
    wide = max(4, pool.stored.element_size())
    return wide * math.prod(pool.stored.shape[1:]) + pool.labels.element_size()
