"""Methods that break a promise where it is hard to see; `test_check` has them caught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstill.core import (
    Data,
    Inbox,
    Node,
    NodeId,
    State,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.content import Axes, Length
from fedstill.core.release import Use
from fedstill.methods.fedavg import Down, FedAvg, Global, Up


class OwnDice(FedAvg):
    """Draws from a generator of its own, which begins anywhere."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train from somewhere near the common start."""
        away = 1 + 1e-3 * float(np.random.default_rng().random())
        weights, _ = await self.trained(client, algebra.scale(inbox.only().weights, away))
        return Up(weights, len(client.data))


KEPT: dict[tuple[NodeId, int], Weights] = {}


class Elsewhere(FedAvg):
    """Keeps weights in a variable of its module, by round: in one process they are all there."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train from between the common start and where the client came to last."""
        start = inbox.only().weights
        last = KEPT.get((client.id, client.round - 1), start)
        weights, _ = await self.trained(client, algebra.mean([start, last]))
        KEPT[client.id, client.round] = weights
        return Up(weights, len(client.data))


class Neighbour(FedAvg):
    """Learns from the first client's examples too, of which it keeps hold."""

    first: ClassVar[list[Data]] = []

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train on the own and on the first client's examples."""
        if client.id == "c0":
            self.first[:] = [client.data]
        start, data = inbox.only().weights, sum(self.first, client.data)
        batches = data.batches(self.batch_size, client.rng("order"))
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer, start=start
        )
        return Up(weights, len(client.data))


class Pooled(FedAvg):
    """Learns from all that lies in the pool of its own examples."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train on everybody's examples."""
        data = client.data.parts[0].pool.all() if len(client.data) else client.data
        start, batches = inbox.only().weights, data.batches(self.batch_size, client.rng("order"))
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer, start=start
        )
        return Up(weights, len(client.data))


class Relabelling(FedAvg):
    """Writes into the labels of its examples."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train, and take every example for one of the second class from now on."""
        weights, _ = await self.trained(client, inbox.only().weights)
        for pool, rows in client.data.parts:
            pool.labels[rows] = 1
        return Up(weights, len(client.data))


class Popping(FedAvg):
    """Takes the head out of what it received."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train with a bias of zero."""
        start = inbox.only().weights
        start.pop("head.bias", None)
        bias = torch.zeros(client.model.classes)
        weights, _ = await self.trained(client, {**start, "head.bias": bias})
        return Up(weights, len(client.data))


class Partial(FedAvg):
    """Sends a part of its network and does not say so."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train, and keep the head."""
        weights, _ = await self.trained(client, inbox.only().weights)
        shared = {n: w for n, w in weights.items() if n not in client.model.head_names}
        return Up(shared, len(client.data))


class Own(State):
    """What a client remembers."""

    rounds: Tensor


class Adding(FedAvg):
    """Adds to its memory in place."""

    def client_state(self, client: Node[Any]) -> Own:
        return Own(torch.zeros(1))

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train, and count."""
        client.state.rounds.add_(1)
        weights, _ = await self.trained(client, inbox.only().weights)
        return Up(weights, len(client.data))


class Shown(Up):
    """Where a client came to, and something as long as an example."""

    more: Annotated[Tensor, Axes("pixel")]


class Telling(FedAvg):
    """Sends one example as a vector."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Shown:
        """Train, and tell more."""
        weights, _ = await self.trained(client, inbox.only().weights)
        told = self.told(client) if len(client.data) else torch.zeros(64)
        return Shown(weights, len(client.data), told.flatten())

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Shown]) -> None:
        """Take the mean of the clients' weights."""
        server.state = Global(self.averaged(server.state.weights, list(inbox.values())))

    def told(self, client: Node[None]) -> Tensor:
        return client.data.all().x[0]

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        return {**super().axes(node, sender), "pixel": 64}


class Exact(Telling):
    """Tells the ledger that it uses records, and sends their mean as it is."""

    def told(self, client: Node[None]) -> Tensor:
        return client.spend(Use("mean")).all().x.mean(0)


class ThroughNoise(Telling):
    """Sends a mean as it is that a network saw which was trained with noise in the same step."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Shown:
        """Train, and tell the mean of features."""
        weights, _ = await self.trained(client, inbox.only().weights)
        data = client.spend(Use("mean"))
        if not len(data):
            return Shown(weights, 0, torch.zeros(64))
        seen = client.model.features(weights, data.all().x).mean(0).repeat(64)
        return Shown(weights, len(client.data), seen[:64])


class Seen(State):
    """What a client remembers of its examples."""

    mean: Tensor


class InTheNextRound(Telling):
    """Sends in a round the mean that it took in the round before."""

    def client_state(self, client: Node[Any]) -> Seen:
        return Seen(torch.zeros(64))

    @at_clients
    async def update(self, client: Node[Seen], inbox: Inbox[Down]) -> Shown:
        """Train, and tell what was remembered."""
        weights, _ = await self.trained(client, inbox.only().weights)
        told, data = client.state.mean, client.spend(Use("mean"))
        client.state = Seen(data.all().x.mean(0).flatten() if len(data) else told)
        return Shown(weights, len(client.data), told)


class Logging(FedAvg):
    """Logs the mean of its examples as it is."""

    @at_clients
    async def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Train, and log how bright images are."""
        weights, _ = await self.trained(client, inbox.only().weights)
        data = client.spend(Use("mean"))
        client.log(brightness=data.all().x.mean() if len(data) else 0.0)
        return Up(weights, len(client.data))


class Bare(FedAvg):
    """Trains on private samples without the mechanism that came with them."""

    async def trained(self, client: Node[Any], start: Weights) -> tuple[Weights, int]:
        batches, _ = self.training(client, client.model, start)
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer, start=start
        )
        return weights, len(batches)


class Unsealing(Telling):
    """Opens what is sealed, past the ledger."""

    def told(self, client: Node[None]) -> Tensor:
        return client._records.all().x[0] if client.private else torch.zeros(64)


class Noisy(Telling):
    """Adds the noise that it should: nothing is wrong with it."""

    def told(self, client: Node[None]) -> Tensor:
        data, terms = client.spend(Use("mean")), client.privacy
        x = data.all().x.flatten(1)
        if terms is None:
            return x.mean(0)
        clipped = x * (terms.clip / x.norm(dim=1, keepdim=True)).clamp(max=1)
        noise = client.secret("mean").normal(torch.empty(64))
        return (clipped.sum(0) + terms.sigma * terms.clip * noise) / len(data)
