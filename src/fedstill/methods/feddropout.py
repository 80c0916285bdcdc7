"""Federated Dropout: every client trains a random part of the network, drawn each round.

Caldas, Konečný, McMahan, Talwalkar. Expanding the Reach of Federated Learning by Reducing Client
Resource Requirements. arXiv 1812.07210, 2018. Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Never

from fedstill.core import Addressed, Inbox, Node, NodeId, at_server, seeds
from fedstill.core.content import Seed
from fedstill.methods.fedavg import Down, Global
from fedstill.methods.heterofl import HeteroFL
from fedstill.parts import submodels


class Drawing(Global):
    """What the server remembers: the weights, and what this round's parts are drawn from."""

    seed: int


class Drawn(Down):
    """A client's part, and the seed that says which units it is."""

    seed: Seed


@dataclass(frozen=True)
class FedDropout(HeteroFL):
    """HeteroFL whose clients hold random units: one draw for each client, round and stream."""

    presets: ClassVar = {"small": {"lr": 0.1, "batch_size": 8, "rho": 2}}

    def server_state(self, server: Node[Any]) -> Drawing:
        return Drawing(super().server_state(server).weights, 0)

    @at_server
    def broadcast(self, server: Node[Drawing], inbox: Inbox[Never]) -> Addressed[Drawn]:
        """Draw a part for each client and send it."""
        server.state = server.state.replace(seed=server.draw("units"))
        return Addressed(
            {c: Drawn(self.part(server, c), self.seed(server, c)) for c in server.models}
        )

    def units(self, server: Node[Any], client: NodeId) -> submodels.Units:
        """A random subset of each stream's units."""
        rng = seeds.generator(self.seed(server, client))
        return submodels.random_units(self.narrowed(server, client), rng)

    def seed(self, server: Node[Drawing], client: NodeId) -> int:
        """What a client's units of this round are drawn from."""
        return seeds.draw(server.state.seed, client)
