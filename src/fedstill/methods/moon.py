"""MOON: FedAvg with a contrast: features near the global network's, not the last local one's.

Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021. Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core import Batch, Inbox, Model, Node, NodeId, State, Weights, at_clients, minimize
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Whole
from fedstill.methods.fedavg import Down, FedAvg, Global, Up
from fedstill.parts import heads
from fedstill.parts.losses import model_contrast, task_loss


class Own(State):
    """What a client remembers: where its last training ended; at first, where all begin."""

    previous: Weights


@dataclass(frozen=True)
class Moon(FedAvg):
    """A projection head on every network; mu times the contrast of its outputs joins the loss."""

    keeps_own: ClassVar[bool] = False
    presets: ClassVar = {
        "cifar10": {"mu": 5.0, "epochs": 10, "batch_size": 64},
        "small": {"lr": 0.1, "batch_size": 12, "hidden": 8},
    }

    momentum: Fraction = 0.9
    weight_decay: NonNegative = 1e-5
    mu: NonNegative = 1.0  # weight of the contrastive term
    temperature: Positive = 0.5
    projection: Count = 256  # width of the projection, the classifier's input
    hidden: Whole = 0  # width of the projection's hidden layer; none: that of the features

    def server_state(self, server: Node[Any]) -> Global:
        return Global(self.network(server).init(server.draw("weights", shared=True)))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(self.network(client).init(client.draw("weights", shared=True)))

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train from the global weights, near them and away from the last own ones."""
        start = inbox.only().weights
        model = self.network(client)
        batches, mechanism = self.training(client, model, start)
        weights = await minimize(
            self.contrasted, model, start, batches, self.optimizer_in(client.round),
            mechanism=mechanism, start=start, previous=client.state.previous,
            **self.weighing(client),
        )  # fmt: skip
        client.state = Own(weights)
        return Up(weights, len(client.data))

    def contrasted(
        self, model: Model, weights: Weights, batch: Batch, start: Weights, previous: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The local loss and mu times the contrast of projected features."""
        own, logits = model.both(weights, batch.x)
        with torch.no_grad():
            near = model.evaluating.features(start, batch.x)
            far = model.evaluating.features(previous, batch.x)
        contrast = model_contrast(own, near, far, temperature=self.temperature)
        return task_loss(logits, batch.y, class_weights) + self.mu * contrast

    def network(self, node: Node[Any]) -> Model:
        """The node's network with the projection between features and classifier."""
        hidden = self.hidden or node.model.feature_width
        return heads.projected(node.model, hidden, self.projection)

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return self.network(node)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return self.network(node)(node.state.weights, x)
