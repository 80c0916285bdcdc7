"""A vector for every class: its mean over examples, and over those who hold the class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import Batch, Data, Lazy, Loop, Model, Node, Positional, Record, Weights
from fedstill.core.content import Axes
from fedstill.core.errors import BadValue
from fedstill.core.mechanism import Gradient
from fedstill.core.release import BITS, SUMS, Use, class_sums, grid_of, noised
from fedstill.parts.robust import MEAN, Aggregation, joined_rows
from fedstill.parts.synthetic_sets import mean_over_holders

CHUNK = 1024


class ClassMeans(NamedTuple):
    """The mean vector of each class that somebody holds, sorted by class."""

    rows: Tensor  # [held class, entry]
    classes: Tensor  # [held class]
    counts: Tensor  # [held class], examples behind a row


class ClassTable(Record):
    """A row for every class; those that nobody has ever held have no value."""

    rows: Annotated[Tensor, Axes("class", "entry")]
    known: Annotated[Positional, Axes("class", entries="bool")]  # whether the row has a value

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
        how: Aggregation = MEAN,
    ) -> Self:
        """Means over the holders of a class, plain or by counts; a class not sent stays.

        In place of the mean may stand a robust rule, which counts holders alike.
        """
        sent = torch.zeros_like(self.known).index_fill(0, torch.cat(list(classes)), True)
        if how.rule == "mean":
            means = mean_over_holders(rows, classes, self.rows, counts)
        else:
            means = joined_rows(rows, classes, self.rows, how)
        return self.replace(rows=means, known=self.known | sent)


@dataclass(frozen=True)
class Features:
    """What a network's head sees of examples."""

    model: Model

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.model.features(weights, x)


@dataclass(frozen=True)
class Logits:
    """What a network says of examples."""

    model: Model

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.model(weights, x)


class Look(Protocol):
    """What is averaged of examples: features, logits, or anything else [example, entry].

    A frozen dataclass, so that equal ones are stacked.
    """

    @property
    def model(self) -> Model: ...

    def __call__(self, weights: Weights, x: Tensor) -> Tensor: ...


async def class_averages(
    node: Node[Any], look: Look, weights: Weights, known: ClassTable
) -> ClassMeans:
    """The mean of what is seen of a node's examples, for each class that it holds; none is fine.

    Where they are private, sums of clipped differences from the known table, with noise.
    """
    terms, classes = node.privacy, len(known.rows)
    if terms is None or not node.private:
        if not len(node.records):
            none = torch.zeros(0, dtype=torch.long, device=node.device)
            return ClassMeans(known.rows[:0], none, none)
        return exact_averages(lambda x: look(weights, x), node.records, classes)
    model = look.model
    if model.couples if model.training else not model.by_example:
        raise BadValue(f"{model.title} answers by the whole batch; use another norm")
    data, secret = node.spend(Use(SUMS)), node.secret(SUMS)
    carry = torch.zeros(known.rows.shape, dtype=torch.float64, device=node.device)
    body = Summing(look, terms.clip)
    index = torch.split(torch.arange(len(data), device=data.device), CHUNK)
    steps = len(index) if len(data) else 0
    batches = Lazy(steps, lambda step: data.take(index[step]))
    grid = carry.new_tensor(grid_of(terms.sigma * terms.clip, terms.clip))
    given = {"weights": weights, "centre": known.rows, "grid": grid}
    total = await Loop(body, carry, given, batches)
    noise = secret.whole(torch.empty(total.shape, dtype=torch.float64), BITS).to(total)
    counts = node.data.counts(classes).to(node.device)
    held = counts.nonzero().flatten()
    noise *= float(terms.sigma > 0)
    released = noised(total, noise, grid)[held] / counts[held].unsqueeze(1)
    return ClassMeans(known.rows[held] + released.to(known.rows), held, counts[held])


@dataclass(frozen=True)
class Summing:
    """The body of a loop that adds up clipped differences from a table. It tells no loss."""

    look: Look
    clip: float
    silent: ClassVar[bool] = True

    def __call__(
        self, carry: Tensor, given: Mapping[str, Any], batch: Batch, gradient: Gradient
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            rows = self.look(given["weights"], batch.x) - given["centre"][batch.y]
            places = carry.shape[0]
            total = carry + class_sums(rows, batch.y, places, self.clip, given["grid"])
        return total, total.new_zeros(())


@torch.no_grad()
def exact_averages(look: Callable[[Tensor], Tensor], data: Data, classes: int) -> ClassMeans:
    """The mean of `look` over the examples of each class, in one pass."""
    total = torch.zeros((), device=data.device)
    for x, y in data.chunks(CHUNK):
        seen = look(x)  # [example, entry]
        total = total + F.one_hot(y, classes).to(seen).T @ seen
    counts = data.counts(classes).to(data.device)
    held = counts.nonzero().flatten()
    return ClassMeans(total[held] / counts[held].unsqueeze(1), held, counts[held])
