"""DeSA: peers exchange synthetic anchors, then logits on them; no server, no shared weights.

Huang, Srinivas, Zhang, Li. Overcoming Data and Model Heterogeneities in Decentralized Federated
Learning via Synthetic Anchors. ICML 2024. Algorithm 1, equations 3 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor

from fedstill.core import (
    SGD,
    Batch,
    Inbox,
    Lazy,
    Message,
    Model,
    Node,
    NodeId,
    Step,
    Weights,
    at_clients,
    minimize,
    trees,
)
from fedstill.core.content import Axes
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count, NonNegative, Positive, Share, Whole
from fedstill.methods.anchored import COMMON, MEAN, Anchored, Own
from fedstill.parts import robust
from fedstill.parts.anchors import beside, stream
from fedstill.parts.class_balance import (
    UNSAFE,
    ClassWeights,
    Sampling,
    unfit_weights,
    weights_of,
)
from fedstill.parts.learning import Training, private_training
from fedstill.parts.losses import hinton, supervised_contrastive, task_loss
from fedstill.parts.opinions import mean_over_speakers, opinions
from fedstill.parts.passes import all_seen, features_at_rest
from fedstill.parts.robust import Aggregation, Rule


class Opinions(Message):
    """Logits on every set of anchors that the sender knows."""

    logits: dict[str, Annotated[Tensor, Axes("anchor", "class", empty=True)]]


class Draw(NamedTuple):
    """What one step of training sees."""

    own: Batch  # of own examples and anchors together
    distil: Batch  # of anchors, to learn from peers on
    teacher: Tensor  # [anchor, class], the peers' mean logits on them
    heard: Tensor  # [anchor], 1 where some peer spoke of it, else 0
    lean: Batch  # of anchors, to lean features on


def joined(own: Batch, beside: tuple[Any, ...]) -> Draw:
    """Examples and what stands beside them, as one step sees both."""
    return Draw(own, *beside)


@dataclass(frozen=True)
class DeSA(Anchored):
    """Peers share synthetic anchors once, and their logits on them in every round.

    How anchors are made and shared stands in `Anchored`. The defaults are those for digits. Where
    paper and released code differ the code is followed: sets are averaged, and distillation has a
    temperature, a share of cross-entropy and the mean over elements.
    """

    presets: ClassVar = {
        "office": {"per_class": 10, "real_batch": 32},
        "cifar10c": {"steps": 2000},
        "plain_kl": {"temperature": 1.0, "soft_share": 1.0, "kd_mean": "rows"},  # as printed
        "small": {
            "per_class": 2, "steps": 4, "real_batch": 8, "synthesis_width": 4,
            "generator_width": 4, "lr": 0.1, "batch_size": 12,
            "reg_weight": 0.1,  # more blows rounding errors up within four rounds
        },
    }  # fmt: skip

    lr: Positive = 0.01
    epochs: Count = 1
    batch_size: Count = 32
    class_weights: ClassWeights = "none"  # weights in the local loss: balanced, or one per class
    sampling: Sampling = "shuffled"  # examples and anchors: each once an epoch, or class-balanced
    anchor_batch: Whole = 0  # anchors per step, to distil and to contrast; none: batch_size
    reg_weight: NonNegative = 1.0  # λ_REG, weight of the contrast with the anchors' features
    reg_temperature: Positive = 0.07  # temperature of that contrast
    kd_weight: NonNegative = 1.0  # λ_KD, weight of distillation from the neighbours' mean logits
    temperature: Positive = 20.0
    soft_share: Share = 0.9  # share of the divergence; the rest is cross-entropy with labels
    # the divergence is a mean over all elements, or over rows
    kd_mean: Literal["elements", "rows"] = "elements"
    aggregation: Rule = "mean"  # rule for the peers' logits, see robust.md
    byzantine: Whole = 1  # malicious clients that the rule tolerates

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return [*super().unfit(server, models), *unfit_weights(self.class_weights, server)]

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.learn]

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Opinions:
        """Send logits on all anchors, of the network as it stands before this round's training."""
        anchors, weights = client.state.known().labelled(), client.state.weights
        logits = {name: opinions(client.model, weights, data) for name, data in anchors.items()}
        return Opinions(logits)

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Opinions]) -> None:
        """Train on own examples and anchors, leaning on anchors and on the peers' opinions."""
        if not client.private:
            batches, mechanism = Training(self.draws(client, inbox), None)
        else:
            batches, mechanism = self.private_draws(client, inbox)
        weights = await minimize(
            self.objective, client.model, client.state.weights, batches, SGD(self.lr),
            mechanism=mechanism, **self.weighing(client),
        )  # fmt: skip
        client.state = client.state.replace(weights=weights)

    def weighing(self, client: Node[Own]) -> dict[str, Any]:
        """What the local loss is given besides: weights of the classes of all it is taken on."""
        if self.class_weights == "none":
            return {}
        data = client.data
        if not client.private:  # private examples come without anchors
            data = data + client.state.known().together(client.model.shape, client.device)
        found = weights_of(self.class_weights, data, client.model.classes)
        return trees.to(found, client.device)

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Opinions):
            return why
        sets = set(message.logits)
        common = self.anchors == "generator" or self.combination == "average"
        known = {COMMON if self.anchors == "generator" else MEAN} if common else {*node.models}
        if strange := sorted(sets - known):  # who was away while sets were made has none
            return f"sent logits on {strange[0]!r}, which is none of the sets that are shared"
        most = self.per_class * node.model.classes
        for name, logits in message.logits.items():
            if len(logits) % self.per_class or len(logits) > most:
                return (
                    f"sent logits of {len(logits)} anchors of {name!r}; a set has "
                    f"{self.per_class} of each of up to {node.model.classes} classes"
                )
        return None

    def objective(
        self, model: Model, weights: Weights, batch: Draw, class_weights: Tensor | None = None
    ) -> Tensor:
        """Equation 7: cross-entropy + λ_REG · REG + λ_KD · KD."""
        distils = self.kd_weight and len(batch.distil.x)
        # Own features come to the anchors', not these to them.
        leaning = batch.lean.x if self.reg_weight else batch.lean.x[:0]
        if distils:
            features, own, told, lean = all_seen(
                model, weights, batch.own.x, batch.distil.x, leaning
            )
        else:
            features, own = model.both(weights, batch.own.x)
            lean = features_at_rest(model.train(), weights, leaning) if len(leaning) else leaning
        loss = task_loss(own, batch.own.y, class_weights)
        if len(leaning):
            rows, classes = torch.cat([features, lean]), torch.cat([batch.own.y, batch.lean.y])
            reg = supervised_contrastive(rows, classes, temperature=self.reg_temperature)
            loss = loss + self.reg_weight * reg
        if distils:
            kd = hinton(
                told, batch.teacher, batch.distil.y, weight=batch.heard,
                temperature=self.temperature, soft_share=self.soft_share, reduction=self.kd_mean,
            )  # fmt: skip
            loss = loss + self.kd_weight * kd
        return loss

    def draws(self, client: Node[Own], inbox: Inbox[Opinions]) -> Lazy[Draw]:
        """Epochs over own examples and anchors, beside two streams of anchors alone."""
        anchors = client.state.known().together(client.model.shape, client.device)
        teacher, heard = teachers(client, inbox, Aggregation(self.aggregation, self.byzantine))
        both = client.records + anchors
        draw = both.balanced_batches if self.sampling == "balanced" else both.batches
        plan = draw(self.batch_size, client.rng("order"), epochs=self.epochs)
        size = min(self.anchor_batch or self.batch_size, len(anchors))
        distil, lean = (
            stream(len(anchors), size, len(plan), client.rng(purpose)).to(client.device)
            for purpose in ("distil", "lean")
        )

        def make(own: Batch, step: int | slice) -> Draw:
            at = distil[step]
            return Draw(own, anchors.take(at), teacher[at], heard[at], anchors.take(lean[step]))

        return beside(plan, make)

    def private_draws(self, client: Node[Own], inbox: Inbox[Opinions]) -> Training:
        """Private samples of the own examples, each contrasted with anchors alone."""
        if self.sampling == "balanced":
            raise BadValue(UNSAFE)
        anchors = client.state.known().together(client.model.shape, client.device)
        teacher, heard = teachers(client, inbox, Aggregation(self.aggregation, self.byzantine))
        own = private_training(
            client, client.model, client.state.weights, self.batch_size, epochs=self.epochs
        )
        steps, size = len(own.batches), min(self.anchor_batch or self.batch_size, len(anchors))
        distil, lean = (
            stream(len(anchors), size, steps, client.rng(purpose)).to(client.device)
            for purpose in ("distil", "lean")
        )

        def make(examples: Batch, step: int) -> tuple[Batch, tuple[Any, ...]]:
            at = distil[step]
            shared = (anchors.take(at), teacher[at], heard[at], anchors.take(lean[step]))
            return examples, shared

        return own.beside(make, joined)


def teachers(
    client: Node[Own], inbox: Inbox[Opinions], how: Aggregation = robust.MEAN
) -> tuple[Tensor, Tensor]:
    """[anchor, class] the mean logits of the peers heard on each anchor; [anchor] 1 where any."""
    said = [peer.logits for peer in inbox.values()]
    # A peer that knows other classes, because mixing was cut short, is not comparable.
    sizes = {name: made.shape[0] * made.shape[1] for name, made in client.state.sets.items()}
    return mean_over_speakers(said, sizes, client.model.classes, client.device, how)
