"""DeSA: peers agree through synthetic anchors; no server, no shared weights.

Huang, Srinivas, Zhang, Li. Overcoming Data and Model Heterogeneities in Decentralized Federated
Learning via Synthetic Anchors. ICML 2024. Algorithm 1, equations 3 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SGD,
    Batch,
    Inbox,
    Made,
    Message,
    Method,
    Model,
    Node,
    Place,
    Positional,
    State,
    Step,
    Weights,
    at_clients,
    minimize,
)
from fedstill.core.errors import BadValue
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Share
from fedstill.parts import augment, gossip, pixels
from fedstill.parts.anchors import Sets, beside, over_holders, stream
from fedstill.parts.generators import UNTRAINED, Untrained, untrained_set
from fedstill.parts.losses import hinton, supervised_contrastive
from fedstill.parts.opinions import mean_over_speakers, opinions
from fedstill.parts.synthesis import Matching, convnet_for, strategy_faults, warmed_up

MEAN = "mean of all"  # the name of the one set where sets are averaged
COMMON = "of one seed"  # the same where a generator makes it
WAYS = {"average": ("once", "fastmix", "gossip"), "union": ("once", "flood"),
        "neighbour": ("once",)}  # fmt: skip
SHARING = ("combination", "mix", "anchor_space", "quantize_anchors")  # values of how sets travel


class Own(State):
    """What a peer remembers; anchors are normalised as its own examples are."""

    weights: Weights
    sets: dict[str, Tensor]  # anchors by their maker, or averaged: [class, image, ...]
    classes: dict[str, Tensor]  # which classes: [class]
    sums: Weights  # while sets are being mixed: what is mixed now, and a step ago
    sums_before: Weights

    def known(self) -> Sets:
        """The anchors it has."""
        return Sets(self.sets, self.classes)

    def knowing(self, known: Sets) -> Own:
        """The same memory with other anchors."""
        return self.replace(sets=known.images, classes=known.classes)


class Anchors(Message):
    """Synthetic sets by their makers, in the space that all share."""

    images: dict[str, Tensor]  # [class, image, ...], of the classes the maker holds
    classes: dict[str, Positional]  # [class]


class Sums(Message):
    """A peer's share in the mean over holders, as far as it has been mixed."""

    images: Tensor  # [class, image, ...], of all classes; zero where not held
    held: Tensor  # [class], 1 where held


class Opinions(Message):
    """Logits on every set of anchors that the sender knows."""

    logits: dict[str, Tensor]  # [anchor, class]


class Draw(NamedTuple):
    """What one step of training sees."""

    own: Batch  # of own examples and anchors together
    distil: Batch  # of anchors, to learn from peers on
    teacher: Tensor  # [anchor, class], the peers' mean logits on them
    heard: Tensor  # [anchor], 1 where some peer spoke of it, else 0
    lean: Batch  # of anchors, to lean features on


