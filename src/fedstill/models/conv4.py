"""Conv4: four convolutions and the mean of the last map, the small network of the HeteroFL code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import Initial, Initials, Norm, conv_initial, linear_initial, norm_initial
from fedstill.core.records import Weights
from fedstill.models.by_pixel import entered, halved, normed, pooled, taken
from fedstill.models.scalable import CLASSES, IMAGE, Scalable, Wiring, check_groups, four


@dataclass(frozen=True)
class Conv4(Scalable):
    """Blocks of convolution, norm, ReLU and max-pooling; the last is pooled to its mean.

    The biases of the head start at zero.
    """

    of_images: ClassVar[bool] = True

    widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: Norm = "static"
    last_pool: bool = False  # max-pooling after the fourth block too, as in DFRD's released code

    def streams(self) -> dict[str, int]:
        return {f"block{block}": width for block, width in enumerate(four("conv4", self.widths))}

    def wiring(self) -> Wiring:
        wiring: Wiring = {"head": (CLASSES, "block3")}
        for block, (read, written) in enumerate(pairwise([IMAGE, *self.streams()])):
            wiring[f"conv{block}"] = (written, read)
            wiring[f"norm{block}"] = (written,)
        return wiring

    def initial(self) -> Initials:
        initial: Initials = {}
        kept = [self.units(width) for width in four("conv4", self.widths)]
        check_groups("conv4", self.norm, self.widths, kept)
        height, width = self.shape[1:]
        least, often = (16, "four times") if self.last_pool else (8, "three times")
        if min(height, width) < least:
            raise BadValue(
                f"conv4: an image of {height}x{width} cannot be pooled {often}; "
                f"use at least {least}x{least}"
            )
        if self.norm == "instance" and max(height, width) < 16:
            # Norm over a single pixel gives the bias, whatever the image was.
            raise BadValue(
                f"conv4: an image of {height}x{width} leaves one pixel, constant under instance "
                "norm; use at least 16x16"
            )
        for block, (inputs, outputs) in enumerate(pairwise([self.shape[0], *kept])):
            initial |= conv_initial(f"conv{block}", inputs, outputs, 3)
            initial |= norm_initial(f"norm{block}", outputs, self.norm, (outputs, height, width))
            height, width = height // 2, width // 2
        initial |= linear_initial("head", kept[-1], self.classes)
        return initial | {"head.bias": Initial((self.classes,), "zeros")}

    @property
    def by_example(self) -> bool:
        return self.norm != "static"

    @property
    def takes_half(self) -> bool:
        return taken(self.norm)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """The maps of the blocks, then the pooled vector."""
        return self._stages(weights, x)

    def features(self, weights: Weights, x: Tensor) -> Tensor:
        return self._stages(weights, x, only_last=True)[-1]

    def halved(self, weights: Weights) -> Weights:
        return halved(self._counting(weights), first="conv0.weight", norm=self.norm)

    def _counting(self, weights: Weights) -> Weights:
        """Without constants that count for nothing."""
        if self.norm != "static":
            return weights
        # A norm by the batch takes any constant of a map away again; leaving it out is exact.
        constants = {f"conv{block}.bias" for block in range(4)}
        return {name: tensor for name, tensor in weights.items() if name not in constants}

    def _stages(self, weights: Weights, x: Tensor, *, only_last: bool = False) -> list[Tensor]:
        maps: list[Tensor] = []
        weights = self._counting(weights)
        weights, x, back = entered(weights, x, first="conv0.weight", norm=self.norm)
        for block in range(4):
            bias = weights.get(f"conv{block}.bias")
            x = self.scaled(F.conv2d(x, weights[f"conv{block}.weight"], bias, padding=1))
            last = block == 3 and not self.last_pool  # of which only the mean is taken
            x = normed(self, weights, f"norm{block}", x, self.norm, relu=last)
            x = x if last else pooled(x)
            if block == 3 or not only_last:
                maps.append(back(x))
        return [*maps, maps[-1].mean((2, 3))]
