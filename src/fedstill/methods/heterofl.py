"""HeteroFL: weak clients train a narrow part of the network; the server averages over holders.

Diao, Ding, Tarokh. HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients. ICLR 2021. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

import torch
from torch import Tensor

from fedstill.core import (
    SERVER,
    Addressed,
    Batch,
    Exact,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    Step,
    Weights,
    at_clients,
    at_server,
    content,
    minimize,
)
from fedstill.core.content import Amount, Axes, Layout, presence
from fedstill.core.ranges import Whole
from fedstill.methods import fedavg
from fedstill.methods.fedavg import Down, FedAvg, Global, Up
from fedstill.parts import statistics, submodels
from fedstill.parts.losses import task_loss
from fedstill.parts.submodels import CLASSES, Scalable, SubModel


class Own(fedavg.Own):
    """What a client remembers where its model is scored: the part it trained last."""


class Trained(Up):
    """Where a client came to with its part."""

    held: Annotated[Exact, Axes("class", low=0, high=1)] | None  # 1 for what it has; only if asked


class Uncut(Down):
    """The whole network, to be looked at."""


class Measured(Message):
    """What the norm layers of the whole network see at a client."""

    statistics: Weights
    examples: Amount


@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """FedAvg where client i trains the first share R_i of the units of every hidden layer.

    R_i = (1/2)^min(σ, ⌊ρ·i/N⌋) for the i-th of N clients, unless `budgets` gives them in order.
    """

    presets: ClassVar = {
        "paper": {
            "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 5, "batch_size": 10,
            "masked": True, "weighting": "uniform", "norm_statistics": "clients",
        },
        # As the released code of DFRD averages the parts of all three methods.
        "dfrd": {"weighting": "uniform", "head_rows": "held", "round_steps": 20, "batch_size": 64},
        "small": {"lr": 0.1, "batch_size": 8, "rho": 2},  # widths 1, 1/2, 1/4 for three clients
    }  # fmt: skip

    rho: Whole = 5  # ρ, how fast budgets fall from client to client; 0: all are full
    sigma: Whole = 4  # σ, the narrowest budget is (1/2)^σ
    # share of each hidden layer for each client, in place of ρ and σ
    budgets: tuple[float, ...] = ()
    weighting: Literal["examples", "uniform", "width"] = "examples"  # type: ignore[assignment]
    scaler: bool = True  # in training, divide the output of a narrow layer by its share
    # zero the logits of classes a client lacks; do not average their rows
    masked: bool = False
    head_rows: Literal["all", "held"] = "all"  # classes whose rows of the head are averaged
    norm_statistics: Literal["batch", "clients"] = "batch"  # of static norms, in evaluation
    score_parts: bool = False  # score clients' submodels on their own test sets

    def faults(self) -> Sequence[str]:
        lines = submodels.budget_faults(self.budgets)
        if self.aggregation != "mean":
            lines.append(
                f"aggregation = {self.aggregation!r}: clients hold different parts of the network, "
                "of which only the mean over holders is defined; leave it out"
            )
        return [*super().faults(), *lines]

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        lines = [*super().unfit(server, models)]
        lines += submodels.unfit(server, models, self._budgets(len(models)))
        if self.norm_statistics == "clients" and getattr(server, "norm", None) != "static":
            lines.append('norm_statistics = "clients" is for networks with norm = "static"')
        return lines

    @property
    def scores_own(self) -> bool:
        return self.score_parts or self.score_own

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update, self.aggregate, *self.calibration()]

    def calibration(self) -> Sequence[Step]:
        """The steps that measure the statistics of static norm layers, or none."""
        wanted = self.norm_statistics == "clients"
        return [self.show, self.measure, self.calibrate] if wanted else []

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[Down]:
        """Send each client its part; one message for all who hold the same."""
        said: dict[float, Down] = {}
        rates = self.rates(server.models)
        for client, rate in rates.items():
            if rate not in said:
                said[rate] = Down(self.part(server, client))
        return Addressed({client: said[rate] for client, rate in rates.items()})

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Trained:
        """Train the part on local examples."""
        weights, _ = await self.trained(client, inbox.only().weights)
        if self.scores_own:
            client.state = Own(weights)
        rows = self.masked or self.head_rows == "held"
        return Trained(weights, len(client.data), submodels.held_mask(client) if rows else None)

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Trained]) -> None:
        """For each entry take the mean over those who hold it; what nobody holds stays."""
        parts = [self.placed(server, client, up) for client, up in inbox.items()]
        weights = submodels.cover(self.whole(server), server.state.weights, parts)
        server.state = server.state.replace(weights=weights)

    @at_server
    def show(self, server: Node[Global], inbox: Inbox[Never]) -> Uncut:
        """Send the whole network, to be looked at."""
        return Uncut(server.state.weights)

    @at_clients
    def measure(self, client: Node[Own], inbox: Inbox[Uncut]) -> Measured | None:
        """Measure what the norm layers of the whole network see in local examples."""
        if not len(client.data):
            return None
        weights = inbox.only().weights
        found = statistics.measured(client.model, weights, client.data, self.batch_size)
        return Measured(found, len(client.data))

    @at_server
    def calibrate(self, server: Node[Global], inbox: Inbox[Measured]) -> None:
        """Join the clients' statistics; the network is evaluated with them until it changes."""
        said = list(inbox.values())
        found = statistics.pooled([m.statistics for m in said], [float(m.examples) for m in said])
        server.state = server.state.replace(weights={**server.state.weights, **found})

    async def trained(self, client: Node[Any], start: Weights) -> tuple[Weights, int]:
        """A part after the local epochs, and the number of steps they took."""
        model, mask = (
            self.narrowed(client, client.id),
            submodels.held_mask(client) if self.masked else None,
        )
        batches, mechanism = self.training(client, model, start)
        weights = await minimize(
            self.objective, model, start, batches, self.optimizer_in(client.round),
            mechanism=mechanism, start=start, held=mask, **self.weighing(client),
        )  # fmt: skip
        return weights, len(batches)

    def objective(
        self,
        model: Model,
        weights: Weights,
        batch: Batch,
        start: Weights,
        class_weights: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """The local loss; the logits of classes that the client lacks are zero."""
        logits = model(weights, batch.x)
        return task_loss(logits if held is None else logits * held, batch.y, class_weights)

    def predict(self, node: Node[Any], x: Tensor) -> Tensor:
        model = node.model if node.id == SERVER else self.narrowed(node, node.id)
        return model(node.state.weights, x)

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return self.whole(node) if who == SERVER else self.narrowed(node, who)

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        if isinstance(message, Uncut):
            return content.layout(self.whole(node))
        if isinstance(message, Measured):
            return statistics.layout(self.whole(node))
        return super().layout(node, sender, message, field)

    def units(self, server: Node[Any], client: NodeId) -> submodels.Units:
        """The units that a client holds in this round: the first ones."""
        return submodels.first_units(self.narrowed(server, client))

    def part(self, server: Node[Any], client: NodeId) -> Weights:
        """What a client holds of the global weights in this round."""
        units = self.units(server, client)
        return submodels.extract(self.whole(server), server.state.weights, units)

    def placed(self, server: Node[Any], client: NodeId, up: Trained) -> SubModel:
        """A client's part with its place in the network; without rows of classes it lacks."""
        model, weights, units = self.whole(server), up.weights, dict(self.units(server, client))
        if up.held is not None:
            rows = {CLASSES: torch.nonzero(up.held).flatten().cpu()}
            weights, units = submodels.extract(model, weights, rows), {**units, **rows}
        rate = self.rates(server.models)[client]
        shares = {"examples": float(up.examples), "uniform": 1.0, "width": rate}
        return SubModel(weights, units, shares[self.weighting])

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        wanted = presence(message, Trained, held=self.masked or self.head_rows == "held")
        return super().wrong(node, sender, message) or wanted

    def rates(self, models: Mapping[NodeId, Model]) -> dict[NodeId, float]:
        """Each client's share of the units."""
        return dict(zip(models, self._budgets(len(models)), strict=True))

    def narrowed(self, node: Node[Any], client: NodeId) -> Scalable:
        """The network that a client trains."""
        rate = self.rates(node.models)[client]
        return self.whole(node).narrowed(rate, scaler=self.scaler)

    def whole(self, node: Node[Any]) -> Scalable:
        """The network of the server, which every node knows."""
        assert isinstance(node.model, Scalable)  # see unfit
        return node.model

    def _budgets(self, clients: int) -> Sequence[float]:
        halved = submodels.halved_rates(clients, rho=self.rho, sigma=self.sigma)
        return self.budgets or halved
