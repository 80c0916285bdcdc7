"""Lessons without data: what a generator draws, what networks say of it, what a student learns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Node, Weights
from fedstill.core.loop import Descent, moved_part
from fedstill.parts.augment import Draws


class Drawn(NamedTuple):
    """What the generator makes images of."""

    noise: Tensor  # [image, number]
    labels: Tensor  # [image]
    view: Draws | None = None  # how networks see the images, where not as they are


class View(NamedTuple):
    """All that a loss of the generator may be made of."""

    inputs: Tensor  # [image, number], noise and label as the generator sees them
    images: Tensor  # [image, channel, height, width]
    labels: Tensor  # [image]
    said: Tensor  # [client, image, class], logits of the clients' networks
    student: Tensor  # [image, class], logits of the server's model
    shares: Tensor  # [client, image], each client's say about the label
    gaps: Tensor | None  # [client], how far batch norms are from what they know, where asked for

    @property
    def ensemble(self) -> Tensor:
        """[image, class], Σ_i τ_{i,y} · logits of client i."""
        return torch.einsum("ibc,ib->bc", self.said, self.shares)


class Lesson(NamedTuple):
    """Images for the student, and what it is to say of them."""

    images: Tensor  # [image, channel, height, width]
    target: Tensor  # [image, class], what `target` makes of the clients' logits


class Losses:
    """Means over the loops of a step, by name."""

    def __init__(self, node: Node[Any]):
        self.node = node
        self.found: dict[str, list[Tensor]] = {}

    def keep(self, name: str) -> None:
        """Note the loss of the latest loop under a name; a rehearsal has none."""
        if "loss" in self.node.numbers:
            self.found.setdefault(name, []).append(torch.as_tensor(self.node.numbers["loss"]))

    def write(self) -> None:
        self.node.log(**{name: torch.stack(some).mean() for name, some in self.found.items()})


def begun(body: Descent, value: Weights) -> tuple[Weights, Any]:
    """Where a loop that is run in several parts begins."""
    return value, body.optimizer.start(moved_part(value))
