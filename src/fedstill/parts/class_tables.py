"""A vector for every class: its mean over examples, and over those who hold the class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import Data, Positional, Record
from fedstill.parts.synthetic_sets import mean_over_holders

CHUNK = 1024


class ClassMeans(NamedTuple):
    """The mean vector of each class that somebody holds, sorted by class."""

    rows: Tensor  # [held class, entry]
    classes: Tensor  # [held class]
    counts: Tensor  # [held class], examples behind a row


class ClassTable(Record):
    """A row for every class; those that nobody has ever held have no value."""

    rows: Tensor  # [class, entry]
    known: Positional  # [class], whether the row has a value

    @classmethod
    def empty(cls, classes: int, width: int, device: torch.device | str) -> Self:
        """No class has a value yet."""
        known = torch.zeros(classes, dtype=torch.bool, device=device)
        return cls(torch.zeros(classes, width, device=device), known)

    def renewed(
        self,
        rows: Sequence[Tensor],
        classes: Sequence[Tensor],
        counts: Sequence[Tensor] | None = None,
    ) -> Self:
        """Means over the holders of a class, plain or by counts; a class not sent stays."""
        sent = torch.zeros_like(self.known).index_fill(0, torch.cat(list(classes)), True)
        means = mean_over_holders(rows, classes, self.rows, counts)
        return self.replace(rows=means, known=self.known | sent)


@torch.no_grad()
def class_averages(look: Callable[[Tensor], Tensor], data: Data, classes: int) -> ClassMeans:
    """The mean of `look` over the examples of each class, in one pass."""
    total = torch.zeros((), device=data.device)
    for x, y in data.chunks(CHUNK):
        seen = look(x)  # [example, entry]
        total = total + F.one_hot(y, classes).to(seen).T @ seen
    counts = data.counts(classes).to(data.device)
    held = counts.nonzero().flatten()
    return ClassMeans(total[held] / counts[held].unsqueeze(1), held, counts[held])
