"""Images searched for with a generator and the noise it starts from; the best are kept (DENSE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Model, Weights
from fedstill.core.loop import Given, joined, moved_part
from fedstill.core.mechanism import Gradient
from fedstill.core.optim import Optimizer
from fedstill.parts import augment
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.lessons import MOVES, Latent, Networks


class Found(NamedTuple):
    """Where the search for a batch of images stands."""

    value: Weights  # the generator's weights, and the noise it starts from
    memory: Any  # of the optimiser
    images: Tensor  # those of the lowest loss so far
    lowest: Tensor


@dataclass(frozen=True)
class Search:
    """One step of an optimiser on a generator and its noise; the best images are kept."""

    recordable: ClassVar[bool] = True

    networks: Networks
    maker: ImageGenerator
    optimizer: Optimizer

    def begun(self, generator: Weights, latent: Latent) -> Found:
        """Where the search begins: a generator as it is drawn, and no images yet."""
        value = {**generator, "noise": latent.noise}
        memory = self.optimizer.start(moved_part(value))
        blank = latent.noise.new_zeros(len(latent.noise), *self.maker.shape)
        return Found(value, memory, blank, torch.full((), torch.inf, device=blank.device))

    def __call__(
        self, carry: Found, given: Given, batch: Latent, gradient: Gradient
    ) -> tuple[Found, Tensor]:
        def scored(candidate: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            notes: Weights = {}
            value = joined(carry.value, candidate)
            here = batch._replace(noise=value["noise"])
            view = self.networks.view(self.maker.train(notes), value, here, **given)
            return self.networks.tuner.generator_loss(view), (notes, view.images.detach())

        grad, loss, (notes, images) = gradient(scored, moved_part(carry.value))
        moved, memory = self.optimizer.step(moved_part(carry.value), grad, carry.memory)
        better = loss < carry.lowest
        return Found(
            joined(carry.value, {**moved, **notes}),
            memory,
            torch.where(better, images, carry.images),
            torch.where(better, loss, carry.lowest),
        ), loss


def drawn_moves(model: Model, rng: torch.Generator, images: int, steps: int) -> list[augment.Draws]:
    """How each image is shown to the networks, for so many steps."""
    height, width = model.shape[1:]
    return [
        augment.Draws(*(part.to(model.device) for part in drawn))
        for drawn in (
            augment.draw(
                rng, MOVES, groups=1, image=(height, width), mode="multi", per_image=images
            )
            for _ in range(steps)
        )
    ]
