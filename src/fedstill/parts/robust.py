"""Robust aggregation: what many say joined into one, so that a few liars among them move little.

Each rule works on trees of tensors of one kind: weights, logits, rows of a table. All but the mean
count every party alike, since whoever may lie about weights may lie about counts as well.

Median and trimmed mean, entry by entry: Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust
Distributed Learning. ICML 2018. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer. Machine
Learning with Adversaries. NeurIPS 2017. Geometric median: Pillutla, Kakade, Harchaoui. Robust
Aggregation for Federated Learning. IEEE TSP 2022. Bounded norms: Sun, Kairouz, Suresh, McMahan. Can
You Really Backdoor Federated Learning? 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedstill.core import algebra, trees
from fedstill.core.records import is_buffer

T = TypeVar("T")

Rule = Literal["mean", "median", "trimmed_mean", "multi_krum", "geometric_median", "norm_bound"]
STEPS = 100  # of the search for a geometric median; it is over a handful of numbers
NEAR = 1e-6  # of the median distance: who is nearer to the geometric median counts as this far


@dataclass(frozen=True)
class Aggregation:
    """A rule, with how many liars it is to stand and how far anybody may move.

    `byzantine` is of `trimmed_mean` and `multi_krum`: so many are cut off at either end of each
    entry, or left out as a whole. Of n parties the first stands at most (n - 1) / 2, the second
    (n - 3) / 2; where fewer are heard, so many are taken. `bound` is of `norm_bound`: the longest
    change of anybody; none takes the median of the lengths.
    """

    rule: Rule = "mean"
    byzantine: int = 1
    bound: float | None = None

    def joined(
        self, items: Sequence[T], shares: Sequence[float] | None = None, start: T | None = None
    ) -> T:
        """One of many; `shares` are those of the mean, `start` is where all came from, or zero.

        In a robust rule statistics of norm layers are the medians of their entries: they are in no
        norm and no distance, so nothing else would hold them. Whole numbers are medians too.
        """
        if self.rule == "mean":
            return algebra.mean(items, shares)
        if self.rule == "median":
            return trimmed(items, len(items))
        if self.rule == "trimmed_mean":
            return trimmed(items, self.byzantine)
        moved = self._joined(items, algebra.zeros(items[0]) if start is None else start)
        middle = trimmed(items, len(items))
        names = [name for name, _ in trees.named_tensors(moved)]
        chosen = [
            still if is_buffer(name) or not still.is_floating_point() else move
            for name, move, still in zip(
                names, trees.tensors(moved), trees.tensors(middle), strict=True
            )
        ]
        return trees.with_tensors(moved, chosen)

    def faults(self) -> list[str]:
        """What does not go together; a line each."""
        if self.bound is None or self.rule == "norm_bound":
            return []
        return [f'bound = {self.bound!r}: is of aggregation = "norm_bound"; leave it out']

    def _joined(self, items: Sequence[T], start: T) -> T:
        if self.rule == "multi_krum":
            return algebra.mean([items[i] for i in self.kept(items)])
        if self.rule == "geometric_median":
            return algebra.mean(items, geometric_shares(inner_products(items)))
        lengths = inner_products(items, start).diagonal().clamp(min=0).sqrt()
        bound = float(lengths.median()) if self.bound is None else self.bound
        factors = (bound / lengths.clamp(min=1e-30)).clamp(max=1.0).tolist()
        pairs = zip(items, factors, strict=True)
        return algebra.mean([algebra.add(start, algebra.sub(w, start), f) for w, f in pairs])

    def kept(self, items: Sequence[T]) -> list[int]:
        """The places of those whom Multi-Krum keeps, in order."""
        return krum(squared_distances(inner_products(items)), self.byzantine)


MEAN = Aggregation()


def trimmed(items: Sequence[T], cut: int) -> T:
    """Entry by entry the mean of what is left when so many are cut off at either end.

    One or two are always left: with a cut of (n - 1) / 2 or more it is the median. Of whole numbers
    it is the lower median.
    """
    count = len(items)
    ends = min(cut, (count - 1) // 2)

    def middle(*rows: Tensor) -> Tensor:
        ranked = torch.stack(rows).sort(0).values
        if not ranked.is_floating_point():
            return ranked[(count - 1) // 2]
        return ranked[ends : count - ends].mean(0)

    return trees.map_tensors(middle, items[0], *items[1:])


def inner_products(items: Sequence[T], start: T | None = None) -> Tensor:
    """[item, item], of the ways from `start`, or from the medians of entries; no statistics.

    Tensor by tensor and in double precision: no item is laid out as a whole. From the medians,
    which a few far away do not move, products of the others lose no digits.
    """
    found = torch.zeros(len(items), len(items), dtype=torch.float64)
    starts = None if start is None else trees.tensors(start)
    names = [name for name, _ in trees.named_tensors(items[0])]
    for place, (name, rows) in enumerate(zip(names, trees.columns(items), strict=True)):
        if is_buffer(name) or not rows[0].is_floating_point():
            continue
        flat = torch.stack([row.detach().flatten() for row in rows]).double()
        flat = flat - (flat.median(0).values if starts is None else starts[place].flatten())
        found += (flat @ flat.T).cpu()
    return found


def squared_distances(products: Tensor) -> Tensor:
    """[item, item], from inner products."""
    own = products.diagonal()
    return (own.unsqueeze(0) + own.unsqueeze(1) - 2 * products).clamp(min=0)


def krum(distances: Tensor, byzantine: int) -> list[int]:
    """The n - f items whose n - f - 2 nearest others are nearest; f at most (n - 3) / 2."""
    count = len(distances)
    liars = min(byzantine, max(0, (count - 3) // 2))
    others = distances.clone().fill_diagonal_(torch.inf).sort(1).values
    scores = others[:, : max(1, count - liars - 2)].sum(1)
    return sorted(torch.argsort(scores, stable=True)[: count - liars].tolist())


def geometric_shares(products: Tensor) -> list[float]:
    """Shares whose mean of all items has the least sum of distances to them (Weiszfeld's steps).

    Every step is a mean of the items, so their inner products are all that is needed.
    """
    count = len(products)
    shares = torch.full((count,), 1 / count, dtype=torch.float64)
    distances = squared_distances(products).sqrt()
    least = float(NEAR * distances.median()) or float(NEAR * distances.max())
    if not least > 0:
        return shares.tolist()
    for _ in range(STEPS):
        across = products @ shares
        squares = products.diagonal() - 2 * across + shares @ across
        nearness = 1 / squares.clamp(min=0).sqrt().clamp(min=least)
        shares = nearness / nearness.sum()
    return shares.tolist()


def joined_rows(
    rows: Sequence[Tensor], classes: Sequence[Tensor], nobody: Tensor, how: Aggregation
) -> Tensor:
    """[class, ...], for each class its holders' rows joined; `nobody`'s where there are none."""
    held: dict[int, list[Tensor]] = {}
    for sent, which in zip(rows, classes, strict=True):
        for row, c in zip(sent, which.tolist(), strict=True):
            held.setdefault(c, []).append(row)
    return torch.stack([how.joined(held[c]) if c in held else row for c, row in enumerate(nobody)])
