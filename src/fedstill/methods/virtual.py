"""Virtual data: every client distils its examples once; other methods then train on the result.

The warm-up of FedLGD (Huang et al., TMLR 2024, section 3.2), by which its tables train every
method on the same small sets. Chosen in a recipe by a table `data.virtual`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Never

import torch
from torch import Tensor

from fedstill.core import (
    Exact,
    Inbox,
    Message,
    Method,
    Node,
    Place,
    Positional,
    State,
    Step,
    at_clients,
)
from fedstill.core.content import LARGEST_INPUT, Axes
from fedstill.core.ranges import Count, Fraction, Positive
from fedstill.core.records import Pictured
from fedstill.parts import augment, pixels
from fedstill.parts.augment import strategy_faults
from fedstill.parts.distribution_matching import Matching
from fedstill.parts.synthetic_sets import Start, SyntheticSet, held_classes, statistics
from fedstill.parts.warm_up import MatchingNetwork, plain_network, warmed_up


class Own(State):
    """What a client remembers."""

    images: Tensor  # [class, image, ...]
    share: Tensor  # [class, image]
    classes: Tensor  # [class]

    def as_set(self) -> SyntheticSet:
        return SyntheticSet(self.images, self.share, self.classes)


class Statistics(Message):
    """Mean and deviation of each class held."""

    mean: Annotated[Exact, Axes("held", "channel", high=LARGEST_INPUT)]
    std: Annotated[Exact, Axes("held", "channel", low=0, high=LARGEST_INPUT)]
    classes: Annotated[Positional, Axes("held", below="class", rising=True)]


@dataclass(frozen=True)
class Virtual(Method):
    """Warm-up by distribution matching under random networks."""

    scored: ClassVar[Place] = Place.CLIENTS
    distils: ClassVar[bool] = True
    moves_inputs: ClassVar[bool] = True

    per_class: Count = 10
    # steps in which the clients' virtual sets are matched before the first round
    warm_up_steps: Count = 10_000
    warm_up_network: MatchingNetwork = "own"  # own: the client's architecture; or always a ConvNet
    start: Start = "statistics"
    pixel_lr: Positive = 1.0
    pixel_momentum: Fraction = 0.5
    real_batch: Count = 256
    eight_bits: bool = False  # clip and round virtual sets, as if kept in image files
    augmentation: str = augment.DEFAULT

    def faults(self) -> Sequence[str]:
        return strategy_faults("augmentation", self.augmentation)

    def before(self) -> Sequence[Step]:
        return [self.warm_up]

    def pictures(self, node: Node[Any]) -> Mapping[str, Pictured]:
        return {"own": node.state.as_set().flat()} if isinstance(node.state, Own) else {}

    @at_clients
    async def warm_up(self, client: Node[Own], inbox: Inbox[Never]) -> None:
        """Distil the own examples under random networks."""
        client.state = Own(*await self.warmed(client))

    async def warmed(self, client: Node[Any]) -> SyntheticSet:
        """The client's first virtual set."""
        model = plain_network(client.model) if self.warm_up_network == "convnet" else client.model
        made = await warmed_up(client, self.warming, self.start, self.per_class, model)
        if not self.eight_bits or not len(made.classes):
            return made
        kept = pixels.given_away(client.data, made.images, "normalised", eight_bits=True)
        return made._replace(images=kept)

    def described(self, client: Node[Any]) -> Statistics | None:
        """Statistics of the own examples, as a set begins with them; None where there are none."""
        held = held_classes(client)
        if not held:
            return None
        mean, std = statistics(client.data, held, client.model.classes, self.start)
        return Statistics(mean, std, torch.tensor(held, device=client.device))

    @property
    def warming(self) -> Matching:
        return self.matching(self.warm_up_steps)

    def matching(self, steps: int) -> Matching:
        """Matching of features for so many steps."""
        return Matching(steps, self.pixel_lr, self.pixel_momentum, self.real_batch,
                        self.augmentation)  # fmt: skip
