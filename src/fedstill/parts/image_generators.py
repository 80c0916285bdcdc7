"""Generators of images that a server trains without data: DFRD's, DENSE's, FedFTG's; no training.

Images are what networks see: their range is that of the last layer, not that of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.gpu import plain_on_gpu
from fedstill.core.model import Initial, Initials, conv_initial, linear_initial, norm_initial
from fedstill.core.ranges import Count
from fedstill.core.records import Weights
from fedstill.parts.generators import SLOPE, ImageGenerator, one_hot

DEVIATION = 0.02  # of weights at the start
FEW = 8  # channels
Merge = Literal["mul", "add", "cat", "ncat", "none"]


def normal_norm_laws(name: str, channels: int) -> Initials:
    """A batch norm whose factors start around one."""
    initial = norm_initial(name, channels, "batch")
    return {**initial, f"{name}.weight": Initial((channels,), "normal", DEVIATION, 1.0)}


@dataclass(frozen=True)
class Deconvolution(ImageGenerator):
    """Transposed convolutions from one point to the image, with tanh at the end (DFRD).

    A merge operator joins noise z and label y: `mul` z ⊙ E(y), `add` z + E(y), `cat` [z, E(y)],
    `ncat` [z, one-hot y], `none` z; E is a table that is learnt. The map grows from 4x4 by
    factors of two, its channels halve, and the image is the middle of the last one.
    """

    merge: Merge = "mul"
    latent: Count = 100
    width: Count = 512  # channels at 4x4

    @property
    def noise_width(self) -> int:
        return self.latent

    @property
    def input_width(self) -> int:
        """How many numbers the first layer sees."""
        return self.latent + {"cat": self.latent, "ncat": self.classes}.get(self.merge, 0)

    @property
    def channels(self) -> list[int]:
        """Of each map, from 4x4 to the image; at least one doubling."""
        found, side = [self.width], 8
        while side < max(self.shape[1:]):
            found, side = [*found, max(1, found[-1] // 2)], 2 * side
        return [*found, self.shape[0]]

    def initial(self) -> Initials:
        initial: Initials = {}
        if self.merge in ("mul", "add", "cat"):
            initial["label.weight"] = Initial((self.classes, self.latent), "normal")
        widths = [self.input_width, *self.channels]
        last = len(widths) - 2
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            initial[f"conv{layer}.weight"] = Initial((inputs, outputs, 4, 4), "normal", DEVIATION)
            if 0 < layer < last:
                initial |= normal_norm_laws(f"norm{layer}", outputs)
        return initial

    def embedded(self, weights: Weights, labels: Tensor) -> Tensor | None:
        """E(y), [example, number]."""
        table = weights.get("label.weight")
        return None if table is None else table[labels]

    def merged(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        """h = o(z, y), [example, number]."""
        if self.merge == "none":
            return noise
        if self.merge == "ncat":
            return torch.cat([noise, one_hot(labels, self.classes).to(noise)], 1)
        label = weights["label.weight"][labels]
        if self.merge == "cat":
            return torch.cat([noise, label], 1)
        return noise * label if self.merge == "mul" else noise + label

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(first_map(self.merged(weights, noise, labels), weights["conv0.weight"]))
        last = len(self.channels) - 1
        for layer in range(1, last + 1):
            x = doubled(x, weights[f"conv{layer}.weight"])
            if layer < last:
                x = F.relu(self.normalise(weights, f"norm{layer}", x, "batch"))
        return self.cut(torch.tanh(x))


def first_map(x: Tensor, weight: Tensor) -> Tensor:
    """A transposed convolution of single points [example, input]; a product on a GPU.

    The library's own takes twenty times as long there.
    """
    if plain_on_gpu(x, weight):
        return (x @ weight.flatten(1)).view(len(x), *weight.shape[1:])
    return F.conv_transpose2d(x[..., None, None], weight)


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    """A transposed convolution to maps of twice the side.

    To the few channels of an image it is a product on a GPU, whose results for each point are added
    up where they overlap: the library's own is made for many channels.
    """
    if weight.shape[1] < FEW and plain_on_gpu(x, weight):
        told = weight.flatten(1).T @ x.flatten(2)  # [example, output · row · column, point]
        size = (2 * x.shape[2], 2 * x.shape[3])
        return F.fold(told, size, kernel_size=4, stride=2, padding=1)
    return F.conv_transpose2d(x, weight, stride=2, padding=1)


@dataclass(frozen=True)
class Upsampling(ImageGenerator):
    """Linear to a quarter of the side, then enlarging and convolution, twice; sigmoid (DENSE).

    It is not told the label.
    """

    latent: Count = 256
    width: Count = 128  # channels of the first map; the second has half as many

    @property
    def noise_width(self) -> int:
        return self.latent

    @property
    def start(self) -> tuple[int, int]:
        """Height and width of the first map."""
        return -(-self.shape[1] // 4), -(-self.shape[2] // 4)

    def initial(self) -> Initials:
        size, half = self.width * self.start[0] * self.start[1], max(1, self.width // 2)
        return {
            "start.weight": Initial((size, self.latent), "normal", DEVIATION),
            "start.bias": Initial((size,), "zeros"),
            **normal_norm_laws("norm0", self.width),
            "conv1.weight": Initial((self.width, self.width, 3, 3), "normal", DEVIATION),
            **normal_norm_laws("norm1", self.width),
            "conv2.weight": Initial((half, self.width, 3, 3), "normal", DEVIATION),
            **normal_norm_laws("norm2", half),
            "image.weight": Initial((self.shape[0], half, 3, 3), "normal", DEVIATION),
            "image.bias": Initial((self.shape[0],), "zeros"),
        }

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        x = F.linear(noise, weights["start.weight"], weights["start.bias"])
        return torch.sigmoid(self.grown(weights, x.reshape(-1, self.width, *self.start)))

    def grown(self, weights: Weights, x: Tensor) -> Tensor:
        """The image before its last function, from the first map."""
        x = self.normalise(weights, "norm0", x, "batch")
        for name, norm in (("conv1", "norm1"), ("conv2", "norm2")):
            x = F.interpolate(x, scale_factor=2.0)
            # A batch norm takes any constant of a map away again. In training leaving the bias out
            # is exact; at rest, running statistics that began at zero would still hold some of it.
            x = F.conv2d(x, weights[f"{name}.weight"], padding=1)
            x = F.leaky_relu(self.normalise(weights, norm, x, "batch"), SLOPE)
        x = F.conv2d(x, weights["image.weight"], weights["image.bias"], padding=1)
        return self.cut(x)


@dataclass(frozen=True)
class Conditioned(Upsampling):
    """As DENSE's, of noise and label side by side; tanh and a norm without factors (FedFTG)."""

    latent: Count = 100

    def initial(self) -> Initials:
        area, half = self.start[0] * self.start[1], max(1, self.width // 2)
        from_label = self.width // 2
        initial = linear_initial("noise", self.latent, (self.width - from_label) * area)
        initial |= linear_initial("label", self.classes, from_label * area)
        initial |= norm_initial("norm0", self.width, "batch")
        initial |= conv_initial("conv1", self.width, self.width, 3)
        initial |= norm_initial("norm1", self.width, "batch")
        initial |= conv_initial("conv2", self.width, half, 3)
        initial |= norm_initial("norm2", half, "batch")
        initial |= conv_initial("image", half, self.shape[0], 3)
        initial["last.running_mean"] = Initial((self.shape[0],), "zeros")
        initial["last.running_var"] = Initial((self.shape[0],), "ones")
        return initial

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        told = one_hot(labels, self.classes).to(noise)
        parts = [
            F.linear(given, weights[f"{name}.weight"], weights[f"{name}.bias"])
            for name, given in (("noise", noise), ("label", told))
        ]
        x = torch.cat([part.reshape(len(noise), -1, *self.start) for part in parts], 1)
        return self.normalise(weights, "last", torch.tanh(self.grown(weights, x)), "batch")
