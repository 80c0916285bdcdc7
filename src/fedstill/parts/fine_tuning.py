"""A server's model trained on images that clients sent, anywhere or within a ball."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Batch, Data, Model, Node, Schedule, Weights, minimize, scheduled
from fedstill.core.optim import Optimizer
from fedstill.parts import balls
from fedstill.parts.synthetic_batches import Labelled, training_batches


class Weighted(NamedTuple):
    """Images to learn from."""

    images: Batch
    weight: Tensor  # [image], one in the mean


class Ball(NamedTuple):
    """Where the images are meant to hold, and how far weights may go: anywhere, if None."""

    centre: Weights
    reach: float | None


@dataclass(frozen=True)
class FineTuning:
    """Training on augmented images, counted in epochs, or in steps where there are any."""

    optimizer: Optimizer
    fall: Schedule
    epochs: int
    steps: int
    batch_size: int
    augmentation: str
    weighted: bool  # losses by the weights of images, or all alike

    async def tuned(
        self, node: Node[Any], start: Weights, some: Weighted, ball: Ball,
        part: tuple[int, int] = (0, 1),
    ) -> Weights:  # fmt: skip
        """The weights after training, or after one part of so many; each has its own draws."""
        data, (place, parts) = Data.of(*some.images), part
        per_epoch = -(-len(data) // self.batch_size)
        steps = max(1, self.steps // parts)
        if not self.steps:
            steps = max(1, self.epochs // parts) * per_epoch
        batches = training_batches(
            node, data, some.weight, self.batch_size, -(-steps // per_epoch),
            self.augmentation, place,
        )  # fmt: skip
        batches = replace(batches, steps=steps)
        optimizer = scheduled(self.optimizer, steps, self.fall)
        if ball.reach is None:
            return await minimize(self.objective, node.model, start, batches, optimizer)
        return await minimize(
            self.objective, node.model, start, batches, optimizer, project=self.projected,
            centre=ball.centre, reach=torch.tensor(ball.reach, device=node.device),
        )  # fmt: skip

    def objective(
        self, model: Model, weights: Weights, batch: Labelled, centre: Weights | None = None,
        reach: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy on augmented synthetic images."""
        logits = model(weights, batch.augmented())
        if not self.weighted:
            return cross_entropy(logits, batch.y)
        return (batch.weight * cross_entropy(logits, batch.y, reduction="none")).mean()

    def projected(self, weights: Weights, centre: Weights, reach: Tensor) -> Weights:
        """As in FedDM, the server stays where the sets are meant to hold."""
        return balls.projected(weights, centre, reach)
