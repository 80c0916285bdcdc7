"""VHL: clients align features on virtual images that an untrained generator makes from a seed.

Tang, Zhang, Shi, He, Han, Chu. Virtual Homogeneity Learning: Defending against Data Heterogeneity
in Federated Learning. ICML 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    Batch,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.content import LARGEST_INPUT, Axes, Length, Seed, presence
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count, NonNegative, Positive, Whole
from fedstill.methods.fedavg import Down, FedAvg, Global, Up
from fedstill.parts.generators import UNTRAINED, Untrained, unfit_images, untrained_set
from fedstill.parts.learning import Training
from fedstill.parts.losses import supervised_contrastive, task_loss


class Own(State):
    """What a client remembers: the virtual set, as it was sent."""

    seed: int | None
    images: Tensor  # [class, image, ...]


class Virtual(Message):
    """The virtual set, once: the seed to make it from, or the images sorted by class."""

    seed: Seed | None
    images: Annotated[Tensor, Axes("virtual", high=LARGEST_INPUT)]  # [class, image, ...], or none


class Mixed(NamedTuple):
    """What one step sees: real examples and virtual ones."""

    real: Batch
    virtual: Batch
    aligning: Tensor  # 1 in the epochs that align, 0 afterwards


def joined(real: Batch, beside: tuple[Batch, Tensor]) -> Mixed:
    """Examples and what stands beside them, as one step sees both."""
    return Mixed(real, *beside)


@dataclass(frozen=True)
class VHL(FedAvg):
    """Local loss: CE(real) + α · CE(virtual) + λ · (SupCon(real, virtual) + 0.1 · SupCon(virtual)).

    Virtual classes are outputs of their own (`extra`, twice as many as classes; predictions are
    over the real ones) or share those of the real classes (`same`, as later papers compare).
    """

    keeps_own: ClassVar[bool] = False
    presets: ClassVar = {
        "desa": {"labels": "same", "per_class": 50, "weighting": "uniform"},
        "released": {"deviation": 0.3},  # of its launch files; the code's own default is 0.1
        "small": {
            "lr": 0.1, "batch_size": 12, "per_class": 3, "virtual_batch": 6, "generator_width": 4,
        },
    }  # fmt: skip

    alpha: NonNegative = 1.0  # weight of the virtual images' cross-entropy
    weight: NonNegative = 1.0  # λ, weight of the contrast of real and virtual features
    virtual_contrast: NonNegative = 0.1  # weight of the contrast among virtual images only
    temperature: Positive = 0.07
    aligned_epochs: Whole = 5  # number of first local epochs in which λ applies
    # virtual classes have extra outputs, or the real classes' outputs
    labels: Literal["extra", "same"] = "extra"
    per_class: Count = 200  # virtual images
    virtual_batch: Count = 128  # virtual images in a step
    generator: Untrained = "style"
    generator_width: Count = 32
    deviation: Positive = 0.1  # standard deviation of latents around their class mean
    sharing: Literal["seed", "images"] = "seed"  # whether the server sends a seed or the images

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        lines = [*unfit_images(server), *super().unfit(server, models)]
        try:
            self.network(server)
        except BadValue as error:
            lines += [
                f'labels = "extra" needs twice the outputs, but {line}' for line in error.faults
            ]
        return lines

    def before(self) -> Sequence[Step]:
        return [self.announce, self.prepare]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(self.network(server.model).init(server.draw("weights", shared=True)))

    @at_server
    def announce(self, server: Node[Global], inbox: Inbox[Never]) -> Virtual:
        """Send the seed of the virtual set, or the set."""
        seed = server.draw("virtual")
        if self.sharing == "seed":
            return Virtual(seed, torch.empty(0, device=server.device))
        return Virtual(None, self.made(server, seed))

    @at_clients
    def prepare(self, client: Node[Own], inbox: Inbox[Virtual]) -> None:
        """Keep the seed or the images of the virtual set."""
        client.state = Own(inbox.only().seed, inbox.only().images)

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train on local examples and virtual images from the global weights."""
        start, model = inbox.only().weights, self.network(client.model)
        real = self.training(client, model, start)
        if self.alpha or self.weight:
            batches, mechanism = self.mixed(client, real)
            weights = await minimize(
                self.aligned, model, start, batches, self.optimizer_in(client.round),
                mechanism=mechanism, **self.weighing(client),
            )  # fmt: skip
        else:
            weights = await minimize(
                self.objective, model, start, real.batches, self.optimizer_in(client.round),
                mechanism=real.mechanism, start=start, **self.weighing(client),
            )  # fmt: skip
        return Up(weights, len(client.data))

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return self.network(node.model)(node.state.weights, x)[:, : node.model.classes]

    def aligned(
        self, model: Model, weights: Weights, batch: Mixed, class_weights: Tensor | None = None
    ) -> Tensor:
        """The local loss; real features move towards the virtual ones, which stand still."""
        (x, y), (images, classes) = batch.real, batch.virtual
        features, logits = model.both(weights, torch.cat([x, images]))
        own, virtual = features[: len(y)], features[len(y) :]
        shift = model.classes // 2 if self.labels == "extra" else 0
        loss = task_loss(logits[: len(y)], y, class_weights)
        loss = loss + self.alpha * cross_entropy(logits[len(y) :], classes + shift)
        if not self.weight:
            return loss
        rows, matched = torch.cat([own, virtual.detach()]), torch.cat([y, classes])
        term = supervised_contrastive(rows, matched, temperature=self.temperature)
        second = supervised_contrastive(virtual, classes, temperature=self.temperature)
        return loss + self.weight * batch.aligning * (term + self.virtual_contrast * second)

    def mixed(self, client: Node[Own], real: Training) -> Training:
        """Each batch of real examples beside virtual ones, of which none stands twice in it."""
        own, rng = client.state, client.rng("virtual")
        total = self.per_class * client.model.classes
        size = min(self.virtual_batch, total)
        drawn = [torch.randperm(total, generator=rng)[:size] for _ in range(len(real.batches))]
        aligned_steps = self.in_a_pass(len(client.data)) * self.aligned_epochs

        def make(examples: Batch, step: int) -> tuple[Batch, tuple[Batch, Tensor]]:
            images = own.images if own.seed is None else self.made(client, own.seed)
            rows = drawn[step].to(client.device)
            virtual = Batch(images.flatten(0, 1)[rows], rows // self.per_class)
            on = torch.tensor(float(step < aligned_steps), device=client.device)
            return examples, (virtual, on)

        return real.beside(make, joined)

    def made(self, node: Node[Any], seed: int) -> Tensor:
        """[class, image, ...], the virtual set of a seed; made once, whoever asks."""
        kind = UNTRAINED[self.generator]
        generator = kind(node.model.shape, node.model.classes, width=self.generator_width,
                         within=self.deviation)  # fmt: skip
        return untrained_set(generator, seed, self.per_class, node.device).images

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return self.network(node.model)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        known = super().axes(node, sender)
        whole = (node.model.classes, self.per_class, *node.model.shape)
        return {**known, "virtual": (0,) if self.sharing == "seed" else whole}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        wanted = presence(message, Virtual, seed=self.sharing == "seed")
        return super().wrong(node, sender, message) or wanted

    def network(self, model: Model) -> Model:
        """What is trained: with `extra` labels twice as many outputs as there are classes."""
        return model.with_classes(2 * model.classes) if self.labels == "extra" else model
