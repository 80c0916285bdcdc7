"""Batches of synthetic images, augmented, for training a classifier."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedstill.core import Data, Lazy, Node
from fedstill.parts import augment
from fedstill.parts.augment import Draws, augmentations, image_size


class Labelled(NamedTuple):
    """A batch of synthetic images for training a classifier."""

    x: Tensor  # [image, ...]
    y: Tensor  # [image], or [image, class] for soft labels
    weight: Tensor  # [image]
    draws: Draws
    only: str

    def augmented(self) -> Tensor:
        """The images, each changed in its own way."""
        return augment.apply(self.x.unsqueeze(0), self.draws, only=self.only).squeeze(0)


def training_batches(
    node: Node[Any],
    data: Data,
    weight: Tensor,
    size: int,
    epochs: int,
    strategy: str,
    part: int = 0,
    mode: augment.Mode = "single",
) -> Lazy[Labelled]:
    """Epochs over a synthetic set; one operation a batch (or all), each image in its own way.

    A step that trains in several parts numbers them, so that each has draws of its own.
    """
    named = f" {part}" if part else ""
    plan = data.batches(size, node.rng(f"order{named}"), epochs=epochs)
    lengths = list(plan.sizes)
    choice, rng = node.rng(f"operations{named}"), node.rng(f"augmentation{named}")
    supply = {
        length: iter(
            augmentations(
                choice,
                rng,
                strategy,
                lengths.count(length),
                groups=1,
                image=image_size(node.model),
                per_image=length,
                mode=mode,
                device=node.device,
            )
        )
        for length in sorted(set(lengths))
    }
    drawn = [next(supply[length]) for length in lengths]

    def make(step: int) -> Labelled:
        only, draws = drawn[step]
        row = plan.rows[step]
        x, y = data.take(row)
        return Labelled(x, y, weight[row], draws, only)

    return Lazy(len(plan), make)
