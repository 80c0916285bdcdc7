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

from fedstill.core import Batch, Batches, Data, Lazy, Model, Node, Weights, seeds
from fedstill.core.errors import BadValue
from fedstill.core.loop import moved_part
from fedstill.core.release import ClippedGradient, Sampled, Use
from fedstill.parts.views import Views, drawn_moves, moved, viewed

SGD_USE = "DP-SGD"
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
    model: Model,
    start: Weights,
    size: int,
    *,
    epochs: int = 1,
    steps: int | None = None,
    views: Views = "none",
) -> Training:
    """Batches of so many of the node's examples, for some epochs or steps."""
    if not node.private:
        plan = node.records.batches(size, node.rng("order"), epochs=epochs, steps=steps)
        return Training(viewed(plan, views, node), None)
    return private_training(node, model, start, size, epochs=epochs, steps=steps, views=views)


def private_training(
    node: Node[Any],
    model: Model,
    start: Weights,
    size: int,
    *,
    epochs: int = 1,
    steps: int | None = None,
    views: Views = "none",
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

    def make(step: int) -> Sampled:
        rng = seeds.generator(sampling, step)
        picked = torch.nonzero(torch.rand(len(data), generator=rng) < rate).flatten()
        places = max(usual, _rounded(len(picked)))
        batch = _taken(data, picked, places, model.shape)
        if views != "none":
            moves = drawn_moves(rng, places, *model.shape[1:])
            moves = type(moves)(*(each.to(batch.x.device) for each in moves))
            batch = Batch(moved(batch.x, moves, views), batch.y)
        there = torch.arange(places, device=batch.x.device) < len(picked)
        share = there.float() / expected
        return Sampled(batch, share, _noise(start, noising, step, deviation))

    return Training(Lazy(steps, make), mechanism)


def _taken(data: Data, picked: Tensor, places: int, shape: tuple[int, ...]) -> Batch:
    """The examples that were picked, and any in the places that are left."""
    if not len(data):
        return Batch(torch.zeros(places, *shape), torch.zeros(places, dtype=torch.long))
    rows = torch.zeros(places, dtype=torch.long)
    rows[: len(picked)] = picked
    return data.take(rows.to(data.device))


def _noise(like: Weights, seed: int, step: int, deviation: float) -> Weights:
    """Normal numbers in the shape of what is trained, drawn where it lies: there are many."""
    moving = moved_part(like)
    device = next(iter(moving.values())).device
    rng = seeds.generator(seed, step, device=device)
    sizes = [tensor.numel() for tensor in moving.values()]
    flat = deviation * torch.randn(sum(sizes), generator=rng, device=device)
    parts = zip(moving.items(), torch.split_with_sizes(flat, sizes), strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in parts}


def _rounded(number: float) -> int:
    return max(1, math.ceil(number / ROUNDED)) * ROUNDED
