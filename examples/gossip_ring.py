"""Gossip SGD: peers without a server take means with their neighbours and train in between.

Koloskova, Loizou, Boreiri, Jaggi, Stich. A Unified Theory of Decentralized SGD with Changing
Topology and Local Updates. ICML 2020. Algorithm 1, with a momentum that every peer keeps, as in
Yu, Jin, Yang. On the Linear Speedup Analysis of Communication Efficient Momentum SGD. ICML 2019.

What it shows beside examples/new_method.py: clients speak to clients along a graph (`client.graph`,
`parts.gossip`), there is no server, and an optimiser's memory lasts longer than a round
(`minimize_further`).

    python examples/gossip_ring.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Never

from torch import Tensor
from torch.nn.functional import cross_entropy

import fedstill
from fedstill import (
    SGD,
    Batch,
    Complete,
    ConvNet,
    Execution,
    Experiment,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    Place,
    Population,
    Ring,
    State,
    Step,
    Weights,
    at_clients,
    minimize_further,
)
from fedstill.core import algebra
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.parts import gossip
from fedstill.parts.learning import training
from fedstill.testing import check


class Own(State):
    """What a peer remembers."""

    weights: Weights
    velocity: Weights  # of trainable parameters


class Said(Message):
    """Where a peer is."""

    weights: Weights


@dataclass(frozen=True)
class GossipSGD(Method):
    """Each round x ← W x over the graph, then local epochs of SGD from there."""

    scored: ClassVar[Place] = Place.CLIENTS
    presets: ClassVar = {"small": {"lr": 0.1, "batch_size": 12, "momentum": 0.5}}

    lr: Positive = 0.01
    momentum: Fraction = 0.9
    epochs: Count = 1
    batch_size: Count = 32

    @property
    def one_network(self) -> bool:
        return True  # weights are averaged, though clients' models are scored

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.learn]

    def client_state(self, client: Node[Any]) -> Own:
        weights = client.model.init(client.draw("weights", shared=True))
        return Own(weights, algebra.zeros(algebra.parameters(weights)))

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Said:
        """Send the weights to the neighbours."""
        return Said(client.state.weights)

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Said]) -> None:
        """Take the mean with the neighbours that are heard, and train from there."""
        heard = [said.weights for said in inbox.values()]
        mixing = gossip.mixing(client.graph, client.id)
        start = gossip.plain(client.state.weights, heard, mixing)
        batches, mechanism = training(
            client, client.model, start, self.batch_size, epochs=self.epochs
        )
        weights, velocity = await minimize_further(
            self.objective, client.model, start, client.state.velocity, batches,
            SGD(self.lr, self.momentum), mechanism=mechanism,
        )  # fmt: skip
        client.state = Own(weights, velocity)

    def objective(self, model: Model, weights: Weights, batch: Batch) -> Tensor:
        """The local loss."""
        return cross_entropy(model(weights, batch.x), batch.y)


def main() -> None:
    population = Population(fedstill.load("digits5"), partial(ConvNet, width=8))
    values = {"lr": 0.05, "epochs": 2, "momentum": 0.5}
    graphs = {"ring": Ring(1), "complete": Complete()}
    runs = [
        fedstill.run(
            Experiment(GossipSGD(**values), population, rounds=3, topology=topology),
            execution=Execution(device="cpu"),
            label=label,
        )
        for label, topology in graphs.items()
    ]
    # Of five peers each hears two in a ring, four in a complete graph, where all come closer to
    # one another: they do better on each other's test sets (inter) and worse on their own (local).
    print(fedstill.compare(runs).as_markdown())
    print(check(GossipSGD))


if __name__ == "__main__":
    main()
