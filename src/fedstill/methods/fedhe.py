"""FedHe: clients share the mean logits of each class and learn from the global ones.

Chan, Ngai. FedHe: Heterogeneous Models and Communication-Efficient Federated Learning. MSN 2021.
In rounds: the original lets one client finish at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

from torch import Tensor

from fedstill.core import (
    Adam,
    Batch,
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
from fedstill.core.content import Axes, Length
from fedstill.core.optim import Optimizer
from fedstill.core.ranges import NonNegative, Whole
from fedstill.methods.local import Local, Own
from fedstill.parts.class_tables import ClassTable, Logits, class_averages
from fedstill.parts.losses import class_square_error, task_loss
from fedstill.parts.robust import Aggregation, Rule


class Global(State):
    """What the server remembers."""

    logits: ClassTable


class Down(Message):
    """Everybody's mean logits; zeros for a class that nobody has held so far."""

    logits: ClassTable  # [class, class]


class Up(Message):
    """The mean logits of the classes a client holds, sorted by class."""

    logits: Annotated[Tensor, Axes("held", "class")]
    classes: Annotated[Positional, Axes("held", below="class", rising=True)]


@dataclass(frozen=True)
class FedHe(Local):
    """Local epochs with logits pulled towards everybody's mean of the class; clients' models.

    Networks may differ in everything but the number of classes.
    """

    presets: ClassVar = {
        "paper": {"rule": "adam", "lr": 1e-3, "batch_size": 50},
        "small": {"lr": 0.1, "batch_size": 12},
    }

    alpha: NonNegative = 0.5  # weight of the distance to the mean logits of a class
    rule: Literal["sgd", "adam"] = "sgd"  # the optimiser of local training
    aggregation: Rule = "mean"  # rule for the logits of each class, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates

    def faults(self) -> Sequence[str]:
        if self.momentum and self.rule == "adam":
            return ['momentum must be 0 with rule = "adam", which has its own']
        return ()

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.learn, self.aggregate]

    def server_state(self, server: Node[Any]) -> Global:
        classes = server.model.classes
        return Global(ClassTable.empty(classes, classes, server.device))

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send everybody's mean logits."""
        return Down(server.state.logits)

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Down]) -> Up | None:
        """Train on the own examples, then take the means of their logits."""
        if not len(client.data):
            return None
        model, table = client.model, inbox.only().logits
        batches, mechanism = self.training(client, model, client.state.weights)
        weights = await minimize(
            self.distilled, model, client.state.weights, batches, self.optimizer,
            mechanism=mechanism, table=table, **self.weighing(client),
        )  # fmt: skip
        client.state = Own(weights)
        # The public code collects logits while the weights still move; as for prototypes, ours are
        # of the weights that are kept.
        means = await class_averages(client, Logits(model), weights, table)
        return Up(means.rows, means.classes)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean of each class over the clients that hold it."""
        ups = list(inbox.values())
        how = Aggregation(self.aggregation, self.byzantine)
        table = server.state.logits.renewed(
            [up.logits for up in ups], [up.classes for up in ups], how=how
        )
        server.log(known_classes=table.known.sum())
        server.state = Global(table)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        return {**super().axes(node, sender), "entry": node.model.classes}

    def distilled(
        self, model: Model, weights: Weights, batch: Batch, table: ClassTable,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The local loss, and once every class has a value α times the mean squared distance."""
        logits = model(weights, batch.x)
        begun = table.known.all().expand(len(table.known))
        apart = class_square_error(logits, batch.y, table.rows, begun)
        return task_loss(logits, batch.y, class_weights) + self.alpha * apart

    @property
    def optimizer(self) -> Optimizer:
        if self.rule == "adam":
            return Adam(self.lr, weight_decay=self.weight_decay)
        return super().optimizer
