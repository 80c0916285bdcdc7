"""FedGen: the server trains a feature generator on clients' heads; clients learn from it.

Zhu, Hong, Zhou. Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021.
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    Adam,
    Batch,
    Exact,
    Inbox,
    Lazy,
    Message,
    Model,
    Node,
    NodeId,
    Weights,
    at_clients,
    at_server,
    content,
    minimize,
)
from fedstill.core.content import MOST, Axes, Layout
from fedstill.core.ranges import Count, NonNegative, Positive, Range, Share, Whole
from fedstill.methods import fedavg
from fedstill.methods.fedavg import FedAvg
from fedstill.parts.generators import FeatureGenerator
from fedstill.parts.guidance import (
    FeatureLatent,
    Guided,
    drawn,
    heads_loss,
    heads_of,
    joined,
    teacher_shares,
)
from fedstill.parts.heads import projected
from fedstill.parts.label_distribution import miscounted
from fedstill.parts.learning import Training
from fedstill.parts.losses import divergence, diversity, task_loss


class Global(fedavg.Global):
    """What the server remembers."""

    generator: Weights


class Down(fedavg.Down):
    """The common start and the generator."""

    generator: Weights


class Up(fedavg.Up):
    """Where a client came to, and how many examples of each class it has."""

    counts: Annotated[Exact, Axes("class", entries="whole", high=MOST)]


@dataclass(frozen=True)
class FedGen(FedAvg):
    """Local loss from round 2 on: CE(real) + α_t · CE(generated) + β_t · KL(generated, real).

    Features are what the head of the network sees, or with a `bottleneck` the output of one more
    linear layer of that width. α_t, β_t and the generator's rate decay by a factor each round.
    """

    keeps_own: ClassVar[bool] = False
    presets: ClassVar = {
        "cifar": {"hidden": 512, "noise_size": 64},
        "released": {"generator_batch": 32},  # that of local training, whatever its option says
        "small": {
            "lr": 0.1, "batch_size": 12, "free_batch": 6, "hidden": 8, "generator_steps": 5,
            "generator_batch": 8,
        },
    }  # fmt: skip

    alpha: NonNegative = 10.0  # weight of the loss on generated features with drawn labels
    beta: NonNegative = 10.0  # weight of the divergence from generated features of a batch's labels
    decay: Share = 0.98  # decay of both weights and the generator's rate per round
    guided_epochs: Whole = 20  # number of first local epochs in which both terms apply
    free_batch: Count = 32  # generated features with drawn labels in a step
    bottleneck: Whole = 0  # width of a layer before the head; 0: none
    hidden: Count = 256  # hidden units of the generator
    noise_size: Count = 32
    generator_steps: Count = 50
    generator_batch: Annotated[int, Range(2)] = 128  # batch norm needs two
    generator_lr: Positive = 3e-4
    generator_decay: NonNegative = 0.01  # weight decay of the generator
    diversity_weight: NonNegative = 1.0  # η

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        found = list(super().unfit(server, models))
        if not self.network(server).head_names[0]:
            found.append(
                f"{server.title} has no linear head to teach a generator; set a bottleneck"
            )
        return found

    def server_state(self, server: Node[Any]) -> Global:
        weights = self.network(server.model).init(server.draw("weights", shared=True))
        return Global(weights, self.generator(server.model).init(server.draw("generator")))

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the global weights and the generator to everybody awake."""
        return Down(server.state.weights, server.state.generator)

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train on local examples, from round 2 on with generated features beside them."""
        start, generator = inbox.only().weights, inbox.only().generator
        model = self.network(client.model)
        real = self.training(client, model, start)
        if client.round > 1 and (self.alpha or self.beta):
            batches, mechanism = self.draws(client, real)
            weights = await minimize(
                self.guided, model, start, batches, self.optimizer_in(client.round),
                mechanism=mechanism, generator=generator, **self.weighing(client),
            )  # fmt: skip
        else:
            weights = await minimize(
                self.objective, model, start, real.batches, self.optimizer_in(client.round),
                mechanism=real.mechanism, start=start, **self.weighing(client),
            )  # fmt: skip
        counts = client.data.counts(client.model.classes).to(client.device)
        return Up(weights, len(client.data), counts)

    @at_server
    async def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Teach the generator what the clients' heads agree on, then take the mean."""
        ups = list(inbox.values())
        counts = torch.stack([up.counts for up in ups])
        if not counts.any():  # nobody has examples, so no head knows anything
            return
        heads = heads_of(self.network(server.model), [up.weights for up in ups])
        rate = self.generator_lr * self.decay ** (server.round - 1)
        generator = await minimize(
            self.taught, self.generator(server.model), server.state.generator,
            self.lessons(server, counts.sum(0)), Adam(rate, weight_decay=self.generator_decay),
            heads=heads, share=teacher_shares(counts),
        )  # fmt: skip
        mean = self.averaged(server.state.weights, ups)
        server.state = Global(mean, generator)

    def taught(
        self, generator: FeatureGenerator, weights: Weights, batch: FeatureLatent,
        heads: Weights, share: Tensor,
    ) -> Tensor:  # fmt: skip
        """What the heads say of generated features, and η times the diversity term."""
        features = generator(weights, batch.noise, batch.labels)
        loss = heads_loss(features, batch.labels, heads, share)
        return loss + self.diversity_weight * diversity(batch.noise, features)

    def guided(
        self, model: Model, weights: Weights, batch: Guided, generator: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy; generated features are to be told apart, and to agree with real ones."""
        x, y = batch.real
        maker = self.generator(model)
        logits = model(weights, x)
        free = model.head(weights, maker(generator, *batch.free))
        with torch.no_grad():
            aim = model.head(weights, maker(generator, batch.noise, y))
        told = cross_entropy(free, batch.free.labels) * self.free_batch / self.batch_size
        # A mean over rows and classes, as in the released code: 1/classes of the usual divergence.
        apart = divergence(logits, aim) / logits.shape[1]
        terms = self.alpha * told + self.beta * apart
        return task_loss(logits, y, class_weights) + batch.strength * terms

    def draws(self, client: Node[None], real: Training) -> Training:
        """Each batch of real examples with the noise and the labels of this step."""
        maker, classes = self.generator(client.model), client.model.classes
        steps, rng = len(real.batches), client.rng("noise")
        noise = maker.noise(rng, steps, self.batch_size).to(client.device)
        free = drawn(maker, client, torch.ones(classes), steps, self.free_batch)
        guided_steps = self.in_a_pass(len(client.data)) * self.guided_epochs
        strength = self.decay ** (client.round - 1)

        def make(examples: Batch, step: int) -> tuple[Any, Any]:
            on = torch.tensor(strength if step < guided_steps else 0.0, device=client.device)
            # A private sample may have more examples than a batch; the noise then begins again.
            own = torch.arange(len(examples.y), device=client.device) % self.batch_size
            return (examples, noise[step, own]), (free.at(step), on)

        return real.beside(make, joined)

    def lessons(self, server: Node[Global], seen: Tensor) -> Lazy[FeatureLatent]:
        """Draws for the generator's steps; labels uniform over those that participants hold."""
        steps = self.generator_steps
        many = drawn(self.generator(server.model), server, seen, steps, self.generator_batch)
        return Lazy(steps, many.at)

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return self.network(node.model)

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        if field == "generator":
            return content.layout(self.generator(node.model))
        return super().layout(node, sender, message, field)

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Up):
            return why
        return miscounted(message.counts, node.model.classes, used=message.examples)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return self.network(node.model)(node.state.weights, x)

    def network(self, model: Model) -> Model:
        """What is trained: the model, with a bottleneck where one is asked for."""
        return projected(model, self.bottleneck) if self.bottleneck else model

    def generator(self, model: Model) -> FeatureGenerator:
        """The generator of what the model's head sees."""
        width = self.bottleneck or model.feature_width
        return FeatureGenerator(
            (width,),
            model.classes,
            hidden=self.hidden,
            noise_size=self.noise_size,
            device=model.device,
        )
