"""A node's own examples as the batches of a loop: in random orders, or as private samples.

Private samples are DP-SGD's: at each step every example takes part with one chance, its gradient
is clipped, and noise is added (`core.release.ClippedGradient`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Batch, Batches, Data, Lazy, Node, Weights, trees
from fedstill.core.data import Plan
from fedstill.core.errors import BadValue
from fedstill.core.loop import moved_part
from fedstill.core.model import Network
from fedstill.core.release import BITS, ClippedGradient, Sampled, Use, grid_of
from fedstill.core.secret import Secret
from fedstill.parts.class_balance import UNSAFE, Sampling
from fedstill.parts.views import Views, drawn_moves, ground_of, moved, viewed

SGD_USE = "DP-SGD"
TRAINING = "training"  # a part of a step that may come several times, see `Node.anew`
NUMBERS = {"cpu": 2**24, "cuda": 2**27}  # of the gradients that are made at a time
MOST_AT_A_TIME = {"cpu": 32, "cuda": 512}  # a processor is faster on what its caches hold
ROUNDED = 16  # places of a sample are a multiple of this, so that neighbours are alike


class Training(NamedTuple):
    """What a loop over a node's own examples is given."""

    batches: Batches[Any]
    mechanism: ClippedGradient | None

    def beside(
        self,
        make: Callable[[Any, int], Any],
        joined: Callable[[Any, Any], Any],
    ) -> Training:
        """The same with what each step sees besides: `make(examples, step)`.

        It gives a pair of the examples, with whatever belongs to each of them, and of the rest,
        which holds no example; `joined` makes the batch of the objective from both.
        """
        plain, mechanism = self.batches, self.mechanism
        if mechanism is None:
            return Training(Lazy(len(plain), lambda step: joined(*make(plain[step], step))), None)

        def sampled(step: int) -> Sampled:
            batch = plain[step]
            examples, beside = make(batch.examples, step)
            return Sampled(examples, batch.share, batch.noise, batch.grid, beside)

        private = ClippedGradient(mechanism.clip, mechanism.chunk, joined)
        return Training(Lazy(len(plain), sampled), private)


def training(
    node: Node[Any],
    model: Network,
    start: Weights,
    size: int,
    *,
    epochs: int = 1,
    steps: int | None = None,
    views: Views = "none",
    shift: int | None = None,
    sampling: Sampling = "shuffled",
) -> Training:
    """Batches of so many of the node's examples, for some epochs or steps.

    Asked for again in a step, for a second network or another loop, they are others.
    """
    if not node.private:
        node = node.anew(TRAINING)
        plan = planned(node, size, sampling, epochs=epochs, steps=steps)
        return Training(viewed(plan, views, node, shift=shift), None)
    if sampling == "balanced":
        raise BadValue(UNSAFE)
    return private_training(
        node, model, start, size, epochs=epochs, steps=steps, views=views, shift=shift
    )


def planned(
    node: Node[Any], size: int, sampling: Sampling, *, epochs: int = 1, steps: int | None = None
) -> Plan:
    """Which of a node's examples are in the batches of some epochs or steps."""
    draw = node.records.balanced_batches if sampling == "balanced" else node.records.batches
    return draw(size, node.rng("order"), epochs=epochs, steps=steps)


def private_training(
    node: Node[Any],
    model: Network,
    start: Weights,
    size: int,
    *,
    epochs: int = 1,
    steps: int | None = None,
    views: Views = "none",
    shift: int | None = None,
) -> Training:
    """Poisson samples of `size` examples on average, as many as there would be batches."""
    terms = node.privacy
    assert terms is not None
    if model.couples:
        raise BadValue(
            f"{model.title} normalises by the whole batch, so records that are trained together "
            "mix before they are clipped; use the norm instance, group or layer"
        )
    count = len(node.data)
    if steps is None:
        steps = epochs * math.ceil(count / size)
    clip = terms.gradient_clip
    mechanism = ClippedGradient(clip, _at_a_time(start, node.device))
    if not count or not steps:
        return Training(Lazy(0, lambda _: ()), mechanism)
    rate = min(1.0, size / count)
    data = node.spend(Use(SGD_USE, steps, rate))
    expected = rate * count
    samples = _Samples(
        data, node.model.shape, start, rate, expected, clip / expected, terms.sigma,
        node.secret("samples"), node.secret(SGD_USE), views, shift,
    )  # fmt: skip
    many = samples.some if views == "none" else None
    return Training(Lazy(steps, samples.one, many), mechanism)


