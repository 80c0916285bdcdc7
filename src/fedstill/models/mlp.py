"""MLP: fully connected layers on flattened input; the smallest network here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.model import Initials, linear_initial
from fedstill.core.records import Weights
from fedstill.models.scalable import CLASSES, IMAGE, Scalable, Wiring


@dataclass(frozen=True)
class MLP(Scalable):
    """One linear layer and activation for each entry of `hidden`, then a linear head."""

    hidden: tuple[int, ...] = (64,)
    activation: Literal["relu", "tanh"] = "relu"

    def streams(self) -> dict[str, int]:
        return {f"layer{layer}": width for layer, width in enumerate(self.hidden)}

    def wiring(self) -> Wiring:
        names = [IMAGE, *self.streams()]
        layers: Wiring = {name: (name, before) for before, name in pairwise(names)}
        return {**layers, "head": (CLASSES, names[-1])}

    def initial(self) -> Initials:
        sizes = [math.prod(self.shape), *map(self.units, self.hidden)]
        initial: Initials = {}
        for layer in range(len(self.hidden)):
            initial |= linear_initial(f"layer{layer}", sizes[layer], sizes[layer + 1])
        return initial | linear_initial("head", sizes[-1], self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        x = x.flatten(1)
        maps: list[Tensor] = [] if self.hidden else [x]
        for layer in range(len(self.hidden)):
            x = F.linear(x, weights[f"layer{layer}.weight"], weights[f"layer{layer}.bias"])
            x = self.scaled(x)
            x = torch.tanh(x) if self.activation == "tanh" else F.relu(x)
            maps.append(x)
        return maps
