"""FedDualMatch: FedDM that matches layers from the deepest on, and gradients on the server.

Heterogeneous Federated Learning: A Dual Matching Dataset Distillation Approach. Anonymous
submission, no public code. Algorithm 1, equations 2 to 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Never

from fedstill.core import (
    SGD,
    Adam,
    Batch,
    Inbox,
    Message,
    Method,
    Model,
    Node,
    NodeId,
    Schedule,
    State,
    Step,
    Weights,
    at_clients,
    at_server,
)
from fedstill.core.content import LARGEST, Inputs, Labels, Length, presence
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range, Whole
from fedstill.core.records import Pictured
from fedstill.parts import augment, balls
from fedstill.parts.augment import strategy_faults
from fedstill.parts.distribution_matching import Matching, Outputs
from fedstill.parts.fine_tuning import Ball, FineTuning, Weighted
from fedstill.parts.matching import (
    GradientMatching,
    distance,
    grad,
    gradient_spread,
    loss_on,
    union,
    without_second_derivative,
)
from fedstill.parts.robust import Aggregation
from fedstill.parts.sent_sets import believed_sets, image_weights, images_sent, stands_for
from fedstill.parts.synthetic_sets import Standing, from_noise, from_real, held_classes


class Global(State):
    """What the server remembers."""

    weights: Weights
    radius: float


class Down(Message):
    """The centre and the radius of this round's ball."""

    weights: Weights
    radius: Annotated[float, Range(0, LARGEST)]


class Up(Message):
    """Images of the classes a client holds, sorted by class."""

    images: Inputs
    labels: Labels
    counts: Standing | None = None  # examples that an image stands for; only if asked for

    def pictures(self) -> Pictured:
        return self.images, self.labels


