"""Convolutions of many networks at once, with their gradients; who asks for them does not matter.

Under a vmap over networks torch makes a convolution one of as many groups as there are networks,
which GPUs are slow at. Here it is one kernel of ours for all of them. What such a kernel does is
written beside it as products of matrices: what a network's taps see of every pixel, all channels
side by side, times its weights. Values are the same but for the order of sums; in memory they lie
as the framework's do. Gradients are convolutions again, and have gradients themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.convolutions import Moves, moves_of, rounded_as_convolutions
from fedstill.core.torch_internals import is_stacked, unwrapped


def convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """conv2d of [image, channel, height, width] with the weights of a stack of networks.

    None where it is of another kind: with groups, gaps between taps or padding by a word, or on a
    GPU that has no kernels of ours or is not to round.
    """
    moves = moves_of(input, stride, padding, dilation, groups)
    if moves is None or not is_stacked(weight) or not _taken(input, weight, bias):
        return None
    made: Tensor = _Convolution.apply(input, weight, bias, moves)  # type: ignore[no-untyped-call]
    return made


def _taken(*tensors: Tensor | None) -> bool:
    """Whether tensors are on the host, where only tests ask for it, or our kernels take them."""
    plain = [unwrapped(tensor) for tensor in tensors if tensor is not None]
    on_gpu = any(tensor.is_cuda for tensor in plain)
    return all(t.numel() for t in plain) and (not on_gpu or _kernels(*plain) is not None)


class _Convolution(torch.autograd.Function):
    """A convolution; under a vmap over networks one of all of them."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, moves: Moves) -> Tensor:
        return torch.conv2d(x, weight, bias, moves.stride, moves.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.moves = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        to_x = _ToImages.apply(grad, weight, tuple(x.shape), ctx.moves) if of_x else None  # type: ignore[no-untyped-call]
        told: tuple[Tensor | None, Tensor | None] = (None, None)
        if of_weight or of_bias:
            told = _ToWeights.apply(grad, x, tuple(weight.shape[2:]), ctx.moves)  # type: ignore[no-untyped-call]
        return to_x, told[0] if of_weight else None, told[1] if of_bias else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, moves: Moves
    ) -> Any:
        x, weight = with_networks_first(info, in_dims, x, weight)
        if bias is not None:
            (bias,) = with_networks_first(info, in_dims[2:], bias)
        return convolutions(x, weight, bias, moves), 0


class _ToImages(torch.autograd.Function):
    """The gradient of a convolution's images."""

    @staticmethod
    def forward(grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
        return image_gradients(grad[None], weight[None], shape, moves)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, weight, _, ctx.moves = inputs
        ctx.save_for_backward(grad, weight)

    @staticmethod
    def backward(ctx: Any, images: Tensor) -> tuple[Tensor | None, ...]:
        """`images` stand where those of the convolution stood."""
        grad, weight = ctx.saved_tensors
        of_grad, of_weight = ctx.needs_input_grad[:2]
        to_grad = _Convolution.apply(images, weight, None, ctx.moves) if of_grad else None  # type: ignore[no-untyped-call]
        kernel = tuple(weight.shape[2:])
        to_weight = _ToWeights.apply(grad, images, kernel, ctx.moves)[0] if of_weight else None  # type: ignore[no-untyped-call]
        return to_grad, to_weight, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves
    ) -> Any:
        grad, weight = with_networks_first(info, in_dims, grad, weight)
        return image_gradients(grad, weight, shape, moves), 0


class _ToWeights(torch.autograd.Function):
    """The gradients of a convolution's weights and bias."""

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves
    ) -> tuple[Tensor, Tensor]:
        to_weight, to_bias = weight_gradients(grad[None], x[None], kernel, moves)
        return to_weight[0], to_bias[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grad, x, _, ctx.moves = inputs
        ctx.save_for_backward(grad, x)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple[Tensor | None, ...]:
        """`weight` and `bias` stand where those of the convolution stood."""
        grad, x = ctx.saved_tensors
        of_grad, of_x = ctx.needs_input_grad[:2]
        to_grad = _Convolution.apply(x, weight, bias, ctx.moves) if of_grad else None  # type: ignore[no-untyped-call]
        to_x = _ToImages.apply(grad, weight, tuple(x.shape), ctx.moves) if of_x else None  # type: ignore[no-untyped-call]
        return to_grad, to_x, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves
    ) -> Any:
        grad, x = with_networks_first(info, in_dims, grad, x)
        return weight_gradients(grad, x, kernel, moves), (0, 0)


