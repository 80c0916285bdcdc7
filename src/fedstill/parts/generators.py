"""Generators: networks that make images or features of a class from noise; no training.

A generator is described like a model, and its weights are passed in: it can be drawn from a
seed, sent, optimised and stacked. The noise is one row of numbers for each example, whatever a
generator does with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import seeds
from fedstill.core.errors import BadValue
from fedstill.core.model import (
    Initial,
    Initials,
    Model,
    Network,
    linear_initial,
    norm_initial,
)
from fedstill.core.ranges import Count, Positive
from fedstill.core.records import Weights
from fedstill.parts.synthetic_sets import SyntheticSet

SLOPE = 0.2  # of leaky ReLU, below zero
GAIN = math.sqrt(2)  # keeps the size of activations through a leaky ReLU, about
CHUNK = 256  # images made at once


@dataclass(frozen=True)
class Generator(Network):
    """Makes examples of one shape. A subclass gives `initial()`, `noise_width` and `__call__`."""

    shape: tuple[int, ...]
    classes: int

    @property
    def noise_width(self) -> int:
        """How many random numbers go into one example."""
        raise TypeError(f"{type(self).__name__} must define noise_width")

    def noise(self, rng: torch.Generator, *count: int) -> Tensor:
        """[..., number], what goes into so many examples: standard normal unless said otherwise."""
        return torch.randn(*count, self.noise_width, generator=rng, device=rng.device)

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        """[example, ...] from noise [example, number] and labels [example]."""
        raise TypeError(f"{type(self).__name__} must define __call__()")


def unfit_images(model: Model) -> list[str]:
    """Why a generator of images cannot make what a model sees, as lines for `Method.unfit`."""
    if len(model.shape) == 3:
        return []
    return [
        "its generator makes images of channels, height and width, but the networks see inputs of "
        f"shape {tuple(model.shape)}; use a method without a generator of images, such as feddm"
    ]


@dataclass(frozen=True)
class ImageGenerator(Generator):
    """Makes images; those that grew too large are cut to size."""

    def __post_init__(self) -> None:
        if len(self.shape) != 3:
            raise BadValue(
                f"a generator of images needs [channel, height, width], not {self.shape}"
            )

    def cut(self, images: Tensor) -> Tensor:
        """The middle of images that grew too large."""
        height, width = self.shape[1:]
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        return images[..., top : top + height, left : left + width]

    def merged(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        """[example, number], what the first layer sees of noise and labels."""
        return noise

    def embedded(self, weights: Weights, labels: Tensor) -> Tensor | None:
        """[example, number], what has been learnt to stand for labels; None where nothing is."""
        return None

    @torch.no_grad()
    def imagined(
        self, weights: Weights, rng: torch.Generator, per_class: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Images of each class and their labels, to be looked at."""
        labels = torch.arange(self.classes, device=device).repeat_interleave(per_class)
        noise = self.noise(rng, len(labels)).to(device)
        return self.evaluating(weights, noise, labels), labels


@dataclass(frozen=True)
class Gaussians(ImageGenerator):
    """An image generator fed from one Gaussian for each class: means are weights, drawn once.

    Images grow from 4x4 by factors of two until they are large enough, and are cut to size.
    """

    width: Count = 32  # channels of every layer
    latent: Count = 64
    between: Positive = 0.3  # deviation of the classes' means
    within: Positive = 0.1  # deviation around a mean

    @property
    def sides(self) -> list[int]:
        """The side of the map at each size."""
        found = [4]
        while found[-1] < max(self.shape[1:]):
            found.append(2 * found[-1])
        return found

    @property
    def noise_width(self) -> int:
        return self.latent

    def means_law(self, width: int) -> Initials:
        return {"means": Initial((self.classes, width), "normal", self.between)}


