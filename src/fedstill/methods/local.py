"""Local: every client trains alone; the baseline without federation.

The same training as FedAvg's local part, without any message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Never

from torch import Tensor

from fedstill.core import (
    SGD,
    Batch,
    Inbox,
    Method,
    Model,
    Node,
    NodeId,
    Place,
    State,
    Step,
    Weights,
    at_clients,
    minimize,
    trees,
)
from fedstill.core.model import Network
from fedstill.core.optim import Optimizer
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive
from fedstill.parts.class_balance import ClassWeights, Sampling, unfit_weights, weights_of
from fedstill.parts.learning import Training, training
from fedstill.parts.losses import task_loss


class Own(State):
    """What a client remembers."""

    weights: Weights


@dataclass(frozen=True)
class Local(Method):
    """Local epochs each round from the client's own weights; nothing travels."""

    scored: ClassVar[Place] = Place.CLIENTS
    presets: ClassVar = {"small": {"lr": 0.1, "batch_size": 12}}

    lr: Positive = 0.01
    epochs: Count = 1
    batch_size: Count = 32
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    class_weights: ClassWeights = "none"  # weights in the loss: balanced, or one per class
    sampling: Sampling = "shuffled"  # examples: each once an epoch, or class-balanced

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return unfit_weights(self.class_weights, server)

    def each_round(self) -> Sequence[Step]:
        return [self.learn]

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)))

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Train on the own examples."""
        start = client.state.weights
        batches, mechanism = self.training(client, client.model, start)
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer, mechanism=mechanism,
            **self.weighing(client),
        )  # fmt: skip
        client.state = Own(weights)

    def training(self, client: Node[Any], model: Network, start: Weights) -> Training:
        """The batches of a client's round, private samples where its examples are private."""
        return training(
            client, model, start, self.batch_size, epochs=self.epochs, sampling=self.sampling
        )

    def weighing(self, client: Node[Any]) -> dict[str, Any]:
        """What the loss is given besides: the weights of classes, where there are any."""
        found = weights_of(self.class_weights, client.data, client.model.classes)
        return trees.to(found, client.device)

    def objective(
        self, model: Model, weights: Weights, batch: Batch, class_weights: Tensor | None = None
    ) -> Tensor:
        """The local loss."""
        return task_loss(model(weights, batch.x), batch.y, class_weights)

    @property
    def optimizer(self) -> Optimizer:
        return SGD(self.lr, self.momentum, self.weight_decay)
