"""Lessons without data: what a generator draws, what networks say of it, what a student learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedstill.core import Model, Node, Weights
from fedstill.core.loop import Descent, moved_part
from fedstill.parts.augment import Draws, apply_each
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.teachers import Ensemble, has_statistics

VIEW = "crop_flip"  # a view of an image: moved a little, mirrored or not


class Drawn(NamedTuple):
    """What the generator makes images of."""

    noise: Tensor  # [image, number]
    labels: Tensor  # [image]
    view: Draws | None = None  # how networks see the images, where not as they are


class View(NamedTuple):
    """All that a loss of the generator may be made of."""

    inputs: Tensor  # [image, number], noise and label as the generator sees them
    images: Tensor  # [image, channel, height, width]
    labels: Tensor  # [image]
    said: Tensor  # [client, image, class], logits of the clients' networks
    student: Tensor  # [image, class], logits of the server's model
    shares: Tensor  # [client, image], each client's say about the label
    gaps: Tensor | None  # [client], how far batch norms are from what they know, where asked for

    @property
    def ensemble(self) -> Tensor:
        """[image, class], Σ_i τ_{i,y} · logits of client i."""
        return torch.einsum("ibc,ib->bc", self.said, self.shares)


class Lesson(NamedTuple):
    """Images for the student, and what it is to say of them."""

    images: Tensor  # [image, channel, height, width]
    target: Tensor  # [image, class], what `target` makes of the clients' logits


class Tuner(Protocol):
    """What lessons ask of a method; methods of equal values are equal."""

    uses_statistics: ClassVar[bool]  # losses look at the clients' batch norms

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss."""

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], what the student is to say, from logits and shares of the clients."""


@dataclass(frozen=True)
class Room:
    """The networks of a round without their weights; two with the same ones are equal."""

    tuner: Tuner
    student: Model
    teachers: Ensemble

    def invention(
        self, maker: ImageGenerator, weights: Weights, batch: Drawn,
        student: Weights, teachers: list[Weights], shares: Tensor,
    ) -> Tensor:  # fmt: skip
        """The generator's loss; all other networks are at rest, and pass gradients to images."""
        view = self.view(maker, weights, batch, student, teachers, shares)
        return self.tuner.generator_loss(view)

    def view(
        self, maker: ImageGenerator, weights: Weights, batch: Drawn,
        student: Weights, teachers: list[Weights], shares: Tensor,
    ) -> View:  # fmt: skip
        """What everybody says of the generator's images."""
        images = maker(weights, batch.noise, batch.labels)
        inputs = maker.merged(weights, batch.noise, batch.labels)
        shown = images if batch.view is None else apply_each(images, batch.view, only=VIEW)
        gaps = None
        if self.tuner.uses_statistics and any(map(has_statistics, teachers)):
            said, gaps = self.teachers.logits_and_gaps(teachers, shown)
        else:
            said = self.teachers.logits(teachers, shown)
        own = self.student.evaluating(student, shown)
        return View(inputs, images, batch.labels, said, own, shares[:, batch.labels], gaps)


class Teaching(NamedTuple):
    """Who teaches in a round: networks without and with weights, and what counts say."""

    room: Room
    stacks: list[Weights]
    shares: Tensor  # [client, class]
    law: Tensor  # [class], of labels; on the host

    def given(self, student: Weights) -> Mapping[str, Any]:
        """What stands still while the generator learns."""
        return {"student": student, "teachers": self.stacks, "shares": self.shares}

    @torch.no_grad()
    def lesson(self, maker: ImageGenerator, weights: Weights, batch: Drawn) -> Lesson:
        """Images of a generator at rest, with the target of each."""
        images = maker.evaluating(weights, batch.noise, batch.labels)
        return self.lesson_on(images, batch.labels)

    @torch.no_grad()
    def lesson_on(self, images: Tensor, labels: Tensor) -> Lesson:
        """These images, with the target of each."""
        said = self.room.teachers.logits(self.stacks, images)
        return Lesson(images, self.room.tuner.target(said, self.shares[:, labels]))


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


def drawn(
    maker: ImageGenerator, law: Tensor, rng: torch.Generator, *, steps: int, size: int
) -> list[Drawn]:
    """Noise, and labels by a law [class], of so many steps; drawn on the host."""
    noise = maker.noise(rng, steps, size).to(maker.device)
    labels = torch.multinomial(law, steps * size, replacement=True, generator=rng)
    labels = labels.reshape(steps, size).to(maker.device)
    return [Drawn(noise[step], labels[step]) for step in range(steps)]
