"""FedProto: clients share the mean features of each class and stay near the global ones.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

import torch
from torch import Tensor

from fedstill.core import (
    Batch,
    Exact,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    Positional,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.content import MOST, Axes, Length, presence
from fedstill.core.ranges import Count, Fraction, NonNegative, Whole
from fedstill.methods import local
from fedstill.methods.local import Local
from fedstill.parts import heads
from fedstill.parts.class_tables import ClassTable, Features, class_averages
from fedstill.parts.losses import class_square_error, task_loss
from fedstill.parts.robust import Aggregation, Rule


class Global(State):
    """What the server remembers."""

    prototypes: ClassTable


class Own(local.Own):
    """What a client remembers."""

    prototypes: ClassTable | None  # everybody's; only for inference by them


class Down(Message):
    """Everybody's prototypes; zeros for a class that nobody has held so far."""

    prototypes: ClassTable  # [class, feature]


class Up(Message):
    """The mean features of the classes a client holds, sorted by class."""

    prototypes: Annotated[Tensor, Axes("held", "entry")]
    classes: Annotated[Positional, Axes("held", below="class", rising=True)]
    counts: Annotated[Exact, Axes("held", entries="whole", low=1, high=MOST)] | None  # if asked


@dataclass(frozen=True)
class FedProto(Local):
    """Local epochs with a pull of the features towards the class's prototype; clients' models.

    Networks may differ. Where their features differ in width, a linear layer before the head, or
    a mean of neighbouring features, brings them to `feature_width`; the paper has networks with
    equal features only.
    """

    presets: ClassVar = {
        "reference": {"batch_size": 4},
        "htfllib": {"joining": "pooled", "inference": "prototype", "momentum": 0.0},
        "small": {"lr": 0.1, "batch_size": 12},
    }

    momentum: Fraction = 0.5
    pull: NonNegative = 1.0  # λ, weight of the distance to the global prototypes
    weighting: Literal["uniform", "examples"] = "uniform"
    # predict with the head, or by the nearest prototype
    inference: Literal["head", "prototype"] = "head"
    feature_width: Count = 512  # common width of features, if clients' widths differ
    joining: heads.Joining = "linear"  # to that width: by a linear layer, or by average pooling
    aggregation: Rule = "mean"  # rule for prototypes, class by class, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates

    def each_round(self) -> Sequence[Step]:
        steps = [self.broadcast, self.learn, self.aggregate]
        return steps if self.inference == "head" else [*steps, self.broadcast, self.keep]

    def server_state(self, server: Node[Any]) -> Global:
        width = heads.common_width(server.models.values(), self.feature_width)
        return Global(ClassTable.empty(server.model.classes, width, server.device))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(self.network(client).init(client.draw("weights", shared=True)), None)

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send everybody's prototypes."""
        return Down(server.state.prototypes)

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Down]) -> Up | None:
        """Train on the own examples, then take the means of their features."""
        if not len(client.data):
            return None
        model, table = self.network(client), inbox.only().prototypes
        batches, mechanism = self.training(client, model, client.state.weights)
        weights = await minimize(
            self.pulled, model, client.state.weights, batches, self.optimizer,
            mechanism=mechanism, table=table, **self.weighing(client),
        )  # fmt: skip
        client.state = client.state.replace(weights=weights)
        # The public code takes means while the weights still move; the paper's are of the end.
        means = await class_averages(client, Features(model), weights, table)
        return Up(means.rows, means.classes, means.counts if self.weighting == "examples" else None)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean of each class over the clients that hold it."""
        ups = list(inbox.values())
        # The paper also divides by the number of holders, after shares that already sum to one.
        counts = [up.counts for up in ups if up.counts is not None]
        table = server.state.prototypes.renewed(
            [up.prototypes for up in ups], [up.classes for up in ups], counts or None,
            Aggregation(self.aggregation, self.byzantine),
        )  # fmt: skip
        server.state = Global(table)

    @at_clients
    def keep(self, client: Node[Own], inbox: Inbox[Down]) -> None:
        """Remember everybody's prototypes, to classify by them."""
        client.state = client.state.replace(prototypes=inbox.only().prototypes)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        width = heads.common_width(node.models.values(), self.feature_width)
        return {**super().axes(node, sender), "entry": width}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        wanted = presence(message, Up, counts=self.weighting == "examples")
        return super().wrong(node, sender, message) or wanted

    def pulled(
        self, model: Model, weights: Weights, batch: Batch, table: ClassTable,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The local loss and λ times the mean squared distance to the prototypes."""
        features, logits = model.both(weights, batch.x)
        apart = class_square_error(features, batch.y, table.rows, table.known)
        return task_loss(logits, batch.y, class_weights) + self.pull * apart

    def network(self, node: Node[Any]) -> Model:
        """The node's own network, with features as wide as everybody's."""
        width = heads.common_width(node.models.values(), self.feature_width)
        return heads.with_features(node.model, width, self.joining)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        """The head's logits, or minus the distances to the prototypes once they are known."""
        model, weights, table = self.network(node), node.state.weights, node.state.prototypes
        return model(weights, x) if table is None else nearness(model.features(weights, x), table)


def nearness(features: Tensor, table: ClassTable) -> Tensor:
    """[example, class], minus the distances; a class without a prototype lies beyond all others."""
    distances = torch.cdist(
        features, table.rows, compute_mode="donot_use_mm_for_euclid_dist"
    ).masked_fill(~table.known, 0)
    beyond = distances.amax(1, keepdim=True) + 1
    return -torch.where(table.known, distances, beyond)
