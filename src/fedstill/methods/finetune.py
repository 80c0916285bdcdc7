"""Fine-tuning without data: another method's rounds, after which its server model is taught.

What DFRD, DENSE and FedFTG share. The server sees the weights that clients send up in the base
method's round. It trains a generator of images against these networks and its own, and teaches its
own model with what they say of the images. The losses, the weights of clients and the label law
are each method's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Never, TypeVar

import torch
from torch import Tensor

from fedstill.core import (
    SERVER,
    SGD,
    Adam,
    Addressed,
    Inbox,
    Loop,
    Made,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Place,
    State,
    Step,
    Weights,
)
from fedstill.core.loop import Descent
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range, Whole
from fedstill.core.records import extended, grown
from fedstill.methods.fedavg import FedAvg
from fedstill.parts.augment import apply_each
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.label_law import Counted, counts_table, miscounted
from fedstill.parts.lessons import Drawn, Lesson, Losses, View, begun
from fedstill.parts.losses import row_divergences
from fedstill.parts.submodels import misfit
from fedstill.parts.teachers import Ensemble, has_statistics

G = TypeVar("G", bound=ImageGenerator)
Role = Literal["fine_tune", "data_free"]
FEDAVG = FedAvg()  # the base where no other is named
VIEW = "crop_flip"  # a view of an image: moved a little, mirrored or not


class Teaching(NamedTuple):
    """Who teaches in a round: networks without and with weights, and what counts say."""

    room: Room
    stacks: list[Weights]
    shares: Tensor  # [client, class]
    law: Tensor  # [class], of labels; on the host


@dataclass(frozen=True)
class FineTuner(Method):
    """A base method of the steps broadcast, update, aggregate, and distillation after the last.

    As `data_free`, nothing is averaged: clients train on from their own models, which only they
    overwrite, and the server's model learns from them alone.
    """

    uses_counts: ClassVar[bool] = True  # clients send how many examples of each label they used
    uses_statistics: ClassVar[bool] = False  # losses look at the clients' batch norms

    base: Method = FEDAVG
    role: Role = "fine_tune"
    iterations: Whole = 10  # of generator and student in turn, each round; none leaves the base
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

    def faults(self) -> Sequence[str]:
        if not isinstance(self.base, Method):
            return ()
        wrong = unfit(self.base)
        if not wrong and self.role == "data_free" and self._steps[1].remembers is not None:
            wrong = "its clients remember more than a model, so they cannot be played alone"
        return [f"base = {type(self.base).__name__}: {wrong}"] if wrong else []

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return self.base.unfit(server, models)

    @property
    def scores_own(self) -> bool:
        return self.base.scores_own

    @property
    def sends_examples(self) -> bool:
        return self.base.sends_examples

    def each_round(self) -> Sequence[Step]:
        broadcast, update, aggregate = self._steps
        up, memory = self._up, aggregate.remembers
        taught = aggregate.taken_over(
            self, type(self).aggregate, reads=up, sends=None, remembers=self._memory
        )
        if self.role == "data_free":
            alone = type(self).update_alone
            return [
                update.taken_over(self, alone, reads=None, sends=up, remembers=memory), taught
            ]  # fmt: skip
        if self.uses_counts:
            update = update.taken_over(
                self, type(self).update, reads=update.reads, sends=up, remembers=update.remembers
            )
        return [broadcast, update, taught]

    def server_state(self, server: Node[Any]) -> State:
        held = self.base.server_state(server)
        assert held is not None  # `unfit` refuses a base whose server remembers nothing
        return grown(held, self._memory, **self.beginning(server))

    def client_state(self, client: Node[Any]) -> State | None:
        if self.role == "data_free":  # it begins as the base's server does
            return self.base.server_state(client)
        return self.base.client_state(client)

    async def update(self, client: Node[Any], inbox: Inbox[Any]) -> Message:
        """Train as the base method does; count the labels of the examples used."""
        client.data = counted = Counted(client.data.parts)
        up = await self._steps[1].played(client, inbox)
        return self._with_counts(client, counted, up)

    async def update_alone(self, client: Node[Any], inbox: Inbox[Never]) -> Message:
        """Train on from the own model, as a base method with one client; count the labels."""
        broadcast, update, aggregate = self._steps
        counted = Counted(client.data.parts)
        trainee, keeper = copy(client), copy(client)
        trainee.data, trainee.state = counted, self.base.client_state(client)
        down = broadcast(keeper, Inbox())
        if isinstance(down, Addressed):
            down = down[client.id]
        up = await update.played(trainee, Inbox({SERVER: down}))
        await aggregate.played(keeper, Inbox({client.id: up}))
        client.state = keeper.state
        return self._with_counts(client, counted, up)

    async def aggregate(self, server: Node[Any], inbox: Inbox[Any]) -> None:
        """Aggregate as the base method does, then teach the result by the clients' networks."""
        own = {name: getattr(server.state, name) for name in self.remembered}
        for client, up in inbox.items():
            if wrong := self.wrong(server, client, up):
                server.reject(client, wrong)
        if self.role == "fine_tune" and (heard := _accepted(server, inbox)):
            await self._steps[2].played(server, heard)
        held, heard = server.state, _accepted(server, inbox)
        weights = held.weights
        if self.iterations and heard:
            weights, own = await self.taught(server, self.teaching(server, heard), weights, own)
        server.state = grown(held, self._memory, weights=weights, **own)

    def wrong(self, server: Node[Any], client: NodeId, up: Any) -> str | None:
        """Why nothing can be learnt from what a client sent, or None."""
        wrong = misfit(self.base.network_for(server, client), up.weights)
        if wrong or not self.uses_counts:
            return wrong
        used = self.base.used(up) if isinstance(self.base, FedAvg) else None
        return miscounted(up.label_counts, server.model.classes, used=used)

    async def taught(
        self, server: Node[Any], teaching: Teaching, weights: Weights, own: dict[str, Any]
    ) -> tuple[Weights, dict[str, Any]]:
        """The student and the own memory after some turns of generator and student.

        Optimisers remember from turn to turn, and begin anew in each round.
        """
        maker, room = self.generator(server.model), teaching.room
        inventing = Descent(room.invention, maker, self.generator_optimizer(server.round))
        learning = Descent(self.lesson_loss, room.student, self.student_optimizer(server.round))
        generator = begun(inventing, own["image_generator"])
        student = begun(learning, weights)
        rng, losses = server.rng("draws"), Losses(server)
        for _ in range(self.iterations):
            steps = self.generator_steps
            draws = self.drawn(server, rng, maker, teaching.law, steps + self.distil_steps)
            given = {
                "student": student[0], "teachers": teaching.stacks, "shares": teaching.shares,
            }  # fmt: skip
            generator = await Loop(inventing, generator, given, draws[:steps])
            losses.keep("generator_loss")
            lessons = self.lessons(
                server, rng, teaching, {**own, "image_generator": generator[0]}, draws[steps:]
            )
            student = await Loop(learning, student, {}, lessons)
            losses.keep("distil_loss")
        losses.write()
        with torch.no_grad():
            view = room.view(
                maker, generator[0], draws[0], student[0], teaching.stacks, teaching.shares
            )
            server.log(**self.generator_terms(view))
        return student[0], {**own, "image_generator": generator[0]}

    # What a method says of itself.

    @property
    def remembered(self) -> Mapping[str, Any]:
        """What the server remembers besides the base's memory: names and types."""
        return {"image_generator": Weights}

    def beginning(self, server: Node[Any]) -> dict[str, Any]:
        """That memory at the start."""
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
        self,
        server: Node[Any],
        rng: torch.Generator,
        maker: ImageGenerator,
        law: Tensor,
        steps: int,
    ) -> list[Drawn]:
        """Noise and labels of so many steps."""
        size = self.generator_batch
        noise = maker.noise(rng, steps, size).to(server.device)
        labels = torch.multinomial(law, steps * size, replacement=True, generator=rng)
        labels = labels.reshape(steps, size).to(server.device)
        return [Drawn(noise[step], labels[step]) for step in range(steps)]

    def lessons(
        self, server: Node[Any], rng: torch.Generator, teaching: Teaching, own: dict[str, Any],
        draws: Sequence[Drawn],
    ) -> Made[tuple[Lesson, ...]]:  # fmt: skip
        """For each step of the student images of the generator and what clients say of them."""
        maker = self.generator(server.model)
        return Made(
            len(draws),
            lambda step: (self.lesson(maker, own["image_generator"], teaching, draws[step]),),
        )

    @torch.no_grad()
    def lesson(
        self, maker: ImageGenerator, weights: Weights, teaching: Teaching, batch: Drawn
    ) -> Lesson:
        """Images of a generator at rest, with the target of each."""
        images = maker.evaluating(weights, batch.noise, batch.labels)
        said = teaching.room.teachers.logits(teaching.stacks, images)
        return Lesson(images, self.target(said, teaching.shares[:, batch.labels]))

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

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return self.base.predict(node, x)

    def network_for(self, server: Node[Any], who: NodeId) -> Model:
        return self.base.network_for(server, who)

    @torch.no_grad()
    def imagined(self, server: Node[Any], per_class: int) -> tuple[Tensor, Tensor] | None:
        if "image_generator" not in self.remembered:
            return None
        maker, classes = self.generator(server.model), server.model.classes
        labels = torch.arange(classes, device=server.device).repeat_interleave(per_class)
        noise = maker.noise(server.rng("pictures"), len(labels)).to(server.device)
        return maker.evaluating(server.state.image_generator, noise, labels), labels

    @property
    def _steps(self) -> Sequence[Step]:
        return self.base.each_round()

    @property
    def _up(self) -> type[Message]:
        """What clients send: as in the base method, with label counts where they are used."""
        sent = self._steps[1].sends
        assert sent is not None
        if not self.uses_counts:
            return sent
        words = f"As {type(self.base).__name__}'s, and how many examples of each label were used."
        return extended(sent, words, label_counts=Tensor)

    @property
    def _memory(self) -> type[State]:
        """What the server remembers: as in the base method, and what is the method's own."""
        kinds = [step.remembers for step in (self._steps[0], self._steps[2]) if step.remembers]
        held = max(kinds, key=lambda kind: len(kind.__mro__), default=None)  # the one with most
        assert held is not None
        words = f"What the server of {type(self.base).__name__} remembers, and the generator."
        return extended(held, words, **self.remembered)

    def _with_counts(self, client: Node[Any], counted: Counted, up: Message) -> Message:
        if not self.uses_counts:
            return up
        counts = counted.used(client.model.classes).to(client.device)
        return grown(up, self._up, label_counts=counts)


@dataclass(frozen=True)
class Room:
    """The networks of a round without their weights; two with the same ones are equal."""

    tuner: FineTuner
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


def unfit(base: Method) -> str | None:
    """Why a method cannot be the base of a fine-tuner, or None."""
    if isinstance(base, FineTuner):
        return "it fine-tunes another method itself; name that one"
    if base.scored is not Place.SERVER:
        return "its server keeps no model that could be taught"
    steps = base.each_round()
    places = [step.place for step in steps]
    if base.before() or base.after() or places != [Place.SERVER, Place.CLIENTS, Place.SERVER]:
        return "its rounds are not broadcast, update, aggregate"
    sent, held = steps[1].sends, steps[2].remembers
    if not _has_weights(sent) or not _has_weights(held):
        return "its clients send no weights, so there are no networks to learn from"
    return None


def _accepted(server: Node[Any], inbox: Inbox[Any]) -> Inbox[Any]:
    """The messages that no step has rejected."""
    return Inbox({who: up for who, up in inbox.items() if who not in server.rejected})


def _has_weights(kind: type[Message] | type[State] | None) -> bool:
    return kind is not None and "weights" in {f.name for f in fields(kind)}
