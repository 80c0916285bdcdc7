"""FedPer and FedBN: some layers stay with their clients, and only the others travel.

Arivazhagan, Aggarwal, Singh, Choudhary. Federated Learning with Personalization Layers. 2019.
Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization. ICLR 2021.

What it shows beside examples/new_method.py: a part of a network travels (`layout`), clients keep a
memory and their own models are scored, weights are told apart as head, norm layers and the rest.

    python examples/personal_layers.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import fedstill
from fedstill import (
    ConvNet,
    Execution,
    Experiment,
    FedAvg,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    Place,
    Population,
    Weights,
    at_clients,
)
from fedstill.core.content import Layout
from fedstill.methods.fedavg import Down, Global, Own, Up
from fedstill.testing import check


@dataclass(frozen=True)
class Personal(FedAvg):
    """FedAvg over all layers but personal ones, which each client keeps and trains."""

    scored: ClassVar[Place] = Place.CLIENTS  # there is no common model
    keeps_own: ClassVar[bool] = False  # clients remember their own anyhow

    personal: Literal["head", "norms", "none"] = "head"

    @property
    def one_network(self) -> bool:
        return True  # weights are averaged, though clients' models are scored

    def server_state(self, server: Node[Any]) -> Global:
        return Global(self.shared(server.model, super().server_state(server).weights))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)))

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train everything, from the common layers and the own ones."""
        start = {**client.state.weights, **inbox.only().weights}
        weights, _ = await self.trained(client, start)
        client.state = Own(weights)
        return Up(self.shared(client.model, weights), len(client.data))

    def shared(self, model: Model, weights: Weights) -> Weights:
        """The weights that travel."""
        return {name: w for name, w in weights.items() if name not in self.own_names(model)}

    def own_names(self, model: Model) -> tuple[str | None, ...]:
        """The names of the weights that stay."""
        return {"head": model.head_names, "norms": model.norm_names, "none": ()}[self.personal]

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        whole = super().layout(node, sender, message, field)
        stay = self.own_names(self.network_for(node, sender))
        return {name: kind for name, kind in whole.items() if name not in stay}


def main() -> None:
    population = Population(fedstill.load("digits5"), partial(ConvNet, width=8))
    values = {"lr": 0.05, "epochs": 2}
    methods = {
        "fedavg": FedAvg(**values, score_own=True),
        "none": Personal(**values, personal="none"),
        "head": Personal(**values, personal="head"),
        "norms": Personal(**values, personal="norms"),
    }
    runs = [
        fedstill.run(
            Experiment(method, population, rounds=3), execution=Execution(device="cpu"), label=label
        )
        for label, method in methods.items()
    ]
    # Without personal layers the clients are FedAvg's, bit for bit; with them less travels.
    print(fedstill.compare(runs).as_markdown())
    print(check(Personal))


if __name__ == "__main__":
    main()
