"""FedKD: a small student travels, and each client's own network and the student teach each other.

Wu, Wu, Lyu, Huang, Xie. Communication-Efficient Federated Learning via Knowledge Distillation.
Nature Communications 2022. The student's gradients travel uncompressed; that is a channel's affair.

What it shows beside examples/new_method.py: the server's network is another than the clients',
whose networks may differ too (`server_model`, `one_network`, `network_for`), and two networks are
trained in one loop (`Pair`).

    python examples/small_student.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

import fedstill
from fedstill import (
    AlexNet,
    Batch,
    ConvNet,
    Execution,
    Experiment,
    FedAvg,
    Inbox,
    Model,
    Node,
    NodeId,
    Population,
    Weights,
    at_clients,
    minimize,
)
from fedstill.core.ranges import NonNegative
from fedstill.methods.fedavg import Down, Own, Up
from fedstill.parts.losses import divergence, task_loss
from fedstill.parts.pairs import Pair
from fedstill.testing import check


@dataclass(frozen=True)
class FedKD(FedAvg):
    """The server's network is the student, averaged as in FedAvg; mentors stay with clients."""

    keeps_own: ClassVar[bool] = False  # clients remember their mentors

    mutual: NonNegative = 1.0  # weight of what mentor and student say of each other

    @property
    def one_network(self) -> bool:
        return False

    @property
    def scores_own(self) -> bool:
        return True  # mentors beside the student

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)))

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train mentor and student side by side, and send the student."""
        pair = Pair(client.model, client.server_model)
        start = pair.joined(client.state.weights, inbox.only().weights)
        batches, mechanism = self.training(client, pair, start)
        reached = await minimize(
            self.taught, pair, start, batches, self.optimizer_in(client.round),
            mechanism=mechanism, **self.weighing(client),
        )  # fmt: skip
        mentor, student = pair.apart(reached)
        client.state = Own(mentor)
        return Up(student, len(client.data))

    def taught(
        self, model: Pair, weights: Weights, batch: Batch, class_weights: Tensor | None = None
    ) -> Tensor:
        """Both task losses, and both divergences, which count the less the larger those are."""
        mentor, student = model(weights, batch.x)
        own = task_loss(mentor, batch.y, class_weights)
        tasks = own + task_loss(student, batch.y, class_weights)
        apart = divergence(student, mentor.detach()) + divergence(mentor, student.detach())
        return tasks + self.mutual * apart / tasks.detach()

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return node.server_model  # what travels, whoever sends it


def main() -> None:
    data, student = fedstill.load("digits5"), partial(ConvNet, width=4)
    first, second, *_ = (site.name for site in data.sites)
    mentors = {first: partial(AlexNet, width=16), second: partial(ConvNet, width=16)}
    apart = Population(data, partial(ConvNet, width=8), networks=mentors, server=student)
    values = {"lr": 0.05, "epochs": 2}
    experiments = {
        "fedavg": Experiment(FedAvg(**values), Population(data, student), rounds=3),
        "fedkd": Experiment(FedKD(**values), apart, rounds=3),
        "fedkd-0": Experiment(FedKD(**values, mutual=0.0), apart, rounds=3),
    }
    runs = [
        fedstill.run(experiment, execution=Execution(device="cpu"), label=label)
        for label, experiment in experiments.items()
    ]
    # Without teaching the student is FedAvg's up to rounding, whatever networks the mentors are,
    # and in each case the small network alone travels.
    print(fedstill.compare(runs).as_markdown())
    print(check(FedKD))


if __name__ == "__main__":
    main()
