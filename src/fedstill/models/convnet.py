"""ConvNet: the three-block network of the distillation papers and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu, pools
from fedstill.core.errors import BadValue
from fedstill.core.model import Initials, Norm, conv_initial, linear_initial, norm_initial
from fedstill.core.precision import (
    half_asked_for,
    half_will_do,
    half_will_do_for_examples,
    pass_will_do,
)
from fedstill.core.ranges import Count
from fedstill.core.records import Weights
from fedstill.core.torch_internals import in_gradient_under_vmap, is_stacked, unwrapped
from fedstill.models import pooled_blocks
from fedstill.models.by_pixel import GAIN
from fedstill.models.scalable import CLASSES, IMAGE, Scalable, Wiring, check_groups

Activation = Literal["relu", "leaky_relu", "sigmoid", "swish"]
Pooling = Literal["avg", "max", "none"]

_MOST_PIXELS = 2**20  # of a map that kernels take: a program holds one, and can hold no more

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "sigmoid": lambda x: x.sigmoid(),
    "swish": F.silu,
}


@dataclass(frozen=True)
class ConvNet(Scalable):
    """`depth` blocks of convolution, norm, activation and pooling, and a linear head.

    A grey 28x28 input is padded to 32x32 by the first convolution, as in the papers' code.
    """

    of_images: ClassVar[bool] = True

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

    def streams(self) -> dict[str, int]:
        return {f"block{block}": self.width for block in range(self.depth)}

    def wiring(self) -> Wiring:
        names = [IMAGE, *self.streams()]
        wiring: Wiring = {"head": (CLASSES, names[-1])}
        for block in range(self.depth):
            wiring[f"conv{block}"] = (names[block + 1], names[block])
            wiring[f"norm{block}"] = (names[block + 1],)
        return wiring

    def initial(self) -> Initials:
        initial: Initials = {}
        kept = self.units(self.width)
        check_groups("convnet", self.norm, [self.width], [kept])
        channels, grow = self.shape[0], 2 * (self._first_padding() - 1)
        side = (self.shape[1] + grow, self.shape[2] + grow)
        sides = self.sides()
        for block in range(self.depth):
            initial |= conv_initial(f"conv{block}", channels, kept, 3)
            initial |= norm_initial(f"norm{block}", kept, self.norm, (kept, *side))
            channels, side = kept, sides[block]
        return initial | linear_initial("head", kept * side[0] * side[1], self.classes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        made = self._rounded(weights, x) if _may_be_rounded(x) else None
        if made := made or self._evaluated(weights, x):
            return made
        maps: list[Tensor] = []
        for block in range(self.depth):
            padding = self._first_padding() if block == 0 else 1
            # An instance norm takes any constant of a map away again; leaving it out is exact.
            bias = None if self.norm == "instance" else weights[f"conv{block}.bias"]
            x = self.scaled(F.conv2d(x, weights[f"conv{block}.weight"], bias, padding=padding))
            x = self._pooled(weights, f"norm{block}", x)
            maps.append(x)
        return maps

    @property
    def by_example(self) -> bool:
        return self.norm != "static"

    @property
    def takes_half(self) -> bool:
        return self._in_fours and gpu.kernels("kernels.half_blocks") is not None

    @property
    def stacks_well(self) -> bool:
        return (
            half_asked_for()
            and self._in_fours
            and gpu.kernels("kernels.stacked_blocks") is not None
        )

    def coarse_stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        """As `stages`, in half precision on a GPU where that is allowed and the kernels fit."""
        return self._rounded(weights, x) or self.stages(weights, x)

    def features(self, weights: Weights, x: Tensor) -> Tensor:
        if _may_be_rounded(x) and (rounded := self._rounded(weights, x, only_last=True)):
            return rounded[-1].flatten(1)
        return super().features(weights, x)

    def features_beside(self, weights: Weights, x: Tensor, resting: int) -> tuple[Tensor, Tensor]:
        used = [self._block_weights(weights, block) for block in range(self.depth)]
        tensors = [tensor for block in used for tensor in block]
        trained = torch.is_grad_enabled() and all(tensor.requires_grad for tensor in tensors)
        fit = pass_will_do(x) and self._in_fours and trained and not x.requires_grad
        rows = gpu.kernels("kernels.rows", x) if fit and gpu.plain_on_gpu(x, *tensors) else None
        if rows is None:
            return super().features_beside(weights, x, resting)
        paddings = [self._first_padding(), *[1] * (self.depth - 1)]
        found: tuple[Tensor, Tensor] = rows.features(x, used, paddings, resting)
        return found

    def coarse_features(self, weights: Weights, x: Tensor) -> Tensor:
        if rounded := self._rounded(weights, x, only_last=True):
            return rounded[-1].flatten(1)
        return super().coarse_features(weights, x)

    def _rounded(
        self, weights: Weights, x: Tensor, *, only_last: bool = False
    ) -> list[Tensor] | None:
        """The stages in half precision where that may be and there are kernels, else None."""
        examples = half_will_do_for_examples(x)
        if not (examples or half_will_do(x)) or not self._in_fours:
            return None
        used = [self._block_weights(weights, block) for block in range(self.depth)]
        tensors = [tensor for block in used for tensor in block]
        if examples:
            alone = _stacked_on_gpu(x, *tensors) and not any(is_stacked(one) for one in tensors)
            kernels = gpu.kernels("kernels.half_example_blocks", x) if alone else None
            first = gpu.kernels("kernels.half_example_first", x) if alone else None
            return self._stacked_stages(kernels, used, x, only_last, first) if kernels else None
        plain = gpu.plain_on_gpu(x, *tensors)
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if plain and not trained and (kernels := gpu.kernels("kernels.half_blocks", x)) is not None:
            return self._half_stages(kernels, used, x, only_last)
        stacked = (plain and trained) or _stacked_on_gpu(x, *tensors)
        if stacked and (kernels := gpu.kernels("kernels.stacked_blocks", x)) is not None:
            first = gpu.kernels("kernels.stacked_first", x)
            return self._stacked_stages(kernels, used, x, only_last, first)
        return None

    def _evaluated(self, weights: Weights, x: Tensor) -> list[Tensor] | None:
        """The stages without gradient, unrounded, by pixel on a GPU with kernels; else None."""
        if torch.is_grad_enabled() or not x.is_cuda or not self._in_fours:
            return None
        used = [self._block_weights(weights, block) for block in range(self.depth)]
        known = gpu.plain_on_gpu(x, *(tensor for block in used for tensor in block))
        if not known or (kernels := gpu.kernels("kernels.half_blocks", x)) is None:
            return None
        maps: list[Tensor] = []
        by_pixel = torch.channels_last
        for block, (weight, scale, shift) in enumerate(used):
            x, weight = x.to(memory_format=by_pixel), weight.to(memory_format=by_pixel)
            x = F.conv2d(x, weight, padding=self._first_padding() if block == 0 else 1)
            x = kernels.norm_relu_pool(x, scale, shift, last=block == self.depth - 1)
            maps.append(x)
        return maps

    def _half_stages(
        self, kernels: Any, weights: list[list[Tensor]], x: Tensor, only_last: bool
    ) -> list[Tensor]:
        """Blocks of a network that stays as it is; gradients are louder in it than outside."""
        maps: list[Tensor] = []
        first = gpu.kernels("kernels.first_blocks", x)
        for block in range(self.depth):
            weight, scale, shift = weights[block]
            last = block == self.depth - 1
            padding = self._first_padding() if block == 0 else 1
            if block == 0 and not last and first.takes(x, padding):
                x = first.block(x, weight, scale, shift, padding, GAIN)
            else:
                x = x if block else kernels.gained(x, 1 / GAIN)
                x = F.conv2d(*_in_half(x, weight), padding=padding)
                x = kernels.norm_relu_pool(x, scale, shift, last=last)
            if last or not only_last:
                maps.append(kernels.gained(x.float(), GAIN))
        return maps

    def _stacked_stages(
        self,
        kernels: Any,
        weights: list[list[Tensor]],
        x: Tensor,
        only_last: bool,
        first: Any = None,
    ) -> list[Tensor]:
        """Blocks of a network that is trained: among many under a vmap, alone, or by example.

        `first` has a kernel of its own for the first block, where it takes the images.
        """
        maps: list[Tensor] = []
        for block in range(self.depth):
            padding = self._first_padding() if block == 0 else 1
            alone = block == 0 and first is not None and first.takes(x, padding)
            x = (first if alone else kernels).block(x, *weights[block], padding)
            if block == self.depth - 1 or not only_last:
                maps.append(kernels.in_single(x))
        return maps

    def _block_weights(self, weights: Weights, block: int) -> list[Tensor]:
        """Of the convolution, and scale and shift of the norm."""
        return [
            weights[f"{n}{block}.{k}"]
            for n, k in (("conv", "weight"), ("norm", "weight"), ("norm", "bias"))
        ]

    @property
    def _in_fours(self) -> bool:
        """Whether blocks of this kind can be made in half precision: their pixels go in fours."""
        grow = 2 * (self._first_padding() - 1)
        seen = [(self.shape[1] + grow, self.shape[2] + grow), *self.sides()[:-1]]
        even = all(height % 2 == 0 and width % 2 == 0 for height, width in seen)
        scaled = self.training and self.scaler
        return self._fused and even and not scaled

    @property
    def _fused(self) -> bool:
        """Whether there are kernels for blocks of this kind, and of maps so large."""
        usual = (self.norm, self.activation, self.pooling) == ("instance", "relu", "avg")
        return usual and self.shape[1] * self.shape[2] <= _MOST_PIXELS

    def _pooled(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Norm, activation and pooling; as one kernel where that can be."""
        if self._fused:
            scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
            plain = gpu.plain_on_gpu(x, scale, shift)
            kernels = gpu.kernels("kernels.blocks", x) if plain else None
            if kernels is not None:
                fused: Tensor = kernels.norm_relu_pool(x, scale, shift)
                return fused
            alone = _stacked_on_gpu(x) and not any(is_stacked(one) for one in (scale, shift))
            kernels = gpu.kernels("kernels.example_blocks", x) if alone else None
            if kernels is not None:
                by_example: Tensor = kernels.norm_relu_pool(x, scale, shift)
                return by_example
            if gpu.plain_on_cpu(x, scale, shift):
                return pooled_blocks.norm_relu_pool(x, scale, shift)
        x = self.normalise(weights, name, x, self.norm)
        x = _ACTIVATIONS[self.activation](x)
        if self.pooling == "none":
            return x
        return pools.avg_pool(x) if self.pooling == "avg" else pools.max_pool(x)

    def _first_padding(self) -> int:
        return 3 if self.shape == (1, 28, 28) else 1


def _may_be_rounded(x: Tensor) -> bool:
    """Whether a pass of which nothing is said may be made in half precision."""
    of_examples = torch.is_grad_enabled() and half_will_do_for_examples(x)
    return of_examples or pass_will_do(x)


def _in_half(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Input and weights of a convolution in half precision, pixel by pixel in memory.

    Tensor cores take channels in eights; zeros are added to make them so.
    """
    if missing := -x.shape[1] % 8:  # padding by nothing would be a copy
        x, weight = (F.pad(tensor, (0, 0, 0, 0, 0, missing)) for tensor in (x, weight))
    by_pixel = torch.channels_last
    return x.to(torch.half, memory_format=by_pixel), weight.to(torch.half, memory_format=by_pixel)


def _stacked_on_gpu(*tensors: Tensor) -> bool:
    """Whether a kernel for stacks may be handed these.

    They are under one vmap, and in it one gradient is taken; what is outside wants none. So no
    gradient of a gradient is asked for, which these kernels do not have.
    """
    return in_gradient_under_vmap() and all(
        tensor.is_cuda and tensor.dtype == torch.float32 and not unwrapped(tensor).requires_grad
        for tensor in tensors
    )
