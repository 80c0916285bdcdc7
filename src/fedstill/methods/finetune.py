"""Fine-tuning: another method's rounds, after each of which its server's model is taught.

What DFRD, DENSE and FedFTG share. A fine-tuner holds a base method and plays its steps: the
server's memory holds the base's memory, a client's message holds the base's. After the base has
aggregated, the server trains a generator of images against the clients' networks and its own, and
teaches its own model with what they say of the images. The losses, the weights of clients and the
frequencies of labels are each method's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never, TypeVar, cast

import torch
from torch import Tensor

from fedstill.core import (
    SERVER,
    SGD,
    Adam,
    Addressed,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.method import Scored
from fedstill.core.optim import Optimizer
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range, Whole
from fedstill.core.records import Record
from fedstill.methods import held_base
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.held_base import Base, Counted, Tuned, of_base
from fedstill.parts.generators import ImageGenerator, unfit_images
from fedstill.parts.label_distribution import miscounted, used_labels
from fedstill.parts.lessons import Latent, Lesson, Networks, Teaching, Turns, View
from fedstill.parts.losses import row_divergences
from fedstill.parts.teachers import Ensemble

G = TypeVar("G", bound=ImageGenerator)
Role = Literal["fine_tune", "data_free"]
FEDAVG = FedAvg()  # the base where no other is named
SMALL: Mapping[str, Any] = {  # for tiny federations
    "base": FedAvg(lr=0.1, batch_size=12), "iterations": 2, "generator_steps": 2,
    "distil_steps": 3, "distil_lr": 0.01, "generator_batch": 8, "generator_width": 4,
}  # fmt: skip


@dataclass(frozen=True)
class FineTuner(Method):
    """A base method of the steps broadcast, update, aggregate, and distillation after the last.

    As `data_free`, nothing is averaged: clients train on from their own models, which only they
    overwrite, and the server's model learns from them alone. A method writes the step `aggregate`.
    """

    uses_statistics: ClassVar[bool] = False  # losses look at the clients' batch norms
    aggregate: ClassVar[Any]

    base: Method = FEDAVG  # the method whose result is fine-tuned, a table of its own
    role: Role = "fine_tune"  # fine-tune the aggregate, or learn from clients that train alone
    iterations: Whole = 10  # turns of distillation per round; 0: only the base
    generator_steps: Count = 5
    distil_steps: Count = 2
    generator_batch: Annotated[int, Range(2)] = 64  # batch norm needs two
    generator_lr: Positive = 2e-4
    generator_width: Annotated[int, Range(2)] = 512
    latent: Count = 100
    distil_lr: Positive = 0.01
    distil_momentum: Fraction = 0.0
    distil_decay: NonNegative = 1e-4
    temperature: Positive = 10.0
    feedback: bool = True  # clients continue from the distilled model; false: it is only scored
    reuse_draws: bool = False  # one draw of noise and labels for all steps of a turn
    fresh_optimizers: bool = False  # reset optimisers in every turn; otherwise in every round

    def faults(self) -> Sequence[str]:
        if not isinstance(self.base, Method):
            return ()
        if self.role == "data_free" and not self.feedback:
            return ["feedback = false: as data_free nothing is sent to clients; leave it out"]
        wrong = held_base.unfit(self.base, alone=self.role == "data_free")
        return [f"base = {type(self.base).__name__}: {wrong}"] if wrong else []

    # The base's steps, played on the memory and the messages that it knows.

    def each_round(self) -> Sequence[Step]:
        steps = (self.broadcast, self.update, self.aggregate)
        return held_base.around(self.base, steps, alone=self.role == "data_free")

    @property
    def holds(self) -> Sequence[type[Record]]:
        """The message and the memory of the base."""
        return held_base.held_kinds(self.base)

    def client_state(self, client: Node[Any]) -> State | None:
        if self.role == "data_free":  # it begins as the base's server does
            return self.base.server_state(client)
        return self.base.client_state(client)

    @at_server
    async def broadcast(
        self, server: Node[Tuned], inbox: Inbox[Never]
    ) -> Message | Addressed[Message]:
        """Send what the base method sends."""
        return cast(Message, await held_base.as_base(self.base, 0, server, inbox))

    @at_clients
    async def update(self, client: Node[Any], inbox: Inbox[Message]) -> Counted:
        """Train as the base method does; count the labels of the examples used."""
        up = await self.trained(client, inbox)
        return Counted(up, self.counted(client).to(client.device))

    def counted(self, client: Node[Any]) -> Tensor:
        """[class], what a client says of the labels it learnt from: how many it used."""
        if client.private and isinstance(self._base, FedAvg):
            return self._base.told_uses(client)
        return used_labels(self._base.plan(client), client.model.classes)

    def total(self, up: Any) -> int | None:
        """How many those are, from what a client of the base sent; None where it does not say."""
        return self._base.used(up)

    async def trained(self, client: Node[Any], inbox: Inbox[Message]) -> Message:
        """What a client of the base sends; as data-free, of a base whose only client it is."""
        if self.role == "data_free":
            return await held_base.played_alone(self.base, client)
        return cast(Message, await self.base.each_round()[1].played(client, inbox))

    async def aggregated(self, server: Node[Any], inbox: Inbox[Any]) -> dict[NodeId, Any]:
        """After the base has aggregated: the messages of clients that learnt anything, if any."""
        if self.role == "fine_tune":
            sent = Inbox({who: of_base(up) for who, up in inbox.items()})
            await held_base.as_base(self.base, 2, server, sent)
        heard = {who: up for who, up in inbox.items() if who not in server.rejected}
        return {who: up for who, up in heard.items() if self.total(of_base(up)) != 0}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        """What the base says of its message, and whether labels were counted."""
        own = of_base(message)
        why = self.base.wrong(node, sender, own)
        if why or not isinstance(message, Counted):
            return why
        miscount = miscounted(message.label_counts, node.model.classes, used=self.total(own))
        return miscount or super().wrong(node, sender, message)

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return self.base.network_for(node, who)

    # Lessons.

    def teaching(
        self, server: Node[Any], heard: Mapping[NodeId, Any], shares: Tensor, frequencies: Tensor,
        *, resting: tuple[Weights, ...] = (),
    ) -> Teaching:  # fmt: skip
        """The clients' networks of a round side by side, each with its share [client, class]."""
        student = self._base.network_for(server, SERVER)
        teachers = Ensemble.of([self._base.network_for(server, client) for client in heard])
        stacks = teachers.stacked([of_base(up).weights for up in heard.values()])
        networks = Networks(self, self.generator(server.model), student, teachers)
        turns = Turns(
            self.iterations, self.generator_steps, self.distil_steps, self.generator_batch,
            self.reuse_draws, self.fresh_optimizers,
        )  # fmt: skip
        shares = shares.to(server.device)
        return Teaching(turns, networks, stacks, shares, frequencies.cpu(), resting)

    def asking(self, some: Sequence[Latent], clients: int) -> Sequence[Latent]:
        """The generator's steps; all clients are asked in each."""
        return some

    def made(self, kind: Callable[..., G], model: Model, **more: Any) -> G:
        """A kind of generator in the sizes of this method."""
        sizes = {"latent": self.latent, "width": self.generator_width, **more}
        return kind(model.shape, model.classes, device=model.device, **sizes)

    @torch.no_grad()
    def imagined(self, server: Node[Any], per_class: int) -> tuple[Tensor, Tensor] | None:
        if server.state.image_generator is None:
            return None
        maker, rng = self.generator(server.model), server.rng("pictures")
        return maker.imagined(server.state.image_generator, rng, per_class, server.device)

    # What a method says of itself.

    def generator(self, model: Model) -> ImageGenerator:
        """The generator of images for a model."""
        raise TypeError(f"{type(self).__name__} must define generator()")

    def generator_terms(self, view: View) -> dict[str, Tensor]:
        """The terms of the generator's loss, by name, each a scalar."""
        raise TypeError(f"{type(self).__name__} must define generator_terms()")

    def generator_loss(self, view: View) -> Tensor:
        """The generator's loss."""
        raise TypeError(f"{type(self).__name__} must define generator_loss()")

    def target(self, said: Tensor, shares: Tensor) -> Tensor:
        """[image, class], what the student is to say, from logits and shares of the clients."""
        return torch.einsum("ibc,ib->bc", said, shares)

    def lesson_loss(self, model: Model, weights: Weights, lessons: Sequence[Lesson]) -> Tensor:
        """KL(target ‖ student) at the temperature, mean over images."""
        (lesson,) = lessons
        student = model(weights, lesson.images)
        return row_divergences(student, lesson.target, temperature=self.temperature).mean()

    def generator_optimizer(self, round: int) -> Optimizer:
        return Adam(self.generator_lr, (0.5, 0.999))

    def student_optimizer(self, round: int) -> Optimizer:
        return SGD(self.distil_lr, self.distil_momentum, self.distil_decay)

    # What the base says.

    def scored_state(self, server: Node[Any]) -> Scored | None:
        return self.base.scored_state(server.remembering(server.state.scored))

    @property
    def scored_kind(self) -> type[Scored]:
        return self.base.scored_kind

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        if isinstance(node.state, Tuned):
            node = node.remembering(node.state.scored)
        return self.base.predict(node, x)

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return [*unfit_images(server), *self.base.unfit(server, models)]

    @property
    def scores_own(self) -> bool:
        return self.base.scores_own

    @property
    def sends_examples(self) -> bool:
        return self.base.sends_examples

    @property
    def _base(self) -> Base:
        return cast(Base, self.base)
