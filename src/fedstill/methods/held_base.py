"""A base method held by another: its memory, its messages, and what it must say of itself.

For methods that play another one's steps, as fine-tuners do. The server's memory holds the base's
memory, a client's message holds the base's message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Protocol, Self, cast, runtime_checkable

from torch import Tensor

from fedstill.core import (
    SERVER,
    Addressed,
    Exact,
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
from fedstill.core.content import MOST, Axes
from fedstill.core.data import Plan
from fedstill.core.method import memory_of
from fedstill.core.records import Record
from fedstill.methods.fedavg import Own
from fedstill.parts.label_distribution import counts_table, dynamic_shares, label_distribution


class Tuned(State):
    """What the server remembers: the base's memory; each method adds its generators."""

    base: State
    shown: Weights | None  # the model that was taught, where it is scored and not sent on

    @property
    def weights(self) -> Weights:
        """Of the server's model."""
        held: Any = self.base
        return cast(Weights, held.weights)

    @property
    def scored(self) -> State:
        """The base's memory with the model that is scored."""
        return self.base if self.shown is None else self.base.replace(weights=self.shown)

    def taught(self, weights: Weights, *, feedback: bool, **own: Any) -> Self:
        """The same with other weights of the server's model, and changes of the own fields.

        Without feedback they are kept beside the base's, which clients go on from.
        """
        if not feedback:
            return self.replace(shown=weights, **own)
        return self.replace(base=self.base.replace(weights=weights), **own)


class Counted(Message):
    """What a client of the base sends, and how many examples of each label it used."""

    base: Message
    label_counts: Annotated[Exact, Axes("class", entries="whole", high=MOST)]


@runtime_checkable
class Base(Protocol):
    """What a method says that can be fine-tuned, beside what all do; FedAvg and its kin say it."""

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        """The network whose weights a party sends and hears; for the server, the one it keeps."""

    def plan(self, client: Node[Any]) -> Plan:
        """Which examples are in the batches of a client's round; asked again, the same."""

    def used(self, up: Any) -> int:
        """How many examples a client trained on in a round, repeats counted."""


def of_base(up: Any) -> Any:
    """What a client of the base sent."""
    return up.base if isinstance(up, Counted) else up


def by_label_counts(heard: Mapping[NodeId, Counted]) -> tuple[Tensor, Tensor]:
    """Dynamic weighting and label sampling, from the labels used in a round.

    τ_{i,y} = n_{i,y} / Σ_i n_{i,y} [client, class], and labels as often as clients used them.
    """
    counts = counts_table({client: up.label_counts for client, up in heard.items()})
    return dynamic_shares(counts), label_distribution(counts)


def around(base: Method, steps: Sequence[Step], *, alone: bool) -> Sequence[Step]:
    """A fine-tuner's broadcast, update and aggregate, which read and send what the base's do.

    Alone, clients hear nothing and remember what the base's server does.
    """
    told, trained, _ = base.each_round()
    broadcast, update, aggregate = steps
    sends = Counted if update.sends is Counted else trained.sends
    taught = aggregate.narrowed(reads=sends, sends=None, remembers=aggregate.remembers)
    if alone:
        memory = memory_of(base, Place.SERVER)
        return [update.narrowed(reads=None, sends=sends, remembers=memory), taught]
    return [
        broadcast.narrowed(reads=None, sends=told.sends, remembers=Tuned),
        update.narrowed(reads=trained.reads, sends=sends, remembers=trained.remembers),
        taught,
    ]


def held_kinds(base: Method) -> Sequence[type[Record]]:
    """The message and the memory of a base, which those of a fine-tuner hold."""
    kinds = (base.each_round()[1].sends, memory_of(base, Place.SERVER))
    return [kind for kind in kinds if kind is not None]


def first_memory(base: Method, server: Node[Any]) -> State:
    """What the base's server remembers at the start."""
    state = base.server_state(server)
    assert state is not None  # `unfit` refuses a base whose server remembers nothing
    return state


async def as_base(base: Method, place: int, server: Node[Any], inbox: Inbox[Any]) -> Any:
    """What a step of the base's rounds says at the server, played on the memory that ours holds."""
    inner = server.remembering(server.state.base)
    said = await base.each_round()[place].played(inner, inbox)
    if inner.state is not server.state.base:
        server.state = server.state.replace(base=inner.state)
    return said


async def played_alone(base: Method, client: Node[Any]) -> Message:
    """What a client sends after a round of the base in which it is the only one, and the server."""
    broadcast, update, aggregate = base.each_round()
    down = await broadcast.played(client, Inbox())
    if isinstance(down, Addressed):
        down = down[client.id]
    trainee = client.remembering(base.client_state(client))
    up = await update.played(trainee, Inbox({SERVER: down}))
    await aggregate.played(client, Inbox({client.id: up}))
    return cast(Message, up)


def unfit(base: Method, *, alone: bool = False) -> str | None:
    """Why a method cannot be the base of a fine-tuner, or of one that plays clients alone."""
    if base.scored is not Place.SERVER:
        return "its server keeps no model that could be taught"
    steps, memory = base.each_round(), memory_of(base, Place.SERVER)
    if memory is not None and issubclass(memory, Tuned):
        return "it fine-tunes another method itself; name that one"
    places = [step.place for step in steps]
    if base.before() or base.after() or places != [Place.SERVER, Place.CLIENTS, Place.SERVER]:
        return "its rounds are not broadcast, update, aggregate"
    if not _has_weights(steps[1].sends) or not _has_weights(memory):
        return "its clients send no weights, so there are no networks to learn from"
    if not isinstance(base, Base):
        return "it must say network_for, plan and used, as FedAvg does"
    # A model that is kept to be scored is the one that a client trains on from.
    if alone and steps[1].remembers not in (None, Own):
        return "its clients remember more than a model, so they cannot be played alone"
    return None


def _has_weights(kind: type[Message] | type[State] | None) -> bool:
    return kind is not None and "weights" in {f.name for f in fields(kind)}
