"""FCCL: clients align their logits on public data and preserve what they know.

Huang, Ye, Du. Learn from Others and Be Yourself in Heterogeneous Federated Learning. CVPR 2022.
Algorithm 1; collaborative and local updating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Never

from torch import Tensor

from fedstill.core import (
    Adam,
    Batch,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Place,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
    trees,
)
from fedstill.core.content import Axes
from fedstill.core.optim import Scheduled
from fedstill.core.ranges import Count, NonNegative, Positive, Whole
from fedstill.parts.class_balance import ClassWeights, Sampling, unfit_weights, weights_of
from fedstill.parts.learning import Training, training
from fedstill.parts.losses import cross_correlation, divergence, task_loss
from fedstill.parts.opinions import mean_opinion, opinions
from fedstill.parts.robust import Aggregation, Rule


class Own(State):
    """What a client remembers."""

    weights: Weights
    intra: Weights  # the network after the training before the first round


class Opinion(Message):
    """What a client says of the public data."""

    logits: Annotated[Tensor, Axes("public", "class")]


class Consensus(Message):
    """The mean of what was said."""

    logits: Annotated[Tensor, Axes("public", "class")]


@dataclass(frozen=True)
class FCCL(Method):
    """Cross-correlation with the mean logits on public data; then local epochs with two teachers.

    One epoch a round is what comparisons with other methods here use; the paper has twenty.
    """

    scored: ClassVar[Place] = Place.CLIENTS
    needs_public: ClassVar[bool] = True
    presets: ClassVar = {
        "paper": {"epochs": 20},
        "small": {
            "lr": 0.01, "batch_size": 12, "pretrain_epochs": 2, "public_batch": 10,
            "public_lr": 1e-4,  # more moves weights that do not matter by their rounding errors
        },
    }  # fmt: skip

    lr: Positive = 1e-3  # Adam's, of all training on the own examples
    epochs: Count = 1
    batch_size: Count = 32
    class_weights: ClassWeights = "none"  # weights in the local loss: balanced, or one per class
    sampling: Sampling = "shuffled"  # own examples: each once an epoch, or class-balanced
    weight_decay: NonNegative = 1e-5
    inter_weight: NonNegative = 1.0  # weight of distillation from the last round's network
    intra_weight: NonNegative = 1.0  # weight of distillation from the pretrained network
    pretrain_epochs: Whole = 50  # epochs on own examples before the first round
    public_lr: Positive = 1e-3  # learning rate on public images
    public_batch: Count = 256  # public images in a step
    public_epochs: Whole = 1  # passes over the public images per round; 0: none
    off_diagonal: NonNegative = 0.0051  # λ, weight of correlations between different classes
    aggregation: Rule = "mean"  # rule for logits, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return unfit_weights(self.class_weights, server)

    def before(self) -> Sequence[Step]:
        return [self.pretrain]

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.agree, self.learn]

    def client_state(self, client: Node[Any]) -> Own:
        weights = client.model.init(client.draw("weights", shared=True))
        return Own(weights, weights)

    @at_clients
    async def pretrain(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Train on the own examples; the result is the start and the intra-domain teacher."""
        start = client.state.weights
        batches, mechanism = self.training(client, start, self.pretrain_epochs)
        optimizer = Scheduled(Adam(self.lr), len(batches))
        weights = await minimize(
            self.task, client.model, start, batches, optimizer, mechanism=mechanism,
            **self.weighing(client),
        )  # fmt: skip
        client.state = Own(weights, weights)

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Opinion | None:
        """Send the own logits on the public data; who has no examples knows nothing of its own."""
        if not len(client.data):
            return None
        return Opinion(opinions(client.model, client.state.weights, client.public))

    @at_server
    def agree(self, server: Node[None], inbox: Inbox[Opinion]) -> Consensus:
        """Send the mean of the logits to everybody."""
        said = [opinion.logits for opinion in inbox.values()]
        return Consensus(mean_opinion(said, Aggregation(self.aggregation, self.byzantine)))

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Consensus]) -> None:
        """Correlate with the consensus on public data, then train on the own examples."""
        inter, intra = client.state.weights, client.state.intra
        weights = inter
        if inbox and self.public_epochs:
            weights = await self.aligned(client, inter, inbox.only().logits)
        batches, mechanism = self.training(client, weights, self.epochs)
        optimizer = Adam(self.lr, weight_decay=self.weight_decay)
        weights = await minimize(
            self.objective, client.model, weights, batches, optimizer, mechanism=mechanism,
            inter=inter, intra=intra, **self.weighing(client),
        )  # fmt: skip
        client.state = Own(weights, intra)

    def training(self, client: Node[Own], start: Weights, epochs: int) -> Training:
        """Batches of the own examples, private samples where these are private."""
        return training(
            client, client.model, start, self.batch_size, epochs=epochs, sampling=self.sampling
        )

    def weighing(self, client: Node[Own]) -> dict[str, Any]:
        """What local losses are given besides: the weights of classes, where there are any."""
        found = weights_of(self.class_weights, client.data, client.model.classes)
        return trees.to(found, client.device)

    async def aligned(self, client: Node[Own], start: Weights, consensus: Tensor) -> Weights:
        """Weights after the passes over the public data."""
        batches = client.public.batches(
            self.public_batch, client.rng("public order"), epochs=self.public_epochs
        )
        # Some weights only shift all logits alike, which the loss does not feel: with the usual eps
        # of 1e-8 Adam would make whole steps of their rounding errors.
        optimizer = Adam(self.public_lr, eps=1e-5)
        return await minimize(
            self.collaboration, client.model, start, batches, optimizer, consensus=consensus
        )

    def collaboration(
        self, model: Model, weights: Weights, batch: Batch, consensus: Tensor
    ) -> Tensor:
        """Cross-correlation with the consensus on a public batch; the head's bias rests."""
        bias = model.head_names[1]
        resting = weights if bias is None else {**weights, bias: weights[bias].detach()}
        logits, teacher = model(resting, batch.x), consensus[batch.y]
        return cross_correlation(logits, teacher, off_diagonal=self.off_diagonal)

    def objective(
        self, model: Model, weights: Weights, batch: Batch, inter: Weights, intra: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy, and what the two teachers say of the own examples."""
        logits, still = model(weights, batch.x), model.evaluating
        loss = task_loss(logits, batch.y, class_weights)
        for weight, teacher in ((self.inter_weight, inter), (self.intra_weight, intra)):
            if weight:
                loss = loss + weight * divergence(logits, still(teacher, batch.x))
        return loss

    def task(
        self, model: Model, weights: Weights, batch: Batch, class_weights: Tensor | None = None
    ) -> Tensor:
        """The loss before the first round."""
        return task_loss(model(weights, batch.x), batch.y, class_weights)
