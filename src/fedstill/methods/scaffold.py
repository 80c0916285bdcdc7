"""SCAFFOLD: control variates correct each client's drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning. ICML 2020. Algorithm 1, option II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Never

from torch import Tensor

from fedstill.core import (
    Batch,
    Change,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    State,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.content import Layout, trainable
from fedstill.core.ranges import Positive
from fedstill.core.records import is_buffer
from fedstill.methods import fedavg
from fedstill.methods.fedavg import FedAvg
from fedstill.parts import controls


class Global(fedavg.Global):
    """What the server remembers."""

    control: Weights  # trainable parameters only


class Own(State):
    """What a client remembers."""

    control: Weights


class Down(fedavg.Down):
    """The common start and the common control."""

    control: Weights


class Up(fedavg.Up):
    """Where a client came to, and how its control changed."""

    control: Change  # new minus old


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Local steps w ← w - lr · (g - c_i + c); controls start at zero and skip statistics."""

    keeps_own: ClassVar[bool] = False
    presets: ClassVar = {
        "niid_bench": {"correction": "step", "momentum": 0.9, "weight_decay": 1e-5,
                       "weighting": "examples", "epochs": 10, "batch_size": 64},
        "small": {"lr": 0.1, "batch_size": 12},
    }  # fmt: skip

    weighting: Literal["examples", "uniform"] = "uniform"
    server_lr: Positive = 1.0
    correction: Literal["gradient", "step"] = "gradient"  # what the controls correct

    def faults(self) -> Sequence[str]:
        wrong = list(super().faults())
        if self.correction == "gradient" and (self.momentum or self.weight_decay):
            wrong.append(
                "momentum and weight_decay must be 0: option II reads the gradient off the way; or "
                'use correction = "step", as NIID-Bench does'
            )
        return wrong

    def server_state(self, server: Node[Any]) -> Global:
        weights = super().server_state(server).weights
        return Global(weights, controls.fresh(weights))

    def client_state(self, client: Node[Any]) -> Own:
        return Own(controls.fresh(client.model.init(0)))

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the global weights and control to everybody awake."""
        return Down(server.state.weights, server.state.control)

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train with the corrected gradient, then renew the own control."""
        start, common = inbox.only().weights, inbox.only().control
        own = client.state.control
        batches, mechanism = self.training(client, client.model, start)
        drift = algebra.sub(common, own)
        optimizer, rate = self.optimizer_in(client.round), self.rate_in(client.round)
        if self.correction == "gradient":
            weights = await minimize(
                self.corrected, client.model, start, batches, optimizer,
                mechanism=mechanism, start=start, drift=drift, **self.weighing(client),
            )  # fmt: skip
        else:
            fallen = drift if rate == self.lr else algebra.scale(drift, rate / self.lr)
            weights = await minimize(
                self.uncorrected, client.model, start, batches, optimizer,
                project=self.moved_back, mechanism=mechanism, start=start, drift=fallen,
                **self.weighing(client),
            )  # fmt: skip
        change = controls.change(common, start, weights, len(batches), rate)
        client.state = Own(algebra.add(own, change))
        return Up(weights, len(client.data), change)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Move towards the mean of the weights; add the changes of control over all N clients.

        Statistics of norm layers are the mean itself: beyond it a variance could be negative.
        """
        ups = list(inbox.values())
        start, control = server.state.weights, server.state.control
        mean = self.averaged(start, ups)
        if self.server_lr != 1:
            moved = algebra.add(start, algebra.sub(mean, start), self.server_lr)
            mean = {name: mean[name] if is_buffer(name) else moved[name] for name in start}
        changes = [up.control for up in ups]
        control = controls.renewed(control, changes, len(server.models), self.joining.joined)
        server.state = Global(mean, control)

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        wanted = super().layout(node, sender, message, field)
        return trainable(wanted) if field == "control" else wanted

    def corrected(
        self, model: Model, weights: Weights, batch: Batch, start: Weights, drift: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The local loss plus (c - c_i) · w, whose gradient is the correction."""
        task = self.objective(model, weights, batch, start, class_weights)
        return task + controls.correction(drift, weights)

    def uncorrected(
        self, model: Model, weights: Weights, batch: Batch, start: Weights, drift: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The local loss alone."""
        return self.objective(model, weights, batch, start, class_weights)

    def moved_back(
        self, weights: Weights, start: Weights, drift: Weights, class_weights: Tensor | None = None
    ) -> Weights:
        """w - lr · (c - c_i) after a step of the optimiser, whose momentum knows nothing of it."""
        return {**weights, **{n: weights[n] - self.lr * way for n, way in drift.items()}}
