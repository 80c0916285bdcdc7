"""Lessons without data: what a generator makes, what networks say of it, what a student learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedstill.core import Loop, Model, Node, Weights
from fedstill.core.branches import in_branches
from fedstill.core.gpu import sent
from fedstill.core.loop import Descent, moved_part
from fedstill.core.optim import Optimizer
from fedstill.parts.augment import Draws, apply_each
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.teachers import Ensemble, Stack, has_statistics

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


class Tuner(Protocol):
    """What lessons ask of a method; methods of equal values are equal."""

    uses_statistics: ClassVar[bool]  # losses look at the clients' batch norms

    def generator_optimizer(self, round: int) -> Optimizer:
        """How the generator learns in a round."""

    def student_optimizer(self, round: int) -> Optimizer:
        """How the student learns in a round."""

    def asking(self, some: Sequence[Latent], clients: int) -> Sequence[Latent]:
        """The generator's steps of some latents."""

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """The terms of the generator's loss, by name, each a scalar."""

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss."""

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], what the student is to say, from logits and shares of the clients."""

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """The student's loss on a lesson of each generator."""


@dataclass(frozen=True)
class Networks:
    """Those of a round, without weights; two with the same ones are equal."""

    tuner: Tuner
    maker: ImageGenerator
    student: Model
    teachers: Ensemble

    def invention(
        self, maker: ImageGenerator, weights: Weights, batch: Latent,
        student: Weights, teachers: list[Stack], shares: Tensor,
    ) -> Tensor:  # fmt: skip
        """The generator's loss; all other networks are at rest, and pass gradients to images."""
        view = self.view(maker, weights, batch, student, teachers, shares)
        return self.tuner.generator_loss(view)

    def view(
        self, maker: ImageGenerator, weights: Weights, batch: Latent,
        student: Weights, teachers: list[Stack], shares: Tensor,
    ) -> View:  # fmt: skip
        """What everybody says of the generator's images."""
        images = maker(weights, batch.noise, batch.labels)
        inputs = maker.merged(weights, batch.noise, batch.labels)
        shown = images if batch.moves is None else apply_each(images, batch.moves, only=MOVES)
        gaps: Tensor | None = None
        asking: Callable[[], Tensor] = partial(self.student.evaluating, student, shown)
        if self.tuner.uses_statistics and any(has_statistics(stack.plain) for stack in teachers):
            said, gaps = self.teachers.logits_and_gaps(teachers, shown)
            own = asking()
        else:
            *found, own = in_branches([*self.teachers.questions(teachers, shown), asking])
            said = self.teachers.answers(found)
        say = shares[:, batch.labels]
        say = say if batch.asked is None else say * batch.asked.unsqueeze(1)
        embedded = maker.embedded(weights, batch.labels)
        return View(inputs, images, batch.labels, said, own, say, gaps, batch.noise, embedded)

    def distillation(
        self, model: Model, weights: Weights, batch: Sequence[Latent],
        generators: Sequence[Weights], teachers: list[Stack], shares: Tensor,
    ) -> Tensor:  # fmt: skip
        """The student's loss. Generators and teachers are at rest, and none is given a gradient.

        Lessons are made here and not before, so that an engine may record the whole of a step.
        """
        pairs = list(zip(generators, batch, strict=True))
        seen = in_branches([partial(self.images_of, *pair) for pair in pairs])
        questions = [self.teachers.questions(teachers, images) for images in seen]
        found = iter(in_branches([question for some in questions for question in some]))
        lessons = []
        for latent, images, some in zip(batch, seen, questions, strict=True):
            said = self.teachers.answers(list(islice(found, len(some))))
            target = self.tuner.target(said, shares[:, latent.labels])
            lessons.append(Lesson(images, target))
        return self.tuner.lesson_loss(model, weights, lessons)

    def images_of(self, generator: Weights, latent: Latent) -> Tensor:
        """Images of a generator at rest."""
        return self.maker.evaluating(generator, latent.noise, latent.labels)

    def lesson_of(
        self, generator: Weights, latent: Latent, teachers: list[Stack], shares: Tensor
    ) -> Lesson:
        """Images of a generator at rest, with the target of each."""
        images = self.images_of(generator, latent)
        return self.lesson_on(images, latent.labels, teachers, shares)

    def lesson_on(
        self, images: Tensor, labels: Tensor, teachers: list[Stack], shares: Tensor
    ) -> Lesson:
        """Images, with the target of each."""
        said = self.teachers.logits(teachers, images)
        return Lesson(images, self.tuner.target(said, shares[:, labels]))


