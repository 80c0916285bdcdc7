"""Centralised: the server trains on all clients' examples; the baseline with pooled data.

No federated method: it shows what pooling the data would give, and says that it shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Never

import torch
from torch import Tensor

from fedstill.core import (
    SGD,
    Batch,
    Data,
    Exact,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Pool,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
    trees,
)
from fedstill.core.content import LARGEST_INPUT, Axes, Labels, presence
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive
from fedstill.parts.class_balance import ClassWeights, Sampling, unfit_weights, weights_of
from fedstill.parts.losses import task_loss


class Examples(Message):
    """A client's training examples, as they are stored, and how to normalise them."""

    stored: Annotated[Tensor, Axes("image", "input", entries="stored", high=LARGEST_INPUT)]
    labels: Labels
    mean: Exact | None  # that stretch to the shape of an input
    std: Exact | None


class Global(State):
    """What the server remembers."""

    weights: Weights
    pools: tuple[Examples, ...]


@dataclass(frozen=True)
class Centralised(Method):
    """Epochs each round on the union of all training examples."""

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

    @property
    def sends_examples(self) -> bool:
        return True

    def before(self) -> Sequence[Step]:
        return [self.hand_over, self.collect]

    def each_round(self) -> Sequence[Step]:
        return [self.learn]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(server.model.init(server.draw("weights", shared=True)), ())

    @at_clients
    def hand_over(self, client: Node[None], inbox: Inbox[Never]) -> Examples | None:
        """Send all training examples."""
        if not len(client.data):
            return None
        pools = [part.pool for part in client.data.parts]
        if len(pools) == 1:
            (pool,), rows = pools, client.data.parts[0].rows
            return Examples(pool.stored[rows], pool.labels[rows], pool.mean, pool.std)
        everything = client.data.all()
        return Examples(everything.x, everything.y, None, None)

    @at_server
    def collect(self, server: Node[Global], inbox: Inbox[Examples]) -> None:
        """Keep every client's examples."""
        server.state = server.state.replace(pools=tuple(inbox.values()))

    @at_server
    async def learn(self, server: Node[Global], inbox: Inbox[Never]) -> None:
        """Train on the examples of all clients together."""
        union = Data()
        for sent in server.state.pools:
            union += Pool(sent.stored, sent.labels, sent.mean, sent.std).all()
        draw = union.balanced_batches if self.sampling == "balanced" else union.batches
        batches = draw(self.batch_size, server.rng("order"), epochs=self.epochs)
        weighing = weights_of(self.class_weights, union, server.model.classes)
        optimizer = SGD(self.lr, self.momentum, self.weight_decay)
        weights = await minimize(
            self.objective, server.model, server.state.weights, batches, optimizer,
            **trees.to(weighing, server.device),
        )  # fmt: skip
        server.state = server.state.replace(weights=weights)

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Examples):
            return why
        together = presence(message, Examples, mean=message.std is not None)
        if together or message.mean is None or message.std is None:
            return together
        for name, tensor in (("mean", message.mean), ("std", message.std)):
            if tensor.dtype != torch.float32 or not stretches(tensor, node.model.shape):
                shape = f"{list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
                return f"sent {name} of {shape}, which does not fit {list(node.model.shape)}"
        fine = bool((message.std > 0).all())
        return None if fine else "sent std with values that are not above 0"

    def objective(
        self, model: Model, weights: Weights, batch: Batch, class_weights: Tensor | None = None
    ) -> Tensor:
        """The loss on the union."""
        return task_loss(model(weights, batch.x), batch.y, class_weights)


def stretches(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor can stand for one of a shape, axes of one entry repeated."""
    given = tuple(tensor.shape)
    aligned = zip(given[::-1], tuple(shape)[::-1], strict=False)
    return len(given) <= len(shape) and all(one in (1, other) for one, other in aligned)
