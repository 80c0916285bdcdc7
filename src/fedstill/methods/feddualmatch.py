"""FedDualMatch: FedDM with layers matched from the deep end and gradients matched on the server.

Heterogeneous Federated Learning: A Dual Matching Dataset Distillation Approach. Anonymous
submission, no public code. Algorithm 1, equations 2 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Data,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Schedule,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
    scheduled,
    trees,
)
from fedstill.core.content import LARGEST, Inputs, Labels, Length, presence
from fedstill.core.optim import Optimizer
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range, Whole
from fedstill.core.records import Pictured
from fedstill.parts import augment, balls
from fedstill.parts.augment import strategy_faults
from fedstill.parts.distribution_matching import Matching, Outputs
from fedstill.parts.matching import (
    GradientMatching,
    distance,
    grad,
    gradient_spread,
    loss_on,
    union,
    without_second_derivative,
)
from fedstill.parts.outliers import believed
from fedstill.parts.robust import Aggregation
from fedstill.parts.synthetic_batches import Labelled, training_batches
from fedstill.parts.synthetic_sets import Standing, from_noise, from_real, held_classes


class Global(State):
    """What the server remembers."""

    weights: Weights
    radius: float


class Down(Message):
    """The centre and the radius of this round's ball."""

    weights: Weights
    radius: Annotated[float, Range(0, LARGEST)]


class Up(Message):
    """Images of the classes a client holds, sorted by class."""

    images: Inputs
    labels: Labels
    counts: Standing | None = None  # examples that an image stands for; only if asked for

    def pictures(self) -> Pictured:
        return self.images, self.labels