def convolutions(x: Tensor, weight: Tensor, bias: Tensor | None, moves: Moves) -> Tensor:
    """[network, image, output, height, width].

    Of [network, image, input, height, width], [network, output, input, row, column] and [network,
    output].
    """
    if (kernels := _kernels(x, weight, made=_made(x, weight, moves))) is not None:
        found: Tensor = kernels.convolved(x, weight, bias, *moves)
        return found
    seen = _by_pixel(x, (weight.shape[3], weight.shape[4]), moves)
    with rounded_as_convolutions():
        made = seen.flatten(1, 3) @ _flat(weight).mT
    made = made if bias is None else made + bias.unsqueeze(1)
    return made.view(*seen.shape[:4], -1).movedim(4, 2).contiguous()


def weight_gradients(
    grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves
) -> tuple[Tensor, Tensor]:
    """Of weights and bias: what came out by what was seen or by one, summed over pixels."""
    if (kernels := _kernels(grad, x)) is not None:
        found: tuple[Tensor, Tensor] = kernels.to_weights(grad, x, kernel, *moves)
        return found
    told = grad.movedim(2, 4).flatten(1, 3)  # [network, pixel, output]
    with rounded_as_convolutions():
        made = told.mT @ _by_pixel(x, kernel, moves).flatten(1, 3)
    made = made.view(*made.shape[:2], *kernel, x.shape[2]).movedim(4, 2)
    return made.contiguous(), told.sum(1)


def image_gradients(grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    """[network, image, input, height, width]: each pixel's sum over the taps."""
    (rows, columns), (down, right) = weight.shape[3:], moves.padding
    images, channels, height, width = shape
    if (kernels := _kernels(grad, weight, made=math.prod(shape))) is not None:
        found: Tensor = kernels.to_images(grad, weight, (height, width), *moves)
        return found
    told = grad.movedim(2, 4)  # [network, image, height, width, output]
    with rounded_as_convolutions():
        taps = told.flatten(1, 3) @ _flat(weight)
    taps = taps.view(*told.shape[:4], rows, columns, -1)
    wide = taps.new_zeros(len(grad), images, height + 2 * down, width + 2 * right, channels)
    for row in range(rows):
        for column in range(columns):
            _reached(wide, (row, column), told.shape[2:4], moves).add_(taps[..., row, column, :])
    made = wide[:, :, down : down + height, right : right + width]
    return made.movedim(4, 2).contiguous()


def _by_pixel(x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
    """[network, image, height, width, row · column · input], what the taps see at each pixel."""
    (rows, columns), (down, right) = kernel, moves.padding
    by_pixel = x.movedim(2, 4)
    wide = F.pad(by_pixel, (0, 0, right, right, down, down)) if down or right else by_pixel
    # [network, image, height, width, input, row, column]: views, copied once for the product.
    seen = wide.unfold(2, rows, moves.stride[0]).unfold(3, columns, moves.stride[1])
    return seen.movedim(4, 6).flatten(4)


def _reached(wide: Tensor, tap: tuple[int, int], size: Sequence[int], moves: Moves) -> Tensor:
    """The pixels that one tap of a kernel sees, in the order of what comes out."""
    (row, column), (down, right) = tap, moves.stride
    return wide[
        :, :, row : row + down * (size[0] - 1) + 1 : down,
        column : column + right * (size[1] - 1) + 1 : right,
    ]  # fmt: skip


def _flat(weight: Tensor) -> Tensor:
    """[network, output, row · column · input]"""
    return weight.movedim(2, 4).flatten(2)


def _made(x: Tensor, weight: Tensor, moves: Moves) -> int:
    """How many numbers a convolution makes for one network."""
    sizes = zip(x.shape[3:], weight.shape[3:], moves.stride, moves.padding, strict=True)
    pixels = math.prod((side + 2 * pad - taps) // step + 1 for side, taps, step, pad in sizes)
    return x.shape[1] * weight.shape[1] * pixels


def _kernels(*tensors: Tensor, made: int = 0) -> Any:
    """Kernels that may be handed these, or None; they round as convolutions may be rounded.

    They count up to 2**31 numbers of one network, in what they see and in what is `made`, those
    included that lie between its own.
    """
    if not torch.backends.cudnn.allow_tf32 or not gpu.plain_on_gpu(*tensors):
        return None
    small = max(made, *(_reach(tensor[0]) for tensor in tensors)) < 2**31
    return gpu.kernels("kernels.convolution_stacks", *tensors) if small else None


def _reach(tensor: Tensor) -> int:
    """Over how many numbers a tensor goes in memory, or how many it has where it repeats some."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return max(tensor.numel(), 1 + sum((size - 1) * step for size, step in sides))


def with_networks_first(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Tensors with the networks first; what all have in common is repeated without a copy."""
    return [
        one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
        for one, dim in zip(tensors, in_dims, strict=False)
    ]
