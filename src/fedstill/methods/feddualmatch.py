"""FedDualMatch: FedDM with layers matched from the deep end and gradients matched on the server.

Heterogeneous Federated Learning: A Dual Matching Dataset Distillation Approach. Anonymous
submission, no public code. Algorithm 1, equations 2 to 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SGD,
    Adam,
    Data,
    Inbox,
    Made,
    Message,
    Method,
    Model,
    Node,
    Positional,
    State,
    Step,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
    seeds,
)
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Whole
from fedstill.parts import augment, balls
from fedstill.parts.matching import gradient_distance, slope
from fedstill.parts.synthesis import (
    Labelled,
    Matching,
    Outputs,
    from_noise,
    from_real,
    strategy_faults,
    training_batches,
)


class Global(State):
    """What the server remembers."""

    weights: Weights
    radius: float


class Down(Message):
    """The centre and the radius of this round's ball."""

    weights: Weights
    radius: float


class Up(Message):
    """Images of the classes a client holds, sorted by class."""

    images: Tensor  # [image, ...]
    labels: Positional  # [image]


class Probe(NamedTuple):
    """A network of the ball and the gradient of the uploaded sets there."""

    network: Weights
    target: Weights


@dataclass(frozen=True)
class FedDualMatch(Method):
    """Deep-first matching on clients, gradient matching and fine-tuning on the server.

    Round t's radius needs round t's sets, so clients work with the radius of the round before.
    """

    presets: ClassVar = {
        "sgd": {"tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9},
        "interleaved": {"interleave": True},
    }

    per_class: Count = 10
    steps: Count = 200
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    start: Literal["noise", "real"] = "noise"
    outputs: Outputs = "stages"
    distance: Literal["norm", "squared"] = "norm"
    deep_first: bool = True
    augmentation: str = augment.DEFAULT
    first_radius: Positive = 5.0
    radius_lr: Positive = 1.0
    lowest_radius: NonNegative = 1e-3
    samplings: Whole = 10  # M; none switches gradient matching off
    sampling_steps: Count = 10
    sampling_lr: Positive = 0.1
    tuning: Literal["adam", "sgd"] = "adam"
    tune_epochs: Count = 500
    tune_batch: Count = 256
    tune_lr: Positive = 1e-3
    tune_momentum: Fraction = 0.0
    tune_augmentation: str = augment.DEFAULT
    interleave: bool = False  # fine-tune within the samplings instead of after them

    def faults(self) -> Sequence[str]:
        return [
            *strategy_faults("augmentation", self.augmentation),
            *strategy_faults("tune_augmentation", self.tune_augmentation),
            *(["interleave needs samplings"] if self.interleave and not self.samplings else []),
        ]

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.synthesize, self.train]

    def server_state(self, server: Node[Any]) -> Global:
        weights = server.model.init(server.draw("weights", shared=True))
        return Global(weights, self.first_radius)

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the weights and the radius."""
        return Down(server.state.weights, server.state.radius)

    @at_clients
    async def synthesize(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Match class means of the layers, deepest first, under networks of the ball."""
        down = inbox.only()
        counts = client.data.counts(client.model.classes)
        held = [c for c, count in enumerate(counts.tolist()) if count]
        fill = from_noise if self.start == "noise" else from_real
        matching = Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                            self.augmentation, self.outputs, self.distance,
                            self.deep_first)  # fmt: skip
        networks = self.networks(client, down.weights, down.radius)
        made = await matching.matched(client, fill(client, held, self.per_class), networks)
        return Up(*made.flat())

    @at_server
    async def train(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Renew the radius, match gradients on a copy of the sets, fine-tune on both."""
        centre = server.state.weights
        sets = {name: Data.of(up.images, up.labels) for name, up in inbox.items()}
        radius = self.radius(server.model, centre, list(sets.values()))
        server.log(radius=radius)
        ball = self.networks(server, centre, radius)
        copies = {name: data.all().x for name, data in sets.items()}
        weights = centre
        for sampling in range(self.samplings):
            copies = await self.matched(server, sets, copies, ball(sampling))
            if self.interleave:
                part = max(1, self.tune_epochs // self.samplings)
                weights = await self.tuned(server, weights, sets, copies, part)
        if not self.interleave:
            weights = await self.tuned(server, weights, sets, copies, self.tune_epochs)
        server.state = Global(weights, radius)

    def radius(self, model: Model, centre: Weights, sets: Sequence[Data]) -> float:
        """Equation 2: η · max_k ||∇L(w; S_k) - ∇L(w; S)||, kept within bounds."""
        whole = slope(loss_on(model, union(sets)), centre)
        ways = [algebra.sub(slope(loss_on(model, data), centre), whole) for data in sets]
        longest = torch.stack([algebra.square(way) for way in ways]).max().sqrt()
        reach = self.radius_lr * float(longest)
        return min(max(reach, self.lowest_radius), self.first_radius)

    async def matched(
        self,
        server: Node[Global],
        sets: dict[str, Data],
        copies: dict[str, Tensor],
        network: Weights,
    ) -> dict[str, Tensor]:
        """Equation 4 under one network: each copy's gradient moves towards that of all sets."""
        target = slope(loss_on(server.model, union(list(sets.values()))), network)
        probe = Probe(network, target)
        batches = Made(self.sampling_steps, lambda _: probe)
        labels = {name: data.labels for name, data in sets.items()}
        return await minimize(
            self.gradients_apart, server.model, copies, batches, SGD(self.sampling_lr),
            labels=labels,
        )  # fmt: skip

    def gradients_apart(
        self, model: Model, copies: dict[str, Tensor], batch: Probe, labels: dict[str, Tensor]
    ) -> Tensor:
        """Σ over clients of the distance between the copy's gradient and the common one."""
        still = model.evaluating
        apart = []
        for name, images in copies.items():
            own = slope(loss_on(still, Data.of(images, labels[name])), batch.network)
            apart.append(gradient_distance(own, batch.target))
        return torch.stack(apart).sum()

    async def tuned(
        self,
        server: Node[Global],
        start: Weights,
        sets: dict[str, Data],
        copies: dict[str, Tensor],
        epochs: int,
    ) -> Weights:
        """Train on the uploaded sets and their matched copies."""
        both = union(list(sets.values()))
        if self.samplings:
            both = both + union([Data.of(copies[name], data.labels) for name, data in sets.items()])
        weight = torch.ones(len(both), device=server.device)
        batches = training_batches(
            server, both, weight, self.tune_batch, epochs, self.tune_augmentation
        )
        optimizer = (
            Adam(self.tune_lr) if self.tuning == "adam" else SGD(self.tune_lr, self.tune_momentum)
        )
        return await minimize(self.objective, server.model, start, batches, optimizer)

    def objective(self, model: Model, weights: Weights, batch: Labelled) -> Tensor:
        """Cross-entropy on augmented synthetic images."""
        return cross_entropy(model(weights, batch.augmented()), batch.y)

    def networks(self, node: Node[Any], centre: Weights, radius: float) -> Callable[[int], Weights]:
        """For each step a network on the sphere, drawn where the node computes."""
        seed, draw = node.draw("networks"), balls.sphere(centre, radius)
        return lambda step: draw(seeds.generator(seed, step, device=node.device))


def loss_on(model: Model, data: Data) -> Callable[[Weights], Tensor]:
    """The mean cross-entropy on a whole set as a function of the weights."""
    x, y = data.all()
    return lambda weights: cross_entropy(model(weights, x), y)


def union(sets: Sequence[Data]) -> Data:
    """All sets as one."""
    batches = [data.all() for data in sets]
    return Data.of(torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches]))
