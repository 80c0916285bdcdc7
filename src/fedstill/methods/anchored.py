"""Peers that share synthetic anchors before the rounds begin.

What DeSA does once: every peer makes a set of images that stands for its examples, and sets reach
all peers, averaged or side by side. What peers then do with them is a method's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

from torch import Tensor

from fedstill.core import (
    Exact,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Place,
    Positional,
    State,
    Step,
    Weights,
    at_clients,
)
from fedstill.core.content import LARGEST_INPUT, Axes, Length
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.core.records import Pictured
from fedstill.parts import augment, gossip, pixels
from fedstill.parts.anchors import Sets, over_holders
from fedstill.parts.augment import strategy_faults
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.generators import UNTRAINED, Untrained, unfit_images, untrained_set
from fedstill.parts.synthetic_sets import Start
from fedstill.parts.warm_up import plain_network, warmed_up

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
        """The anchors that this client has heard of so far, its own included."""
        return Sets(self.sets, self.classes)

    def knowing(self, known: Sets) -> Own:
        """The same memory with other anchors."""
        return self.replace(sets=known.images, classes=known.classes)


class Anchors(Message):
    """Synthetic sets by their makers, in the space that all share."""

    images: dict[str, Annotated[Tensor, Axes("held", "image", "input", high=LARGEST_INPUT)]]
    classes: dict[str, Annotated[Positional, Axes("held", below="class", rising=True)]]

    def pictures(self) -> Pictured | None:
        return self.sets().pictured()

    def sets(self) -> Sets:
        """The same as sets of their makers."""
        return Sets(self.images, self.classes)


class Sums(Message):
    """A peer's share in the mean over holders, as far as it has been mixed."""

    images: Annotated[Tensor, Axes("class", "image", "input")]  # of all classes; zero if not held
    held: Annotated[Exact, Axes("class")]  # 1 where held


@dataclass(frozen=True)
class Anchored(Method):
    """Peers that make anchors, share them once and remember them beside their own network.

    A class that a peer does not hold is averaged over its holders only.
    """

    scored: ClassVar[Place] = Place.CLIENTS
    moves_inputs: ClassVar[bool] = True

    anchors: Literal["synthesised", "generator"] = "synthesised"  # from data, or without data
    per_class: Count = 50
    steps: Count = 1000
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    augmentation: str = augment.DEFAULT
    synthesis_width: Count = 128  # width of the random ConvNets
    common_start: bool = True  # all sets start from the same noise, so that they can be averaged
    generator: Untrained = "style"
    generator_width: Count = 32
    # whose anchors a client uses: the mean of all, every set, its neighbours'
    combination: Literal["average", "union", "neighbour"] = "average"
    mix: Literal["once", "fastmix", "gossip", "flood"] = "once"  # how sets spread over the graph
    mix_steps: Count = 20  # number of exchanges, unless mix is once
    anchor_space: pixels.Space = "normalised"  # form in which anchors are averaged
    quantize_anchors: bool = False  # round anchors to eight bits, like image files

    def faults(self) -> Sequence[str]:
        ways = WAYS.get(self.combination, (self.mix,))
        wrong = f"mix = {self.mix!r}: {self.combination} sets are mixed by {' or '.join(ways)}"
        idle = [name for name in SHARING if getattr(self, name) != getattr(Anchored, name)]
        return [
            *([] if self.mix in ways else [wrong]),
            *strategy_faults("augmentation", self.augmentation),
            *(f"{name} = {getattr(self, name)!r}: anchors of a generator are the same for all, so "
              "no set is shared; leave it out" for name in idle if self.anchors == "generator"),
        ]  # fmt: skip

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return unfit_images(server) if self.anchors == "generator" else ()

    def unheard(self, graph: Mapping[NodeId, Sequence[NodeId]]) -> Sequence[str]:
        once = self.anchors == "synthesised" and self.mix == "once"
        if not once or self.combination != "average" or gossip.in_circles(graph):
            return ()
        # A mean over different peers for different clients: logits on it say nothing.
        return [
            "mix = 'once' averages what a peer hears, and in this topology not everybody hears "
            "everybody: use mix = 'fastmix', or combination = 'neighbour' or 'union'"
        ]

    def before(self) -> Sequence[Step]:
        if self.anchors == "generator":
            return [self.imagine]
        again = self.mix_steps - 1
        if self.mix in ("fastmix", "gossip"):
            return [self.synthesize, self.begin, *[self.blend] * again, self.settle]
        passing = [self.pass_on] * again if self.mix == "flood" else []
        return [self.synthesize, self.share, *passing, self.combine]

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        """The anchors that all peers share, where there is one set of them; else the node's own."""
        return node.state.known().pictures_at(node.id) if isinstance(node.state, Own) else {}

    def client_state(self, client: Node[Any]) -> Own:
        return Own(client.model.init(client.draw("weights", shared=True)), {}, {}, {}, {})

    @at_clients
    async def synthesize(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Make a set of anchors that stands for the own examples.

        Equation 3: from noise, matched under a fresh random ConvNet at each step.
        """
        matching = Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                            self.augmentation)  # fmt: skip
        network = plain_network(client.model, self.synthesis_width)
        start: Start = "common_noise" if self.common_start else "noise"
        made = await warmed_up(client, matching, start, self.per_class, network)
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
        joined = known.joined(sent.sets() for sent in inbox.values())
        client.state = client.state.knowing(joined)
        return Anchors(*joined.beyond(known))

    @at_clients
    def combine(self, client: Node[Own], inbox: Inbox[Anchors]) -> None:
        """Make the anchors of all that was heard: the mean over holders, or the union."""
        sets = client.state.known().joined(sent.sets() for sent in inbox.values())
        if self.combination == "average":
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

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        held = range(node.model.classes + 1)
        return {**super().axes(node, sender), "image": self.per_class, "held": held}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        why = super().wrong(node, sender, message)
        if why or not isinstance(message, Anchors):
            return why
        flood = self.mix == "flood"
        return message.sets().wrong(list(node.models) if flood else [sender], none=flood)

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
