"""GPU kernels of ConvNet blocks in half precision for a stack of networks; only where Triton is.

Every member of the stack has its own weights and its own images; a network that is trained alone
is a stack of one. The framework makes a convolution
of such a stack one with groups, which its library does slowly. Here it is a matrix product for each
member: of what a pixel sees (nine taps, all channels) and the member's weights. Maps are of two
bytes a number and lie in memory pixel by pixel, all channels of a pixel side by side. Sums are in
single precision and of a fixed order, and heights and widths are even.

Between blocks gradients are `GAIN` times louder than outside, since half precision would round
small numbers to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.core.torch_internals import in_transform
from fedstill.kernels.grids import fitting, long
from fedstill.kernels.half_blocks import NormTiles, _norm_relu_pool, _slopes, norm_tiles
from fedstill.models.by_pixel import GAIN
from fedstill.models.pooled_blocks import EPS


class Tiles(NamedTuple):
    """What one program of a convolution works on at a time, and with how many threads.

    `inputs` counts channels of all nine taps; a tile of one tap, which divides them, is simplest.
    """

    pixels: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# The choices below were the best of some on an H200.


def convolution_tiles(inputs: int, outputs: int) -> Tiles:
    """For a convolution from so many channels to so many; also the one back to its input."""
    out = _tile(outputs, 128)
    seen = 32 if inputs == 32 else _tile(9 * inputs, 64)
    if seen < 64 and out == 128:  # images
        return Tiles(64, out, seen, 4, 2)
    return Tiles(128, out, seen, 8 if out == 128 else 4, 3)


def weighing_tiles(inputs: int, outputs: int) -> Tiles:
    """For the gradient of a convolution's weights."""
    out = _tile(outputs, 128)
    if out == 128:
        return Tiles(64, out, _tile(9 * inputs, 64), 4, 3 if inputs < 16 else 4)
    seen = _tile(9 * inputs, 128)
    return Tiles(128 if inputs < 16 else 64, out, seen, 8 if seen * out > 64 * 64 else 4, 3)


def own_weighing_tiles(inputs: int, outputs: int) -> Tiles:
    """For the same where members have few pixels, as single examples have."""
    wide = inputs >= 128 and outputs >= 128
    return Tiles(64, 128, 128, 4, 3) if wide else weighing_tiles(inputs, outputs)


LAID = 64  # weights along each side of the tile that a program turns
PROGRAMS = 256  # keep a large GPU busy; where there are fewer, sums over pixels are shared out


def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
    """avg_pool2d(relu(instance_norm(conv2d(x, weight)) * scale + shift), 2), in half precision.

    For one level of `torch.func.vmap` and gradients in it of first order, or for one network
    outside of `torch.func`. `x` holds images in single precision, whose gradients are as loud as
    those outside, or what a block returned.
    """
    if not in_transform():
        return _Alone.apply(x, weight, scale, shift, padding)  # type: ignore[no-untyped-call,no-any-return]
    return _Block.apply(x, weight, scale, shift, padding)[0]  # type: ignore[no-any-return]


def in_single(maps: Tensor, gain: float = GAIN) -> Tensor:
    """What a block returned, for the outside: in single precision, its gradient made louder."""
    return _InSingle.apply(maps, gain)  # type: ignore[no-untyped-call,no-any-return]


