"""FedDM: clients send synthetic sets that approximate their loss near the current weights.

Xiong, Wang, Cheng, Yu, Hsieh. FedDM: Iterative Distribution Matching for Communication-Efficient
Federated Learning. CVPR 2023. Algorithm 1, equations 8 to 10, appendix G.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedstill.core import (
    SGD,
    Data,
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
    minimize,
    scheduled,
)
from fedstill.core.content import Inputs, Labels, Length, presence
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Whole
from fedstill.core.records import Pictured
from fedstill.parts import augment, balls
from fedstill.parts.augment import strategy_faults
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.robust import Aggregation
from fedstill.parts.sent_sets import believed_sets, image_weights, images_sent, stands_for
from fedstill.parts.synthetic_batches import Labelled, training_batches
from fedstill.parts.synthetic_sets import (
    Standing,
    SyntheticSet,
    from_noise,
    from_real,
    held_classes,
)


class Sets(State):
    """What clients sent in one round, all together."""

    images: Tensor  # [image, ...]
    labels: Tensor  # [image]
    counts: Tensor | None  # [image], examples that an image stands for


class Global(State):
    """What the server remembers."""

    weights: Weights
    past: tuple[Sets, ...] = ()  # of the latest rounds, where they are replayed


class Own(State):
    """What a client remembers where its sets grow over rounds: the latest one."""

    images: Tensor  # [class, image, ...]
    share: Tensor  # [class, image]
    classes: Tensor  # [class]


class Down(Message):
    """The centre of this round's ball."""

    weights: Weights


class Up(Message):
    """Images of the classes a client holds, sorted by class."""

    images: Inputs
    labels: Labels
    counts: Standing | None  # examples that an image stands for; only if asked for

    def pictures(self) -> Pictured:
        return self.images, self.labels


