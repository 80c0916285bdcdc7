"""Lessons without data: what a generator makes, what networks say of it, what a student learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedstill.core import Lazy, Model, Node, Weights
from fedstill.core.loop import Descent, moved_part
from fedstill.parts.augment import Draws, apply_each
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.teachers import Ensemble, has_statistics

MOVES = "crop_flip"  # how images are shown to networks: moved a little, mirrored or not


class Latent(NamedTuple):
    """What the generator makes a batch of images of."""

    noise: Tensor  # [image, number]
    labels: Tensor  # [image]
    moves: Draws | None = None  # how images are shown to networks, where not as they are
    asked: Tensor | None = None  # [client], one for those whose say counts; None: for all


class View(NamedTuple):
    """All that a loss of the generator may be made of."""

    inputs: Tensor  # [image, number], noise and label as the generator sees them
    images: Tensor  # [image, channel, height, width]
    labels: Tensor  # [image]
    said: Tensor  # [client, image, class], logits of the clients' networks
    student: Tensor  # [image, class], logits of the server's model
    shares: Tensor  # [client, image], each client's say about the label
    gaps: Tensor | None  # [client], how far batch norms are from what they know, where asked for
    noise: Tensor  # [image, number]
    embedded: Tensor | None  # [image, number], what the generator has learnt to stand for labels

    @property
    def ensemble(self) -> Tensor:
        """[image, class], Σ_i τ_{i,y} · logits of client i."""
        return torch.einsum("ibc,ib->bc", self.said, self.shares)


class Lesson(NamedTuple):
    """Images for the student, and what it is to say of them."""

    images: Tensor  # [image, channel, height, width]
    target: Tensor  # [image, class], what `target` makes of the clients' logits


MakeLessons = Callable[[Weights, Sequence[Latent], torch.Generator], Lazy[tuple[Lesson, ...]]]
"""The student's lessons of so many latents, from a generator's weights and further draws."""


class Tuner(Protocol):
    """What lessons ask of a method; methods of equal values are equal."""

    uses_statistics: ClassVar[bool]  # losses look at the clients' batch norms

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss."""

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], what the student is to say, from logits and shares of the clients."""


@dataclass(frozen=True)
class Networks:
    """Student and teachers of a round, without weights; two with the same ones are equal."""

    tuner: Tuner
    student: Model
    teachers: Ensemble

    def invention(
        self, maker: ImageGenerator, weights: Weights, batch: Latent,
        student: Weights, teachers: list[Weights], shares: Tensor,
    ) -> Tensor:  # fmt: skip
        """The generator's loss; all other networks are at rest, and pass gradients to images."""
        view = self.view(maker, weights, batch, student, teachers, shares)
        return self.tuner.generator_loss(view)

    def view(
        self, maker: ImageGenerator, weights: Weights, batch: Latent,
        student: Weights, teachers: list[Weights], shares: Tensor,
    ) -> View:  # fmt: skip
        """What everybody says of the generator's images."""
        images = maker(weights, batch.noise, batch.labels)
        inputs = maker.merged(weights, batch.noise, batch.labels)
        shown = images if batch.moves is None else apply_each(images, batch.moves, only=MOVES)
        gaps = None
        if self.tuner.uses_statistics and any(map(has_statistics, teachers)):
            said, gaps = self.teachers.logits_and_gaps(teachers, shown)
        else:
            said = self.teachers.logits(teachers, shown)
        own = self.student.evaluating(student, shown)
        say = shares[:, batch.labels]
        say = say if batch.asked is None else say * batch.asked.unsqueeze(1)
        embedded = maker.embedded(weights, batch.labels)
        return View(inputs, images, batch.labels, said, own, say, gaps, batch.noise, embedded)


class Teaching(NamedTuple):
    """Who teaches in a round: networks without and with weights, and what counts say."""

    networks: Networks
    stacks: list[Weights]
    shares: Tensor  # [client, class]
    frequencies: Tensor  # [class], of labels to be drawn; on the host

    def given(self, student: Weights) -> Mapping[str, Any]:
        """What stands still while the generator learns."""
        return {"student": student, "teachers": self.stacks, "shares": self.shares}

    @torch.no_grad()
    def lesson(self, maker: ImageGenerator, weights: Weights, batch: Latent) -> Lesson:
        """Images of a generator at rest, with the target of each."""
        images = maker.evaluating(weights, batch.noise, batch.labels)
        return self.lesson_on(images, batch.labels)

    def lessons_of(self, maker: ImageGenerator) -> MakeLessons:
        """What makes the student's lessons, each of images of the generator as it is by then."""

        def made(
            weights: Weights, some: Sequence[Latent], rng: torch.Generator
        ) -> Lazy[tuple[Lesson, ...]]:
            return Lazy(len(some), lambda step: (self.lesson(maker, weights, some[step]),))

        return made

    @torch.no_grad()
    def lesson_on(self, images: Tensor, labels: Tensor) -> Lesson:
        """These images, with the target of each."""
        said = self.networks.teachers.logits(self.stacks, images)
        return Lesson(images, self.networks.tuner.target(said, self.shares[:, labels]))


class Losses:
    """Means over the loops of a step, by name."""

    def __init__(self, node: Node[Any]):
        self.node = node
        self.found: dict[str, list[Tensor]] = {}

    def keep(self, name: str) -> None:
        """Note the loss of the latest loop under a name; a rehearsal has none."""
        if "loss" in self.node.numbers:
            self.found.setdefault(name, []).append(torch.as_tensor(self.node.numbers["loss"]))

    def write(self) -> None:
        self.node.log(**{name: torch.stack(some).mean() for name, some in self.found.items()})


def begun(body: Descent, value: Weights) -> tuple[Weights, Any]:
    """Where a loop that is run in several parts begins."""
    return value, body.optimizer.start(moved_part(value))


def latents(
    maker: ImageGenerator, frequencies: Tensor, rng: torch.Generator, *, steps: int, size: int
) -> list[Latent]:
    """Noise, and labels by their frequencies [class], of so many steps; drawn on the host."""
    noise = maker.noise(rng, steps, size).to(maker.device)
    labels = torch.multinomial(frequencies, steps * size, replacement=True, generator=rng)
    labels = labels.reshape(steps, size).to(maker.device)
    return [Latent(noise[step], labels[step]) for step in range(steps)]