class _InSingle(torch.autograd.Function):
    """Gradients enter the blocks here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(maps: Tensor, gain: float) -> Tensor:
        return maps.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.gain = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.gain).half(), None


def framed(forward: Callable[..., Any], gradients: Callable[..., Any]) -> Any:
    """A block of (x, weight, scale, shift, padding) for `torch.func`, from launches for stacks.

    `forward` returns the pooled maps and what the gradient needs; all of it leaves the block, since
    only that can be kept. `gradients` is given which inputs want one, the gradient of the pooled
    maps, the inputs but for padding, what was kept, and padding; it returns those of the inputs.
    """

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return tuple(made[0] for made in forward(*stacked_once(inputs)))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *kept, ctx.padding = inputs
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*kept, *output[1:])

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
            if grad is None:
                return (None,) * 5
            with torch.no_grad():
                found = gradients(ctx.needs_input_grad, grad, *ctx.saved_tensors, ctx.padding)
            return *found, None

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return forward(*stacked(info, in_dims, inputs)), 0

    return Block


class _Alone(torch.autograd.Function):
    """The block of a network that is not in a stack."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, _, scale, shift, ctx.padding = inputs
        pooled, *kept = _forward(*stacked_once(inputs))
        ctx.save_for_backward(x, scale, shift, *kept)
        return pooled[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, *kept, laid = ctx.saved_tensors
        grad, x, scale, shift = stacked_once((grad, x, scale, shift))
        *norm, grad = norm_slopes(grad, scale, shift, *kept)
        of_x, of_weight = ctx.needs_input_grad[:2]
        to_x = image_slopes(grad, x, laid, ctx.padding)[0] if of_x else None
        to_weight = weight_slopes(grad, x, ctx.padding)[0] if of_weight else None
        return to_x, to_weight, *(one[0] for one in norm), None


def function(launch: Callable[..., Any]) -> Any:
    """A launch for stacks as `torch.func` wants it: with a rule for a vmap, without a gradient."""

    class Launched(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            made = launch(*stacked_once(inputs))
            return tuple(one[0] for one in made) if isinstance(made, tuple) else made[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return launch(*stacked(info, in_dims, inputs)), 0

    return Launched


def stacked_once(inputs: tuple[Any, ...]) -> list[Any]:
    """What is not stacked, as a stack of one."""
    return [one[None] if isinstance(one, Tensor) else one for one in inputs]


def stacked(info: Any, in_dims: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """All tensors with a first axis for members; what they share is not copied."""
    found = []
    for one, dim in zip(inputs, in_dims, strict=True):
        if isinstance(one, Tensor):
            one = one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
        found.append(one)
    return found


def _forward(
    x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int
) -> tuple[Tensor, ...]:
    """The pooled maps; then for the gradient the maps before, their moments and the weights."""
    laid = laid_out(weight)
    maps = convolved(x, laid, padding)
    return *normed(maps, scale, shift), laid


def laid_out(weight: Tensor) -> Tensor:
    """[member, output, input, 3, 3] as [member, tap, input, output], in half precision."""
    members, outputs, inputs = weight.shape[:3]
    laid = torch.empty((members, 9, inputs, outputs), dtype=torch.float16, device=weight.device)
    tiles = (triton.cdiv(9 * inputs, LAID), triton.cdiv(outputs, LAID))
    with torch.cuda.device_of(weight):  # type: ignore[no-untyped-call]
        for some in fitting(weight.contiguous(), laid):
            _lay_out[(*tiles, len(some[0]))](*some, inputs, outputs, LAID, num_warps=4)
    return laid


def by_pixel(maps: Tensor) -> Tensor:
    """[member, image, channel, y, x], of which the channels of a pixel lie side by side."""
    return maps.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _empty(*shape: int, like: Tensor) -> Tensor:
    """Maps in half precision, [member, image, channel, y, x] by pixel."""
    members, images, channels, height, width = shape
    flat = (members, images, height, width, channels)
    return torch.empty(flat, dtype=torch.float16, device=like.device).permute(0, 1, 4, 2, 3)


def convolved(x: Tensor, laid: Tensor, padding: int, tiles: Tiles | None = None) -> Tensor:
    """conv2d of [member, image, input, y, x], each member by its own weights."""
    members, images, _, height, width = x.shape
    grow = 2 * padding - 2
    maps = _empty(members, images, laid.shape[3], height + grow, width + grow, like=x)
    _launch_convolution(x, laid, maps, padding, 1.0, False, tiles)
    return maps


def image_slopes(
    grad: Tensor,
    x: Tensor,
    laid: Tensor,
    padding: int,
    tiles: Tiles | None = None,
    *,
    gain: float = GAIN,
) -> Tensor:
    """The gradient of a convolution's input: the convolution of its output's, weights turned."""
    single = x.dtype == torch.float32
    to_x = torch.empty(x.shape, device=x.device) if single else _empty(*x.shape, like=x)
    _launch_convolution(grad, laid, to_x, 2 - padding, 1 / gain if single else 1.0, True, tiles)
    return to_x


def _launch_convolution(
    x: Tensor, laid: Tensor, out: Tensor, padding: int, gain: float, turned: bool,
    tiles: Tiles | None,
) -> None:  # fmt: skip
    _, images, inputs, height, width = x.shape
    outputs, high, wide = out.shape[2:]
    tiles = tiles or convolution_tiles(inputs, outputs)
    pixels = images * high * wide
    programs = (triton.cdiv(pixels, tiles.pixels), triton.cdiv(outputs, tiles.outputs))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for some in fitting(x, laid.contiguous(), out):
            _convolve[(*programs, len(some[0]))](
                *some, gain, pixels, *x.stride(), *out.stride(), inputs, outputs, height, width,
                high, wide, padding, turned, long(x, out), tiles.pixels, tiles.outputs,
                tiles.inputs, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip


def weight_slopes(
    grad: Tensor,
    x: Tensor,
    padding: int,
    tiles: Tiles | None = None,
    shares: int | None = None,
    *,
    gain: float = GAIN,
    by_tap: bool = False,
) -> Tensor:
    """The gradient of a convolution's weights, [member, output, input, 3, 3].

    Where programs are few, each sums over a share of the pixels, and then the shares are summed.
    `by_tap` lets outputs of a tap and an input lie side by side in memory, as they are made.
    """
    members, images, inputs, height, width = x.shape
    outputs, high, wide = grad.shape[2:]
    tiles = tiles or weighing_tiles(inputs, outputs)
    parts = triton.cdiv(9 * inputs, tiles.inputs)
    across = triton.cdiv(outputs, tiles.outputs)
    pixels = images * high * wide
    if shares is None:
        shares = triton.cdiv(PROGRAMS, parts * across * members)
    share = max(1, triton.cdiv(pixels, shares * tiles.pixels)) * tiles.pixels
    shares = max(1, triton.cdiv(pixels, share))
    # Shares are written as they are made; the order that is wanted is made of their sum.
    as_made = by_tap or shares > 1
    axes = (3, 3, inputs, outputs) if as_made else (outputs, inputs, 3, 3)
    found = torch.empty((members, shares, *axes), device=x.device)
    told = by_pixel(grad)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for some in fitting(x, told, found, found):
            _weigh[(parts * shares, across, len(some[0]))](
                *some, 1 / gain, pixels, share, *x.stride(), inputs, outputs, height, width, high,
                wide, padding, as_made, False, long(x, told), tiles.pixels, tiles.outputs,
                tiles.inputs, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
    summed = found[:, 0] if shares == 1 else found.sum(1)
    turned = summed.permute(0, 4, 3, 1, 2) if as_made else summed
    return turned if by_tap else turned.contiguous()


def squared_weight_slopes(
    grad: Tensor, x: Tensor, padding: int, tiles: Tiles | None = None, *, gain: float = GAIN
) -> tuple[Tensor, Tensor]:
    """[member, output, input, 3, 3] in half precision, and [member], the sums of their squares.

    The squares are of the very numbers that are kept. Outputs lie side by side in memory.
    """
    members, images, inputs, height, width = x.shape
    outputs, high, wide = grad.shape[2:]
    tiles = tiles or own_weighing_tiles(inputs, outputs)
    programs = (triton.cdiv(9 * inputs, tiles.inputs), triton.cdiv(outputs, tiles.outputs))
    pixels = images * high * wide
    flat = (members, 3, 3, inputs, outputs)
    found = torch.empty(flat, dtype=torch.float16, device=x.device)
    squares = torch.empty((members, *programs), dtype=torch.float64, device=x.device)
    told = by_pixel(grad)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for some in fitting(x, told, found, squares):
            _weigh[(*programs, len(some[0]))](
                *some, 1 / gain, pixels, pixels, *x.stride(), inputs, outputs, height, width, high,
                wide, padding, True, True, long(x, told), tiles.pixels, tiles.outputs,
                tiles.inputs, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
    return found.permute(0, 4, 3, 1, 2), squares.sum((1, 2))


def normed(
    maps: Tensor, scale: Tensor, shift: Tensor, tiles: NormTiles | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pooled maps, those they are made of, and each map's mean and inverse deviation."""
    members, images, channels, height, width = maps.shape
    pooled = _empty(members, images, channels, height // 2, width // 2, like=maps)
    mean = torch.empty((members, images, channels), device=maps.device)
    factor = torch.empty_like(mean)
    tiles = tiles or norm_tiles(channels, height, width)
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        _norm_relu_pool[(members * images * triton.cdiv(channels, tiles.channels),)](
            maps, scale.contiguous(), shift.contiguous(), pooled, mean, factor, images, channels,
            EPS, False, height, width, tiles.places, tiles.channels, num_warps=tiles.warps,
        )  # fmt: skip
    return pooled, maps, mean, factor


def norm_slopes(
    grad: Tensor,
    scale: Tensor,
    shift: Tensor,
    maps: Tensor,
    mean: Tensor,
    factor: Tensor,
    tiles: NormTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scale and shift, summed over images in a fixed order, and of the maps."""
    to_both, to_maps = norm_slopes_by_image(grad, scale, shift, maps, mean, factor, tiles)
    to_scale, to_shift = to_both.sum(1).unbind(1)
    return to_scale, to_shift, to_maps


def norm_slopes_by_image(
    grad: Tensor,
    scale: Tensor,
    shift: Tensor,
    maps: Tensor,
    mean: Tensor,
    factor: Tensor,
    tiles: NormTiles | None = None,
    *,
    gain: float = GAIN,
) -> tuple[Tensor, Tensor]:
    """[member, image, 2, channel], the gradients of scale and shift, and those of the maps."""
    members, images, channels, height, width = maps.shape
    to_maps = _empty(*maps.shape, like=maps)
    to_both = torch.empty((members, images, 2, channels), device=maps.device)
    tiles = tiles or norm_tiles(channels, height, width)
    with torch.cuda.device_of(maps):  # type: ignore[no-untyped-call]
        _slopes[(members * images * triton.cdiv(channels, tiles.channels),)](
            by_pixel(maps), scale.contiguous(), shift.contiguous(), mean.contiguous(),
            factor.contiguous(), by_pixel(grad), to_maps, to_both, 1 / gain, images, channels,
            False, True, height, width, tiles.places, tiles.channels, num_warps=tiles.warps,
        )  # fmt: skip
    return to_both, to_maps


_NormSlopes = function(norm_slopes)
_ImageSlopes = function(image_slopes)
_WeightSlopes = function(weight_slopes)


def _gradients(
    wanted: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor,
    maps: Tensor, mean: Tensor, factor: Tensor, laid: Tensor, padding: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *norm, grad = _NormSlopes.apply(grad, scale, shift, maps, mean, factor)
    to_x = _ImageSlopes.apply(grad, x, laid, padding) if wanted[0] else None
    to_weight = _WeightSlopes.apply(grad, x, padding) if wanted[1] else None
    return to_x, to_weight, *norm


_Block = framed(_forward, _gradients)


def _tile(channels: int, most: int) -> int:
    """A matrix product takes sixteen or more, in powers of two."""
    return max(16, min(most, int(triton.next_power_of_2(channels))))


@triton.jit
def _lay_out(weight, laid, inputs, outputs, SIDE: tl.constexpr):
    """Some weights of a member, [output, input and tap], turned and in half precision."""
    member = tl.program_id(2).to(tl.int64) * (9 * inputs * outputs)
    unit = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    channel = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    known, there = unit < 9 * inputs, channel < outputs
    read = weight + member + channel[:, None] * (9 * inputs) + unit[None, :]
    taken = tl.load(read, mask=there[:, None] & known[None, :], other=0.0).to(tl.float16)
    line = unit % 9 * inputs + unit // 9
    written = laid + member + line[:, None] * outputs + channel[None, :]
    tl.store(written, tl.trans(taken), mask=known[:, None] & there[None, :])


@triton.jit
def _tap(part, unit, IN: tl.constexpr, INPUTS: tl.constexpr):
    """Which of nine, how far down and right: one for all units of a part, or each unit's own."""
    if IN % INPUTS == 0:
        tap = part // (IN // INPUTS)
        return tap, tap // 3, tap % 3
    else:
        tap = unit // IN
        return tap, (tap // 3)[None, :], (tap % 3)[None, :]


@triton.jit
def _counted(number, LONG: tl.constexpr):
    """A number that places are made of, in 64 bits if so."""
    return number.to(tl.int64) if LONG else number


@triton.jit
def _convolve(
    x, laid, out, gain, pixels,
    x_member, x_image, x_channel, x_row, x_column,
    out_member, out_image, out_channel, out_row, out_column,
    IN: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PADDING: tl.constexpr, TURNED: tl.constexpr,
    LONG: tl.constexpr, PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Some pixels of a member's images, some channels of what comes out."""
    member = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = pixel < pixels
    image = _counted(pixel // (HIGH * WIDE), LONG)
    row = pixel // WIDE % HIGH
    column = pixel % WIDE
    corner = image * x_image + (row - PADDING) * x_row + (column - PADDING) * x_column
    start = x + member * x_member + corner[:, None]
    weights = laid + member * (9 * IN * OUT)
    total = tl.zeros([PIXELS, OUTPUTS], tl.float32)
    for step in range((9 * IN + INPUTS - 1) // INPUTS):
        unit = step * INPUTS + tl.arange(0, INPUTS)
        known = unit < 9 * IN
        part = unit % IN
        tap, down, right = _tap(step, unit, IN, INPUTS)
        high = row[:, None] + (down - PADDING)
        wide = column[:, None] + (right - PADDING)
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH) & there[:, None]
        where = start + (down * x_row + right * x_column) + part[None, :] * x_channel
        seen = tl.load(where, mask=inside & known[None, :], other=0.0).to(tl.float16)
        if TURNED:
            place = ((8 - tap) * (OUT * IN) + part)[:, None] + channel[None, :] * IN
        else:
            place = (tap * (IN * OUT) + part * OUT)[:, None] + channel[None, :]
        fits = known[:, None] & (channel < OUT)[None, :]
        total = tl.dot(seen, tl.load(weights + place, mask=fits, other=0.0), total)
    first = out + member * out_member
    place = (image * out_image + row * out_row + column * out_column)[:, None]
    value = (total * gain).to(out.dtype.element_ty)
    fits = there[:, None] & (channel < OUT)[None, :]
    tl.store(first + place + channel[None, :] * out_channel, value, mask=fits)


@triton.jit
def _weigh(
    x, grad, out, squares, gain, pixels, share,
    x_member, x_image, x_channel, x_row, x_column,
    IN: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PADDING: tl.constexpr, BY_TAP: tl.constexpr,
    SQUARED: tl.constexpr, LONG: tl.constexpr, PIXELS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Some weights of a member, of one tap or of all, over a share of its pixels.

    `SQUARED`, the sum of the squares of what is stored as well.
    """
    member = tl.program_id(2).to(tl.int64)
    parts: tl.constexpr = (9 * IN + INPUTS - 1) // INPUTS
    mine = tl.program_id(0) % parts
    number = tl.program_id(0) // parts
    unit = mine * INPUTS + tl.arange(0, INPUTS)
    known = unit < 9 * IN
    part = unit % IN
    tap, down, right = _tap(mine, unit, IN, INPUTS)
    channel = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    counts = channel < OUT
    move = (down - PADDING) * x_row + (right - PADDING) * x_column + part[None, :] * x_channel
    start = x + member * x_member + move
    told = grad + member * pixels * OUT + channel[None, :]
    total = tl.zeros([INPUTS, OUTPUTS], tl.float32)
    end = tl.minimum((number + 1) * share, pixels)
    for begin in range(number * share, end, PIXELS):
        pixel = begin + tl.arange(0, PIXELS)
        there = (pixel < end)[:, None]
        row = (pixel // WIDE % HIGH)[:, None]
        column = (pixel % WIDE)[:, None]
        high = row + (down - PADDING)
        wide = column + (right - PADDING)
        inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH) & there
        image = _counted(pixel // (HIGH * WIDE), LONG)[:, None]
        where = image * x_image + row * x_row + column * x_column
        seen = tl.load(start + where, mask=inside & known[None, :], other=0.0).to(tl.float16)
        place = _counted(pixel, LONG)[:, None] * OUT
        heard = tl.load(told + place, mask=there & counts[None, :], other=0.0)
        total = tl.dot(tl.trans(seen), heard, total)
    shares = tl.num_programs(0) // parts
    first = out + (member * shares + number) * (9 * IN * OUT)
    if BY_TAP:
        place = ((tap * IN + part) * OUT)[:, None] + channel[None, :]
    else:
        place = (part * 9 + tap)[:, None] + channel[None, :] * (9 * IN)
    value = (total * gain).to(out.dtype.element_ty)
    if SQUARED:
        exact = value.to(tl.float32)  # products of halves are exact
        square = tl.sum(tl.sum(exact * exact, 0).to(tl.float64), 0)
        across = tl.num_programs(1)
        mine = (member * tl.num_programs(0) + tl.program_id(0)) * across + tl.program_id(1)
        tl.store(squares + mine, square)
    tl.store(first + place, value, mask=known[:, None] & counts[None, :])