class Turns(NamedTuple):
    """How often generator and student learn in a round."""

    times: int
    generator_steps: int  # in each turn
    student_steps: int
    size: int  # images in a step
    reuse_draws: bool = False  # one draw of noise and labels for all steps of a turn
    fresh_optimizers: bool = False  # reset optimisers in every turn; otherwise in every round


class Teaching(NamedTuple):
    """Who teaches in a round: networks without and with weights, and what counts say."""

    turns: Turns
    networks: Networks
    stacks: list[Stack]
    shares: Tensor  # [client, class]
    frequencies: Tensor  # [class], of labels to be drawn; on the host
    resting: tuple[Weights, ...] = ()  # generators whose images the student sees besides

    def given(self, **others: Any) -> Mapping[str, Any]:
        """What stands still while one learns: teachers, and the student or generators."""
        return {**others, "teachers": self.stacks, "shares": self.shares}

    def latents(self, rng: torch.Generator, steps: int) -> list[Latent]:
        """Noise and labels of so many steps: a draw for each, or one for all."""
        maker, reuse = self.networks.maker, self.turns.reuse_draws
        draws = 1 if reuse else steps
        some = latents(maker, self.frequencies, rng, steps=draws, size=self.turns.size)
        return some * steps if reuse else some

    @torch.no_grad()
    def lesson(self, generator: Weights, latent: Latent) -> Lesson:
        """Images of a generator at rest, with the target of each."""
        return self.networks.lesson_of(generator, latent, self.stacks, self.shares)

    @torch.no_grad()
    def lesson_on(self, images: Tensor, labels: Tensor) -> Lesson:
        """These images, with the target of each."""
        return self.networks.lesson_on(images, labels, self.stacks, self.shares)


async def in_turns(server: Node[Any], teaching: Teaching) -> tuple[Weights, Weights]:
    """Generator and student of a server's memory after some turns of both.

    Of each turn, some steps train the generator and then some the student, on images of the
    generator as it is by then and of those at rest. Optimisers remember from turn to turn, and
    begin anew in each round, or in each turn.
    """
    turns, networks = teaching.turns, teaching.networks
    tuner, maker = networks.tuner, networks.maker
    inventing = Descent(networks.invention, maker, tuner.generator_optimizer(server.round))
    learning = Descent(
        networks.distillation, networks.student, tuner.student_optimizer(server.round)
    )
    generator = begun(inventing, server.state.image_generator)
    student = begun(learning, server.state.weights)
    rng, losses = server.rng("draws"), Losses(server)
    steps = turns.generator_steps
    for turn in range(turns.times):
        if turn and turns.fresh_optimizers:
            generator, student = begun(inventing, generator[0]), begun(learning, student[0])
        some = teaching.latents(rng, steps + turns.student_steps)
        asking = tuner.asking(some[:steps], len(teaching.shares))
        given = teaching.given(student=student[0])
        generator = await Loop(inventing, generator, given, asking, turns.times * len(asking))
        losses.keep("generator_loss")
        others = [teaching.latents(rng, turns.student_steps) for _ in teaching.resting]
        batches = list(zip(some[steps:], *others, strict=True))
        given = teaching.given(generators=(generator[0], *teaching.resting))
        student = await Loop(learning, student, given, batches, turns.times * len(batches))
        losses.keep("distil_loss")
    losses.write()
    with torch.no_grad():
        view = networks.view(maker, generator[0], some[0], **teaching.given(student=student[0]))
        server.log(**tuner.generator_terms(view))
    return generator[0], student[0]


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
    noise = sent(maker.noise(rng, steps, size), maker.device)
    labels = torch.multinomial(frequencies, steps * size, replacement=True, generator=rng)
    labels = sent(labels.reshape(steps, size), maker.device)
    return [Latent(noise[step], labels[step]) for step in range(steps)]
