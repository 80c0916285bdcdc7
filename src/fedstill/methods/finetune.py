"""Fine-tuning: another method's rounds, after each of which its server's model is taught.

How a base method and what is done after its `aggregate` are joined: which steps are played, what
travels and is remembered besides, and whose messages count. How the server's model is taught is
said by subclasses: see `generator_tuner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Never

from torch import Tensor

from fedstill.core import (
    SERVER,
    Addressed,
    Inbox,
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
from fedstill.core.ranges import Whole
from fedstill.core.records import extended, grown
from fedstill.methods.fedavg import FedAvg
from fedstill.parts.label_distribution import Counted, miscounted
from fedstill.parts.submodels import misfit

Role = Literal["fine_tune", "data_free"]
FEDAVG = FedAvg()  # the base where no other is named


@dataclass(frozen=True)
class FineTuner(Method):
    """A base method of the steps broadcast, update, aggregate, and distillation after the last.

    As `data_free`, nothing is averaged: clients train on from their own models, which only they
    overwrite, and the server's model learns from them alone.
    """

    uses_counts: ClassVar[bool] = True  # clients send how many examples of each label they used

    base: Method = FEDAVG
    role: Role = "fine_tune"
    iterations: Whole = 10  # turns of teaching in each round; none leaves the base

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
            weights, own = await self.taught(server, heard, weights, own)
        server.state = grown(held, self._memory, weights=weights, **own)

    def wrong(self, server: Node[Any], client: NodeId, up: Any) -> str | None:
        """Why nothing can be learnt from what a client sent, or None."""
        wrong = misfit(self.base.network_for(server, client), up.weights)
        if wrong or not self.uses_counts:
            return wrong
        used = self.base.used(up) if isinstance(self.base, FedAvg) else None
        return miscounted(up.label_counts, server.model.classes, used=used)

    # What a fine-tuner says of itself.

    @property
    def remembered(self) -> Mapping[str, Any]:
        """What the server remembers besides the base's memory: names and types."""
        return {}

    def beginning(self, server: Node[Any]) -> dict[str, Any]:
        """That memory at the start."""
        return {}

    async def taught(
        self, server: Node[Any], inbox: Inbox[Any], weights: Weights, own: dict[str, Any]
    ) -> tuple[Weights, dict[str, Any]]:
        """The server's weights and that memory, after lessons by those whose messages count."""
        raise TypeError(f"{type(self).__name__} must define taught()")

    # What the base says.

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        return self.base.predict(node, x)

    def network_for(self, server: Node[Any], who: NodeId) -> Model:
        return self.base.network_for(server, who)

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