@dataclass(frozen=True)
class StyleGenerator(Gaussians):
    """A small StyleGAN2 (Karras et al. 2020): the style scales what convolutions read.

    One mapping layer; at each size modulated convolutions with noise, and an image that is added
    to the enlarged smaller one. Each class has a mean of its own for the noise of every layer too
    (VHL). Enlarging is bilinear, in place of the original's transposed convolution and blur.
    """

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Name and side of each convolution: one at 4x4, then two at each size."""
        rest = [(f"conv{side}{part}", side) for side in self.sides[1:] for part in "ab"]
        return [("conv4", 4), *rest]

    @property
    def noise_width(self) -> int:
        return self.latent + sum(side * side for _, side in self.layers)

    def initial(self) -> Initials:
        initial = self.means_law(self.latent + len(self.layers))
        initial["mapping.weight"] = Initial((self.latent, self.latent), "normal", self.latent**-0.5)
        initial["mapping.bias"] = Initial((self.latent,), "zeros")
        initial["start"] = Initial((self.width, 4, 4), "normal")
        for name, _ in self.layers:
            initial |= self._modulated_laws(name, self.width, 3)
        for side in self.sides:
            initial |= self._modulated_laws(f"image{side}", self.shape[0], 1)
        return initial

    def _modulated_laws(self, name: str, outputs: int, kernel: int) -> Initials:
        fan = self.width * kernel * kernel
        return {
            f"{name}.weight": Initial((outputs, self.width, kernel, kernel), "normal", fan**-0.5),
            f"{name}.bias": Initial((outputs,), "zeros"),
            f"{name}.style.weight": Initial((self.width, self.latent), "normal", self.latent**-0.5),
            f"{name}.style.bias": Initial((self.width,), "ones"),
        }

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        parts = [self.latent, *(side * side for _, side in self.layers)]
        latent, *maps = torch.split(noise, parts, dim=1)
        means = weights["means"][labels]  # [example, latent and layers]
        latent = means[:, : self.latent] + self.within * latent
        unit = latent * torch.rsqrt(latent.square().mean(1, keepdim=True) + 1e-8)
        style = F.linear(unit, weights["mapping.weight"], weights["mapping.bias"])
        style = GAIN * F.leaky_relu(style, SLOPE)
        x = weights["start"].expand(len(noise), -1, -1, -1)
        image = torch.zeros(len(noise), self.shape[0], 4, 4, device=noise.device)
        for at, (name, side) in enumerate(self.layers):
            own = means[:, self.latent + at, None] + self.within / len(maps) * maps[at]
            if x.shape[-1] != side:
                x, image = enlarged(x), enlarged(image)
            x = modulated(weights, name, x, style) + own.reshape(-1, 1, side, side)
            x = GAIN * F.leaky_relu(x + weights[f"{name}.bias"].reshape(-1, 1, 1), SLOPE)
            if not name.endswith("a"):
                made = modulated(weights, f"image{side}", x, style, demodulate=False)
                image = image + made + weights[f"image{side}.bias"].reshape(-1, 1, 1)
        return self.cut(image)


def modulated(
    weights: Weights, name: str, x: Tensor, style: Tensor, *, demodulate: bool = True
) -> Tensor:
    """A convolution whose kernel each example scales by its style, channel read by channel read.

    Demodulation divides by the norm of the scaled kernel: independent input of variance one gives
    output of variance one (edges aside). Scaling input and output is the same and stacks better.
    """
    kernel = weights[f"{name}.weight"]  # [out, in, side, side]
    scale = F.linear(style, weights[f"{name}.style.weight"], weights[f"{name}.style.bias"])
    out = F.conv2d(x * scale.reshape(*scale.shape, 1, 1), kernel, padding=kernel.shape[-1] // 2)
    if not demodulate:
        return out
    squared = F.linear(scale.square(), kernel.square().sum((2, 3)))  # [example, out]
    return out * torch.rsqrt(squared + 1e-8).reshape(*squared.shape, 1, 1)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """[example, class]; unlike the framework's own it can be stacked."""
    return labels.unsqueeze(1) == torch.arange(classes, device=labels.device)


