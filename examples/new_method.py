"""FedAvgM: FedAvg whose server keeps a momentum of the mean movement.

Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019.

A complete new method in one file, entered into the table of methods at run time and compared with
FedAvg on the embedded digits:

    python examples/new_method.py [folder]
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill import recipe as config
from fedstill.core import Inbox, Node, Weights, algebra, at_server
from fedstill.core.ranges import Fraction, Positive
from fedstill.methods import METHODS, fedavg
from fedstill.methods.fedavg import FedAvg, Up
from fedstill.report.tables import comparison
from fedstill.runs import recipes as runs


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
        ups = list(inbox.values())
        mean = algebra.mean([up.weights for up in ups], self.shares(ups))
        start = algebra.parameters(server.state.weights)
        moved = algebra.sub(start, algebra.parameters(mean))
        velocity = algebra.add(moved, server.state.velocity, self.server_momentum)
        weights = {**mean, **algebra.add(start, velocity, -self.server_lr)}  # statistics: the mean
        server.state = Global(weights, velocity)


TABLES = {
    "run": {"name": "fedavgm", "rounds": 3, "seed": 0, "device": "cpu", "pictures": False},
    "data": {"name": "digits5"},
    "models": {"name": "convnet", "width": 8},
    "method": [
        {"name": "fedavg", "lr": 0.05, "epochs": 2},
        {"name": "fedavgm", "lr": 0.05, "epochs": 2, "server_momentum": 0.5},
        {"name": "fedavgm", "label": "fedavgm-0", "lr": 0.05, "epochs": 2, "server_momentum": 0},
    ],
}


def main(out: Path) -> None:
    METHODS["fedavgm"] = FedAvgM
    pairs = runs.folders_for(config.checked(TABLES), [0], out)
    for recipe, folder in pairs:
        runs.begin(recipe, folder)
    # Without momentum the method is FedAvg up to rounding: the first and the last row agree, or
    # nearly so where an example lies on the edge.
    # Three rounds show that it runs, not which method is better.
    print(comparison([folder for _, folder in pairs]).as_markdown())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