@dataclass(frozen=True)
class FedDualMatch(Method):
    """Deep-first matching on clients, gradient matching and fine-tuning on the server.

    Round t's radius needs round t's sets, so clients work with the radius of the round before.
    The paper leaves much open; what it does not say is as in FedDM or in gradient matching: ten
    images per class, augmentation, momentum of the images, a fresh network at every step. Its
    steps are read as divided over the layers (or `sweep`), T_g as epochs of Adam (or `tune_steps`),
    η in the radius as 1, which on images is more than `first_radius` allows: the ball is then
    FedDM's. With preset `theory` η is the rate of fine-tuning, as in the proofs, and the radius
    follows the data.
    """

    moves_inputs: ClassVar[bool] = True
    presets: ClassVar = {
        "sgd": {"tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9},
        "best": {"tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9},  # on held-out data
        "interleaved": {"interleave": True},
        "iterations": {"tune_steps": 500},
        "sweep": {"sweep": True},
        "theory": {"radius_lr": 1e-3, "lowest_radius": 0.0, "tune_within": "ball"},
        "feddm_server": {
            "tuning": "sgd", "tune_lr": 0.01, "tune_momentum": 0.9, "tune_weight_decay": 5e-4,
            "tune_fall": "cosine", "tune_within": "first_ball",
        },
        "small": {
            "per_class": 2, "steps": 4, "real_batch": 8, "samplings": 2, "sampling_steps": 2,
            "tune_epochs": 6, "tune_batch": 8, "tune_lr": 0.05,
        },
    }  # fmt: skip

    per_class: Count = 10
    least_examples: Count = 1  # fewest examples of a class for which a client sends images
    steps: Count = 200
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    start: Literal["noise", "real"] = "noise"
    outputs: Outputs = "stages"
    # between means of features: the norm, or its square
    distance: Literal["norm", "squared"] = "norm"
    deep_first: bool = True  # match the deepest layer first, then one more at a time
    sweep: bool = False  # every step goes from the deepest layer to all, an update for each
    augmentation: str = augment.DEFAULT
    networks: Literal["step", "round"] = "step"  # draw a network at every step, or once a round
    client_weight: Literal["uniform", "examples"] = "uniform"  # of images in fine-tuning
    first_radius: Positive = 5.0  # radius of the ball in the first round, and its upper bound
    radius_lr: Positive = 1.0  # η, factor from the gap of gradients to the radius
    lowest_radius: NonNegative = 1e-3  # lower bound of the radius
    highest_radius: Positive | None = None  # upper bound of the radius; none: first_radius
    samplings: Whole = 10  # M, networks for gradient matching; 0 turns it off
    sampling_steps: Count = 10  # steps on the images for each network drawn
    sampling_lr: Positive = 0.1  # learning rate of the images in gradient matching
    tuning: Literal["adam", "sgd"] = "adam"  # the optimiser of fine-tuning
    tune_epochs: Count = 500
    tune_steps: Whole = 0  # number of batches instead of tune_epochs; none: use epochs
    tune_batch: Count = 256
    tune_lr: Positive = 1e-3
    tune_momentum: Fraction = 0.0
    tune_weight_decay: NonNegative = 0.0
    tune_fall: Schedule = "constant"  # schedule of the rate in each fine-tuning
    tune_within: Literal["anywhere", "ball", "first_ball"] = "anywhere"  # where fine-tuning is kept
    tune_augmentation: str = augment.DEFAULT
    interleave: bool = False  # fine-tune within the samplings instead of after them
    aggregation: Literal["mean", "multi_krum"] = "mean"  # multi_krum drops sets unlike the others
    byzantine: Whole = 1  # malicious clients that multi_krum tolerates

    @property
    def begins_with_examples(self) -> bool:
        return self.start == "real"

    def faults(self) -> Sequence[str]:
        return [
            *strategy_faults("augmentation", self.augmentation),
            *strategy_faults("tune_augmentation", self.tune_augmentation),
            *(["sweep needs deep_first"] if self.sweep and not self.deep_first else []),
            *(["interleave needs samplings"] if self.interleave and not self.samplings else []),
            *(["lowest_radius must be at most first_radius"]
              if self.lowest_radius > self.first_radius else []),
            *(["highest_radius must be at least lowest_radius"]
              if self.highest_radius is not None and self.highest_radius < self.lowest_radius
              else []),
        ]  # fmt: skip

    def unfit(self, server: Model, models: Mapping[NodeId, Model]) -> Sequence[str]:
        return without_second_derivative(server) if self.samplings else ()

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.synthesize, self.train]

    def server_state(self, server: Node[Any]) -> Global:
        weights = server.model.init(server.draw("weights", shared=True))
        return Global(weights, self.first_radius)

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        return {**super().axes(node, sender), **images_sent(node.model, self.per_class)}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        wanted = presence(message, Up, counts=self.client_weight == "examples")
        return super().wrong(node, sender, message) or wanted

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the weights and the radius."""
        return Down(server.state.weights, server.state.radius)

    @at_clients
    async def synthesize(self, client: Node[None], inbox: Inbox[Down]) -> Up | None:
        """Match class means of the layers, deepest first, under networks of the ball."""
        down, classes = inbox.only(), held_classes(client, self.least_examples)
        if not classes:
            return None
        fill = from_noise if self.start == "noise" else from_real
        matching = Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                            self.augmentation, self.outputs, self.distance,
                            self.deep_first, self.sweep)  # fmt: skip
        start = fill(client, classes, self.per_class)
        networks = balls.networks(client, down.weights, down.radius)
        if self.networks == "round":
            networks = balls.always(networks(0))
        images, labels = (await matching.matched(client, start, networks)).flat()
        if self.client_weight == "uniform":
            return Up(images, labels)
        return Up(images, labels, stands_for(client, labels))

    @at_server
    async def train(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Renew the radius, match gradients on a copy of the sets, fine-tune on both."""
        centre, how = server.state.weights, Aggregation(self.aggregation, self.byzantine)
        heard = believed_sets(inbox, server.model, centre, how)
        copies = {name: Batch(up.images, up.labels) for name, up in heard.items()}
        uploaded, weight = union([*copies.values()]), image_weights([*heard.values()])
        radius = self.radius(server.model, centre, [*copies.values()])
        server.log(radius=radius)
        reach = {"anywhere": None, "ball": radius, "first_ball": self.first_radius}
        ball = Ball(centre, reach[self.tune_within])
        networks, weights = balls.networks(server, centre, radius), centre
        matching = GradientMatching(self.sampling_steps, self.sampling_lr, self.pixel_momentum)
        for sampling in range(self.samplings):
            network = networks(sampling)
            target = grad(loss_on(server.model, uploaded), network)
            copies = await matching.matched(server.model, copies, network, target)
            if self.interleave:
                both = Weighted(union([uploaded, *copies.values()]), weight.repeat(2))
                part = (sampling, self.samplings)
                weights = await self.fine_tuning.tuned(server, weights, both, ball, part)
        if not self.interleave:
            both = Weighted(union([uploaded, *copies.values()]), weight.repeat(2))
            images = both if self.samplings else Weighted(uploaded, weight)
            weights = await self.fine_tuning.tuned(server, weights, images, ball)
        server.log(moved=distance(weights, centre))
        server.state = Global(weights, radius)

    def radius(self, model: Model, centre: Weights, sets: Sequence[Batch]) -> float:
        """Equation 2: η · max_k ||∇L(w; S_k) - ∇L(w; S)||, kept within bounds."""
        reach = self.radius_lr * float(gradient_spread(model, centre, sets))
        return min(max(reach, self.lowest_radius), self.highest_radius or self.first_radius)

    @property
    def fine_tuning(self) -> FineTuning:
        """How the server learns from images."""
        adam = Adam(self.tune_lr, weight_decay=self.tune_weight_decay)
        sgd = SGD(self.tune_lr, self.tune_momentum, self.tune_weight_decay)
        return FineTuning(
            adam if self.tuning == "adam" else sgd, self.tune_fall, self.tune_epochs,
            self.tune_steps, self.tune_batch, self.tune_augmentation,
            weighted=self.client_weight == "examples",
        )  # fmt: skip
