"""A node's own examples as the batches of a loop: in random orders, or as private samples.

Private samples are DP-SGD's: at each step every example takes part with one chance, its gradient
is clipped, and noise is added (`core.release.ClippedGradient`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Batch, Batches, Data, Lazy, Node, Weights, trees
from fedstill.core.data import Plan
from fedstill.core.errors import BadValue
from fedstill.core.loop import moved_part
from fedstill.core.model import Network
from fedstill.core.release import ClippedGradient, Sampled, Use
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
            return Sampled(examples, batch.share, batch.noise, beside)

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
    numbers = sum(tensor.numel() for tensor in moved_part(start).values())
    device = "cuda" if node.device.type == "cuda" else "cpu"
    chunk = max(1, min(MOST_AT_A_TIME[device], NUMBERS[device] // max(1, numbers)))
    mechanism = ClippedGradient(clip, chunk)
    if not count or not steps:
        return Training(Lazy(0, lambda _: ()), mechanism)
    rate = min(1.0, size / count)
    data = node.spend(Use(SGD_USE, steps, rate))
    expected = rate * count
    sampling, noising = node.secret("samples"), node.secret(SGD_USE)
    usual = _rounded(expected + 4 * math.sqrt(expected))
    deviation = terms.sigma * clip / expected

    def rows(step: int) -> Tensor:
        return torch.nonzero(sampling.uniform(len(data), step) < rate).flatten()

    def places(picked: Tensor) -> int:
        return max(usual, _rounded(len(picked)))

    def made(first: int, drawn: list[Tensor]) -> Sampled:
        """The samples of some steps, along a first axis; all have as many places."""
        count, wide = len(drawn), places(drawn[0])
        batch = _taken(data, drawn, wide, node.model.shape)
        device = batch.x.device
        sizes = torch.tensor([[len(picked)] for picked in drawn]).to(device)
        share = (torch.arange(wide, device=device) < sizes).float() / expected
        noise = _noise(start, noising, range(first, first + count), deviation)
        return Sampled(batch, share, noise)

    def one(step: int) -> Sampled:
        sample: Sampled = trees.map_tensors(lambda tensor: tensor[0], made(step, [rows(step)]))
        if views == "none":
            return sample
        batch, rng = sample.examples, sampling.generator(step)
        torch.rand(len(data), generator=rng)  # which examples take part was drawn before
        height, width = node.model.shape[1:]
        moves = drawn_moves(rng, len(batch.y), height, width, shift)
        moves = type(moves)(*(each.to(batch.x.device) for each in moves))
        ground = ground_of(views, data, _padded([rows(step)], len(batch.y))[0])
        seen = moved(batch.x, moves, views, ground(slice(None), batch.y.shape))
        return sample._replace(examples=Batch(seen, batch.y))

    def some(first: int, count: int) -> Sampled | None:
        drawn = [rows(step) for step in range(first, first + count)]
        alike = len({places(picked) for picked in drawn}) == 1
        return made(first, drawn) if alike else None

    return Training(Lazy(steps, one, some if views == "none" else None), mechanism)


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


def _noise(like: Weights, secret: Secret, steps: range, deviation: float) -> Weights:
    """Normal numbers in the shape of what is trained, of each step, drawn where it lies."""
    moving = moved_part(like)
    device = next(iter(moving.values())).device
    sizes = [tensor.numel() for tensor in moving.values()]
    flat = torch.empty(len(steps), sum(sizes), device=device)
    for row, step in zip(flat, steps, strict=True):
        secret.normal(row, step)
    parts = torch.split_with_sizes(flat.mul_(deviation), sizes, dim=1)
    return {
        name: part.reshape(len(steps), *tensor.shape)
        for (name, tensor), part in zip(moving.items(), parts, strict=True)
    }


def _rounded(number: float) -> int:
    return max(1, math.ceil(number / ROUNDED)) * ROUNDED
