"""GPU kernels of the first block of ConvNets that are trained, many or alone; only where Triton is.

As in `half_blocks` the block is a kernel with its convolution: its maps before pooling, most of
what a network makes, are not stored. For the gradient of the weights they are made anew, and what
patches are told is summed at once: the norm's share of it follows from the moments of the patches,
which the pass forward has kept. Only where images want a gradient too, maps are stored for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.core.torch_internals import in_transform
from fedstill.kernels import stacked_blocks as stacked
from fedstill.kernels.blocks import EPS
from fedstill.kernels.half_blocks import (
    FIRST_GROUP,
    _first_block,
    _first_places,
    _is_one,
    _levels,
    _normalising,
    _number,
    _patches,
    _taps,
    _weights,
)
from fedstill.models.by_pixel import GAIN


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """As `stacked_blocks.block`, for images that `takes` accepts."""
    if not in_transform():
        return _Alone.apply(x, weight, scale, shift, padding)  # type: ignore[no-untyped-call,no-any-return]
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-untyped-call,no-any-return]


class _Block(torch.autograd.Function):
    """The block; what its gradient needs is returned as well, since only that can be kept."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(made[0] for made in forward(*stacked.stacked_once(inputs)))

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
        return forward(*stacked.stacked(info, in_dims, inputs)), 0


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
        grad, x, weight, scale, shift, mean, factor, spread = every
        of_x = ctx.needs_input_grad[0]
        to_x = image_slopes(grad, x, weight, scale, shift, ctx.padding)[0] if of_x else None
        found = slopes(grad, x, weight, scale, shift, mean, factor, spread, ctx.padding)
        return to_x, *(one[0] for one in found), None


class WeighTiles(NamedTuple):
    """Pixels that one turn of a program sees, its channels, and its threads."""

    places: int
    channels: int
    warps: int


def weigh_tiles(channels: int, places: int) -> WeighTiles:
    """For so many channels and pooled pixels."""
    group = max(16, min(64, int(triton.next_power_of_2(channels))))
    return WeighTiles(_first_places(places), group, 4)


def takes(x: Tensor, padding: int) -> bool:
    """Whether the kernels can make these: one program holds all patches of an image."""
    inputs, height, width = x.shape[-3:]
    return inputs <= 3 and (height + 2 * padding - 2) * (width + 2 * padding - 2) <= 1024


def forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps of [member, image, input, y, x], by pixel; then for the gradient the maps'
    means and inverse deviations, and the patches' second moments."""
    members, images, inputs, height, width = x.shape
    high, wide = height // 2 + padding - 1, width // 2 + padding - 1
    channels, taps, places = weight.shape[1], _taps(inputs), _first_places(high * wide)
    x = _laid(x)
    flat = (members, images, high, wide, channels)
    pooled = torch.empty(flat, dtype=torch.float16, device=x.device).permute(0, 1, 4, 2, 3)
    mean = torch.empty((members, images, channels), device=x.device)
    factor = torch.empty_like(mean)
    spread = torch.empty((members, images, taps, taps), device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _first_block[(members * images,)](
            x, weight.contiguous(), scale.contiguous(), shift.contiguous(), pooled, mean, factor,
            pooled, spread, images, x.stride(0), channels, EPS, False, True, inputs, height, width,
            padding, taps, places, FIRST_GROUP, 128, num_warps=8 if places > 64 else 4,
            num_stages=1, maxnreg=128,
        )  # fmt: skip
    return pooled, mean, factor, spread


def image_slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """The gradient of the images, by the kernels of other blocks."""
    laid = stacked.laid_out(weight)
    _, maps, mean, factor = stacked.normed(stacked.convolved(x, laid, padding), scale, shift)
    to_maps = stacked.norm_slopes(grad, scale, shift, maps, mean, factor)[2]
    return stacked.image_slopes(to_maps, x, laid, padding)


def slopes(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, mean: Tensor,
    factor: Tensor, spread: Tensor, padding: int, tiles: WeighTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the weights, of scale and of shift, summed over images in a fixed order."""
    kept = (mean, factor, spread)
    of_weights, of_both = slopes_by_image(grad, x, weight, scale, shift, *kept, padding, tiles)
    to_scale, to_shift = of_both.sum(1).unbind(1)
    return of_weights.sum(1).view(weight.shape), to_scale, to_shift


def slopes_by_image(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, mean: Tensor,
    factor: Tensor, spread: Tensor, padding: int, tiles: WeighTiles | None = None,
    *, gain: float = GAIN,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[member, image, channel, input and tap], of the weights; [member, image, 2, channel]."""
    members, images, inputs, height, width = x.shape
    channels, taps = weight.shape[1], _taps(inputs)
    x = _laid(x)
    tiles = tiles or weigh_tiles(channels, grad.shape[3] * grad.shape[4])
    of_weights = torch.empty((members, images, channels, 9 * inputs), device=x.device)
    of_both = torch.empty((members, images, 2, channels), device=x.device)
    told = grad.permute(0, 1, 3, 4, 2).contiguous()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _weigh_first[(members * images * triton.cdiv(channels, tiles.channels),)](
            x, weight.contiguous(), scale.contiguous(), shift.contiguous(), mean.contiguous(),
            factor.contiguous(), spread.contiguous(), told, of_weights, of_both, 1 / gain, images,
            x.stride(0), channels, inputs, height, width, padding, taps, tiles.places,
            tiles.channels, num_warps=tiles.warps, num_stages=1,
        )  # fmt: skip
    return of_weights, of_both


_Slopes = stacked.function(slopes)
_ImageSlopes = stacked.function(image_slopes)


def _laid(x: Tensor) -> Tensor:
    """A member's images one after the other; members that share them need no copies."""
    size = x[0, 0].numel()
    return x if x[0, 0].is_contiguous() and x.stride(1) == size else x.contiguous()


@triton.jit(do_not_specialize=["each", "apart"])
def _weigh_first(
    images, weight, scale, shift, means, factors, spreads, grad, of_weights, of_both, gain, each,
    apart, channels, INPUTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    PADDING: tl.constexpr, TAPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what their weights, scale and shift do to the loss."""
    groups = tl.cdiv(channels, GROUP)
    one, first = tl.program_id(0) // groups, tl.program_id(0) % groups * GROUP
    member = one // each
    places: tl.constexpr = (WIDTH // 2 + PADDING - 1) * (HEIGHT // 2 + PADDING - 1)
    pieces: tl.constexpr = (places + PLACES - 1) // PLACES
    image = images + member.to(tl.int64) * apart + one % each * (INPUTS * HEIGHT * WIDTH)
    weight += member * channels * (9 * INPUTS)
    scale, shift = scale + member * channels, shift + member * channels
    means, factors = means + one * channels, factors + one * channels
    start = grad + one.to(tl.int64) * places * channels
    levels = _levels(image, INPUTS, HEIGHT * WIDTH)
    tap, channel = tl.arange(0, TAPS), first + tl.arange(0, GROUP)
    known = channel < channels
    taken = _normalising(weight, scale, shift, means, factors, first, channels, INPUTS, TAPS, GROUP)
    heard = tl.zeros([TAPS, GROUP], tl.float32)  # of every patch, what it is told
    for turn in range(4 * pieces):
        begin = turn % pieces * PLACES
        patches = _patches(
            image, levels, turn // pieces, begin, 1, INPUTS, HEIGHT, WIDTH, PADDING, TAPS, PLACES
        )  # fmt: skip
        out = begin + tl.arange(0, PLACES)
        where = start + out[:, None] * channels + channel[None, :]
        told = tl.load(where, mask=(out < places)[:, None] & known[None, :], other=0.0)
        share = tl.where(tl.dot(patches, taken) > 0, told, 0.0).to(tl.float16)
        heard = tl.dot(tl.trans(patches), share, heard)
    heard = tl.trans(heard) * 0.25
    square = spreads + one.to(tl.int64) * (TAPS * TAPS)
    spread = tl.load(square + tap[:, None] * TAPS + tap[None, :])
    level = tl.sum(tl.where(_is_one(tap, TAPS)[:, None], spread, 0.0), 0)[None, :]
    raw = _weights(weight, tap[None, :], channel[:, None], channels, INPUTS, TAPS).to(tl.float32)
    mean = tl.load(means + channel, mask=known, other=0.0)
    factor = tl.load(factors + channel, mask=known, other=0.0)
    stretch = tl.load(scale + channel, mask=known, other=0.0) * factor
    alone = tl.sum(tl.where(_is_one(tap, TAPS)[None, :], heard, 0.0), 1)
    along = (tl.sum(heard * raw, 1) - mean * alone) * factor
    # What the norm takes away: the mean of what maps are told, and what of it goes along with them.
    normal = tl.dot(raw, spread, input_precision="tf32x3") - mean[:, None] * level
    moved = heard - alone[:, None] * level - (along * factor)[:, None] * normal
    number = _number(tap, TAPS)
    place = of_weights + one.to(tl.int64) * channels * (9 * INPUTS)
    place = place + channel[:, None] * (9 * INPUTS) + number[None, :]
    fits = known[:, None] & (number < 9 * INPUTS)[None, :]
    tl.store(place, moved * (stretch * gain)[:, None], mask=fits)
    both = of_both + one * (2 * channels) + channel
    tl.store(both, along * gain, mask=known)
    tl.store(both + channels, alone * gain, mask=known)
