"""Experiment: all that decides the outcome of a run, as objects; looks up no names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from fedstill.channels import Channel, TensorChannel
from fedstill.core import ranges, trees
from fedstill.core.errors import BadValue, unknown
from fedstill.core.method import Method, Place, steps_of
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Node
from fedstill.core.ranges import Count, Whole
from fedstill.core.records import NodeId
from fedstill.federation.clock import Clock
from fedstill.federation.population import Population
from fedstill.federation.private import misfits
from fedstill.federation.sampling import Everyone, Sample, Sampler
from fedstill.federation.topology import TOPOLOGIES, Complete, Graph, Star, Topology
from fedstill.metrics import ALWAYS, Metric, chosen
from fedstill.privacy.privacy import Privacy

BadMessages = Literal["stop", "leave_out"]
SUCH = {  # what may stand in a field, for whoever wrote something else
    "topology": "Ring(2)",
    "sampling": "Sample(share=0.1)",
    "channels": "[EightBit()]",
    "privacy": "Privacy(epsilon=4)",
    "clock": "Clock(speed=1e9, up=1e6)",
}
# Of a name: what tables of lines, files and the names of draws cannot hold.
UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
CROSSED = 30  # clients, up to which `auto` scores every model on every test set


@dataclass(frozen=True, eq=False)
class Experiment:
    """All that decides the outcome of a run.

        Experiment(FedAvg(lr=0.1), Population(data, ConvNet), rounds=20, seed=1)

    Without a `topology` clients are joined as the method needs: not at all (a star around the
    server), or everybody with everybody where clients speak to clients. `scores` says on which
    test sets clients' models are scored: every one (`cross`), their `own`, or, with `auto`, every
    one up to thirty clients. `channels` code messages on their way, in order, e.g.
    `channels=[TopK(share=0.1), EightBit()]`. What does not fit together is refused when the
    experiment is made.
    """

    method: Method
    population: Population
    rounds: Whole = field(default=10, kw_only=True)
    seed: Whole = field(default=0, kw_only=True)
    topology: Topology | None = field(default=None, kw_only=True)
    sampling: Sampler = field(default=Everyone(), kw_only=True)
    channels: Sequence[Channel] = field(default=(), kw_only=True)
    metrics: Sequence[str | Metric] = field(default=ALWAYS, kw_only=True)  # see fedstill.metrics
    evaluate_every: Count = field(default=1, kw_only=True)
    scores: Literal["auto", "cross", "own"] = field(default="auto", kw_only=True)
    bad_messages: BadMessages = field(default="stop", kw_only=True)
    privacy: Privacy | None = field(default=None, kw_only=True)  # of clients' records
    clock: Clock | None = field(default=None, kw_only=True)  # simulated time

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise BadValue(_no_method(self.method))
        if not isinstance(self.population, Population):
            kind = type(self.population).__name__
            raise BadValue(
                f"population must be a Population, not a {kind}; write Population(data, network)"
            )
        wrong = [*map(_with_example, ranges.faults(self))] or [*self._misfits()]
        chosen(self.metrics)
        if wrong:
            raise BadValue(wrong)

    @cached_property
    def graph(self) -> Graph:
        """Who is joined with whom."""
        topology = self.topology
        if topology is None:
            topology = Complete() if speaks_to_peers(self.method) else Star()
        return topology.graph(self.population.clients, self.seed)

    @property
    def scores_crosswise(self) -> bool:
        """Whether clients' models are scored on each other's test sets."""
        if self.scores == "auto":
            return len(self.population.clients) <= CROSSED
        return self.scores == "cross"

    @property
    def networks(self) -> set[Model]:
        """Every network that takes part."""
        return self.population.networks

    def awake(self, round: int) -> Sequence[NodeId]:
        """The clients that take part in a round."""
        return self.sampling.awake(round, self.population.clients, self.seed)

    def reader(self, node: NodeId, round: int) -> Node[Any]:
        """A party as others know it, who is to judge a message: without memory, data and draws."""
        population = self.population
        server = population.party(SERVER).model
        model = server if node == SERVER else population.models[node]
        return Node(
            node,
            round,
            None,
            model=model,
            public=population.public,
            models=population.models,
            server_model=server,
            graph=self.graph.neighbours,
        )

    def _misfits(self) -> Iterator[str]:
        """What does not fit together, each line with the field it begins with."""
        name, population = type(self.method).__name__, self.population
        if self.method.needs_public and not len(population.public):
            yield (
                f"public: {name} needs public data, but the population has none; give it some: "
                "Population(…, public=fedstill.unlabelled(x)), in a recipe a table [data.public]"
            )
        server = population.party(SERVER).model
        if self.method.moves_inputs:
            yield from self._unmoved(name)
        unfit = self.method.unfit(server, population.models)
        yield from (f"networks: {name}: {line}" for line in unfit)
        mixed = any(model != server for model in {*population.models.values()})
        if mixed and self.method.one_network and not unfit:
            yield (
                f"networks: {name} averages one network, but the clients' networks differ; give "
                "all clients the same one, or use a method for mixed networks"
            )
        yield from self._misfits_among_clients(name)
        if self.privacy is not None:
            yield from misfits(self.privacy, population)
        if self.clock is not None:
            yield from (f"clock: {line}" for line in self.clock.misfits(population.clients))
        yield from self._misfits_of_channels(name)

    def _unmoved(self, name: str) -> Iterator[str]:
        """Which networks pass no gradient on to their inputs, for a method that moves these."""
        cut = sorted({model.title for model in self.population.networks if not model.smooth})
        if cut:
            yield (
                f"networks: {name} makes examples by gradients, but no gradient reaches the inputs "
                f"of {', '.join(cut)}, as where tokens are looked up or numpy is asked"
            )

    def _misfits_among_clients(self, name: str) -> Iterator[str]:
        clients = len(self.population.clients)
        yield from map(_misnamed, filter(_is_misnamed, self.population.clients))
        if isinstance(self.topology, Star) and speaks_to_peers(self.method):
            others = ", ".join(sorted({*TOPOLOGIES} - {"star"}))
            yield f"topology: Star: {name} speaks from client to client; use one of {others}"
        elif self.topology is not None:
            try:
                unheard = self.method.unheard(self.graph.neighbours)
                yield from (f"topology: {name}: {line}" for line in unheard)
            except BadValue as error:
                yield from (f"topology: {line}" for line in error.faults)
        if isinstance(self.sampling, Sample) and self.sampling.wanted(clients) > clients:
            yield (
                f"sampling: count = {self.sampling.count}, but there are {clients} clients; "
                f"ask for at most {clients}"
            )

    def _misfits_of_channels(self, name: str) -> Iterator[str]:
        kinds = {step.sends for step in steps_of(self.method) if step.sends} | {*self.method.holds}
        sent = {field for kind in kinds for field in trees.field_names(kind)}
        for place, channel in enumerate(self.channels):
            if not isinstance(channel, Channel):
                yield (
                    f"channels[{place}]: {channel!r} is not a Channel, such as Half(); derive one "
                    "of your own from fedstill.channels.Channel or TensorChannel"
                )
            elif isinstance(channel, TensorChannel):
                strange = [field for field in channel.leave if field not in sent]
                yield from (
                    f"channels[{place}].leave: " + unknown(f"field of {name}'s messages", f, sent)
                    for f in strange
                )
                yield from self._behind(place, channel)

    def _behind(self, place: int, channel: TensorChannel) -> Iterator[str]:
        """Why a channel of differences cannot stand behind one that has coded them already."""
        first = next(
            (
                type(other).__name__
                for other in self.channels[:place]
                if isinstance(other, TensorChannel) and {*other.directions} & {*channel.directions}
            ),
            None,
        )
        if first is not None and (channel.of_change or channel.feedback):
            yield (
                f"channels[{place}]: {type(channel).__name__} codes differences, of which it finds "
                f"none behind {first}; let it come first, or give it of_change = false and "
                "feedback = false"
            )


def _is_misnamed(client: NodeId) -> bool:
    return not client or UNWRITABLE.search(client) is not None


def _misnamed(client: NodeId) -> str:
    """Why a client cannot have this name."""
    why = "holds what cannot be written, such as a line break" if client else "is empty"
    return f"clients: the name {client!r} {why}; give the client another"


def speaks_to_peers(method: Method) -> bool:
    """Whether some client step reads what a client step before it sends."""
    parts = (method.before(), method.each_round(), method.after())
    return any(
        earlier.place is Place.CLIENTS and later.place is Place.CLIENTS and later.reads is not None
        for steps in parts
        for earlier, later in pairwise(steps)
    )


def _with_example(fault: str) -> str:
    """A fault, with what may stand in a field that holds an object."""
    name = fault.partition(" = ")[0]
    return f"{fault}, such as {SUCH[name]}" if name in SUCH else fault


def _no_method(given: object) -> str:
    """What to write instead of what was given for a method."""
    made = given.__name__ if isinstance(given, type) and issubclass(given, Method) else "FedAvg"
    return f"method must be a Method, such as {made}(), not {given!r}; write {made}(…)"
