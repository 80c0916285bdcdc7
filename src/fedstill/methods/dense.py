"""DENSE: the server distils clients' networks on images inverted from them.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Wu. DENSE: Data-Free One-Shot Federated Learning. NeurIPS
2022. Algorithm 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    Data,
    Inbox,
    Lazy,
    Loop,
    Message,
    Model,
    Node,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.loop import Descent
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.finetune import SMALL, FineTuner
from fedstill.methods.held_base import Tuned, first_memory
from fedstill.parts import augment
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.image_generators import Deconvolution, Merge, Upsampling
from fedstill.parts.image_search import Search, drawn_moves
from fedstill.parts.label_distribution import alike
from fedstill.parts.lessons import MOVES, Lesson, Losses, Teaching, View, begun, in_turns
from fedstill.parts.losses import Selection, row_divergences, transferability


class Memory(Tuned):
    """What the server remembers: the base's memory; in a stream, the generator too."""

    image_generator: Weights | None


@dataclass(frozen=True)
class Dense(FineTuner):
    """Generator: CE of the mean logits + batch-norm statistics + disagreement with the student.

    As published (`pool`), each turn searches one batch of images with a new generator, noise
    included, adds the best to a pool, and passes over the pool. DFRD compared with a generator
    that is kept and makes new images for each step (`stream`). Clients count alike, labels too.
    """

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
        "dfrd_released": {  # as the code of DFRD has it
            "synthesis": "stream", "generator_steps": 1, "distil_steps": 5, "generator_batch": 64,
            "latent": 100, "generator_lr": 2e-4, "generator_width": 512, "distil_lr": 0.01,
            "distil_momentum": 0.0, "distil_decay": 1e-4, "temperature": 10.0, "merge": "mul",
            "statistics_weight": 0.0, "selection": "one_right", "fresh_optimizers": True,
        },
        "small": SMALL,
    }  # fmt: skip

    generator_steps: Count = 30
    distil_steps: Count = 2  # on each batch of a `stream`
    generator_batch: Annotated[int, Range(2)] = 256
    generator_lr: Positive = 1e-3
    generator_width: Annotated[int, Range(2)] = 128
    latent: Count = 256
    distil_lr: Positive = 0.005
    distil_momentum: Fraction = 0.9
    distil_decay: NonNegative = 0.0
    temperature: Positive = 20.0
    fidelity_weight: NonNegative = 1.0  # weight of the ensemble's cross-entropy with the label
    statistics_weight: NonNegative = 1.0  # weight of the distance to clients' batch-norm statistics
    transferability_weight: NonNegative = 1.0
    # a growing pool of optimised images, or a stream of generated ones
    synthesis: Literal["pool", "stream"] = "pool"
    pool: Count = 50  # batches kept, the newest; emptied after every round
    selection: Selection = "disagreement"
    merge: Merge = "none"  # of noise and label in a `stream`

    def server_state(self, server: Node[Any]) -> Memory:
        stream = self.synthesis == "stream"
        kept = self.generator(server.model).init(server.draw("images")) if stream else None
        return Memory(first_memory(self.base, server), None, kept)

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[Message]) -> Message:
        """Train as the base method does."""
        return await self.trained(client, inbox)

    @at_server
    async def aggregate(self, server: Node[Memory], inbox: Inbox[Message]) -> None:
        """Aggregate as the base method does, then teach the result by the clients' networks."""
        heard = await self.aggregated(server, inbox)
        if not heard or not self.iterations:
            return
        teaching = self.teaching(server, heard, *alike(len(heard), server.model.classes))
        if self.synthesis == "pool":
            weights = await self.from_a_pool(server, teaching)
            server.state = server.state.taught(weights, feedback=self.feedback)
        else:
            generator, weights = await in_turns(server, teaching)
            server.state = server.state.taught(
                weights, feedback=self.feedback, image_generator=generator
            )

    async def from_a_pool(self, server: Node[Memory], teaching: Teaching) -> Weights:
        """Search a batch of images, add it to the pool, pass over the pool; so many times."""
        optimizer = self.student_optimizer(server.round)
        learning = Descent(self.lesson_loss, teaching.networks.student, optimizer)
        student, losses = begun(learning, server.state.weights), Losses(server)
        rng, pool = server.rng("draws"), deque[tuple[Tensor, Tensor]](maxlen=self.pool)
        for turn in range(self.iterations):
            pool.append(await self.searched(server, rng, teaching, student[0], turn))
            losses.keep("generator_loss")
            images, labels = (torch.cat(parts) for parts in zip(*pool, strict=True))
            lessons = self.passed(server, rng, teaching, Data.of(images, labels))
            student = await Loop(learning, student, {}, lessons)
            losses.keep("distil_loss")
        losses.write()
        return student[0]

    async def searched(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, student: Weights,
        turn: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The images of lowest loss on the way of a new generator and its noise, and labels."""
        maker, size = self.generator(server.model), self.generator_batch
        (batch,) = teaching.latents(rng, 1)
        batch = batch._replace(labels=batch.labels.sort()[0])
        moves = drawn_moves(server.model, rng, size, self.generator_steps)
        searching = Search(teaching.networks, maker, self.generator_optimizer(server.round))
        start = searching.begun(maker.init(server.draw(f"generator {turn}")), batch)
        given = teaching.given(student=student)
        found = await Loop(searching, start, given, [batch._replace(moves=each) for each in moves])
        if turn == self.iterations - 1:
            last = batch._replace(noise=found.value["noise"], moves=moves[-1])
            with torch.no_grad():
                view = teaching.networks.view(maker, found.value, last, **given)
                server.log(**self.generator_terms(view))
        return found.images, batch.labels

    def passed(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, pool: Data
    ) -> Lazy[tuple[Lesson, ...]]:
        """Every image of the pool once, moved in a way of its own, and what clients say of it."""
        plan = pool.batches(self.generator_batch, rng)
        moves = drawn_moves(server.model, rng, self.generator_batch, len(plan))

        def make(step: int) -> tuple[Lesson, ...]:
            images, labels = plan[step]
            images = augment.apply_each(images, moves[step], only=MOVES)
            return (teaching.lesson_on(images, labels),)

        return Lazy(len(plan), make)

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """Without batch norms in the clients' networks there is no second term."""
        ensemble = view.ensemble
        heat = self.temperature if self.synthesis == "stream" else 1.0
        terms = {
            "fidelity": cross_entropy(ensemble, view.labels),
            "transferability": transferability(
                view.student, ensemble, view.labels, selection=self.selection, temperature=heat
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

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """KL(mean logits ‖ student) at the temperature; as published with its square."""
        (lesson,) = lessons
        student = model(weights, lesson.images)
        loss = row_divergences(student, lesson.target, temperature=self.temperature).mean()
        return self.temperature**2 * loss if self.synthesis == "pool" else loss

    def generator(self, model: Model) -> ImageGenerator:
        """Its own, or DFRD's, without labels unless they are merged with the noise."""
        if self.synthesis == "pool":
            return self.made(Upsampling, model)
        return self.made(Deconvolution, model, merge=self.merge)

    def imagined(self, server: Node[Any], per_class: int) -> tuple[Tensor, Tensor] | None:
        """Where the generator knows no labels the server's model says what its images are."""
        made = super().imagined(server, per_class)
        if self.merge != "none":
            return made
        return made and (made[0], self.predict(server, made[0]).argmax(1))
