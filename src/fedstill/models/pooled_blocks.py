"""Norm, activation and pooling of a ConvNet's block, on a CPU with few passes over its maps.

Pools are those of `core.pools`. The activation is written over the normalised maps, and its
gradient over the gradient that it is made of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.pools import averaged, spread
from fedstill.core.torch_internals import (
    gradient_of_relu_,
    gradients_of_norm,
    normed_by_channel,
)
from fedstill.core.unfolding import differentiable_gradients

EPS = 1e-5


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2) for [image, channel, y, x]."""
    maps = maps.contiguous()  # here, where gradients of gradients find the way back
    if torch.is_grad_enabled():
        return _Block.apply(maps, scale, shift)  # type: ignore[no-untyped-call,no-any-return]
    return averaged(_activated(maps, scale, shift)[0])


def unfolded(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The same by single operations of torch."""
    return F.avg_pool2d(F.relu(F.group_norm(maps, maps.shape[1], scale, shift, EPS)), 2)


class _Block(torch.autograd.Function):
    """The block with its gradient; for a gradient of the gradient it is unfolded again."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        activated, mean, factor = _activated(maps, scale, shift)
        ctx.save_for_backward(maps, scale, shift, mean, factor, activated)
        return averaged(activated)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, scale, shift, mean, factor, activated = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(differentiable_gradients(unfolded, (maps, scale, shift), grad))
        passed = gradient_of_relu_(spread(grad, maps), activated)
        return gradients_of_norm(passed, maps, mean, factor, scale, ctx.needs_input_grad)


def _activated(maps: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps after norm and ReLU, and each map's mean and inverse deviation before them."""
    normed, mean, factor = normed_by_channel(maps, scale, shift, EPS)
    return normed.relu_(), mean, factor
