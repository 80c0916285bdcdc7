"""GPU kernels for gradients of single examples; imported only where Triton is.

What a network does with an example is what it does with a batch, and so are most kernels. Three
differ: norms, whose scale and shift have a gradient for each example; what taps of a convolution
see, by which its weights' gradients are products of matrices; and lengths and sums of such
gradients, which are as large as the network for every example and are read as seldom as can be.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.kernels import grids
from fedstill.kernels.blocks import _backward, _forward


def norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """avg_pool2d(relu(instance_norm(maps) * scale + shift), 2), under a vmap over examples.

    Scale and shift are everybody's; their gradients are of first order and each example's own.
    """
    return _Block.apply(maps, scale, shift)[0]  # type: ignore[no-untyped-call,no-any-return]


class _Block(torch.autograd.Function):
    """The block; what its gradient needs is returned as well, since only that can be kept."""

    @staticmethod
    def forward(maps: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
            pooled, mean, factor = _forward(maps.contiguous(), scale, shift)
        return pooled, mean, factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        found: tuple[Tensor, ...] = _Slopes.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def vmap(info: Any, in_dims: Any, maps: Tensor, scale: Tensor, shift: Tensor) -> Any:
        maps = maps.movedim(in_dims[0], 0)
        made = _Block.forward(maps.flatten(0, 1), scale, shift)
        return tuple(one.view(*maps.shape[:2], *one.shape[1:]) for one in made), (0, 0, 0)


class _Slopes(torch.autograd.Function):
    """Gradients of maps, scale and shift; of an example's images alone under the vmap."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        to_maps, to_scale, to_shift = _slopes_by_image(*inputs)
        return to_maps, to_scale.sum(0), to_shift.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Tensor) -> Any:
        grad, maps, scale, shift, mean, factor = inputs
        by_map = [
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip(inputs, in_dims, strict=True)
            if one is not scale and one is not shift
        ]
        grad, maps, mean, factor = (one.flatten(0, 1) for one in by_map)
        to_maps, to_scale, to_shift = _slopes_by_image(grad, maps, scale, shift, mean, factor)
        lead = by_map[0].shape[:2]
        summed = (one.view(*lead, -1).sum(1) for one in (to_scale, to_shift))
        return (to_maps.view(*lead, *to_maps.shape[1:]), *summed), (0, 0, 0)


def _slopes_by_image(
    grad: Tensor, maps: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kept = (maps.contiguous(), scale, shift, mean.contiguous(), factor.contiguous())
    return _backward(*kept, grad.contiguous(), summed=False)


def patches(x: Tensor, padding: int) -> Tensor:
    """[example, input · tap, image · pixel], what each of nine taps sees of [example, image, …]."""
    examples, images, inputs, height, width = x.shape
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    seen = torch.empty((examples, inputs * 9, images * high * wide), device=x.device, dtype=x.dtype)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _lay_out[(examples * inputs * images,)](
            x.contiguous(), seen, inputs, images, height, width, high, wide, padding,
            triton.next_power_of_2(high * wide), num_warps=4,
        )  # fmt: skip
    return seen


@triton.jit
def _lay_out(
    x, seen, inputs, images, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, PADDING: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One map of an image, nine times."""
    line, image = tl.program_id(0) // images, tl.program_id(0) % images
    example, channel = line // inputs, line % inputs
    pixels: tl.constexpr = HIGH * WIDE
    place = tl.arange(0, PLACES)
    row, column = place // WIDE, place % WIDE
    start = x + ((example * images + image).to(tl.int64) * inputs + channel) * (HEIGHT * WIDTH)
    first = seen + line.to(tl.int64) * (9 * images * pixels) + image * pixels
    for tap in tl.static_range(9):
        high = row + (tap // 3 - PADDING)
        wide = column + (tap % 3 - PADDING)
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH)
        value = tl.load(start + high * WIDTH + wide, mask=inside & (place < pixels), other=0.0)
        tl.store(first + tap * images * pixels + place, value, mask=place < pixels)


NUMBERS = 2048  # that a program squares at a time


def squares(rows: Tensor) -> Tensor:
    """[example], the sum of squares of [example, number], in double precision."""
    examples, numbers = rows.shape
    parts = triton.cdiv(numbers, NUMBERS)
    found = torch.empty((examples, parts), device=rows.device, dtype=torch.float64)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        for some in grids.fitting(rows.contiguous(), found):
            _square[(parts, len(some[0]))](*some, numbers, NUMBERS, num_warps=4)
    return found.sum(1)


@triton.jit
def _square(rows, found, numbers, NUMBERS: tl.constexpr):
    """Some numbers of one example."""
    example = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(rows + example * numbers + number, mask=number < numbers, other=0.0)
    value = value.to(tl.float64)
    tl.store(found + example * tl.num_programs(0) + tl.program_id(0), tl.sum(value * value, 0))


def weighted_sum(rows: Tensor, factors: Tensor) -> Tensor:
    """[number], the sum of [example, number], each row times its factor; those of 0 do not count.

    So a row that is not finite leaves no trace when its factor is 0. Sums are of a fixed order and
    in single precision; rows may be in half.
    """
    examples, numbers = rows.shape
    most = SHARE * grids.PLACES
    if examples > most:
        pairs = zip(torch.split(rows, most), torch.split(factors, most), strict=True)
        return torch.stack([weighted_sum(*pair) for pair in pairs]).sum(0)
    shares, added = triton.cdiv(examples, SHARE), BYTES // rows.element_size()
    found = torch.empty((shares, numbers), device=rows.device)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _add_up[(triton.cdiv(numbers, added), shares)](
            rows.contiguous(), factors.contiguous(), found, examples, numbers, SHARE, added,
            num_warps=4,
        )  # fmt: skip
    return found.sum(0)


SHARE = 32  # examples that a program adds up
BYTES = 2048  # of each of them, sixteen for every thread


@triton.jit
def _add_up(rows, factors, found, examples, numbers, SHARE: tl.constexpr, ADDED: tl.constexpr):
    """Some numbers of some examples, of which eight are read at a time."""
    share = tl.program_id(1)
    number = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    there = number < numbers
    total = tl.zeros([ADDED], tl.float32)
    for some in range(0, SHARE, 8):
        for one in tl.static_range(8):
            example = share * SHARE + some + one
            factor = tl.load(factors + example, mask=example < examples, other=0.0)
            factor += tl.zeros([ADDED], tl.float32)
            place = rows + example.to(tl.int64) * numbers + number
            total += factor * tl.load(place, mask=there & (factor != 0), other=0.0).to(tl.float32)
    tl.store(found + share.to(tl.int64) * numbers + number, total, mask=there)
