"""GPU kernels of ConvNet blocks in half precision for gradients of single examples.

As `stacked_blocks`, but all examples go through one network: convolutions and norms are those of
one batch, and only gradients of weights, scale and shift are made example by example. Those of
weights lie aside in half precision where they may (`core.asides`), all else comes out in single
precision; lengths and sums are of the very numbers that were kept. An example whose numbers leave
the reach of half precision has a gradient that is not finite; others do not feel it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedstill.core import asides
from fedstill.kernels import stacked_blocks
from fedstill.kernels.stacked_blocks import (
    _empty,
    _launch_convolution,
    framed,
    function,
    laid_out,
    norm_slopes_by_image,
    normed,
    squared_weight_slopes,
    weight_slopes,
)

GAIN = 16.0  # of gradients inside: an example's own is larger than its share of a batch's mean
NUMBERS = 2**31 - 1  # that one launch can tell apart


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """avg_pool2d(relu(instance_norm(conv2d(x, weight)) * scale + shift), 2), in half precision.

    For one vmap over examples and one gradient in it. Weight, scale and shift are everybody's; `x`
    is an example's images in single precision, or what a block returned, or everybody's as well.
    """
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-any-return]


def in_single(maps: Tensor) -> Tensor:
    """What a block returned, for the outside: in single precision, its gradient made louder."""
    return stacked_blocks.in_single(maps, GAIN)


def forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps; then for the gradient the maps before, their moments and the weights.

    All are [example, …]; weight, scale and shift are the same for all of them.
    """
    laid = laid_out(weight[:1])
    grow = 2 * padding - 2
    images = x.flatten(0, 1)
    _, _, height, width = images.shape
    shape = (laid.shape[3], height + grow, width + grow)
    maps = _empty(1, len(images), *shape, like=x)
    _convolve(images, laid, maps[0], padding, 1.0, turned=False)
    made = normed(maps, scale[:1], shift[:1])
    by_example = (torch.unflatten(one[0], 0, x.shape[:2]) for one in made)
    return *by_example, laid.expand(len(x), *laid.shape[1:])


def _convolve(
    x: Tensor, laid: Tensor, out: Tensor, padding: int, gain: float, *, turned: bool
) -> None:
    """conv2d of [image, channel, y, x] into `out`, in as few launches as can be."""
    for some in _pieces(x, out):
        _launch_convolution(x[some][None], laid, out[some][None], padding, gain, turned, None)


def _pieces(*maps: Tensor) -> Iterator[slice]:
    """So many images at a time that every number of theirs has a place in a launch."""
    most = max(1, NUMBERS // max(one[0].numel() for one in maps))
    for begin in range(0, len(maps[0]), most):
        yield slice(begin, begin + most)


def norm_slopes(
    grad: Tensor, scale: Tensor, shift: Tensor, maps: Tensor, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scale and shift, [example, channel], and of the maps."""
    told, maps, mean, factor = (one.flatten(0, 1)[None] for one in (grad, maps, mean, factor))
    to_both, to_maps = norm_slopes_by_image(
        told, scale[:1], shift[:1], maps, mean, factor, gain=GAIN
    )
    by_image = torch.unflatten(to_both[0], 0, grad.shape[:2])  # [example, image, 2, channel]
    summed = by_image[:, 0] if by_image.shape[1] == 1 else by_image.sum(1)
    to_scale, to_shift = summed.unbind(1)
    return to_scale, to_shift, torch.unflatten(to_maps[0], 0, grad.shape[:2])


def image_slopes(grad: Tensor, x: Tensor, laid: Tensor, padding: int) -> Tensor:
    """The gradient of a convolution's input."""
    told = grad.flatten(0, 1)
    single = x.dtype == torch.float32
    shape = (1, len(told), *x.shape[2:])
    to_x = torch.empty(shape, device=x.device) if single else _empty(*shape, like=x)
    gain = 1 / GAIN if single else 1.0
    _convolve(told, laid[:1], to_x[0], 2 - padding, gain, turned=True)
    return torch.unflatten(to_x[0], 0, x.shape[:2])


def own_weight_slopes(grad: Tensor, x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """[example, output, input, 3, 3], of which outputs lie side by side in memory.

    Zeros where these weights' gradients may lie aside.
    """
    place = asides.wanted(weight[0])
    if place is None:
        return weight_slopes(grad, x, padding, shares=1, gain=GAIN, by_tap=True)
    return asides.put(place, *squared_weight_slopes(grad, x, padding, gain=GAIN))


_NormSlopes = function(norm_slopes)
_ImageSlopes = function(image_slopes)
_WeightSlopes = function(own_weight_slopes)


def _gradients(
    wanted: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    maps: Tensor, mean: Tensor, factor: Tensor, laid: Tensor, padding: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *norm, grad = _NormSlopes.apply(grad, scale, shift, maps, mean, factor)
    to_x = _ImageSlopes.apply(grad, x, laid, padding) if wanted[0] else None
    to_weight = _WeightSlopes.apply(grad, x, weight, padding) if wanted[1] else None
    return to_x, to_weight, *norm


_Block = framed(forward, _gradients)