def _at_a_time(start: Weights, device: torch.device) -> int:
    """Of how many examples gradients are made together."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    return max(1, min(MOST_AT_A_TIME[kind], NUMBERS[kind] // max(1, _numbers(start))))


def _numbers(start: Weights) -> int:
    """How many numbers are trained."""
    return sum(tensor.numel() for tensor in moved_part(start).values())


@dataclass(frozen=True, eq=False)
class _Samples:
    """Poisson samples of records, and the noise of each step."""

    data: Data
    shape: tuple[int, ...]  # of an example
    start: Weights
    rate: float  # with which each record takes part
    expected: float  # how many do
    moves: float  # by how much a record moves a gradient at most
    sigma: float  # of the noise, in these units
    sampling: Secret
    noising: Secret
    views: Views
    shift: int | None

    @cached_property
    def grid(self) -> float:
        """Of which gradients are whole multiples."""
        return grid_of(self.sigma * self.moves, self.moves)

    @cached_property
    def share(self) -> float:
        """Of an example: one over their expected number, less what rounding to the grid adds.

        Rounding moves each number of either gradient by half a step. Under noise so strong that
        this alone is all that a record may move, examples have no share.
        """
        rounded = self.grid * math.sqrt(_numbers(self.start))
        return max(0.0, 1 - rounded / self.moves) / self.expected

    def one(self, step: int) -> Sampled:
        """The sample of a step."""
        sample: Sampled = trees.map_tensors(
            lambda tensor: tensor[0], self._made(step, [self._rows(step)])
        )
        return sample if self.views == "none" else self._viewed(sample, step)

    def some(self, first: int, count: int) -> Sampled | None:
        """The samples of some steps, along a first axis, where all have as many places."""
        drawn = [self._rows(step) for step in range(first, first + count)]
        alike = len({self._places(picked) for picked in drawn}) == 1
        return self._made(first, drawn) if alike else None

    def _rows(self, step: int) -> Tensor:
        return torch.nonzero(self.sampling.uniform(len(self.data), step) < self.rate).flatten()

    def _places(self, picked: Tensor) -> int:
        usual = _rounded(self.expected + 4 * math.sqrt(self.expected))
        return max(usual, _rounded(len(picked)))

    def _made(self, first: int, drawn: list[Tensor]) -> Sampled:
        """The samples of some steps, along a first axis; all have as many places."""
        count, wide = len(drawn), self._places(drawn[0])
        batch = _taken(self.data, drawn, wide, self.shape)
        device = batch.x.device
        sizes = torch.tensor([[len(picked)] for picked in drawn]).to(device)
        share = (torch.arange(wide, device=device) < sizes).float() * self.share
        noise = _noise(self.start, self.noising, range(first, first + count))
        if not self.sigma:
            noise = trees.map_tensors(torch.zeros_like, noise)
        grid = torch.full((count,), self.grid, dtype=torch.float64, device=device)
        return Sampled(batch, share, noise, grid)

    def _viewed(self, sample: Sampled, step: int) -> Sampled:
        """The same examples, shifted and flipped."""
        batch, rng = sample.examples, self.sampling.generator(step)
        torch.rand(len(self.data), generator=rng)  # which examples take part was drawn before
        height, width = self.shape[1:]
        moves = drawn_moves(rng, len(batch.y), height, width, self.shift)
        moves = type(moves)(*(each.to(batch.x.device) for each in moves))
        ground = ground_of(self.views, self.data, _padded([self._rows(step)], len(batch.y))[0])
        seen = moved(batch.x, moves, self.views, ground(slice(None), batch.y.shape))
        return sample._replace(examples=Batch(seen, batch.y))


def _taken(data: Data, drawn: list[Tensor], places: int, shape: tuple[int, ...]) -> Batch:
    """[step, place], the examples that were picked, and any in the places that are left."""
    rows = _padded(drawn, places)
    if not len(data):
        return Batch(torch.zeros(*rows.shape, *shape), rows)
    return data.take(rows.to(data.device))


def _padded(drawn: list[Tensor], places: int) -> Tensor:
    """[step, place], the rows that were picked; the first one in the places that are left."""
    rows = torch.zeros(len(drawn), places, dtype=torch.long)
    for row, picked in zip(rows, drawn, strict=True):
        row[: len(picked)] = picked
    return rows


def _noise(like: Weights, secret: Secret, steps: range) -> Weights:
    """Noise in the shape of what is trained, of each step, in whole steps of the grid."""
    moving = moved_part(like)
    device = next(iter(moving.values())).device
    sizes = [tensor.numel() for tensor in moving.values()]
    flat = torch.empty(len(steps), sum(sizes), dtype=torch.int32, device=device)
    for row, step in zip(flat, steps, strict=True):
        row.copy_(secret.whole(torch.empty(len(row), device=device), BITS, step))
    parts = torch.split_with_sizes(flat, sizes, dim=1)
    return {
        name: part.reshape(len(steps), *tensor.shape)
        for (name, tensor), part in zip(moving.items(), parts, strict=True)
    }


def _rounded(number: float) -> int:
    return max(1, math.ceil(number / ROUNDED)) * ROUNDED