@dataclass(frozen=True)
class FedDM(Method):
    """Synthesis in a ball around the weights on clients, projected training on the server.

    The defaults are the best of our trials on held-out data (docs/methods/feddm.md); what the paper
    prints is the preset `paper`.
    """

    moves_inputs: ClassVar[bool] = True
    presets: ClassVar = {
        "paper": {"least_examples": 10, "steps": 1000, "pixel_lr": 1.0, "server_momentum": 0.0,
                  "server_weight_decay": 0.0, "server_fall": "constant",
                  "server_augmentation": "none"},
        "best": {"replay": 4},  # of small trials on held-out data (docs/methods/feddm.md)
        "real": {"upload": "real"},
        "noise": {"start": "noise", "steps": 1000, "pixel_lr": 1.0},
        "small": {"per_class": 2, "steps": 4, "real_batch": 8, "server_lr": 0.1,
                  "server_epochs": 5, "server_batch": 8},
    }  # fmt: skip

    per_class: Count = 10
    least_examples: Count = 1  # fewest examples of a class for which a client sends images
    steps: Whole = 300
    pixel_lr: Positive = 0.1
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    radius: Positive = 5.0  # radius of the ball around the weights, for clients and server
    start: Literal["real", "noise"] = "real"
    keep: bool = False  # from its second round on, a client starts from the set it made last
    outputs: Literal["both", "features", "logits"] = "both"
    augmentation: str = augment.DEFAULT
    upload: Literal["synthetic", "real"] = "synthetic"  # "real": real images, the control
    client_weight: Literal["uniform", "examples"] = "uniform"
    server_lr: Positive = 0.01
    server_momentum: Fraction = 0.9
    server_weight_decay: NonNegative = 5e-4
    server_epochs: Count = 500
    server_batch: Count = 256
    replay: Whole = 0  # earlier rounds whose sets the server also uses, in as many steps
    server_fall: Schedule = "cosine"  # schedule of the server's rate in each round
    server_augmentation: str = augment.DEFAULT
    server_operations: augment.Mode = "single"  # one augmentation per batch, or all at once
    aggregation: Literal["mean", "multi_krum"] = "mean"  # multi_krum drops sets unlike the others
    byzantine: Whole = 1  # malicious clients that multi_krum tolerates

    @property
    def sends_examples(self) -> bool:
        return self.upload == "real" or (self.start == "real" and self.steps == 0)

    @property
    def begins_with_examples(self) -> bool:
        return self.start == "real"

    def faults(self) -> Sequence[str]:
        return [
            *strategy_faults("augmentation", self.augmentation),
            *strategy_faults("server_augmentation", self.server_augmentation),
            *(['keep: a set of real examples does not grow; leave out keep, or upload = "real"']
              if self.keep and self.upload == "real" else []),
        ]  # fmt: skip

    def each_round(self) -> Sequence[Step]:
        return [self.broadcast, self.synthesize, self.train]

    def server_state(self, server: Node[Any]) -> Global:
        return Global(server.model.init(server.draw("weights", shared=True)))

    def axes(self, node: Node[Any], sender: NodeId) -> Mapping[str, Length]:
        return {**super().axes(node, sender), **images_sent(node.model, self.per_class)}

    def wrong(self, node: Node[Any], sender: NodeId, message: Message) -> str | None:
        wanted = presence(message, Up, counts=self.client_weight == "examples")
        return super().wrong(node, sender, message) or wanted

    @at_server
    def broadcast(self, server: Node[Global], inbox: Inbox[Never]) -> Down:
        """Send the current weights."""
        return Down(server.state.weights)

    @at_clients
    async def synthesize(self, client: Node[Own], inbox: Inbox[Down]) -> Up | None:
        """Match the class means of features and logits under networks drawn around the weights."""
        centre, classes = inbox.only().weights, held_classes(client, self.least_examples)
        if not classes:
            return None
        fill = from_noise if self.start == "noise" and self.upload == "synthetic" else from_real
        if self.keep and client.state is not None:
            made = SyntheticSet(client.state.images, client.state.share, client.state.classes)
        else:
            made = fill(client, classes, self.per_class)
        if self.upload == "synthetic" and self.steps:
            networks = balls.networks(client, centre, self.radius)
            made = await self.matching.matched(client, made, networks)
        if self.keep:
            client.state = Own(*made)
        images, labels = made.flat()
        weighed = self.client_weight == "examples"
        return Up(images, labels, stands_for(client, labels) if weighed else None)

    @at_server
    async def train(self, server: Node[Global], inbox: Inbox[Up]) -> None:
        """Train on the union of the sets, never leaving the ball around the weights sent."""
        centre, how = server.state.weights, Aggregation(self.aggregation, self.byzantine)
        fresh = together(list(believed_sets(inbox, server.model, centre, how).values()))
        sets = [fresh, *server.state.past]
        union = Data.of(torch.cat([each.images for each in sets]),
                        torch.cat([each.labels for each in sets]))  # fmt: skip
        epochs = max(1, round(self.server_epochs * len(fresh.labels) / len(union)))
        batches = training_batches(
            server, union, image_weights(sets), self.server_batch, epochs,
            self.server_augmentation, mode=self.server_operations,
        )  # fmt: skip
        sgd = SGD(self.server_lr, self.server_momentum, self.server_weight_decay)
        optimizer = scheduled(sgd, len(batches), self.server_fall)
        weights = await minimize(
            self.objective, server.model, centre, batches, optimizer,
            project=self.projected, centre=centre,
        )  # fmt: skip
        server.state = Global(weights, tuple(sets[: self.replay]))

    def objective(self, model: Model, weights: Weights, batch: Labelled, centre: Weights) -> Tensor:
        """Cross-entropy on augmented synthetic images."""
        losses = cross_entropy(model(weights, batch.augmented()), batch.y, reduction="none")
        return (batch.weight * losses).mean()

    def projected(self, weights: Weights, centre: Weights) -> Weights:
        """Appendix G.4: the server stays where the clients' sets are meant to hold."""
        return balls.projected(weights, centre, self.radius)

    @property
    def matching(self) -> Matching:
        return Matching(self.steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                        self.augmentation, self.outputs)  # fmt: skip


def together(sent: Sequence[Up]) -> Sets:
    """The images of some clients one after the other."""
    counts = [up.counts for up in sent if up.counts is not None]
    return Sets(
        torch.cat([up.images for up in sent]),
        torch.cat([up.labels for up in sent]),
        torch.cat(counts) if counts else None,
    )