def enlarged(x: Tensor) -> Tensor:
    """Maps of twice the side."""
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class ConvDecoder(Gaussians):
    """A linear layer to 4x4, then enlarging and one convolution for each size; cheap."""

    def initial(self) -> Initials:
        spread = self.between * self.latent**0.5  # of a row of noise: the first layer undoes it
        initial = self.means_law(self.latent)
        initial["start.weight"] = Initial((self.width * 16, self.latent), "normal", GAIN / spread)
        initial["start.bias"] = Initial((self.width * 16,), "zeros")
        for side in self.sides[1:]:
            initial |= self._conv_laws(f"conv{side}", self.width)
        return initial | self._conv_laws("image", self.shape[0])

    def _conv_laws(self, name: str, outputs: int) -> Initials:
        deviation = GAIN / math.sqrt(self.width * 9)
        return {
            f"{name}.weight": Initial((outputs, self.width, 3, 3), "normal", deviation),
            f"{name}.bias": Initial((outputs,), "zeros"),
        }

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        latent = weights["means"][labels] + self.within * noise
        x = F.linear(latent, weights["start.weight"], weights["start.bias"])
        x = F.leaky_relu(x, SLOPE).reshape(-1, self.width, 4, 4)
        for name in [*(f"conv{side}" for side in self.sides[1:]), "image"]:
            grown = x if name == "image" else enlarged(x)
            x = F.conv2d(grown, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)
            if name != "image":
                x = F.leaky_relu(x, SLOPE)
        return self.cut(x)


@dataclass(frozen=True)
class FeatureGenerator(Generator):
    """Feature vectors from uniform noise and a label (FedGen): one hidden layer, batch norm."""

    hidden: Count = 256
    noise_size: Count = 32

    @property
    def noise_width(self) -> int:
        return self.noise_size

    def noise(self, rng: torch.Generator, *count: int) -> Tensor:
        """Uniform in [0, 1), as the released code draws it; the paper says normal."""
        return torch.rand(*count, self.noise_size, generator=rng, device=rng.device)

    def initial(self) -> Initials:
        return (
            linear_initial("layer", self.noise_size + self.classes, self.hidden)
            | norm_initial("norm", self.hidden, "batch")
            | linear_initial("out", self.hidden, math.prod(self.shape))
        )

    def __call__(self, weights: Weights, noise: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([noise, one_hot(labels, self.classes).to(noise)], 1)
        x = F.linear(x, weights["layer.weight"], weights["layer.bias"])
        x = F.relu(self.normalise(weights, "norm", x, "batch"))
        x = F.linear(x, weights["out.weight"], weights["out.bias"])
        return x.reshape(-1, *self.shape)


Untrained = Literal["style", "conv_decoder"]
UNTRAINED: dict[str, type[Gaussians]] = {"style": StyleGenerator, "conv_decoder": ConvDecoder}


@lru_cache(maxsize=1)  # a function of its arguments; all parties of a run ask for the same set
@torch.no_grad()
def untrained_set(
    generator: Generator, seed: int, per_class: int, device: torch.device | str = "cpu"
) -> SyntheticSet:
    """Images of every class from a generator that was never trained (VHL).

    Each channel gets mean 0 and deviation 1 over the set, as normalised data have. Equal seeds
    give equal images. The result is shared: never write into it.
    """
    classes = generator.classes
    weights = generator.on(device).init(seeds.draw(seed, "weights"))
    labels = torch.arange(classes, device=device).repeat_interleave(per_class)
    noise = generator.noise(seeds.generator(seed, "noise"), len(labels)).to(device)
    chunks = zip(torch.split(noise, CHUNK), torch.split(labels, CHUNK), strict=True)
    images = standardised([generator(weights, *chunk) for chunk in chunks])
    share = torch.full((classes, per_class), 1 / per_class, device=device)
    images = images.reshape(classes, per_class, *generator.shape)
    return SyntheticSet(images, share, torch.arange(classes, device=device))


def standardised(chunks: Sequence[Tensor]) -> Tensor:
    """[image, channel, ...] with mean 0 and deviation 1 in each channel over all images."""
    images = torch.cat(list(chunks))
    over = [0, *range(2, images.dim())]
    mean = images.mean(over, keepdim=True)
    std = images.std(over, unbiased=False, keepdim=True)
    return (images - mean) / std.clamp(min=1e-6)
