"""GPU kernels of a ConvNet's first block in half precision for gradients of single examples.

As `stacked_first` for one network, whose kernels make the gradients of weights, scale and shift
image by image: here they are summed over the images of each example alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedstill.kernels import half_example_blocks as others
from fedstill.kernels import stacked_first
from fedstill.kernels.stacked_blocks import function, stacked, stacked_once

takes = stacked_first.takes


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """As `half_example_blocks.block`, for images that `takes` accepts."""
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-untyped-call,no-any-return]


class _Block(torch.autograd.Function):
    """The block; what its gradient needs is returned as well, since only that can be kept."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(made[0] for made in _forward(*stacked_once(inputs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.padding = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:-1], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        images = ctx.saved_tensors[:4]
        with torch.no_grad():
            found = _Slopes.apply(grad, *ctx.saved_tensors, ctx.padding)
            of_x = ctx.needs_input_grad[0]
            to_x = _ImageSlopes.apply(grad, *images, ctx.padding) if of_x else None
        return to_x, *found, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _forward(*stacked(info, in_dims, inputs)), 0


def _forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps; then for the gradient what `stacked_first.forward` keeps, by example."""
    network = (weight[:1], scale[:1], shift[:1])
    made = stacked_first.forward(_all_images(x), *network, padding)
    return tuple(torch.unflatten(one[0], 0, x.shape[:2]) for one in made)


def slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, mean: Tensor,
    factor: Tensor, spread: Tensor, padding: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the weights, of scale and of shift, each example's own."""
    of_weights, of_both = stacked_first.slopes_by_image(
        _all_images(grad), _all_images(x), weight[:1], scale[:1], shift[:1], _all_images(mean),
        _all_images(factor), _all_images(spread), padding, gain=others.GAIN,
    )  # fmt: skip
    to_weight, to_both = (
        torch.unflatten(one[0], 0, x.shape[:2]).sum(1) for one in (of_weights, of_both)
    )
    to_scale, to_shift = to_both.unbind(1)
    return to_weight.view(len(x), *weight.shape[1:]), to_scale, to_shift


def image_slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """The gradient of the images, by the kernels of other blocks."""
    network = (weight, scale, shift)
    _, maps, mean, factor, laid = others.forward(x, *network, padding)
    to_maps = others.norm_slopes(grad, scale, shift, maps, mean, factor)[2]
    return others.image_slopes(to_maps, x, laid, padding)


def _all_images(by_example: Tensor) -> Tensor:
    """[1, image, …] of [example, image, …]: those of all examples, for one network."""
    return by_example.flatten(0, 1)[None]


_Slopes = function(slopes)
_ImageSlopes = function(image_slopes)
