"""ConvNet: the three-block network of the distillation papers and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import Laws, Model, Norm, conv_laws, linear_laws, norm_laws
from fedstill.core.ranges import Count
from fedstill.core.records import Weights

Activation = Literal["relu", "leaky_relu", "sigmoid", "swish"]
Pooling = Literal["avg", "max", "none"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "sigmoid": lambda x: x.sigmoid(),
    "swish": F.silu,
}


@dataclass(frozen=True)
class ConvNet(Model):
    """`depth` blocks of convolution, norm, activation and pooling, and a linear head.

    A grey 28x28 input is padded to 32x32 by the first convolution, as in the papers' code.
    """

    depth: Count = 3
    width: Count = 128
    norm: Norm = "instance"
    activation: Activation = "relu"
    pooling: Pooling = "avg"

    def sides(self) -> list[tuple[int, int]]:
        """The height and width of the map after each block."""
        grow = 2 * (self._first_padding() - 1)
        height, width = self.shape[1] + grow, self.shape[2] + grow
        found = []
        for block in range(self.depth):
            if self.pooling != "none":
                height, width = height // 2, width // 2
            if height < 1 or width < 1:
                raise BadValue(
                    f"convnet: an image of {self.shape[1]}x{self.shape[2]} cannot be pooled "
                    f"{block + 1} times; use a smaller depth or larger images"
                )
            found.append((height, width))
        return found

    def laws(self) -> Laws:
        laws: Laws = {}
        channels, grow = self.shape[0], 2 * (self._first_padding() - 1)
        side = (self.shape[1] + grow, self.shape[2] + grow)
        sides = self.sides()
        for block in range(self.depth):
            laws |= conv_laws(f"conv{block}", channels, self.width, 3)
            laws |= norm_laws(f"norm{block}", self.width, self.norm, (self.width, *side))
            channels, side = self.width, sides[block]
        return laws | linear_laws("head", self.width * side[0] * side[1], self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        for block in range(self.depth):
            padding = self._first_padding() if block == 0 else 1
            name = f"conv{block}"
            x = F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=padding)
            x = self.normalise(weights, f"norm{block}", x, self.norm)
            x = _ACTIVATIONS[self.activation](x)
            if self.pooling == "avg":
                x = F.avg_pool2d(x, 2)
            elif self.pooling == "max":
                x = F.max_pool2d(x, 2)
            maps.append(x)
        return maps

    def _first_padding(self) -> int:
        return 3 if self.shape == (1, 28, 28) else 1
