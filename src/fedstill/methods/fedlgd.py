"""FedLGD: clients train on distilled data, leaning on a global set distilled from their updates.

Huang, Srinivas, Zhang, Li. Federated Learning on Virtual Heterogeneous Data with Local-Global
Dataset Distillation. TMLR 2024. Algorithm 1, equations 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SERVER,
    SGD,
    Addressed,
    Batch,
    Data,
    Inbox,
    Made,
    Message,
    Method,
    Model,
    Node,
    State,
    Step,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Whole
from fedstill.parts import augment, controls
from fedstill.parts.losses import mmd, supervised_contrastive
from fedstill.parts.matching import gradient_distance, slope
from fedstill.parts.synthesis import (
    Matching,
    Start,
    SyntheticSet,
    class_statistics,
    held_classes,
    strategy_faults,
    warmed_up,
)


class Own(State):
    """What a client remembers: its virtual set, the global one, its control."""

    images: Tensor  # [class, image, ...]
    share: Tensor  # [class, image]
    classes: Tensor  # [class]
    anchors: Tensor | None  # [image, ...], sorted by class
    control: Weights | None


class Global(State):
    """What the server remembers."""

    weights: Weights
    anchors: Tensor | None  # [image, ...], sorted by class
    version: int  # of the anchors
    told: dict[str, int]  # which version each client has
    control: Weights | None


class Statistics(Message):
    """Mean and deviation of each class and channel, where the server's start asks for them."""

    mean: Tensor  # [class, channel]
    std: Tensor
    held: Tensor  # [class], 1 where the sender has examples


class Down(Message):
    """The common start; the global set where it changed since the hearer last heard it."""

    weights: Weights
    anchors: Tensor | None
    control: Weights | None


class Up(Message):
    """Where a client came to, and how its control changed."""

    weights: Weights
    control: Weights | None


