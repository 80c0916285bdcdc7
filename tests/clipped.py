"""A mechanism for tests: gradients clipped example by example, noise that lies in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Lazy, Node, Weights, minimize, seeds, trees
from fedstill.core.loop import moved_part
from fedstill.core.mechanism import Gradient, LossOn, per_example
from fedstill.methods.fedavg import FedAvg


class Noised(NamedTuple):
    """Examples, and the noise that is added to the mean of their gradients."""

    examples: Any
    noise: Any


@dataclass(frozen=True)
class Clipped:
    """No example's gradient is longer than `clip`."""

    clip: float

    def gradient(
        self, loss_on: LossOn, value: Any, batch: Noised, gradient: Gradient
    ) -> tuple[Any, Tensor, Any]:
        each, losses = per_example(loss_on, value, batch.examples)
        squares = sum(g.reshape(len(g), -1).square().sum(1) for g in trees.tensors(each))
        keep = (self.clip / torch.as_tensor(squares).clamp(min=1e-24).sqrt()).clamp(max=1)

        def mean(gradients: Tensor, noise: Tensor) -> Tensor:
            return torch.tensordot(keep, gradients, dims=1) / len(keep) + noise

        return trees.map_tensors(mean, each, batch.noise), losses.mean(), {}


def noised(batches: Sequence[Any], value: Any, spread: float, seed: int) -> Lazy[Noised]:
    """Batches with normal noise of a deviation in the shape of what is optimised."""

    def make(step: int) -> Noised:
        rng = seeds.generator(seed, step)

        def drawn(tensor: Tensor) -> Tensor:
            return (spread * torch.randn(tensor.shape, generator=rng)).to(tensor)

        return Noised(batches[step], trees.map_tensors(drawn, moved_part(value)))

    return Lazy(len(batches), make)


@dataclass(frozen=True)
class ClippedFedAvg(FedAvg):
    """FedAvg whose clients clip their gradients; each has noise of a size of its own."""

    clip: float = 0.5
    spread: float = 0.01

    async def trained(self, client: Node[Any], start: Weights) -> tuple[Weights, int]:
        spread = self.spread * (1 + len(client.data))
        batches = noised(self.batches(client), start, spread, client.draw("noise"))
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer,
            mechanism=Clipped(self.clip), start=start,
        )  # fmt: skip
        return weights, len(batches)
