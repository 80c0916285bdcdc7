"""Necked: a model whose features pass through a narrow linear layer before its head.

Features of a width that is chosen, whatever the network, as generators of features need them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.model import Laws, Model, linear_laws
from fedstill.core.records import Weights


@dataclass(frozen=True)
class Necked(Model):
    """The body's blocks, a linear layer `neck` without activation, a head on its output."""

    body: Model
    width: int

    def laws(self) -> Laws:
        body = {n: law for n, law in self.body.laws().items() if not n.startswith("head.")}
        neck = linear_laws("neck", feature_width(self.body), self.width)
        return body | neck | linear_laws("head", self.width, self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        stages = replace(self.body, training=self.training, notes=self.notes).stages(weights, x)
        last = stages[-1].flatten(1)
        return [*stages, F.linear(last, weights["neck.weight"], weights["neck.bias"])]


def necked(model: Model, width: int) -> Model:
    """The model with features of a width; of its own width where that is 0."""
    return Necked(model.shape, model.classes, model, width, device=model.device) if width else model


def feature_width(model: Model) -> int:
    """How many features the head of a model sees."""
    return model.laws()["head.weight"].shape[1]
