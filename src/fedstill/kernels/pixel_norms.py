"""GPU kernels of instance norm for maps that lie pixel by pixel; imported only where Triton is.

The framework turns such maps round for a group norm and back again. Here the norm, what is added to
it (the other arm of a residual block) and the activation are one kernel, which reads and writes a
map as convolutions do, in half or in single precision. Sums are in single precision and of a fixed
order.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedstill.core.unfolding import differentiable_gradients
from fedstill.models.pooled_blocks import EPS

MOST_NUMBERS = 16384  # of a map that a program holds at once
NAN = tl.constexpr(tl.PropagateNan.ALL)  # what is not a number stays so, that it be seen


def normed(
    maps: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None = None, *, relu: bool = True
) -> Tensor:
    """relu(instance_norm(maps) * scale + shift + added) for [image, channel, y, x] by pixel.

    `added` has the shape of the maps; None adds nothing. Scale and shift are in single precision.
    """
    maps, added = _by_pixel(maps), None if added is None else _by_pixel(added)
    scale, shift = scale.contiguous(), shift.contiguous()
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            return _Norm.apply(maps, scale, shift, added, relu)  # type: ignore[no-untyped-call,no-any-return]
        return _forward(maps, scale, shift, added, relu)[0]


class _Norm(torch.autograd.Function):
    """The norm with its gradient; for a gradient of the gradient it is unfolded again."""

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None, relu: bool
    ) -> Tensor:
        made, mean, factor = _forward(maps, scale, shift, added, relu)
        ctx.relu, ctx.adds = relu, added is not None
        ctx.save_for_backward(maps, scale, shift, mean, factor, made, added)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        maps, scale, shift, mean, factor, made, added = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = partial(unfolded, relu=ctx.relu)
            return *differentiable_gradients(again, (maps, scale, shift, added), grad), None
        with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
            to_maps, to_added, both = _backward(
                maps, scale, mean, factor, made, _by_pixel(grad), ctx.relu, ctx.adds
            )
        to_scale, to_shift = both.sum(0).unbind(0)
        return to_maps, to_scale, to_shift, to_added, None


def unfolded(
    maps: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None, *, relu: bool
) -> Tensor:
    """The same by the framework's operations."""
    normal = F.group_norm(maps.float(), maps.shape[1], scale, shift, EPS).to(maps.dtype)
    made = normal if added is None else normal + added
    return F.relu(made) if relu else made


