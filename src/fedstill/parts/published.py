"""The mechanisms of the papers, for comparison alone: gradients of many records clipped together.

One record can move such a gradient by more than its noise supposes, so nothing is promised and no
epsilon is reported. What holds stands in `parts.released`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedstill.core import Lazy, Node
from fedstill.core.mechanism import Gradient, LossOn
from fedstill.core.release import Use

if TYPE_CHECKING:
    from fedstill.parts.distribution_matching import Iteration

PAPER = "batch gradients"
GROUPS = "group gradients"


class Noised(NamedTuple):
    """A step of matching and the noise that the papers add to its gradient."""

    step: Iteration
    noise: Tensor  # of the images' shape


@dataclass(frozen=True)
class ClippedClasses:
    """The papers' mechanism: the gradient of each class clipped, noise over the batch added.

    FedDM, algorithm 2. One record can turn the gradient of its class right round, so the noise
    promises nothing; it is here to be compared with.
    """

    clip: float

    def gradient(
        self, loss_on: LossOn, value: Tensor, batch: Noised, gradient: Gradient
    ) -> tuple[Tensor, Tensor, Any]:
        found, loss, notes = gradient(loss_on(batch.step), value)
        return self.shortened(found) + batch.noise, loss, notes

    def shortened(self, found: Tensor) -> Tensor:
        """[class, ...], each class no longer than the clip."""
        length = found.flatten(1).square().sum(1).sqrt().clamp(min=self.clip)
        return found * _beside(self.clip / length, found)


@dataclass(frozen=True)
class ClippedGroups(ClippedClasses):
    """As DeSA's code has it: gradients of groups of records clipped, their mean, noise once.

    A batch of a class is cut into groups of `size` in the order of its records, so one record more
    moves others into other groups, and a group of records is clipped as if it were one. This
    promises nothing either.
    """

    size: int

    def gradient(
        self, loss_on: LossOn, value: Tensor, batch: Noised, gradient: Gradient
    ) -> tuple[Tensor, Tensor, Any]:
        step, share = batch.step, batch.step.share
        total, groups = torch.zeros_like(value), share.new_zeros(len(share))
        loss, notes = share.new_zeros(()), None
        for begin in range(0, share.shape[1], self.size):
            part = slice(begin, begin + self.size)
            whole = share[:, part].sum(1, keepdim=True)
            there = (whole.squeeze(1) > 0).to(share)  # [class], whether it has records here
            own = share[:, part] / whole.clamp(min=torch.finfo(share.dtype).tiny)
            alone = step._replace(real=step.real[:, part], share=own, packing=None)
            found, loss, notes = gradient(loss_on(alone), value)
            total = total + self.shortened(found) * _beside(there, found)
            groups = groups + there
        return total / _beside(groups.clamp(min=1), total) + batch.noise, loss, notes


def _beside(numbers: Tensor, rows: Tensor) -> Tensor:
    """[row], so that each stands beside the whole of its row."""
    return numbers.reshape(-1, *[1] * (rows.dim() - 1))


def published(
    node: Node[Any], steps: Lazy[Iteration], like: Tensor, batch: int
) -> tuple[Lazy[Noised], ClippedClasses]:
    """Steps with the noise of the papers, and what clips their gradients.

    The noise is sigma times the clip, over the number of what is clipped of a batch by itself:
    records in FedDM's text, groups of as many as a class has images in DeSA's code.
    """
    terms = node.privacy
    assert terms is not None
    size = like.shape[1] if terms.grouped else 1
    mechanism = ClippedGroups(terms.clip, size) if terms.grouped else ClippedClasses(terms.clip)
    deviation = terms.sigma * terms.clip * size / batch
    node.spend(Use(GROUPS if terms.grouped else PAPER, len(steps), sigma=terms.sigma))
    secret = node.secret(PAPER)

    def make(step: int) -> Noised:
        noise = secret.normal(torch.empty(like.shape, device=like.device), step)
        return Noised(steps[step], deviation * noise)

    return Lazy(len(steps), make), mechanism
