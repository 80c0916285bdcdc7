"""DynaFed: FedAvg whose server distils its own trajectory into a set and fine-tunes on it.

Pi, Zhang, Xie, Gao, Wang, Kim, Chen. DynaFed: Tackling Client Data Heterogeneity with Global
Dynamics. CVPR 2023. Algorithm 1, equations 3 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedstill.core import (
    SGD,
    Adam,
    Data,
    Inbox,
    Lazy,
    Model,
    Node,
    NodeId,
    Weights,
    algebra,
    at_server,
    minimize,
    seeds,
)
from fedstill.core.optim import PerEntry
from fedstill.core.ranges import Count, Positive, Whole
from fedstill.core.records import Pictured
from fedstill.methods import fedavg
from fedstill.methods.fedavg import FedAvg, Up
from fedstill.parts import augment
from fedstill.parts.augment import Draws, augmentations, image_size, strategy_faults
from fedstill.parts.losses import soft_cross_entropy
from fedstill.parts.matching import grad, path_distance, without_second_derivative
from fedstill.parts.synthetic_batches import Labelled, training_batches


class Global(fedavg.Global):
    """What the server remembers."""

    path: tuple[Weights, ...]  # its own weights, round by round, until they are distilled
    images: Tensor | None  # [image, ...]
    labels: Tensor | None  # [image, class], logits of soft labels


class Stretch(NamedTuple):
    """One iteration of trajectory matching: where to start, where to come to."""

    start: Weights
    target: Weights
    draws: tuple[Draws, ...]  # one for each inner step
    only: tuple[str, ...]


@dataclass(frozen=True)
class DynaFed(FedAvg):
    """After `path_rounds` rounds the path becomes a synthetic set; from then on rounds end on it.

    Clients train as in FedAvg, with SGD or Adam. The released code also shows the set to
    batch norm layers before tuning, which here learn their statistics in the epochs of tuning.
    """

    # A run of twenty rounds would end before the default path of twenty-five rounds is complete.
    moves_inputs: ClassVar[bool] = True
    presets: ClassVar = {
        "twenty rounds": {"path_rounds": 10, "expert_steps": 2},
        "released": {"rule": "adam", "lr": 1e-3, "weighting": "uniform", "least_averaged": 2,
                     "path_rounds": 24},  # 25 weights with the first
        "small": {
            "lr": 0.1, "batch_size": 12, "path_rounds": 2, "per_class": 3, "synthesis_steps": 3,
            "expert_steps": 1, "inner_steps": 2, "tune_epochs": 8, "tune_batch": 8,
        },
    }  # fmt: skip

    path_rounds: Count = 25  # rounds of plain averaging before the trajectory is distilled
    per_class: Count = 15
    synthesis_steps: Count = 3000  # steps that fit the set to the trajectory
    image_lr: Positive = 0.05  # learning rate of the images
    label_lr: Positive = 0.01  # learning rate of the soft labels
    rate_lr: Positive = 1e-5  # learning rate of the learnt step size
    first_rate: Positive = 0.04  # initial value of the learnt step size
    rule: Literal["sgd", "adam"] = "sgd"  # the clients' optimiser
    expert_steps: Count = 3  # s, rounds between start and target
    least_averaged: Whole = 0  # weights averaged for a target, drawn each time; 0: only the last
    latest_start: Count = 50  # last round of the trajectory that may be a start
    inner_steps: Count = 20  # steps on the set from a start towards its target
    tune_epochs: Whole = 20  # none leaves FedAvg
    tune_lr: Positive = 1e-4
    tune_batch: Count = 256
    augmentation: str = augment.DEFAULT

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return [*super().unfit(server, models), *without_second_derivative(server)]

    def faults(self) -> Sequence[str]:
        found = [*super().faults(), *strategy_faults("augmentation", self.augmentation)]
        if self.path_rounds < self.expert_steps:
            found.append("path_rounds must be at least expert_steps")
        if self.least_averaged > self.expert_steps:
            found.append("least_averaged must be at most expert_steps, of which it is a draw")
        if self.rule == "adam" and self.momentum:
            found.append('momentum must be 0 with rule = "adam", which has its own')
        return found

    def server_state(self, server: Node[Any]) -> Global:
        weights = super().server_state(server).weights
        return Global(weights, (weights,), None, None)

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        """The server's set, each image by the class that its soft label leans to."""
        if not isinstance(node.state, Global) or node.state.images is None:
            return {}
        assert node.state.labels is not None
        return {"distilled": (node.state.images, node.state.labels.argmax(1))}

    @at_server
    async def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean; distil the path once it is long enough; then fine-tune every round."""
        ups = list(inbox.values())
        state = server.state
        mean = self.averaged(state.weights, ups)
        images, labels, path = state.images, state.labels, state.path
        if images is None and self.tune_epochs and mean is not state.weights:
            path = (*path, mean)
            if len(path) > self.path_rounds:
                images, labels = await self.distilled(server, path)
                path = ()
        if images is not None and labels is not None:
            mean = await self.tuned(server, mean, images, labels)
        server.state = Global(mean, path, images, labels)

    async def distilled(
        self, server: Node[Global], path: tuple[Weights, ...]
    ) -> tuple[Tensor, Tensor]:
        """Images and soft labels that lead along the path, from noise and equal logits."""
        count = self.per_class * server.model.classes
        start = {
            "images": server.noise("images", count, *server.model.shape),
            "labels": torch.zeros(count, server.model.classes, device=server.device),
            "rate": torch.tensor(self.first_rate, device=server.device),
        }
        optimizer = PerEntry(
            (("images", Adam(self.image_lr)), ("labels", Adam(self.label_lr)),
             ("rate", Adam(self.rate_lr)))
        )  # fmt: skip
        found = await minimize(
            self.off_the_path, server.model, start, self.stretches(server, path), optimizer
        )
        return found["images"], found["labels"]

    def stretches(self, server: Node[Global], path: tuple[Weights, ...]) -> Lazy[Stretch]:
        """Random stretches of the path, with an augmentation for each inner step and image."""
        last = min(self.latest_start, len(path) - self.expert_steps - 1)
        places = torch.randint(
            last + 1, (self.synthesis_steps,), generator=server.rng("stretches")
        ).tolist()
        seed, count = server.draw("path"), self.per_class * server.model.classes

        def make(step: int) -> Stretch:
            drawn = augmentations(
                seeds.generator(seed, "operations", step), seeds.generator(seed, "images", step),
                self.augmentation, self.inner_steps, groups=1, image=image_size(server.model),
                per_image=count, device=server.device,
            )  # fmt: skip
            begin = places[step]
            return Stretch(
                path[begin], self.target(path, begin, seeds.generator(seed, "target", step)),
                tuple(draws for _, draws in drawn), tuple(only for only, _ in drawn),
            )  # fmt: skip

        return Lazy(self.synthesis_steps, make)

    def target(self, path: tuple[Weights, ...], begin: int, rng: Generator) -> Weights:
        """Where a stretch is to come to: weights that the path reaches, or the mean of several.

        As in the released code their number is drawn, then so many of the next `expert_steps`
        weights, each as likely at every draw.
        """
        if not self.least_averaged:
            return path[begin + self.expert_steps]
        span = self.expert_steps - self.least_averaged + 1
        count = self.least_averaged + int(torch.randint(span, (1,), generator=rng))
        drawn = torch.randint(self.expert_steps, (count,), generator=rng).tolist()
        return algebra.mean([path[begin + 1 + ahead] for ahead in drawn])

    @property
    def optimizer(self) -> SGD | Adam:
        if self.rule == "adam":
            return Adam(self.lr, weight_decay=self.weight_decay)
        return super().optimizer

    def off_the_path(self, model: Model, value: dict[str, Tensor], batch: Stretch) -> Tensor:
        """Equation 4: how far the set leads from the target, by the way to be gone."""
        still, weights = model.evaluating, dict(batch.start)
        for draws, only in zip(batch.draws, batch.only, strict=True):
            x = augment.apply(value["images"].unsqueeze(0), draws, only=only).squeeze(0)
            targets = value["labels"].softmax(1)

            def loss(w: Weights, x: Tensor = x, targets: Tensor = targets) -> Tensor:
                return soft_cross_entropy(still(w, x), targets)

            step = algebra.scale(grad(loss, weights), value["rate"])
            weights = {**weights, **algebra.sub(algebra.parameters(weights), step)}
        return path_distance(weights, batch.target, batch.start)

    async def tuned(
        self, server: Node[Global], start: Weights, images: Tensor, labels: Tensor
    ) -> Weights:
        """Fine-tune the mean on the set."""
        data, weight = Data.of(images, labels), torch.ones(len(images), device=server.device)
        batches = training_batches(
            server, data, weight, self.tune_batch, self.tune_epochs, self.augmentation
        )
        return await minimize(self.soft_objective, server.model, start, batches, Adam(self.tune_lr))

    def soft_objective(self, model: Model, weights: Weights, batch: Labelled) -> Tensor:
        """Cross-entropy with soft labels on augmented images."""
        return soft_cross_entropy(model(weights, batch.augmented()), batch.y.softmax(1))
