"""AlexNet: five convolutions without norm, the second network of the DeSA paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.gpu import kernels, plain_on_gpu
from fedstill.core.model import Initials, Model, conv_initial, linear_initial
from fedstill.core.precision import pass_will_do
from fedstill.core.ranges import Count
from fedstill.core.records import Weights
from fedstill.models.by_pixel import convolved, entered


class _Block(NamedTuple):
    halves: int  # outputs, in halves of the width
    kernel: int
    padding: int
    pooled: bool


_BLOCKS = (
    _Block(2, kernel=5, padding=4, pooled=True),
    _Block(3, kernel=5, padding=2, pooled=True),
    _Block(4, kernel=3, padding=1, pooled=False),
    _Block(3, kernel=3, padding=1, pooled=False),
    _Block(3, kernel=3, padding=1, pooled=True),
)


@dataclass(frozen=True)
class AlexNet(Model):
    """Five blocks of convolution and ReLU, three of them max-pooled, and a linear head.

    `width` is that of the first block; the others have 1.5, 2, 1.5 and 1.5 times as many channels.
    The first padding of 4, for grey and colour alike, leaves a 4x4 map of 28x28 and of 32x32.
    """

    of_images: ClassVar[bool] = True

    width: Count = 128

    def initial(self) -> Initials:
        initial: Initials = {}
        channels = self.shape[0]
        for index, block in enumerate(_BLOCKS):
            outputs = block.halves * self.width // 2
            initial |= conv_initial(f"conv{index}", channels, outputs, block.kernel)
            channels = outputs
        height, width = _side(self.shape[1]), _side(self.shape[2])
        if height < 1 or width < 1:
            raise BadValue(
                f"alexnet: an image of {self.shape[1]}x{self.shape[2]} cannot be pooled three "
                f"times; use images of at least 4x4"
            )
        return initial | linear_initial("head", channels * height * width, self.classes)

    @property
    def takes_half(self) -> bool:
        return True

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        return self._stages(weights, x)

    def features(self, weights: Weights, x: Tensor) -> Tensor:
        if (found := self._in_a_row(weights, x, 0)) is not None:
            return found[0]
        return self._stages(weights, x, only_last=True)[-1].flatten(1)

    def features_beside(self, weights: Weights, x: Tensor, resting: int) -> tuple[Tensor, Tensor]:
        found = self._in_a_row(weights, x, resting)
        return super().features_beside(weights, x, resting) if found is None else found

    def _in_a_row(self, weights: Weights, x: Tensor, resting: int) -> tuple[Tensor, Tensor] | None:
        """Features in half precision where that may be and there are kernels, else None."""
        wanted = x.requires_grad and torch.is_grad_enabled()  # kernels have no gradient of images
        if wanted or not (pass_will_do(x) and plain_on_gpu(x, *weights.values())):
            return None
        convolutions, biases = (
            [weights[f"conv{index}.{kind}"] for index in range(len(_BLOCKS))]
            for kind in ("weight", "bias")
        )
        forms = [(block.padding, block.pooled) for block in _BLOCKS]
        ours = kernels("kernels.rectified", x)
        if ours is None or not ours.takes(x, convolutions[0], *forms[0]):
            return None
        found: tuple[Tensor, Tensor] = ours.features(x, convolutions, biases, forms, resting)
        return found

    def _stages(self, weights: Weights, x: Tensor, *, only_last: bool = False) -> list[Tensor]:
        maps: list[Tensor] = []
        weights, x, back = entered(weights, x, first="conv0.weight", norm="none")
        for index, block in enumerate(_BLOCKS):
            weight, bias = weights[f"conv{index}.weight"], weights[f"conv{index}.bias"]
            x = convolved(x, weight, bias, padding=block.padding, pooled=block.pooled)
            if index == len(_BLOCKS) - 1 or not only_last:
                maps.append(back(x))
        return maps


def _side(side: int) -> int:
    """The side of the last map for an image of this side."""
    for block in _BLOCKS:
        side += 2 * block.padding - block.kernel + 1
        side = side // 2 if block.pooled else side
    return side
