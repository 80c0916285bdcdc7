"""Layers between the features and the head of any network; no architecture of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.model import Initials, Model, linear_initial
from fedstill.core.records import Weights


@dataclass(frozen=True)
class Projected(Model):
    """A network whose features pass through linear layers, with ReLU between them.

    What comes out of the last layer are the features; a head of its own makes logits of them.
    The layers before start from the very weights that they have without the projection.
    """

    base: Model
    widths: tuple[int, ...]

    def initial(self) -> Initials:
        initial = {n: law for n, law in self.base.initial().items() if not n.startswith("head.")}
        inputs = feature_width(self.base)
        for layer, outputs in enumerate(self.widths):
            initial |= linear_initial(f"projection{layer}", inputs, outputs)
            inputs = outputs
        return initial | linear_initial("head", inputs, self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        maps = replace(self.base, training=self.training, notes=self.notes).stages(weights, x)
        x = maps[-1].flatten(1)
        for layer in range(len(self.widths)):
            x = F.relu(x) if layer else x
            name = f"projection{layer}"
            x = F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
        return [*maps, x]


def projected(model: Model, *widths: int) -> Projected:
    """The network with a linear layer of each width before its head."""
    return Projected(model.shape, model.classes, model.evaluating, widths,
                     training=model.training, device=model.device, notes=model.notes)  # fmt: skip


def feature_width(model: Model) -> int:
    """How many numbers the head sees."""
    return model.initial()["head.weight"].shape[1]


def common_width(models: Iterable[Model], otherwise: int) -> int:
    """The width of everybody's features, or another one where they differ."""
    distinct = {id(model): model for model in models}  # thousands of clients may share a few
    widths = {feature_width(model) for model in set(distinct.values())}
    return widths.pop() if len(widths) == 1 else otherwise


def with_features(model: Model, width: int) -> Model:
    """The network itself where its features have this width, else with a linear layer to it."""
    return model if feature_width(model) == width else projected(model, width)