@dataclass(frozen=True)
class DeSA(Method):
    """Peers share synthetic anchors once, and their logits on them in every round.

    The defaults are those for digits. Where paper and released code differ the code is followed:
    sets are averaged, and distillation has a temperature, a share of cross-entropy and the mean
    over elements. A class that a peer does not hold is averaged over its holders only.
    """

    scored: ClassVar[Place] = Place.CLIENTS
    presets: ClassVar = {
        "office": {"per_class": 10, "real_batch": 32},
        "cifar10c": {"steps": 2000},
        "plain_kl": {"temperature": 1.0, "soft_share": 1.0, "kd_mean": "rows"},  # as printed
    }

    anchors: Literal["synthesised", "generator"] = "synthesised"  # or VHL's, of nobody's data
    per_class: Count = 50
    steps: Count = 1000
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    augmentation: str = augment.DEFAULT
    synthesis_width: Count = 128  # of the random ConvNets
    generator: Untrained = "style"
    generator_width: Count = 32
    combination: Literal["average", "union", "neighbour"] = "average"
    mix: Literal["once", "fastmix", "gossip", "flood"] = "once"  # how sets reach all
    mix_steps: Count = 20  # exchanges, unless once
    anchor_space: pixels.Space = "normalised"  # in which sets are shared
    quantize_anchors: bool = False  # to eight bits, as if kept in image files
    lr: Positive = 0.01
    epochs: Count = 1
    batch_size: Count = 32
    reg_weight: NonNegative = 1.0  # λ_REG
    reg_temperature: Positive = 0.07
    kd_weight: NonNegative = 1.0  # λ_KD
    temperature: Positive = 20.0
    soft_share: Share = 0.9  # of the divergence; the rest is cross-entropy with the labels
    kd_mean: Literal["elements", "rows"] = "elements"

    def faults(self) -> Sequence[str]:
        ways = WAYS.get(self.combination, (self.mix,))
        wrong = f"mix = {self.mix!r}: {self.combination} sets are mixed by {' or '.join(ways)}"
        idle = [name for name in SHARING if getattr(self, name) != getattr(DeSA, name)]
        return [
            *([] if self.mix in ways else [wrong]),
            *strategy_faults("augmentation", self.augmentation),
            *(f"{name} = {getattr(self, name)!r}: anchors of a generator are the same for all, so "
              "no set is shared; leave it out" for name in idle if self.anchors == "generator"),
        ]  # fmt: skip

    def before(self) -> Sequence[Step]:
        if self.anchors == "generator":
            return [self.imagine]
        again = self.mix_steps - 1
        if self.mix in ("fastmix", "gossip"):
            return [self.synthesize, self.begin, *[self.blend] * again, self.settle]
        passing = [self.pass_on] * again if self.mix == "flood" else []
        return [self.synthesize, self.share, *passing, self.combine]

    def each_round(self) -> Sequence[Step]:
        return [self.speak, self.learn]

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)), {}, {}, {}, {})

    @at_clients
    async def synthesize(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Make a set of anchors that stands for the own examples.

        Equation 3: from noise, matched under a fresh random ConvNet at each step.
        """
        matching = Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                            self.augmentation)  # fmt: skip
        network = convnet_for(client.model, self.synthesis_width)
        made = await warmed_up(client, matching, "noise", self.per_class, network)
        images = pixels.given_away(client.data, made.images, self.anchor_space,
                                   eight_bits=self.quantize_anchors)  # fmt: skip
        client.state = client.state.knowing(Sets.of(client.id, images, made.classes))

    @at_clients
    def imagine(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Make the one set that everybody makes alike: the generator's seed is common knowledge."""
        kind, model = UNTRAINED[self.generator], client.model
        generator = kind(model.shape, model.classes, width=self.generator_width)
        seed = client.draw("anchors", shared=True)
        made = untrained_set(generator, seed, self.per_class, client.device)
        client.state = client.state.knowing(Sets.of(COMMON, made.images, made.classes))

    @at_clients
    def share(self, client: Node[Own], inbox: Inbox[Never]) -> Anchors:
        """Send the own set to the neighbours."""
        return Anchors(client.state.sets, client.state.classes)

    @at_clients
    def pass_on(self, client: Node[Own], inbox: Inbox[Anchors]) -> Anchors:
        """Keep the sets not known before, and send them on."""
        known = client.state.known()
        joined = known.joined(sets_heard(inbox))
        client.state = client.state.knowing(joined)
        return Anchors(*joined.beyond(known))

    @at_clients
    def combine(self, client: Node[Own], inbox: Inbox[Anchors]) -> None:
        """Make the anchors of all that was heard: the mean over holders, or the union."""
        sets = client.state.known().joined(sets_heard(inbox))
        if self.combination == "average":
            check_all_hear_all(client)
            sets = Sets.of(MEAN, *over_holders(sets.sums(client.model.classes), 0.5))
        client.state = client.state.knowing(self.received(client, sets))

    @at_clients
    def begin(self, client: Node[Own], inbox: Inbox[Never]) -> Sums:
        """Send the own set, zero for the classes not held."""
        sums = client.state.known().sums(client.model.classes)
        client.state = client.state.replace(sums=sums, sums_before=sums)
        return Sums(**sums)

    @at_clients
    def blend(self, client: Node[Own], inbox: Inbox[Sums]) -> Sums:
        """Mix with what the neighbours hold, and send it on."""
        client.state = self.blended(client, inbox)
        return Sums(**client.state.sums)

    @at_clients
    def settle(self, client: Node[Own], inbox: Inbox[Sums]) -> None:
        """Mix for the last time; the mean over holders is one mean divided by the other."""
        state = self.blended(client, inbox)
        # One holder among all makes 1/n; what is far below has not come through yet.
        least = 0.5 / max(1, len(client.models))
        sets = self.received(client, Sets.of(MEAN, *over_holders(state.sums, least)))
        client.state = state.knowing(sets).replace(sums={}, sums_before={})

    @at_clients
    def speak(self, client: Node[Own], inbox: Inbox[Never]) -> Opinions:
        """Send logits on all anchors, of the network as it stands before this round's training."""
        anchors, weights = client.state.known().labelled(), client.state.weights
        logits = {name: opinions(client.model, weights, data) for name, data in anchors.items()}
        return Opinions(logits)

    @at_clients
    async def learn(self, client: Node[Own], inbox: Inbox[Opinions]) -> None:
        """Train on own examples and anchors, leaning on anchors and on the peers' opinions."""
        weights = await minimize(
            self.objective, client.model, client.state.weights, self.draws(client, inbox),
            SGD(self.lr),
        )  # fmt: skip
        client.state = client.state.replace(weights=weights)

    def objective(self, model: Model, weights: Weights, batch: Draw) -> Tensor:
        """Equation 7: cross-entropy + λ_REG · REG + λ_KD · KD."""
        features, logits = model.both(weights, batch.own.x)
        loss = cross_entropy(logits, batch.own.y)
        quiet = model.learning()  # statistics of norm layers come from the first stream alone
        if self.reg_weight and len(batch.lean.x):
            with torch.no_grad():  # own features come to the anchors', not these to them
                lean = quiet.features(weights, batch.lean.x)
            rows, classes = torch.cat([features, lean]), torch.cat([batch.own.y, batch.lean.y])
            reg = supervised_contrastive(rows, classes, temperature=self.reg_temperature)
            loss = loss + self.reg_weight * reg
        if self.kd_weight and len(batch.distil.x):
            kd = hinton(
                quiet(weights, batch.distil.x), batch.teacher, batch.distil.y, weight=batch.heard,
                temperature=self.temperature, soft_share=self.soft_share, reduction=self.kd_mean,
            )  # fmt: skip
            loss = loss + self.kd_weight * kd
        return loss

    def draws(self, client: Node[Own], inbox: Inbox[Opinions]) -> Made[Draw]:
        """Epochs over own examples and anchors, beside two streams of anchors alone."""
        anchors = client.state.known().together(client.model.shape, client.device)
        teacher, heard = teachers(client, inbox)
        order = client.rng("order")
        plan = (client.data + anchors).batches(self.batch_size, order, epochs=self.epochs)
        size = min(self.batch_size, len(anchors))
        distil, lean = (
            stream(len(anchors), size, len(plan), client.rng(purpose)).to(client.device)
            for purpose in ("distil", "lean")
        )

        def make(own: Batch, step: int | slice) -> Draw:
            at = distil[step]
            return Draw(own, anchors.take(at), teacher[at], heard[at], anchors.take(lean[step]))

        return beside(plan, make)

    def blended(self, client: Node[Own], inbox: Inbox[Sums]) -> Own:
        """The memory after one step of mixing."""
        now, before = client.state.sums, client.state.sums_before
        heard = [sums.tensors() for sums in inbox.values()]
        weights = gossip.mixing(client.graph, client.id)
        if self.mix == "fastmix":
            mixed = gossip.fast(now, before, heard, weights)
        else:
            mixed = gossip.plain(now, heard, weights)
        return client.state.replace(sums=mixed, sums_before=now)

    def received(self, client: Node[Own], sets: Sets) -> Sets:
        """Sets as they were shared, normalised as the client's own examples."""
        return sets.mapped(lambda made: pixels.received(client.data, made, self.anchor_space))


def sets_heard(inbox: Inbox[Anchors]) -> list[Sets]:
    """The sets that each neighbour sent."""
    return [Sets(sent.images, sent.classes) for sent in inbox.values()]


def check_all_hear_all(client: Node[Own]) -> None:
    """Refuse a mean over different peers for different clients: logits on it say nothing."""
    if not gossip.all_hear_all(client.graph, client.id):
        raise BadValue(
            "mix = 'once' averages what a peer hears, and in this topology not everybody hears "
            "everybody: use mix = 'fastmix', or combination = 'neighbour' or 'union'"
        )


def teachers(client: Node[Own], inbox: Inbox[Opinions]) -> tuple[Tensor, Tensor]:
    """[anchor, class] the mean logits of the peers heard on each anchor; [anchor] 1 where any."""
    said = [peer.logits for peer in inbox.values()]
    # A peer that knows other classes, because mixing was cut short, is not comparable.
    sizes = {name: made.shape[0] * made.shape[1] for name, made in client.state.sets.items()}
    return mean_over_speakers(said, sizes, client.model.classes, client.device)
