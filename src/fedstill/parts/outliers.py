"""Outliers: sets of images whose classes do not look like the others' are left out.

A union of sets has no middle that could be taken in place of a mean. But a set stands for the means
that a network sees in its classes, and of those Multi-Krum keeps all but the ones that lie far from
the others'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fedstill.core import Batch, Data, Model, Weights
from fedstill.parts.class_tables import exact_averages
from fedstill.parts.robust import Aggregation

N = TypeVar("N")


@torch.no_grad()
def believed(
    sets: Mapping[N, Batch], model: Model, weights: Weights, how: Aggregation
) -> dict[N, Tensor]:
    """[image], for each set which of its images are kept: class by class all of it or nothing.

    Compared are the mean features and logits of the images of a class under some weights.
    """

    def look(x: Tensor) -> Tensor:
        return torch.cat(model.evaluating.both(weights, x), 1)

    means: dict[int, dict[N, Tensor]] = {}
    for name, (x, y) in sets.items():
        rows, classes, _ = exact_averages(look, Data.of(x, y), model.classes)
        for row, c in zip(rows, classes.tolist(), strict=True):
            means.setdefault(c, {})[name] = row
    kept: dict[N, list[int]] = {name: [] for name in sets}
    for c, held in means.items():
        names = list(held)
        for place in how.kept(list(held.values())):
            kept[names[place]].append(c)
    return {
        name: torch.isin(y, torch.tensor(kept[name], dtype=y.dtype, device=y.device))
        for name, (_, y) in sets.items()
    }