@dataclass(frozen=True)
class FedLGD(Method):
    """Warm-up once; then FedAvg on virtual sets, both sets refined in the rounds of τ.

    Counting rounds t from 0: the global set is refined at t = 0, 5, …, 50, local ones from 5 on.
    Without refinement there is no global set, and no regulariser either.
    """

    distils: ClassVar[bool] = True

    per_class: Count = 10
    global_per_class: Count = 10
    start: Start = "statistics"
    global_start: Literal["noise", "averaged_statistics"] = "noise"
    warm_up_steps: Count = 10_000
    local_steps: Count = 100
    global_steps: Count = 500
    refine_every: Whole = 5  # 0: never
    refine_until: Whole = 50
    regulariser: Literal["contrastive", "mmd", "none"] = "contrastive"
    weight: NonNegative = 10.0  # λ
    temperature: Positive = 0.07
    lr: Positive = 0.01
    epochs: Count = 1
    batch_size: Count = 32
    local_update: Literal["plain", "fedprox", "scaffold"] = "plain"
    mu: NonNegative = 0.01
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    augmentation: str = augment.DEFAULT

    def faults(self) -> Sequence[str]:
        return strategy_faults("augmentation", self.augmentation)

    def before(self) -> Sequence[Step]:
        averaged = self.refine_every and self.global_start == "averaged_statistics"
        return [self.warm_up, self.describe, self.collect] if averaged else [self.warm_up]

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update, self.aggregate]

    def server_state(self, server: Node[Any]) -> Global:
        weights = server.model.init(server.draw("weights", shared=True))
        count = self.global_per_class * server.model.classes
        noise = server.noise("anchors", count, *server.model.shape) if self.refine_every else None
        return Global(weights, noise, 1, {}, controls.fresh(weights) if self.controlled else None)

    @at_clients
    async def warm_up(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Distil the own examples under random networks."""
        made = await warmed_up(
            client, self.matching(self.warm_up_steps), self.start, self.per_class
        )
        control = controls.fresh(client.model.init(0)) if self.controlled else None
        client.state = Own(*made, None, control)

    @at_clients
    def describe(self, client: Node[Own], inbox: Inbox[Never]) -> Statistics:
        """Send class means and deviations."""
        held = held_classes(client)
        mean, std = class_statistics(client.data, held, client.model.classes)
        wide = torch.zeros(client.model.classes, mean.shape[1], device=client.device)
        mask = torch.zeros(client.model.classes, device=client.device)
        mask[held] = 1
        rows = torch.tensor(held, device=client.device)
        return Statistics(wide.index_copy(0, rows, mean), wide.index_copy(0, rows, std), mask)

    @at_server
    def collect(self, server: Node[Global], inbox: Inbox[Statistics]) -> None:
        """Start the global set from the statistics averaged over the holders of each class."""
        noise = server.state.anchors
        assert noise is not None
        holders = torch.stack([s.held for s in inbox.values()]).sum(0).clamp(min=1).unsqueeze(1)
        mean = torch.stack([s.mean for s in inbox.values()]).sum(0) / holders
        std = torch.stack([s.std for s in inbox.values()]).sum(0) / holders
        labels = self.anchor_labels(server.model, noise)
        wide = (len(noise), -1, *[1] * (noise.dim() - 2))
        anchors = noise * std[labels].reshape(wide) + mean[labels].reshape(wide)
        server.state = server.state.replace(anchors=anchors)

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[Down]:
        """Send the weights to all, the global set to those who lack its latest version."""
        state = server.state
        plain = Down(state.weights, None, state.control)
        full = plain.replace(anchors=state.anchors)
        behind = [name for name in server.models if state.told.get(name, 0) < state.version]
        return Addressed({n: full if n in behind else plain for n in server.models if n != SERVER})

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Refine the virtual set where due, then train on it and on the global set."""
        down, own = inbox.only(), client.state
        start, anchors = down.weights, own.anchors if down.anchors is None else down.anchors
        made = SyntheticSet(own.images, own.share, own.classes)
        if self.refines(client.round) and client.round > 1:
            made = await self.matching(self.local_steps).matched(client, made, lambda _: start)
        labels = None if anchors is None else self.anchor_labels(client.model, anchors)
        data = Data.of(*made.flat())
        if anchors is not None and labels is not None:
            data = Data.of(torch.cat([data.all().x, anchors]), torch.cat([data.labels, labels]))
        batches = data.batches(self.batch_size, client.rng("order"), epochs=self.epochs)
        leaning = not self.refines(client.round) and anchors is not None and self.weight > 0
        drift = None
        if self.controlled and down.control is not None and own.control is not None:
            drift = algebra.sub(down.control, own.control)
        weights = await minimize(
            self.objective, client.model, start, batches, SGD(self.lr), start=start, drift=drift,
            anchors=anchors if leaning else None, labels=labels if leaning else None,
        )  # fmt: skip
        control, change = own.control, None
        if drift is not None and control is not None and down.control is not None:
            change = controls.change(down.control, start, weights, len(batches), self.lr)
            control = algebra.add(control, change)
        client.state = Own(*made, anchors, control)
        return Up(weights, change)

    @at_server
    async def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean; in rounds of τ match the global set's gradient to the common change."""
        state, ups = server.state, list(inbox.values())
        mean = algebra.mean([up.weights for up in ups])
        told = {**state.told, **{name: state.version for name in inbox}}
        anchors, version, control = state.anchors, state.version, state.control
        if self.refines(server.round) and anchors is not None:
            way = algebra.sub(algebra.parameters(state.weights), algebra.parameters(mean))
            batches = Made(self.global_steps, lambda _: Batch(torch.empty(0), torch.empty(0)))
            anchors = await minimize(
                self.gradients_apart, server.model, anchors, batches,
                SGD(self.pixel_lr, self.pixel_momentum),
                weights=state.weights, target=algebra.scale(way, 1 / self.lr),
                labels=self.anchor_labels(server.model, anchors),
            )  # fmt: skip
            version += 1
        changes = [up.control for up in ups if up.control is not None]
        if control is not None and changes:
            control = controls.renewed(control, changes, len(server.models))
        server.state = Global(mean, anchors, version, told, control)

    def objective(
        self,
        model: Model,
        weights: Weights,
        batch: Batch,
        start: Weights,
        drift: Weights | None,
        anchors: Tensor | None,
        labels: Tensor | None,
    ) -> Tensor:
        """Cross-entropy, plus λ times the regulariser that leans on the global set."""
        features, logits = model.both(weights, batch.x)
        loss = cross_entropy(logits, batch.y)
        if anchors is not None and labels is not None and self.regulariser != "none":
            lean = model.features(weights, anchors)
            if self.regulariser == "contrastive":
                rows, classes = torch.cat([features, lean]), torch.cat([batch.y, labels])
                term = supervised_contrastive(rows, classes, temperature=self.temperature)
            else:
                term = mmd(features, lean)
            loss = loss + self.weight * term
        if drift is not None:
            loss = loss + controls.correction(drift, weights)
        if self.local_update == "fedprox":
            moved = algebra.sub(algebra.parameters(weights), algebra.parameters(start))
            loss = loss + self.mu / 2 * algebra.square(moved)
        return loss

    def gradients_apart(
        self, model: Model, anchors: Tensor, batch: Batch, weights: Weights, target: Weights,
        labels: Tensor,
    ) -> Tensor:  # fmt: skip
        """Equation 3: the distance between the global set's gradient and the clients' change."""
        still = model.evaluating
        own = slope(lambda w: cross_entropy(still(w, anchors), labels), weights)
        return gradient_distance(own, target)

    def refines(self, round: int) -> bool:
        """Whether a round, counted from 1, belongs to τ."""
        t = round - 1
        return bool(self.refine_every) and t % self.refine_every == 0 and t <= self.refine_until

    def matching(self, steps: int) -> Matching:
        return Matching(steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                        self.augmentation)  # fmt: skip

    def anchor_labels(self, model: Model, anchors: Tensor) -> Tensor:
        """[image], the global set is sorted by class."""
        each = len(anchors) // model.classes
        return torch.arange(model.classes, device=anchors.device).repeat_interleave(each)

    @property
    def controlled(self) -> bool:
        return self.local_update == "scaffold"
