"""ConvNet and MLP in plain PyTorch; needs torch alone, and is written beside exported weights.

The names of their state dicts are those of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "swish": F.silu,
}


class ConvNet(nn.Module):
    """Blocks of convolution, norm, activation and pooling, and a linear head."""

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        depth: int = 3,
        width: int = 128,
        norm: str = "instance",
        activation: str = "relu",
        pooling: str = "avg",
    ):
        super().__init__()
        self.activation, self.pooling, self.depth = activation, pooling, depth
        channels, height, side = shape
        padding = 3 if tuple(shape) == (1, 28, 28) else 1
        for block in range(depth):
            height, side = height + 2 * padding - 2, side + 2 * padding - 2
            self.add_module(f"conv{block}", nn.Conv2d(channels, width, 3, padding=padding))
            self.add_module(f"norm{block}", norm_layer(norm, width, (height, side)))
            if pooling != "none":
                height, side = height // 2, side // 2
            channels, padding = width, 1
        self.head = nn.Linear(channels * height * side, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[example, class], logits of normalised images [example, channel, height, width]."""
        for block in range(self.depth):
            x = self.get_submodule(f"conv{block}")(x)
            x = ACTIVATIONS[self.activation](self.get_submodule(f"norm{block}")(x))
            if self.pooling != "none":
                x = F.avg_pool2d(x, 2) if self.pooling == "avg" else F.max_pool2d(x, 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class MLP(nn.Module):
    """One linear layer and activation for each entry of `hidden`, then a linear head."""

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        hidden: Sequence[int] = (64,),
        activation: str = "relu",
    ):
        super().__init__()
        self.activation, self.layers = activation, len(hidden)
        sizes = [math.prod(shape), *hidden]
        for layer in range(self.layers):
            self.add_module(f"layer{layer}", nn.Linear(sizes[layer], sizes[layer + 1]))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """[example, class], logits of normalised examples."""
        x = x.flatten(1)
        for layer in range(self.layers):
            x = self.get_submodule(f"layer{layer}")(x)
            x = torch.tanh(x) if self.activation == "tanh" else F.relu(x)
        logits: Tensor = self.head(x)
        return logits


def norm_layer(norm: str, width: int, sides: tuple[int, int]) -> nn.Module:
    """A norm layer for maps of a width and of two sides."""
    if norm == "batch":
        return nn.BatchNorm2d(width)
    if norm == "static":
        return nn.BatchNorm2d(width, track_running_stats=False)
    if norm == "layer":
        return nn.LayerNorm([width, *sides])
    if norm in ("instance", "group"):
        return nn.GroupNorm(width if norm == "instance" else 4, width)
    return nn.Identity()
