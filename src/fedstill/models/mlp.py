"""MLP: fully connected layers on flattened input; the smallest network here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.model import Laws, Model, linear_laws
from fedstill.core.records import Weights


@dataclass(frozen=True)
class MLP(Model):
    """One linear layer and activation for each entry of `hidden`, then a linear head."""

    hidden: tuple[int, ...] = (64,)
    activation: Literal["relu", "tanh"] = "relu"

    def laws(self) -> Laws:
        sizes = [math.prod(self.shape), *self.hidden]
        laws: Laws = {}
        for layer in range(len(self.hidden)):
            laws |= linear_laws(f"layer{layer}", sizes[layer], sizes[layer + 1])
        return laws | linear_laws("head", sizes[-1], self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        x = x.flatten(1)
        maps: list[Tensor] = [] if self.hidden else [x]
        for layer in range(len(self.hidden)):
            x = F.linear(x, weights[f"layer{layer}.weight"], weights[f"layer{layer}.bias"])
            x = torch.tanh(x) if self.activation == "tanh" else F.relu(x)
            maps.append(x)
        return maps
