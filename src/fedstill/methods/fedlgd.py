"""FedLGD: clients train on distilled data, regularised by a set distilled from their updates.

Huang, Jin, Zhao, Xu, Li. Federated Learning on Virtual Heterogeneous Data with Local-Global
Dataset Distillation. TMLR 2024. Algorithm 1, equations 1 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

import torch
from torch import Tensor

from fedstill.core import (
    SGD,
    Addressed,
    Batch,
    Change,
    Data,
    Inbox,
    Message,
    Model,
    Node,
    NodeId,
    Place,
    State,
    Step,
    Weights,
    algebra,
    at_clients,
    at_server,
    minimize,
)
from fedstill.core.content import LARGEST_INPUT, Axes, Layout, Length
from fedstill.core.ranges import Count, NonNegative, Positive, Whole
from fedstill.core.records import Pictured
from fedstill.methods import virtual
from fedstill.parts import controls, synthetic_sets
from fedstill.parts.drift import LocalUpdate, control_layout, first_control, held_near
from fedstill.parts.losses import Regulariser, drawn_towards, task_loss
from fedstill.parts.matching import GradientMatching, without_second_derivative
from fedstill.parts.robust import Aggregation, Rule


class Own(virtual.Own):
    """What a client remembers: its virtual set, the global one, its control."""

    anchors: Tensor  # [image, ...], sorted by class; none until heard
    control: Weights  # empty unless SCAFFOLD's step is taken


class Global(State):
    """What the server remembers."""

    weights: Weights
    anchors: Tensor  # [image, ...], sorted by class; none without refinement
    version: int  # of the anchors; 0 where there are none
    told: dict[str, int]  # which version each client has
    control: Weights


class Down(Message):
    """The common start; the global set where it changed since the hearer last heard it."""

    weights: Weights
    anchors: Annotated[Tensor, Axes("anchor", "input", high=LARGEST_INPUT)] | None
    control: Weights


class Up(Message):
    """Where a client came to, and how its control changed."""

    weights: Weights
    control: Change


@dataclass(frozen=True)
class FedLGD(virtual.Virtual):
    """Virtual's warm-up; then FedAvg on virtual sets, both sets refined in the rounds of τ.

    Counting rounds t from 0: the global set is refined at t = 0, 5, …, 50, local ones from 5 on.
    Without refinement there is no global set, and no regulariser either. The defaults are those
    for digits. Where paper and released code differ the code is followed: clients train on both
    sets in rounds of τ too, and means are uniform. The global set starts as the paper says.
    """

    scored: ClassVar[Place] = Place.SERVER
    presets: ClassVar = {
        "cifar10c": {"weight": 1.0}, "retina": {"weight": 0.1, "lr": 0.001},
        "released": {"start": "released_statistics", "global_start": "averaged_statistics",
                     "warm_up_network": "convnet"},
        "small": {"per_class": 3, "warm_up_steps": 4, "real_batch": 8, "global_per_class": 2,
                  "local_steps": 3, "global_steps": 3, "refine_every": 2, "lr": 0.1,
                  "batch_size": 12},
    }  # fmt: skip

    global_per_class: Count = 10  # images of each class in the global set
    global_start: Literal["noise", "averaged_statistics"] = "noise"  # noise, or clients' statistics
    local_steps: Count = 100  # steps in which a virtual set is refined
    global_steps: Count = 500  # steps in which the global set is refined
    global_lr: Positive = 1.0  # learning rate of the global set's pixels
    refine_every: Whole = 5  # rounds between refinements; 0: never
    refine_until: Whole = 50  # the last t of a refinement
    regulariser: Regulariser = "contrastive"  # term that pulls features to those of the global set
    weight: NonNegative = 10.0  # λ, weight of the regulariser
    temperature: Positive = 0.07
    lr: Positive = 0.01
    epochs: Count = 1
    batch_size: Count = 32
    local_update: LocalUpdate = "plain"  # plain, with FedProx's term, or with SCAFFOLD's controls
    mu: NonNegative = 0.01  # weight of FedProx's term, if local_update has it
    aggregation: Rule = "mean"  # rule for weights, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates
    bound: Positive | None = None  # of norm_bound: largest norm of an update; none: the median norm

    def faults(self) -> Sequence[str]:
        return [*super().faults(), *self.joining.faults()]

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return without_second_derivative(server)

    def before(self) -> Sequence[Step]:
        averaged = self.refine_every and self.global_start == "averaged_statistics"
        return [self.warm_up, self.describe, self.collect] if averaged else [self.warm_up]

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update, self.aggregate]

    def server_state(self, server: Node[Any]) -> Global:
        weights = server.model.init(server.draw("weights", shared=True))
        count = self.global_per_class * server.model.classes if self.refine_every else 0
        anchors = server.noise("anchors", count, *server.model.shape)
        control = first_control(self.local_update, weights)
        return Global(weights, anchors, int(count > 0), {}, control)

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        shown = dict(super().pictures(node))
        if isinstance(node.state, Own) and len(node.state.anchors):
            shown["global"] = synthetic_sets.sorted_by_class(node.state.anchors, node.model.classes)
        return shown

    @at_clients
    async def warm_up(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Distil the own examples under random networks."""
        made = await self.warmed(client)
        control = first_control(self.local_update, client.model.init(0))
        client.state = Own(*made, made.images.new_empty(0, *client.model.shape), control)

    @at_clients
    def describe(self, client: Node[Own], inbox: Inbox[Never]) -> virtual.Statistics | None:
        """Send means and deviations of the classes held."""
        return self.described(client)

    @at_server
    def collect(self, server: Node[Global], inbox: Inbox[virtual.Statistics]) -> None:
        """Start the global set from the statistics averaged over the holders of each class."""
        noise = server.state.anchors.reshape(server.model.classes, -1, *server.model.shape)
        sent = [(each.mean, each.std, each.classes) for each in inbox.values()]
        anchors = synthetic_sets.averaged_statistics(noise, sent).flatten(0, 1)
        server.state = server.state.replace(anchors=anchors)

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Addressed[Down]:
        """Send the weights to all, the global set to those who lack its latest version."""
        state = server.state
        plain = Down(state.weights, None, state.control)
        full = plain.replace(anchors=state.anchors)
        latest = {name: state.told.get(name, 0) == state.version for name in server.models}
        return Addressed({name: plain if has else full for name, has in latest.items()})

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up | None:
        """Refine the virtual set where due, then train on it and on the global set."""
        if not len(client.data):
            return None
        down, own = inbox.only(), client.state
        start, anchors = down.weights, own.anchors if down.anchors is None else down.anchors
        made, refining = own.as_set(), self.refines(client.round)
        if refining and client.round > 1:
            made = await self.matching(self.local_steps).matched(client, made, lambda _: start)
        (x, y), common = made.flat(), synthetic_sets.sorted_by_class(anchors, client.model.classes)
        both = Data.of(torch.cat([x, common.x]), torch.cat([y, common.y]))
        batches = both.batches(self.batch_size, client.rng("order"), epochs=self.epochs)
        # In rounds of τ the change of weights is to be a gradient of the cross-entropy alone.
        leaning = not refining and self.regulariser != "none" and self.weight > 0
        weights = await minimize(
            self.objective, client.model, start, batches, SGD(self.lr), start=start,
            drift=algebra.sub(down.control, own.control),
            anchors=common if leaning else Batch(common.x[:0], common.y[:0]),
        )  # fmt: skip
        change = controls.change(down.control, start, weights, len(batches), self.lr)
        client.state = Own(*made, anchors, algebra.add(own.control, change))
        return Up(weights, change)

    @at_server
    async def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean; in rounds of τ match the global set's gradient to the common change."""
        state, ups = server.state, list(inbox.values())
        mean = self.joining.joined([up.weights for up in ups], start=state.weights)
        told = {**state.told, **{name: state.version for name in inbox}}
        anchors, version = state.anchors, state.version
        if self.refines(server.round):
            matching = GradientMatching(self.global_steps, self.global_lr, self.pixel_momentum)
            common = synthetic_sets.sorted_by_class(anchors, server.model.classes)
            moved = await matching.towards(server.model, common, state.weights, mean, self.lr)
            anchors, version = moved.x, version + 1
        changes = [up.control for up in ups]
        control = controls.renewed(state.control, changes, len(server.models), self.joining.joined)
        server.state = Global(mean, anchors, version, told, control)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        model, known = node.model, super().axes(node, sender)
        count = self.global_per_class * model.classes if self.refine_every else 0
        return {**known, "channel": model.shape[0], "anchor": count}

    def layout(self, node: Node[Any], sender: NodeId, message: Message, field: str) -> Layout:
        wanted = super().layout(node, sender, message, field)
        return control_layout(self.local_update, wanted) if field == "control" else wanted

    def objective(
        self, model: Model, weights: Weights, batch: Batch, start: Weights, drift: Weights,
        anchors: Batch,
    ) -> Tensor:  # fmt: skip
        """Cross-entropy, plus λ times the regulariser that leans on the global set."""
        features, logits = model.both(weights, batch.x)
        loss = task_loss(logits, batch.y)
        if len(anchors.x):
            rows, lean = Batch(features, batch.y), model.features(weights, anchors.x)
            others, how = Batch(lean, anchors.y), self.regulariser
            loss = loss + self.weight * drawn_towards(rows, others, how, self.temperature)
        return held_near(loss, self.local_update, weights, start, drift, mu=self.mu)

    def refines(self, round: int) -> bool:
        """Whether a round, counted from 1, belongs to τ."""
        t = round - 1
        return bool(self.refine_every) and t % self.refine_every == 0 and t <= self.refine_until

    @property
    def joining(self) -> Aggregation:
        return Aggregation(self.aggregation, self.byzantine, self.bound)
