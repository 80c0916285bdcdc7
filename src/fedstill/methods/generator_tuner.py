"""Fine-tuning without data: a server's model is taught on images of a generator.

What DFRD, DENSE and FedFTG share. The server sees the weights that clients send up in the base
method's round. It trains a generator of images against these networks and its own, and teaches its
own model with what they say of the images. The losses, the weights of clients and the label law
are each method's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedstill.core import SERVER, SGD, Adam, Inbox, Lazy, Loop, Model, Node, Weights
from fedstill.core.loop import Descent
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range
from fedstill.methods.finetune import FineTuner
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.label_distribution import counts_table
from fedstill.parts.lessons import Drawn, Lesson, Losses, Room, Teaching, View, begun, drawn
from fedstill.parts.losses import row_divergences
from fedstill.parts.teachers import Ensemble

G = TypeVar("G", bound=ImageGenerator)


@dataclass(frozen=True)
class GeneratorTuner(FineTuner):
    """Of each iteration, some steps train the generator and then some the server's model."""

    uses_statistics: ClassVar[bool] = False  # losses look at the clients' batch norms

    generator_steps: Count = 5
    distil_steps: Count = 2
    generator_batch: Annotated[int, Range(2)] = 64  # batch norm needs two
    generator_lr: Positive = 2e-4
    generator_width: Annotated[int, Range(2)] = 512
    latent: Count = 100
    distil_lr: Positive = 0.01
    distil_momentum: Fraction = 0.0
    distil_decay: NonNegative = 1e-4  # weight decay of the student
    temperature: Positive = 10.0

    async def taught(
        self, server: Node[Any], inbox: Inbox[Any], weights: Weights, own: dict[str, Any]
    ) -> tuple[Weights, dict[str, Any]]:
        """The student and the own memory after some turns of generator and student.

        Optimisers remember from turn to turn, and begin anew in each round.
        """
        maker, teaching = self.generator(server.model), self.teaching(server, inbox)
        room = teaching.room
        inventing = Descent(room.invention, maker, self.generator_optimizer(server.round))
        learning = Descent(self.lesson_loss, room.student, self.student_optimizer(server.round))
        generator = begun(inventing, own["image_generator"])
        student = begun(learning, weights)
        rng, losses = server.rng("draws"), Losses(server)
        for _ in range(self.iterations):
            steps = self.generator_steps
            draws = self.drawn(server, rng, teaching.law, steps + self.distil_steps)
            given = teaching.given(student[0])
            generator = await Loop(inventing, generator, given, draws[:steps])
            losses.keep("generator_loss")
            lessons = self.lessons(
                server, rng, teaching, {**own, "image_generator": generator[0]}, draws[steps:]
            )
            student = await Loop(learning, student, {}, lessons)
            losses.keep("distil_loss")
        losses.write()
        with torch.no_grad():
            view = room.view(maker, generator[0], draws[0], **teaching.given(student[0]))
            server.log(**self.generator_terms(view))
        return student[0], {**own, "image_generator": generator[0]}

    # What a method says of itself.

    @property
    def remembered(self) -> Mapping[str, Any]:
        return {"image_generator": Weights}

    def beginning(self, server: Node[Any]) -> dict[str, Any]:
        return {"image_generator": self.generator(server.model).init(server.draw("images"))}

    def generator(self, model: Model) -> ImageGenerator:
        """The generator of images for a model."""
        raise TypeError(f"{type(self).__name__} must define generator()")

    def made(self, kind: Callable[..., G], model: Model, **more: Any) -> G:
        """A kind of generator in the sizes of this method."""
        return kind(
            model.shape, model.classes, latent=self.latent, width=self.generator_width,
            device=model.device, **more,
        )  # fmt: skip

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """The terms of the generator's loss, by name, each a scalar."""
        raise TypeError(f"{type(self).__name__} must define generator_terms()")

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss."""
        raise TypeError(f"{type(self).__name__} must define generator_loss()")

    def weighed(self, counts: Tensor | None, clients: int, classes: int) -> tuple[Tensor, Tensor]:
        """Shares [client, class] of what clients say, and the label law [class]."""
        raise TypeError(f"{type(self).__name__} must define weighed()")

    def generator_optimizer(self, round: int) -> Adam:
        return Adam(self.generator_lr, (0.5, 0.999))

    def student_optimizer(self, round: int) -> SGD:
        return SGD(self.distil_lr, self.distil_momentum, self.distil_decay)

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], what the student is to say, from logits and shares of the clients."""
        return torch.einsum("ibc,ib->bc", said, shares)

    def lesson_loss(self, model: Model, weights: Weights, batch: Sequence[Lesson]) -> Tensor:
        """KL(target ‖ student) at the temperature, mean over images."""
        (lesson,) = batch
        student = model(weights, lesson.images)
        return row_divergences(student, lesson.target, temperature=self.temperature).mean()

    # What is the same for all.

    def drawn(
        self, server: Node[Any], rng: torch.Generator, law: Tensor, steps: int
    ) -> list[Drawn]:
        """Noise and labels of so many steps."""
        maker = self.generator(server.model)
        return drawn(maker, law, rng, steps=steps, size=self.generator_batch)

    def lessons(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, own: dict[str, Any],
        draws: Sequence[Drawn],
    ) -> Lazy[tuple[Lesson, ...]]:  # fmt: skip
        """For each step of the student images of the generator and what clients say of them."""
        maker, weights = self.generator(server.model), own["image_generator"]
        return Lazy(len(draws), lambda step: (teaching.lesson(maker, weights, draws[step]),))

    def teaching(self, server: Node[Any], inbox: Inbox[Any]) -> Teaching:
        """The clients' networks of a round, side by side."""
        student = self.base.network_for(server, SERVER)
        teachers = Ensemble.of([self.base.network_for(server, client) for client in inbox])
        classes = server.model.classes
        counts = None
        if self.uses_counts:
            counts = counts_table({client: up.label_counts for client, up in inbox.items()})
        shares, law = self.weighed(counts, len(inbox), classes)
        stacks = teachers.stacked([up.weights for up in inbox.values()])
        room = Room(self, student, teachers)
        return Teaching(room, stacks, shares.to(server.device), law.cpu())

    @torch.no_grad()
    def imagined(self, server: Node[Any], per_class: int) -> tuple[Tensor, Tensor] | None:
        if "image_generator" not in self.remembered:
            return None
        maker, classes = self.generator(server.model), server.model.classes
        labels = torch.arange(classes, device=server.device).repeat_interleave(per_class)
        noise = maker.noise(server.rng("pictures"), len(labels)).to(server.device)
        return maker.evaluating(server.state.image_generator, noise, labels), labels
