"""A network with a place for each canary: its gradient is one unit vector, whatever else is there.

Such Dirac canaries are what a private gradient step can tell best of: a canary that was inside
moves one number, which nothing else moves but noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedstill.core import Data
from fedstill.core.model import NO_OPTION, Initial, Initials, Model
from fedstill.core.records import Weights

PLACES = "canaries"  # the tensor with a number for each canary
MARK = 1000.0  # the first entry of a canary is this and its number; no normalised input is as large
STEEP = 1e4  # the gradient of a canary before it is clipped
LABEL = 1


@dataclass(frozen=True)
class Witness(Model):
    """Another network, and a number for each of so many canaries."""

    base: Model = field(metadata=NO_OPTION)
    number: int = field(metadata=NO_OPTION)

    @classmethod
    def of(cls, base: Model, number: int) -> Witness:
        return cls(base.shape, base.classes, base, number, device=base.device)

    def initial(self) -> Initials:
        return {**self.base.initial(), PLACES: Initial((self.number,), "zeros")}

    def init(self, seed: int) -> Weights:
        places = torch.zeros(self.number, device=self.device)
        return {**self.base.on(self.device).init(seed), PLACES: places}

    @property
    def head_names(self) -> tuple[str, str | None]:
        return self.base.head_names

    @property
    def norm_names(self) -> tuple[str, ...]:
        return self.base.norm_names

    @property
    def draws(self) -> bool:
        return self.base.draws

    def drawing(self, seed: Tensor) -> Self:
        return replace(self, base=self.base.drawing(seed))

    @property
    def by_example(self) -> bool:
        return self.base.by_example

    @property
    def couples(self) -> bool:
        return self.base.couples

    @property
    def inner(self) -> Model:
        """The other network in this one's mode."""
        return replace(self.base, training=self.training, notes=self.notes)

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        return self.inner.stages(weights, x)

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        mark = x.flatten(1)[:, :1]  # [example, 1]
        canary = mark > MARK / 2
        plain = torch.where(canary.reshape(-1, *[1] * (x.dim() - 1)), 0.0, x)
        logits = self.inner(weights, plain)
        numbers = torch.arange(self.number, device=x.device)
        own = ((mark - MARK).round() == numbers).to(logits)  # [example, canary]
        pull = (own * weights[PLACES]).sum(1, keepdim=True)
        # Its value is always zero and its slope always the same, so a canary never wears off.
        steep = STEEP * (pull - pull.detach())
        first = torch.arange(self.classes, device=x.device) == 0
        return torch.where(canary, steep * first, logits)


def dirac_canaries(model: Model, number: int, device: torch.device | str) -> Data:
    """So many examples, each of which moves its own place alone."""
    x = torch.zeros(number, *model.shape, device=device)
    x.flatten(1)[:, 0] = MARK + torch.arange(number, device=device)
    return Data.of(x, torch.full((number,), LABEL, device=device))
