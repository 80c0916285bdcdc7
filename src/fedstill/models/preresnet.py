"""PreResNet18: a residual network with norm and ReLU before each convolution, as HeteroFL uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.model import Initial, Initials, Norm, conv_initial, linear_initial, norm_initial
from fedstill.core.records import Weights
from fedstill.models.by_pixel import entered, halved, normed, taken
from fedstill.models.scalable import CLASSES, IMAGE, Scalable, Wiring, check_groups, four


class _Block(NamedTuple):
    name: str
    read: int  # the group whose stream it reads
    written: int  # the group whose stream it adds to
    shortcut: bool  # whether a convolution leads from one stream to the other
    last: bool  # of its group


def _blocks(counts: tuple[int, ...]) -> Iterator[_Block]:
    for group, count in enumerate(counts):
        for block in range(count):
            read = max(group - 1, 0) if block == 0 else group
            shortcut, last = group > 0 and block == 0, block == count - 1
            yield _Block(f"group{group}.block{block}", read, group, shortcut, last)


@dataclass(frozen=True)
class PreResNet18(Scalable):
    """Four groups of two blocks after a 3x3 convolution, a last norm and the mean of the map.

    A group is one residual stream: the stem or the shortcut begins it and its blocks add to it.
    The biases of the head start at zero. `blocks = [2, 3, 2, 2]` is the ResNet-20 of DFRD's
    released code.
    """

    of_images: ClassVar[bool] = True

    widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: Norm = "static"
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # of each group

    def streams(self) -> dict[str, int]:
        widths = four("preresnet18", self.widths)
        groups = {f"group{group}": width for group, width in enumerate(widths)}
        return groups | {block.name: widths[block.written] for block in self._layers()}

    def wiring(self) -> Wiring:
        wiring: Wiring = {"stem": ("group0", IMAGE), "norm": ("group3",)}
        for name, read, written, shortcut, _ in self._layers():
            wiring[f"{name}.norm0"] = (f"group{read}",)
            wiring[f"{name}.conv0"] = (name, f"group{read}")
            wiring[f"{name}.norm1"] = (name,)
            wiring[f"{name}.conv1"] = (f"group{written}", name)
            if shortcut:
                wiring[f"{name}.short"] = (f"group{written}", f"group{read}")
        return wiring | {"head": (CLASSES, "group3")}

    def initial(self) -> Initials:
        kept = [self.units(width) for width in four("preresnet18", self.widths)]
        sides = self._sides()
        check_groups("preresnet18", self.norm, self.widths, kept)
        initial = conv_initial("stem", self.shape[0], kept[0], 3, bias=False)
        for name, read, written, shortcut, _ in self._layers():
            inputs, outputs = kept[read], kept[written]
            initial |= norm_initial(f"{name}.norm0", inputs, self.norm, (inputs, *sides[read]))
            initial |= conv_initial(f"{name}.conv0", inputs, outputs, 3, bias=False)
            initial |= norm_initial(f"{name}.norm1", outputs, self.norm, (outputs, *sides[written]))
            initial |= conv_initial(f"{name}.conv1", outputs, outputs, 3, bias=False)
            if shortcut:
                initial |= conv_initial(f"{name}.short", inputs, outputs, 1, bias=False)
        initial |= norm_initial("norm", kept[3], self.norm, (kept[3], *sides[3]))
        initial |= linear_initial("head", kept[3], self.classes)
        return initial | {"head.bias": Initial((self.classes,), "zeros")}

    @property
    def by_example(self) -> bool:
        return self.norm != "static"

    @property
    def takes_half(self) -> bool:
        return taken(self.norm)

    def halved(self, weights: Weights) -> Weights:
        return halved(weights, first="stem.weight", norm=self.norm)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """The four groups' maps, then the pooled vector."""
        maps: list[Tensor] = []
        weights, x, back = entered(weights, x, first="stem.weight", norm=self.norm)
        x = F.conv2d(x, weights["stem.weight"], padding=1)
        for block in self._layers():
            x = self._block(weights, block, x)
            if block.last:
                maps.append(back(x))
        return [*maps, back(self._ready(weights, "norm", x).mean((2, 3)))]

    def _layers(self) -> Iterator[_Block]:
        """The blocks in order, or what is wrong with their numbers."""
        return _blocks(four("preresnet18", self.blocks, "blocks"))

    def _block(self, weights: Weights, block: _Block, x: Tensor) -> Tensor:
        name, stride = block.name, 2 if block.shortcut else 1
        out = self._ready(weights, f"{name}.norm0", x)
        if block.shortcut:
            x = F.conv2d(out, weights[f"{name}.short.weight"], stride=stride)
        out = F.conv2d(out, weights[f"{name}.conv0.weight"], stride=stride, padding=1)
        out = self._ready(weights, f"{name}.norm1", out)
        return x + F.conv2d(out, weights[f"{name}.conv1.weight"], padding=1)

    def _ready(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """What a convolution sees of a map: scaled, normalised, cut off at zero."""
        return normed(self, weights, name, self.scaled(x), self.norm)

    def _sides(self) -> list[tuple[int, int]]:
        """The height and width of each group's map."""
        sides = [(self.shape[1], self.shape[2])]
        for _ in range(3):
            sides.append(((sides[-1][0] + 1) // 2, (sides[-1][1] + 1) // 2))
        if self.norm == "instance" and sides[-1] == (1, 1):
            # Norm over a single pixel gives the bias, whatever the image was.
            image = f"{self.shape[1]}x{self.shape[2]}"
            raise BadValue(
                f"preresnet18: an image of {image} leaves one pixel, constant under instance norm; "
                "use larger images"
            )
        return sides
