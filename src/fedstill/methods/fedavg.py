"""FedAvg: average the weights that clients reach from common initial weights.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Never

from torch import Tensor

from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Batches,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
    minimize,
    trees,
)
from fedstill.core.content import Amount
from fedstill.core.data import Plan
from fedstill.core.errors import BadValue
from fedstill.core.model import Network
from fedstill.core.optim import Clipped, Optimizer, rated
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Share, Whole
from fedstill.parts.class_balance import (
    UNSAFE,
    ClassWeights,
    Sampling,
    unfit_weights,
    weights_of,
)
from fedstill.parts.learning import TRAINING, Training, planned, private_training
from fedstill.parts.losses import task_loss
from fedstill.parts.robust import Aggregation, Rule
from fedstill.parts.views import Views, idle_shift, unfit_views, viewed


class Global(State):
    """What the server remembers."""

    weights: Weights


class Own(State):
    """What a client remembers where its own network is scored: where it came to last."""

    weights: Weights


class Down(Message):
    """The common start."""

    weights: Weights


class Up(Message):
    """Where a client came to, and how many examples it has."""

    weights: Weights
    examples: Amount


@dataclass(frozen=True)
class FedAvg(Method):
    """Local epochs of SGD from the global weights; the server takes the mean."""

    presets: ClassVar = {"small": {"lr": 0.1, "batch_size": 12}}

    lr: Positive = 0.01
    epochs: Count = 1
    round_steps: Count | None = None  # local steps per round, instead of epochs
    batch_size: Count = 32
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    rate_decay: Share = 1.0  # factor of the learning rate per round
    clip: Positive | None = None  # norm to which the gradient of a step is clipped
    weighting: Literal["examples", "uniform"] = "examples"
    class_weights: ClassWeights = "none"  # weights in the local loss: balanced, or one per class
    sampling: Sampling = "shuffled"  # local examples: each once an epoch, or class-balanced
    views: Views = "none"  # augmentation of images in local training
    shift: Count | None = None  # largest shift by views in pixels; none: an eighth of the side
    score_own: bool = False  # score clients' own models on their own test sets
    aggregation: Rule = "mean"  # others tolerate malicious clients, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates
    bound: Positive | None = None  # of norm_bound: largest norm of an update; none: the median norm

    keeps_own: ClassVar[bool] = True  # whether clients can

    @property
    def scores_own(self) -> bool:
        return self.score_own

    def faults(self) -> Sequence[str]:
        lost = self.score_own and not self.keeps_own
        return [
            *self.joining.faults(),
            *idle_shift(self.views, self.shift),
            *(["score_own: clients of this method remember something else; leave it out"]
              if lost else []),
        ]  # fmt: skip

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return [
            *unfit_views(self.views, server, self.shift),
            *unfit_weights(self.class_weights, server),
        ]

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.update, self.aggregate]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(server.model.init(server.draw("weights", shared=True)))

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the global weights to everybody awake."""
        return Down(server.state.weights)

    @at_clients
    async def update(self, client: Node[Own], inbox: Inbox[Down]) -> Up:
        """Train on local examples from the global weights."""
        weights, _ = await self.trained(client, inbox.only().weights)
        if self.score_own:
            client.state = Own(weights)
        return Up(weights, len(client.data))

    @at_server
    def aggregate(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Take the mean of the clients' weights."""
        ups = list(inbox.values())
        server.state = Global(self.averaged(server.state.weights, ups))

    async def trained(self, client: Node[Any], start: Weights) -> tuple[Weights, int]:
        """Weights after the local epochs, and the number of steps they took."""
        batches, mechanism = self.training(client, client.model, start)
        weights = await minimize(
            self.objective, client.model, start, batches, self.optimizer_in(client.round),
            mechanism=mechanism, start=start, **self.weighing(client),
        )  # fmt: skip
        return weights, len(batches)

    def training(self, client: Node[Any], model: Network, start: Weights) -> Training:
        """The batches of a client's round, private samples where its examples are private."""
        if not client.private:
            return Training(self.batches(client.anew(TRAINING)), None)
        if self.sampling == "balanced":
            raise BadValue(UNSAFE)
        return private_training(
            client, model, start, self.batch_size, epochs=self.epochs, steps=self.round_steps,
            views=self.views, shift=self.shift,
        )  # fmt: skip

    def batches(self, client: Node[Any]) -> Batches[Batch]:
        """The batches of a client's round."""
        return viewed(self.plan(client), self.views, client, shift=self.shift)

    def plan(self, client: Node[Any]) -> Plan:
        """Which examples are in the batches of a client's round."""
        return planned(
            client, self.batch_size, self.sampling, epochs=self.epochs, steps=self.round_steps
        )

    def weighing(self, client: Node[Any]) -> dict[str, Any]:
        """What the local loss is given besides: the weights of classes, where there are any."""
        found = weights_of(self.class_weights, client.data, client.model.classes)
        return trees.to(found, client.device)

    def told_uses(self, client: Node[Any]) -> Tensor:
        """[class], how many examples of each class a round uses, as others may know it."""
        if self.round_steps is not None:
            raise BadValue(
                "round_steps: which examples so many steps use is not told of private ones; give "
                "epochs instead"
            )
        return client.data.counts(client.model.classes) * self.epochs

    def objective(
        self,
        model: Model,
        weights: Weights,
        batch: Batch,
        start: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:
        """The local loss."""
        return task_loss(model(weights, batch.x), batch.y, class_weights)

    @property
    def optimizer(self) -> SGD | Adam:
        return SGD(self.lr, self.momentum, self.weight_decay)

    def optimizer_in(self, round: int) -> Optimizer:
        """How clients learn in a round: at a rate that has fallen, with gradients cut to length."""
        base: Optimizer = self.optimizer
        if self.rate_decay != 1:
            base = rated(replace(self.optimizer, lr=self.rate_in(round)))
        return base if self.clip is None else Clipped(base, self.clip)

    def rate_in(self, round: int) -> float:
        """The rate of a round; the first has the whole one."""
        return self.lr * self.rate_decay ** (round - 1)

    def network_for(self, node: Node[Any], who: NodeId) -> Model:
        return node.model

    def used(self, up: Up) -> int:
        """How many examples a client trained on in a round, repeats counted."""
        if self.round_steps is None or not up.examples:
            return self.epochs * up.examples
        passes, more = divmod(self.round_steps, self.in_a_pass(up.examples))
        return passes * up.examples + min(more * self.batch_size, up.examples)

    def in_a_pass(self, examples: int) -> int:
        """How many batches there are of so many examples."""
        return math.ceil(examples / self.batch_size)

    def averaged(self, start: Weights, ups: Sequence[Up]) -> Weights:
        """The mean of the clients' weights, or what a robust rule makes of them.

        The start itself where no client has examples: nobody has learnt.
        """
        shares = self.shares(ups)
        if not any(shares):
            return start
        return self.joining.joined([up.weights for up in ups], shares, start)

    @property
    def joining(self) -> Aggregation:
        return Aggregation(self.aggregation, self.byzantine, self.bound)

    def shares(self, ups: Sequence[Up]) -> list[float]:
        """Each client's weight in the mean: its number of examples, or one."""
        return [float(up.examples) if self.weighting == "examples" else 1.0 for up in ups]
