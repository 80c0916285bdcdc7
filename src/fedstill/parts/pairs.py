"""Two networks trained in one loop, as those that teach each other are; no loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

from torch import Generator, Tensor

from fedstill.core.model import Initials, Model, Network
from fedstill.core.records import Weights

T = TypeVar("T")

FIRST, SECOND = "first.", "second."  # before the names of either's weights


class Both(NamedTuple):
    """What two networks say of a batch."""

    first: Tensor  # [example, class], logits
    second: Tensor


@dataclass(frozen=True)
class Pair(Network):
    """Two networks as one: its weights are those of both, and it answers with both's logits.

        model = Pair(client.model, client.server_model)
        start = model.joined(mentor, student)
        mentor, student = model.apart(await minimize(self.mutual, model, start, batches, SGD(0.1)))

    The objective gets the pair: `mentor, student = model(weights, batch.x)`. Statistics of norm
    layers are noted and dropout is drawn for either as if it were trained alone.
    """

    first: Model
    second: Model

    def initial(self) -> Initials:
        return _joined(self.first.initial(), self.second.initial())

    def init(self, seed: int) -> Weights:
        return self.joined(self.first.init(seed), self.second.init(seed))

    def samples(self, rng: Generator, count: int) -> list[Weights]:
        drawn = (self.first.samples(rng, count), self.second.samples(rng, count))
        return [self.joined(*each) for each in zip(*drawn, strict=True)]

    def joined(self, first: Weights, second: Weights) -> Weights:
        """The weights of both as those of the pair."""
        return _joined(first, second)

    def apart(self, weights: Weights) -> tuple[Weights, Weights]:
        """The weights of either."""
        return _part(weights, FIRST), _part(weights, SECOND)

    def __call__(self, weights: Weights, x: Tensor) -> Both:
        noted: list[Weights] = [{}, {}]
        said = [
            replace(model, training=self.training, notes=None if self.notes is None else notes)(
                own, x
            )
            for model, own, notes in zip(
                (self.first, self.second), self.apart(weights), noted, strict=True
            )
        ]
        if self.notes is not None:
            self.notes.update(_joined(*noted))
        return Both(*said)

    @property
    def by_example(self) -> bool:
        return self.first.by_example and self.second.by_example

    @property
    def twice(self) -> bool:
        return self.first.twice and self.second.twice

    @property
    def draws(self) -> bool:
        return self.first.draws or self.second.draws

    def drawing(self, seed: Tensor) -> Self:
        other = seed ^ 1  # so that networks of one kind do not drop the same units
        return replace(self, first=self.first.drawing(seed), second=self.second.drawing(other))

    @property
    def title(self) -> str:
        return f"{self.first.title} and {self.second.title}"


def _joined(first: dict[str, T], second: dict[str, T]) -> dict[str, T]:
    return {
        **{FIRST + name: value for name, value in first.items()},
        **{SECOND + name: value for name, value in second.items()},
    }


def _part(weights: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