def _by_pixel(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


class Tiles(NamedTuple):
    """How many pixels and channels of an image a program takes at once, and with what threads."""

    places: int
    channels: int
    warps: int


def tiles(channels: int, pixels: int) -> Tiles:
    """For maps of so many pixels; a larger map than a program can hold is read in parts."""
    places = min(1024, int(triton.next_power_of_2(pixels)))
    most = min(64, MOST_NUMBERS // places)
    group = min(int(triton.next_power_of_2(channels)), max(16, most))
    numbers = places * group
    return Tiles(places, group, 8 if numbers > 4096 else 4 if numbers > 1024 else 2)


def _forward(
    maps: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes out, and each map's mean and inverse deviation."""
    images, channels, height, width = maps.shape
    made = torch.empty_like(maps)
    mean, factor = scale.new_empty(images, channels), scale.new_empty(images, channels)
    at = tiles(channels, height * width)
    _normed[(images * triton.cdiv(channels, at.channels),)](
        maps, scale, shift, maps if added is None else added, made, mean, factor, channels, EPS,
        added is not None, relu, height * width, at.places, at.channels, num_warps=at.warps,
    )  # fmt: skip
    return made, mean, factor


def _backward(
    maps: Tensor, scale: Tensor, mean: Tensor, factor: Tensor, made: Tensor, grad: Tensor,
    relu: bool, adds: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of maps, of what was added, and of scale and shift, [image, 2, channel]."""
    images, channels, height, width = maps.shape
    to_maps = torch.empty_like(maps)
    # What was not cut off is told to the other arm as it came.
    to_added = torch.empty_like(maps) if adds and relu else grad if adds else None
    both = scale.new_empty(images, 2, channels)
    at = tiles(channels, height * width)
    _slopes[(images * triton.cdiv(channels, at.channels),)](
        maps, scale, mean, factor, made, grad, to_maps, to_maps if to_added is None else to_added,
        both, channels, adds and relu, relu, height * width, at.places, at.channels,
        num_warps=at.warps,
    )  # fmt: skip
    return to_maps, to_added, both


@triton.jit
def _at(first, channel, channels, PIXELS: tl.constexpr, PLACES: tl.constexpr):
    """[pixel, channel], where some pixels from the first lie in an image, and whether they do."""
    pixel = first + tl.arange(0, PLACES)
    fits = (pixel < PIXELS)[:, None] & (channel < channels)[None, :]
    return pixel[:, None] * channels + channel[None, :], fits


@triton.jit
def _finished(
    away, added, made, at, fits, stretch, offset, ADDED: tl.constexpr, RELU: tl.constexpr
):
    """Write pixels scaled and shifted, with what is added to them, cut off at zero."""
    value = away * stretch + offset
    if ADDED:
        value += tl.load(added + at, mask=fits, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0, NAN)
    tl.store(made + at, value.to(made.dtype.element_ty), mask=fits)


@triton.jit
def _normed(
    maps, scale, shift, added, made, means, factors, channels, eps, ADDED: tl.constexpr,
    RELU: tl.constexpr, PIXELS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: mean and deviation over all its pixels, then the pixels."""
    groups = tl.cdiv(channels, GROUP)
    one = tl.program_id(0) // groups
    channel = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    start = one.to(tl.int64) * PIXELS * channels
    maps, added, made = maps + start, added + start, made + start
    stretch = tl.load(scale + channel, mask=known, other=0.0)
    offset = tl.load(shift + channel, mask=known, other=0.0)[None, :]
    if PIXELS <= PLACES:
        at, fits = _at(0, channel, channels, PIXELS, PLACES)
        value = tl.load(maps + at, mask=fits, other=0.0).to(tl.float32)
        mean = tl.sum(value, 0) / PIXELS
        away = tl.where(fits, value - mean[None, :], 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(away * away, 0) / PIXELS + eps)
        stretch = (stretch * factor)[None, :]
        _finished(away, added, made, at, fits, stretch, offset, ADDED, RELU)
    else:
        total = tl.zeros([GROUP], tl.float32)
        for first in range(0, PIXELS, PLACES):
            at, fits = _at(first, channel, channels, PIXELS, PLACES)
            total += tl.sum(tl.load(maps + at, mask=fits, other=0.0).to(tl.float32), 0)
        mean = total / PIXELS
        total = tl.zeros([GROUP], tl.float32)
        for first in range(0, PIXELS, PLACES):
            at, fits = _at(first, channel, channels, PIXELS, PLACES)
            value = tl.load(maps + at, mask=fits, other=0.0).to(tl.float32)
            away = tl.where(fits, value - mean[None, :], 0.0)
            total += tl.sum(away * away, 0)
        factor = 1.0 / tl.sqrt(total / PIXELS + eps)
        stretch = (stretch * factor)[None, :]
        for first in range(0, PIXELS, PLACES):
            at, fits = _at(first, channel, channels, PIXELS, PLACES)
            away = tl.load(maps + at, mask=fits, other=0.0).to(tl.float32) - mean[None, :]
            _finished(away, added, made, at, fits, stretch, offset, ADDED, RELU)
    tl.store(means + one * channels + channel, mean, mask=known)
    tl.store(factors + one * channels + channel, factor, mask=known)


@triton.jit
def _heard(maps, made, grad, at, fits, mean, factor, RELU: tl.constexpr):
    """Pixels normalised, and what they are told: nothing where they were cut off."""
    normal = (tl.load(maps + at, mask=fits, other=0.0).to(tl.float32) - mean) * factor
    told = tl.load(grad + at, mask=fits, other=0.0).to(tl.float32)
    if RELU:
        told = tl.where(tl.load(made + at, mask=fits, other=0.0) <= 0, 0.0, told)
    return tl.where(fits, normal, 0.0), told


@triton.jit
def _moved(normal, told, to_maps, to_added, at, fits, stretch, level, tilt, ADDED: tl.constexpr):
    """Write what pixels do to the loss: what they are told, less what the norm takes away."""
    if ADDED:
        tl.store(to_added + at, told.to(to_added.dtype.element_ty), mask=fits)
    moved = stretch * (told - level - normal * tilt)
    tl.store(to_maps + at, moved.to(to_maps.dtype.element_ty), mask=fits)


@triton.jit
def _slopes(
    maps, scale, means, factors, made, grad, to_maps, to_added, to_both, channels,
    ADDED: tl.constexpr, RELU: tl.constexpr, PIXELS: tl.constexpr, PLACES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Some channels of one image: what pixels, scale and shift do to the loss."""
    groups = tl.cdiv(channels, GROUP)
    one = tl.program_id(0) // groups
    channel = tl.program_id(0) % groups * GROUP + tl.arange(0, GROUP)
    known = channel < channels
    start = one.to(tl.int64) * PIXELS * channels
    maps, made, grad = maps + start, made + start, grad + start
    to_maps, to_added = to_maps + start, to_added + start
    mean = tl.load(means + one * channels + channel, mask=known, other=0.0)[None, :]
    factor = tl.load(factors + one * channels + channel, mask=known, other=0.0)[None, :]
    stretch = tl.load(scale + channel, mask=known, other=0.0)[None, :] * factor
    if PIXELS <= PLACES:
        at, fits = _at(0, channel, channels, PIXELS, PLACES)
        normal, told = _heard(maps, made, grad, at, fits, mean, factor, RELU)
        alone, along = tl.sum(told, 0), tl.sum(told * normal, 0)
        level, tilt = (alone / PIXELS)[None, :], (along / PIXELS)[None, :]
        _moved(normal, told, to_maps, to_added, at, fits, stretch, level, tilt, ADDED)
    else:
        alone, along = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP], tl.float32)
        for first in range(0, PIXELS, PLACES):
            at, fits = _at(first, channel, channels, PIXELS, PLACES)
            normal, told = _heard(maps, made, grad, at, fits, mean, factor, RELU)
            alone, along = alone + tl.sum(told, 0), along + tl.sum(told * normal, 0)
        level, tilt = (alone / PIXELS)[None, :], (along / PIXELS)[None, :]
        for first in range(0, PIXELS, PLACES):
            at, fits = _at(first, channel, channels, PIXELS, PLACES)
            normal, told = _heard(maps, made, grad, at, fits, mean, factor, RELU)
            _moved(normal, told, to_maps, to_added, at, fits, stretch, level, tilt, ADDED)
    both = to_both + one * (2 * channels) + channel
    tl.store(both, along, mask=known)
    tl.store(both + channels, alone, mask=known)
