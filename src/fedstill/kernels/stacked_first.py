"""The first block of ConvNets that are trained, many or alone, in half precision; where Triton is.

As in `first_blocks` its maps before pooling, most of what a network makes, are not stored. For
gradients they are made anew, and what patches are told is summed at once: the norm's share of it
follows from the moments of the patches, which the pass forward has kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.core.torch_internals import in_transform
from fedstill.kernels import first_blocks
from fedstill.kernels import stacked_blocks as stacked
from fedstill.kernels.first_blocks import Norm
from fedstill.models.by_pixel import GAIN

takes = first_blocks.takes


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """As `stacked_blocks.block`, for images that `takes` accepts."""
    if not in_transform():
        return _Alone.apply(x, weight, scale, shift, padding)  # type: ignore[no-untyped-call,no-any-return]
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-any-return]


def forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps of [member, image, input, y, x]; then, for the gradient, a `Norm` and the
    patches' second moments."""
    taps = first_blocks.taps(x.shape[2])
    spread = torch.empty((*x.shape[:2], taps, taps), device=x.device)
    made = first_blocks.forward(x, weight, scale, shift, padding=padding, spread=spread)
    return *made, spread


def slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *kept: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, scale and shift, from what `forward` kept and the padding.

    They are summed over images in a fixed order.
    """
    *norm, spread, padding = kept
    of_weights, of_both = first_blocks.weight_slopes_by_image(
        grad, x, weight, scale, Norm(*norm), spread, padding=padding, gain=GAIN
    )
    to_scale, to_shift = of_both.sum(1).unbind(1)
    return of_weights.sum(1).view(weight.shape), to_scale, to_shift


def image_slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *kept: Any
) -> Tensor:
    """The gradient of the images, as loud as outside."""
    *norm, padding = kept
    return first_blocks.image_slopes(
        grad, x, weight, scale, shift, Norm(*norm), padding=padding, gain=GAIN
    )


_Slopes = stacked.function(slopes)
_ImageSlopes = stacked.function(image_slopes)


def _gradients(
    wanted: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    *kept: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *norm, _, padding = kept
    to_x = _ImageSlopes.apply(grad, x, weight, scale, shift, *norm, padding) if wanted[0] else None
    return to_x, *_Slopes.apply(grad, x, weight, scale, *kept)


_Block = stacked.framed(forward, _gradients)


class _Alone(torch.autograd.Function):
    """The block of a network that is not in a stack."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.padding = inputs[-1]
        pooled, *kept = forward(*stacked.stacked_once(inputs))
        ctx.save_for_backward(*inputs[:-1], *(one[0] for one in kept))
        return pooled[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        every = stacked.stacked_once((grad, *ctx.saved_tensors))
        grad, x, weight, scale, shift, *norm, spread = every
        found = slopes(grad, x, weight, scale, *norm, spread, ctx.padding)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = image_slopes(grad, x, weight, scale, shift, *norm, ctx.padding)[0]
        return to_x, *(one[0] for one in found), None
