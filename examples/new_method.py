"""FedAvgM: FedAvg whose server keeps a momentum of the mean movement.

Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019.

A complete new method in one file, compared with FedAvg on the embedded digits, and held to the
contract that every method keeps:

    python examples/new_method.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import fedstill
from fedstill import (
    ConvNet,
    Execution,
    Experiment,
    FedAvg,
    Inbox,
    Node,
    Population,
    Weights,
    at_server,
)
from fedstill.core import algebra
from fedstill.core.ranges import Fraction, Positive
from fedstill.methods import fedavg
from fedstill.methods.fedavg import Up
from fedstill.testing import check


class Global(fedavg.Global):
    """What the server remembers."""

    velocity: Weights  # trainable parameters only


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """Clients as in FedAvg; the server moves by v ← β v + (w - mean), w ← w - η v."""

    server_momentum: Fraction = 0.9  # β
    server_lr: Positive = 1.0  # η

    def server_state(self, server: Node[Any]) -> Global:
        weights = super().server_state(server).weights
        return Global(weights, algebra.zeros(algebra.parameters(weights)))

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Move along the momentum of the clients' mean movement."""
        mean = self.averaged(server.state.weights, list(inbox.values()))
        start = algebra.parameters(server.state.weights)
        moved = algebra.sub(start, algebra.parameters(mean))
        velocity = algebra.add(moved, server.state.velocity, self.server_momentum)
        weights = {**mean, **algebra.add(start, velocity, -self.server_lr)}  # statistics: the mean
        server.state = Global(weights, velocity)


def main() -> None:
    population = Population(fedstill.load("digits5"), partial(ConvNet, width=8))
    values = {"lr": 0.05, "epochs": 2}
    methods = {
        "fedavg": FedAvg(**values),
        "fedavgm": FedAvgM(**values, server_momentum=0.5),
        "fedavgm-0": FedAvgM(**values, server_momentum=0.0),
    }
    runs = [
        fedstill.run(
            Experiment(method, population, rounds=3), execution=Execution(device="cpu"), label=label
        )
        for label, method in methods.items()
    ]
    # Without momentum the method is FedAvg up to rounding: the first and the last row agree, or
    # nearly so where an example lies on the edge.
    # Three rounds show that it runs, not which method is better.
    print(fedstill.compare(runs).as_markdown())
    # Its proof: engines agree, resuming is exact, the order of play does not matter, and so on.
    print(check(FedAvgM))


if __name__ == "__main__":
    main()
