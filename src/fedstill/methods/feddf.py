"""FedDF: the server distils all clients' networks into one student per architecture.

Lin, Kong, Stich, Jaggi. Ensemble Distillation for Robust Model Fusion in Federated Learning.
NeurIPS 2020. Algorithm 1 and its variant for several architectures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Never

from torch import Tensor

from fedstill.core import (
    Adam,
    Addressed,
    Batch,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    Place,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.optim import Scheduled
from fedstill.core.ranges import Count, Positive, Whole
from fedstill.methods.fedavg import FedAvg, Up
from fedstill.parts.losses import divergence
from fedstill.parts.opinions import mean_opinion, opinions


class Students(State):
    """What the server remembers."""

    weights: dict[str, Weights]  # by the first client of each architecture
    holders: tuple[str, ...]  # clients that have the latest student of their architecture


class Own(State):
    """What a client remembers: the student it received."""

    weights: Weights


class Student(Message):
    """The latest student of the hearer's architecture."""

    weights: Weights


@dataclass(frozen=True)
class FedDF(FedAvg):
    """FedAvg for each architecture, then distillation of everybody's mean logits on public data.

    Clients keep the student they receive at the end of a round, and it is scored. The last step
    is kept: without labels there is no set to choose an earlier one on.
    """

    scored: ClassVar[Place] = Place.CLIENTS
    needs_public: ClassVar[bool] = True
    keeps_own: ClassVar[bool] = False
    presets: ClassVar = {
        "paper": {"distil_steps": 10_000},
        "personal": {"average": False},
        "small": {
            "lr": 0.1, "batch_size": 12, "distil_steps": 6, "distil_lr": 0.01, "distil_batch": 10,
        },
    }  # fmt: skip

    distil_steps: Whole = 1000  # none leaves FedAvg
    distil_lr: Positive = 1e-3
    distil_batch: Count = 128
    average: bool = True  # average equal architectures; false: each network is its own student

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update, self.distil, self.adopt]

    def server_state(self, server: Node[Any]) -> Students:  # type: ignore[override]
        seed = server.draw("weights", shared=True)
        first = {kind: server.models[kind] for kind in self.kinds(server.models).values()}
        weights = {kind: model.on(server.device).init(seed) for kind, model in first.items()}
        return Students(weights, tuple(server.models))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)))

    @at_server
    def broadcast(self, server: Node[Students], inbox: Inbox[Never]) -> Addressed[Student]:
        """Send the students to those who were away when they were handed out."""
        away = [name for name in server.models if name not in server.state.holders]
        return self.handed_out(server, server.state.weights, away)

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Student]) -> Up:
        """Train on local examples from the latest student."""
        start = inbox.only().weights if inbox else client.state.weights
        weights, _ = await self.trained(client, start)
        return Up(weights, len(client.data))

    @at_server
    async def distil(self, server: Node[Students], inbox: Inbox[Up]) -> Addressed[Student]:
        """For each architecture take the mean and teach it what all participants say together."""
        kind_of, students = self.kinds(server.models), dict(server.state.weights)
        ensemble, renewed = self.ensemble(server, inbox), {kind_of[name]: None for name in inbox}
        for kind in renewed:
            ups = [up for name, up in inbox.items() if kind_of[name] == kind]
            mean = self.averaged(students[kind], ups)
            students[kind] = await self.taught(server, server.models[kind], mean, ensemble)
        still = [name for name in server.state.holders if kind_of[name] not in renewed]
        server.state = Students(students, (*still, *inbox))
        return self.handed_out(server, students, list(inbox))

    @at_clients
    def adopt(self, client: Node[Own], inbox: Inbox[Student]) -> None:
        """Replace the own weights by the distilled student's."""
        if inbox:
            client.state = Own(inbox.only().weights)

    def ensemble(self, server: Node[Students], inbox: Inbox[Up]) -> Tensor:
        """[example, class], the mean logits of all participants on the public data.

        A client without examples knows nothing of its own, and is asked only where all are so.
        """
        asked = {c: up for c, up in inbox.items() if up.examples} or inbox
        said = [opinions(server.models[c], up.weights, server.public) for c, up in asked.items()]
        return mean_opinion(said, self.joining)

    async def taught(
        self, server: Node[Students], model: Model, start: Weights, ensemble: Tensor
    ) -> Weights:
        """The student of an architecture after distillation from `start`."""
        order = server.rng("public order")
        batches = server.public.batches(self.distil_batch, order, steps=self.distil_steps)
        optimizer = Scheduled(Adam(self.distil_lr), self.distil_steps)
        return await minimize(self.distance, model, start, batches, optimizer, ensemble=ensemble)

    def distance(self, model: Model, weights: Weights, batch: Batch, ensemble: Tensor) -> Tensor:
        """AVGLOGITS: KL from the softmax of the mean logits to that of the student."""
        return divergence(model(weights, batch.x), ensemble[batch.y])

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return node.models[who]

    def kinds(self, models: Mapping[NodeId, Model]) -> dict[NodeId, NodeId]:
        """For each client the first one with its architecture; itself where nothing is averaged."""
        if not self.average:
            return {name: name for name in models}
        first: dict[Model, NodeId] = {}
        return {name: first.setdefault(model, name) for name, model in models.items()}

    def handed_out(
        self,
        server: Node[Students],
        students: Mapping[str, Weights],
        hearers: Sequence[NodeId],
    ) -> Addressed[Student]:
        """To each hearer the student of its architecture; one message for all who share it."""
        kind_of = self.kinds(server.models)
        said = {kind: Student(students[kind]) for kind in {kind_of[name] for name in hearers}}
        return Addressed({name: said[kind_of[name]] for name in hearers})
