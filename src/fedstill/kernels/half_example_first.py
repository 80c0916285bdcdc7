"""The first block of a ConvNet in half precision for gradients of single examples; where Triton is.

As `stacked_first` for one network, whose kernels make the gradients of weights, scale and shift
image by image: here they are summed over the images of each example alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedstill.kernels import first_blocks, stacked_first
from fedstill.kernels.first_blocks import Norm
from fedstill.kernels.half_example_blocks import GAIN
from fedstill.kernels.stacked_blocks import framed, function

takes = first_blocks.takes


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """As `half_example_blocks.block`, for images that `takes` accepts."""
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-any-return]


def _forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps; then for the gradient what `stacked_first.forward` keeps, by example."""
    made = stacked_first.forward(_all_images(x), weight[:1], scale[:1], shift[:1], padding)
    return tuple(torch.unflatten(one[0], 0, x.shape[:2]) for one in made)


def slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *kept: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weights, scale and shift, each example's own, from what was kept and padding."""
    *found, padding = kept
    *norm, spread = (_all_images(one) for one in found)
    of_weights, of_both = first_blocks.weight_slopes_by_image(
        _all_images(grad), _all_images(x), weight[:1], scale[:1], Norm(*norm), spread,
        padding=padding, gain=GAIN,
    )  # fmt: skip
    to_weight, to_both = (
        torch.unflatten(one[0], 0, x.shape[:2]).sum(1) for one in (of_weights, of_both)
    )
    to_scale, to_shift = to_both.unbind(1)
    return to_weight.view(len(x), *weight.shape[1:]), to_scale, to_shift


def image_slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *kept: Any
) -> Tensor:
    """The gradient of the images, as loud as outside."""
    *norm, padding = kept
    found = first_blocks.image_slopes(
        _all_images(grad), _all_images(x), weight[:1], scale[:1], shift[:1],
        Norm(*(_all_images(one) for one in norm)), padding=padding, gain=GAIN,
    )  # fmt: skip
    return torch.unflatten(found[0], 0, x.shape[:2])


def _all_images(by_example: Tensor) -> Tensor:
    """[1, image, …] of [example, image, …]: those of all examples, for one network."""
    return by_example.flatten(0, 1)[None]


_Slopes = function(slopes)
_ImageSlopes = function(image_slopes)


def _gradients(
    wanted: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    *kept: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *norm, _, padding = kept
    to_x = _ImageSlopes.apply(grad, x, weight, scale, shift, *norm, padding) if wanted[0] else None
    return to_x, *_Slopes.apply(grad, x, weight, scale, *kept)


_Block = framed(_forward, _gradients)
