"""ResNet18: four groups of two residual blocks, for small and for large images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import Initials, Model, Norm, conv_initial, linear_initial, norm_initial
from fedstill.core.records import Weights
from fedstill.models.by_pixel import entered, halved, normed, taken

_WIDTHS = (64, 128, 256, 512)


class _Block(NamedTuple):
    name: str
    inputs: int
    outputs: int
    stride: int

    @property
    def shortcut(self) -> bool:
        """Whether the sum needs a convolution on its other arm."""
        return self.stride != 1 or self.inputs != self.outputs


def _blocks() -> Iterator[_Block]:
    inputs = _WIDTHS[0]
    for group, outputs in enumerate(_WIDTHS):
        for block in range(2):
            stride = 2 if group > 0 and block == 0 else 1
            yield _Block(f"group{group}.block{block}", inputs, outputs, stride)
            inputs = outputs


@dataclass(frozen=True)
class ResNet18(Model):
    """Residual blocks with the norm after each convolution, and the mean of the last map.

    The `small` stem is one 3x3 convolution; the `imagenet` stem (7x7, stride 2, max-pooling)
    divides the image by four. With `bridge`, a linear layer and ReLU make 512 features of a map
    that is 1/32 of the image, as FedLGD does for 96x96 images (3x3 map, 4608 inputs).
    """

    of_images: ClassVar[bool] = True

    norm: Norm = "instance"
    stem: Literal["small", "imagenet"] = "small"
    bridge: bool = False

    def initial(self) -> Initials:
        last = self._last_side()
        side = (self.shape[1], self.shape[2])
        kernel = 3 if self.stem == "small" else 7
        initial = conv_initial("stem.conv", self.shape[0], 64, kernel, bias=False)
        if self.stem == "imagenet":
            side = _halved(side)
        initial |= norm_initial("stem.norm", 64, self.norm, (64, *side))
        if self.stem == "imagenet":
            side = _halved(side)
        for block in _blocks():
            name, inputs, outputs, stride = block
            side = _halved(side) if stride == 2 else side
            shape = (outputs, *side)
            initial |= conv_initial(f"{name}.conv0", inputs, outputs, 3, bias=False)
            initial |= norm_initial(f"{name}.norm0", outputs, self.norm, shape)
            initial |= conv_initial(f"{name}.conv1", outputs, outputs, 3, bias=False)
            initial |= norm_initial(f"{name}.norm1", outputs, self.norm, shape)
            if block.shortcut:
                initial |= conv_initial(f"{name}.short.conv", inputs, outputs, 1, bias=False)
                initial |= norm_initial(f"{name}.short.norm", outputs, self.norm, shape)
        if self.bridge:
            height, width = (length // self._window() for length in last)
            initial |= linear_initial("bridge", 512 * height * width, 512)
        return initial | linear_initial("head", 512, self.classes)

    @property
    def by_example(self) -> bool:
        return self.norm != "static"

    @property
    def takes_half(self) -> bool:
        return taken(self.norm)

    def halved(self, weights: Weights) -> Weights:
        return halved(weights, first="stem.conv.weight", norm=self.norm)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """The four groups' maps, then the pooled vector, [example, 512]."""
        maps: list[Tensor] = []
        weights, x, back = entered(weights, x, first="stem.conv.weight", norm=self.norm)
        x = self._stem(weights, x)
        for index, block in enumerate(_blocks()):
            x = self._block(weights, block, x)
            if index % 2 == 1:
                maps.append(back(x))
        return [*maps, self._pooled(weights, maps[-1])]

    def _stem(self, weights: Weights, x: Tensor) -> Tensor:
        if self.stem == "small":
            x = F.conv2d(x, weights["stem.conv.weight"], padding=1)
            return normed(self, weights, "stem.norm", x, self.norm)
        x = F.conv2d(x, weights["stem.conv.weight"], stride=2, padding=3)
        x = normed(self, weights, "stem.norm", x, self.norm)
        return F.max_pool2d(x, 3, stride=2, padding=1)

    def _block(self, weights: Weights, block: _Block, x: Tensor) -> Tensor:
        name = block.name
        out = F.conv2d(x, weights[f"{name}.conv0.weight"], stride=block.stride, padding=1)
        out = normed(self, weights, f"{name}.norm0", out, self.norm)
        out = F.conv2d(out, weights[f"{name}.conv1.weight"], padding=1)
        if block.shortcut:
            x = F.conv2d(x, weights[f"{name}.short.conv.weight"], stride=block.stride)
            x = normed(self, weights, f"{name}.short.norm", x, self.norm, relu=False)
        return normed(self, weights, f"{name}.norm1", out, self.norm, x)

    def _pooled(self, weights: Weights, x: Tensor) -> Tensor:
        if not self.bridge:
            return x.mean((2, 3))
        x = F.avg_pool2d(x, self._window()).flatten(1)
        return F.relu(F.linear(x, weights["bridge.weight"], weights["bridge.bias"]))

    def _window(self) -> int:
        """What the bridge pools over; the large stem has already divided by four."""
        return 4 if self.stem == "small" else 1

    def _last_side(self) -> tuple[int, int]:
        """The height and width of the last map, or why the image is too small to have one."""
        halvings = 3 if self.stem == "small" else 5
        side = image = (self.shape[1], self.shape[2])
        for _ in range(halvings):
            side = _halved(side)
        wrong = None
        if min(image) < 2**halvings:
            least = 2**halvings
            wrong = f"cannot be halved {halvings} times; use at least {least}x{least}"
        elif self.norm == "instance" and side == (1, 1):
            # Norm over a single pixel gives the bias, whatever the image was.
            wrong = "leaves one pixel, constant under instance norm; use larger images"
        elif self.bridge and min(side) < self._window():
            wrong = f"leaves a {side[0]}x{side[1]} map, too small for the bridge; use bridge=False"
        if wrong:
            given = f"an image of {image[0]}x{image[1]} with stem={self.stem!r}"
            raise BadValue(f"resnet18: {given} {wrong}")
        return side


def _halved(side: tuple[int, int]) -> tuple[int, int]:
    """The map after a stride of two, padded so that an odd side rounds up."""
    return (side[0] + 1) // 2, (side[1] + 1) // 2