@dataclass(frozen=True)
class FedDualMatch(Method):
    """Deep-first matching on clients, gradient matching and fine-tuning on the server.

    Round t's radius needs round t's sets, so clients work with the radius of the round before.
    The paper leaves much open; what it does not say is as in FedDM or in gradient matching: ten
    images per class, augmentation, momentum of the images, a fresh network at every step. Its
    steps are read as divided over the layers (or `sweep`), T_g as epochs of Adam (or `tune_steps`),
    η in the radius as 1, which on images is more than `first_radius` allows: the ball is then
    FedDM's. With preset `theory` η is the rate of fine-tuning, as in the proofs, and the radius
    follows the data.
    """

    presets: ClassVar = {
        "sgd": {"tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9},
        "interleaved": {"interleave": True},
        "iterations": {"tune_steps": 500},
        "sweep": {"sweep": True},
        "theory": {"radius_lr": 1e-3, "lowest_radius": 0.0, "tune_within": "ball"},
        "feddm_server": {
            "tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9, "tune_weight_decay": 5e-4,
            "tune_fall": "cosine", "tune_within": "first_ball",
        },
        "small": {
            "per_class": 3, "steps": 5, "real_batch": 8, "samplings": 2, "sampling_steps": 2,
            "tune_epochs": 8, "tune_batch": 8, "tune_lr": 0.02,
        },
    }  # fmt: skip

    per_class: Count = 10
    least_examples: Count = 1  # of a class at a client, for it to be sent
    steps: Count = 200
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    start: Literal["noise", "real"] = "noise"
    outputs: Outputs = "stages"
    # between means of features: the norm, or its square
    distance: Literal["norm", "squared"] = "norm"
    deep_first: bool = True  # match the deepest layer first, then one more at a time
    sweep: bool = False  # every step goes from the deepest layer to all, an update for each
    augmentation: str = augment.DEFAULT
    networks: Literal["step", "round"] = "step"  # how often a client draws one from the ball
    client_weight: Literal["uniform", "examples"] = "uniform"  # of images in fine-tuning
    first_radius: Positive = 5.0  # of the ball in the first round, and the largest
    radius_lr: Positive = 1.0  # η, by which the gap of gradients becomes a radius
    lowest_radius: NonNegative = 1e-3  # below which the ball does not shrink
    highest_radius: Positive | None = None  # none: first_radius
    samplings: Whole = 10  # M; none switches gradient matching off
    sampling_steps: Count = 10  # steps on the images for each network drawn
    sampling_lr: Positive = 0.1  # learning rate of the images in gradient matching
    tuning: Literal["adam", "sgd"] = "adam"  # the optimiser of fine-tuning
    tune_epochs: Count = 500
    tune_steps: Whole = 0  # batches, in place of tune_epochs; none: epochs count
    tune_batch: Count = 256
    tune_lr: Positive = 1e-3
    tune_momentum: Fraction = 0.0
    tune_weight_decay: NonNegative = 0.0
    tune_fall: Schedule = "constant"  # of the rate, in each fine-tuning
    tune_within: Literal["anywhere", "ball", "first_ball"] = "anywhere"  # how far w may go
    tune_augmentation: str = augment.DEFAULT
    interleave: bool = False  # fine-tune within the samplings instead of after them
    aggregation: Literal["mean", "multi_krum"] = "mean"  # or only sets that are like the others
    byzantine: Whole = 1  # liars that multi_krum stands

    def faults(self) -> Sequence[str]:
        return [
            *strategy_faults("augmentation", self.augmentation),
            *strategy_faults("tune_augmentation", self.tune_augmentation),
            *(["sweep needs deep_first"] if self.sweep and not self.deep_first else []),
            *(["interleave needs samplings"] if self.interleave and not self.samplings else []),
            *(["lowest_radius must be at most first_radius"]
              if self.lowest_radius > self.first_radius else []),
            *(["highest_radius must be at least lowest_radius"]
              if self.highest_radius is not None and self.highest_radius < self.lowest_radius
              else []),
        ]  # fmt: skip

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return without_second_derivative(server) if self.samplings else ()

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.synthesize, self.train]

    def server_state(self, server: Node[Any]) -> Global:
        weights = server.model.init(server.draw("weights", shared=True))
        return Global(weights, self.first_radius)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        most = self.per_class * node.model.classes
        return {**super().axes(node, sender), "image": range(1, most + 1)}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Up):
            return why
        return presence(message, counts=self.client_weight == "examples")

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the weights and the radius."""
        return Down(server.state.weights, server.state.radius)

    @at_clients
    async def synthesize(self, client: Node[None], inbox: Inbox[Down]) -> Up | None:
        """Match class means of the layers, deepest first, under networks of the ball."""
        down, classes = inbox.only(), held_classes(client, self.least_examples)
        if not classes:
            return None
        fill = from_noise if self.start == "noise" else from_real
        matching = Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                            self.augmentation, self.outputs, self.distance,
                            self.deep_first, self.sweep)  # fmt: skip
        start = fill(client, classes, self.per_class)
        networks = balls.networks(client, down.weights, down.radius)
        if self.networks == "round":
            networks = balls.always(networks(0))
        images, labels = (await matching.matched(client, start, networks)).flat()
        if self.client_weight == "uniform":
            return Up(images, labels)
        counts = client.data.counts(client.model.classes).to(labels.device)
        return Up(images, labels, counts[labels] / torch.bincount(labels)[labels])

    @at_server
    async def train(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Renew the radius, match gradients on a copy of the sets, fine-tune on both."""
        centre, heard = server.state.weights, self.believed(server, inbox)
        ups = list(heard.values())
        sets = {name: Batch(up.images, up.labels) for name, up in heard.items()}
        radius = self.radius(server.model, centre, list(sets.values()))
        server.log(radius=radius)
        ball, uploaded = balls.networks(server, centre, radius), union(list(sets.values()))
        copies, weights = sets, centre
        matching = GradientMatching(self.sampling_steps, self.sampling_lr, self.pixel_momentum)
        for sampling in range(self.samplings):
            network = ball(sampling)
            target = grad(loss_on(server.model, uploaded), network)
            copies = await matching.matched(server.model, copies, network, target)
            if self.interleave:
                lesson = Lesson(union([uploaded, *copies.values()]), image_weights(ups, 2), centre,
                                radius)  # fmt: skip
                weights = await self.tuned(server, weights, lesson, sampling, self.samplings)
        if not self.interleave:
            both = [uploaded, *(copies.values() if self.samplings else ())]
            weight = image_weights(ups, 2 if self.samplings else 1)
            weights = await self.tuned(server, weights, Lesson(union(both), weight, centre, radius))
        server.log(moved=distance(weights, centre))
        server.state = Global(weights, radius)

    def believed(self, server: Node[Global], inbox: Inbox[Up]) -> dict[NodeId, Up]:
        """What clients sent; with multi_krum without classes that look unlike the others'."""
        if self.aggregation == "mean":
            return dict(inbox)
        sets = {name: Batch(up.images, up.labels) for name, up in inbox.items()}
        how = Aggregation(self.aggregation, self.byzantine)
        kept = believed(sets, server.model, server.state.weights, how)
        left = {
            name: trees.map_tensors(lambda t, k=kept[name]: t[k], up) for name, up in inbox.items()
        }
        return {name: up for name, up in left.items() if len(up.labels)}

    def radius(self, model: Model, centre: Weights, sets: Sequence[Batch]) -> float:
        """Equation 2: η · max_k ||∇L(w; S_k) - ∇L(w; S)||, kept within bounds."""
        reach = self.radius_lr * float(gradient_spread(model, centre, sets))
        return min(max(reach, self.lowest_radius), self.highest_radius or self.first_radius)

    async def tuned(
        self, server: Node[Global], start: Weights, lesson: Lesson, part: int = 0, parts: int = 1
    ) -> Weights:
        """Train on some images, one of the round's parts; each has draws of its own."""
        data = Data.of(*lesson.images)
        per_epoch = -(-len(data) // self.tune_batch)
        steps = max(1, self.tune_steps // parts)
        if not self.tune_steps:
            steps = max(1, self.tune_epochs // parts) * per_epoch
        batches = training_batches(
            server, data, lesson.weight, self.tune_batch, -(-steps // per_epoch),
            self.tune_augmentation, part,
        )  # fmt: skip
        batches = replace(batches, steps=steps)
        optimizer = scheduled(self.optimizer, steps, self.tune_fall)
        if self.tune_within == "anywhere":
            return await minimize(self.objective, server.model, start, batches, optimizer)
        reach = lesson.radius if self.tune_within == "ball" else self.first_radius
        return await minimize(
            self.objective, server.model, start, batches, optimizer, project=self.projected,
            centre=lesson.centre, reach=torch.tensor(reach, device=server.device),
        )  # fmt: skip

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser with which the server fine-tunes its model."""
        if self.tuning == "adam":
            return Adam(self.tune_lr, weight_decay=self.tune_weight_decay)
        return SGD(self.tune_lr, self.tune_momentum, self.tune_weight_decay)

    def objective(
        self, model: Model, weights: Weights, batch: Labelled, centre: Weights | None = None,
        reach: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy on augmented synthetic images."""
        logits = model(weights, batch.augmented())
        if self.client_weight == "uniform":
            return cross_entropy(logits, batch.y)
        return (batch.weight * cross_entropy(logits, batch.y, reduction="none")).mean()

    def projected(self, weights: Weights, centre: Weights, reach: Tensor) -> Weights:
        """As in FedDM, the server stays where the sets are meant to hold."""
        return balls.projected(weights, centre, reach)


class Lesson(NamedTuple):
    """What the server learns from, and the ball in which that holds."""

    images: Batch
    weight: Tensor  # [image], one in the mean
    centre: Weights
    radius: float


def image_weights(ups: Sequence[Up], times: int) -> Tensor:
    """[image], so often one after the other: by the examples an image stands for, or all alike."""
    counts = [up.counts for up in ups if up.counts is not None]
    weight = torch.cat(counts) if counts else torch.cat([torch.ones_like(up.labels) for up in ups])
    return (weight / weight.float().mean()).repeat(times)
