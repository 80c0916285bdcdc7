"""Clients that missed rounds go on from old weights, as in code that some papers released.

A script that keeps a model for each client, and copies the mean to the clients of a round only,
starts a client from the mean of the last round that it took part in. FedLGD's code for CIFAR-10-C
does so (Huang et al., TMLR 2024). fedstill's methods send everybody the latest weights; these two
send each client the weights that it would have there. docs/results.md says what they cost.

    python examples/stale_weights.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Never

import fedstill
from fedstill import (
    Addressed,
    ConvNet,
    Execution,
    Experiment,
    FedAvg,
    FedLGD,
    Inbox,
    Node,
    Population,
    Sample,
    Weights,
    at_server,
)
from fedstill.methods import fedavg, fedlgd
from fedstill.testing import check


class Global(fedavg.Global):
    """What the server remembers, and which weights each client has."""

    first: Weights
    last: dict[str, Weights]  # the mean of the last round of a client, if it had one


class Refined(fedlgd.Global):
    """The same for FedLGD."""

    first: Weights
    last: dict[str, Weights]


@dataclass(frozen=True)
class StaleFedAvg(FedAvg):
    """FedAvg whose clients start from the mean of the last round that they took part in."""

    def server_state(self, server: Node[Any]) -> Global:
        weights = super().server_state(server).weights
        return Global(weights, weights, {})

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[fedavg.Down]:
        """Send everybody awake the weights that it has already."""
        state = server.state
        starts = {name: state.last.get(name, state.first) for name in server.models}
        return Addressed({name: fedavg.Down(start) for name, start in starts.items()})

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[fedavg.Up]) -> None:
        """Take the mean, which clients of this round have from now on."""
        state = server.state
        mean = self.averaged(state.weights, list(inbox.values()))
        server.state = Global(mean, state.first, state.last | dict.fromkeys(inbox, mean))


@dataclass(frozen=True)
class StaleFedLGD(FedLGD):
    """FedLGD whose clients start from the mean of the last round that they took part in."""

    def server_state(self, server: Node[Any]) -> Refined:
        state = super().server_state(server)
        return Refined(**vars(state), first=state.weights, last={})

    @at_server
    def broadcast(self, server: Node[Refined], inbox: Inbox[Never]) -> Addressed[fedlgd.Down]:
        """Send everybody awake the weights that it has already, and the global set as FedLGD."""
        state, latest = server.state, super().broadcast(server, inbox)
        starts = {name: state.last.get(name, state.first) for name in latest}
        return Addressed({name: latest[name].replace(weights=w) for name, w in starts.items()})

    @at_server
    async def aggregate(self, server: Node[Refined], inbox: Inbox[fedlgd.Up]) -> None:
        """Take the mean, which clients of this round have from now on."""
        state = server.state
        await super().aggregate(server, inbox)
        mean = server.state.weights
        last = state.last | dict.fromkeys(inbox, mean)
        server.state = Refined(**vars(server.state), first=state.first, last=last)


def main() -> None:
    population = Population(fedstill.load("digits5"), partial(ConvNet, width=8))
    runs = [
        fedstill.run(
            Experiment(method, population, rounds=12, sampling=sampling),
            execution=Execution(device="cpu"),
            label=f"{type(method).__name__}, {sampling.share:.0%} of the clients",
        )
        for sampling in (Sample(share=1.0), Sample(share=0.4))
        for method in (FedAvg(lr=0.05), StaleFedAvg(lr=0.05))
    ]
    # With everybody in every round both are the same, bit for bit.
    print(fedstill.compare(runs).as_markdown())
    print(check(StaleFedAvg), check(StaleFedLGD), sep="\n")


if __name__ == "__main__":
    main()
