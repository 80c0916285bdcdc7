"""DENSE: a server's model is distilled from clients' networks on images inverted from them.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. DENSE: Data-Free One-Shot Federated Learning. NeurIPS
2022. Algorithm 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import Adam, Data, Inbox, Lazy, Loop, Model, Node, Weights
from fedstill.core.loop import Descent, Given, joined, moved_part
from fedstill.core.mechanism import Gradient
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.generator_tuner import GeneratorTuner
from fedstill.parts import augment
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.image_generators import Deconvolution, Upsampling
from fedstill.parts.lessons import VIEW, Drawn, Lesson, Losses, Room, Teaching, View, begun
from fedstill.parts.losses import row_divergences, transferability


class Found(NamedTuple):
    """Where the search for a batch of images stands."""

    value: Weights  # the generator's weights, and the noise it starts from
    memory: Any  # of the optimiser
    images: Tensor  # those of the lowest loss so far
    lowest: Tensor


@dataclass(frozen=True)
class Dense(GeneratorTuner):
    """Generator: CE of the mean logits + batch-norm statistics + disagreement with the student.

    As published (`pool`), each turn searches one batch of images with a new generator, noise
    included, adds the best to a pool, and passes over the pool. DFRD compared with a generator
    that is kept and makes new images for each step (`stream`). Clients count alike, labels too.
    """

    uses_counts: ClassVar[bool] = False
    uses_statistics: ClassVar[bool] = True
    presets: ClassVar = {
        "one_shot": {  # with run.rounds = 1
            "role": "data_free", "iterations": 200,
            "base": FedAvg(lr=0.01, momentum=0.9, epochs=400, batch_size=128),
        },
        "dfrd": {
            "synthesis": "stream", "generator_steps": 5, "generator_batch": 64, "latent": 100,
            "generator_lr": 2e-4, "generator_width": 512, "distil_lr": 0.01,
            "distil_momentum": 0.0, "distil_decay": 1e-4, "temperature": 10.0,
        },
    }  # fmt: skip

    generator_steps: Count = 30
    distil_steps: Count = 2  # of `stream`
    generator_batch: Annotated[int, Range(2)] = 256
    generator_lr: Positive = 1e-3
    generator_width: Annotated[int, Range(2)] = 128
    latent: Count = 256
    distil_lr: Positive = 0.005
    distil_momentum: Fraction = 0.9
    distil_decay: NonNegative = 0.0
    temperature: Positive = 20.0
    fidelity_weight: NonNegative = 1.0
    statistics_weight: NonNegative = 1.0
    transferability_weight: NonNegative = 1.0
    synthesis: Literal["pool", "stream"] = "pool"
    pool: Count = 50  # batches; the oldest leave. It is a round's own

    @property
    def remembered(self) -> Mapping[str, Any]:
        return super().remembered if self.synthesis == "stream" else {}

    def beginning(self, server: Node[Any]) -> dict[str, Any]:
        return super().beginning(server) if self.synthesis == "stream" else {}

    async def taught(
        self, server: Node[Any], inbox: Inbox[Any], weights: Weights, own: dict[str, Any]
    ) -> tuple[Weights, dict[str, Any]]:
        """Search a batch of images, add it to the pool, pass over the pool; so many times."""
        if self.synthesis == "stream":
            return await super().taught(server, inbox, weights, own)
        teaching = self.teaching(server, inbox)
        optimizer = self.student_optimizer(server.round)
        learning = Descent(self.lesson_loss, teaching.room.student, optimizer)
        student, losses = begun(learning, weights), Losses(server)
        rng, pool = server.rng("draws"), deque[tuple[Tensor, Tensor]](maxlen=self.pool)
        for turn in range(self.iterations):
            pool.append(await self.searched(server, rng, teaching, student[0], turn))
            losses.keep("generator_loss")
            images, labels = (torch.cat(parts) for parts in zip(*pool, strict=True))
            lessons = self.passed(server, rng, teaching, Data.of(images, labels))
            student = await Loop(learning, student, {}, lessons)
            losses.keep("distil_loss")
        losses.write()
        return student[0], own

    async def searched(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, student: Weights,
        turn: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The images of lowest loss on the way of a new generator and its noise, and labels."""
        maker, size = self.generator(server.model), self.generator_batch
        (batch,) = self.drawn(server, rng, teaching.law, 1)
        batch = batch._replace(labels=batch.labels.sort()[0])
        views = self.views(server, rng, size, self.generator_steps)
        fresh = maker.init(server.draw(f"generator {turn}"))
        value = {**fresh, "noise": batch.noise}
        searching = Search(teaching.room, maker, self.generator_optimizer(server.round))
        blank = torch.zeros(size, *server.model.shape, device=server.device)
        start = Found(
            value, searching.optimizer.start(moved_part(value)), blank,
            torch.full((), torch.inf, device=server.device),
        )  # fmt: skip
        given = teaching.given(student)
        found = await Loop(searching, start, given, [batch._replace(view=view) for view in views])
        if turn == self.iterations - 1:
            last = batch._replace(noise=found.value["noise"], view=views[-1])
            with torch.no_grad():
                view = teaching.room.view(maker, found.value, last, **given)
                server.log(**self.generator_terms(view))
        return found.images, batch.labels

    def passed(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, pool: Data
    ) -> Lazy[tuple[Lesson, ...]]:
        """Every image of the pool once, in a view of its own, and what clients say of it."""
        plan = pool.batches(self.generator_batch, rng)
        views = self.views(server, rng, self.generator_batch, len(plan))

        def make(step: int) -> tuple[Lesson, ...]:
            images, labels = plan[step]
            images = augment.apply_each(images, views[step], only=VIEW)
            return (teaching.lesson_on(images, labels),)

        return Lazy(len(plan), make)

    def views(
        self, server: Node[Any], rng: torch.Generator, images: int, steps: int
    ) -> list[augment.Draws]:
        """A view of each image, for so many steps."""
        height, width = server.model.shape[1:]
        return [
            augment.Draws(*(part.to(server.device) for part in drawn))
            for drawn in (
                augment.draw(
                    rng, VIEW, groups=1, image=(height, width), mode="multi", per_image=images
                )
                for _ in range(steps)
            )
        ]

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """Without batch norms in the clients' networks there is no second term."""
        ensemble = view.ensemble
        heat = self.temperature if self.synthesis == "stream" else 1.0
        terms = {
            "fidelity": cross_entropy(ensemble, view.labels),
            "transferability": transferability(
                view.student, ensemble, view.labels, selection="disagreement", temperature=heat
            ),
        }
        return terms if view.gaps is None else {**terms, "statistics": view.gaps.sum()}

    def generator_loss(self, view: View) -> Tensor:
        terms = self.generator_terms(view)
        moved = self.transferability_weight * terms["transferability"]
        loss = self.fidelity_weight * terms["fidelity"] + moved
        if "statistics" in terms:
            loss = loss + self.statistics_weight * terms["statistics"]
        return loss

    def lesson_loss(self, model: Model, weights: Weights, batch: Sequence[Lesson]) -> Tensor:
        """KL(mean logits ‖ student) at the temperature; as published with its square."""
        (lesson,) = batch
        student = model(weights, lesson.images)
        loss = row_divergences(student, lesson.target, temperature=self.temperature).mean()
        return self.temperature**2 * loss if self.synthesis == "pool" else loss

    def weighed(self, counts: Tensor | None, clients: int, classes: int) -> tuple[Tensor, Tensor]:
        """Every client alike, every label alike."""
        return torch.full((clients, classes), 1 / clients), torch.full((classes,), 1 / classes)

    def generator(self, model: Model) -> ImageGenerator:
        """Its own, or DFRD's without labels."""
        if self.synthesis == "pool":
            return self.made(Upsampling, model)
        return self.made(Deconvolution, model, merge="none")

    def imagined(self, server: Node[Any], per_class: int) -> tuple[Tensor, Tensor] | None:
        """The generator knows no labels: the server's model says what its images are."""
        made = super().imagined(server, per_class)
        return made and (made[0], self.predict(server, made[0]).argmax(1))


@dataclass(frozen=True)
class Search:
    """One step of an optimiser on a generator and its noise; the best images are kept."""

    room: Room
    maker: ImageGenerator
    optimizer: Adam

    def __call__(
        self, carry: Found, given: Given, batch: Drawn, gradient: Gradient
    ) -> tuple[Found, Tensor]:
        def scored(candidate: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            notes: Weights = {}
            value = joined(carry.value, candidate)
            here = batch._replace(noise=value["noise"])
            view = self.room.view(self.maker.train(notes), value, here, **given)
            return self.room.tuner.generator_loss(view), (notes, view.images.detach())

        grad, loss, (notes, images) = gradient(scored, moved_part(carry.value))
        moved, memory = self.optimizer.step(moved_part(carry.value), grad, carry.memory)
        better = loss < carry.lowest
        return Found(
            joined(carry.value, {**moved, **notes}),
            memory,
            torch.where(better, images, carry.images),
            torch.where(better, loss, carry.lowest),
        ), loss
