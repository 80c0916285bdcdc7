"""Convolutions of many networks at once, as products of matrices; no loops.

Under a vmap over networks torch makes a convolution one of as many groups as there are networks,
which GPUs are slow at. Here it is a product of matrices for each network: what a kernel sees of
every pixel, all channels side by side in memory, times its weights. Values are the same but for
the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedstill.core import gpu
from fedstill.core.convolutions import Moves, moves_of, rounded_as_convolutions
from fedstill.core.torch_internals import in_gradient_under_vmap, is_stacked


@contextmanager
def as_products() -> Iterator[None]:
    """Inside, convolutions of a stack of networks that are trained are products.

    Others, and those with groups, gaps between taps or padding by a word, stay as they are.
    """
    with _AsProducts():
        yield


class _AsProducts(TorchFunctionMode):
    """Sees every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.conv2d and in_gradient_under_vmap():
            made = _convolved(*args, **given)
            if made is not None:
                return made
        return func(*args, **given)


def _convolved(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """conv2d of [image, channel, height, width]; None where it is of another kind."""
    moves = moves_of(input, stride, padding, dilation, groups)
    if moves is None or not is_stacked(weight):
        return None
    made: Tensor = _Convolution.apply(input, weight, moves)  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias.view(-1, 1, 1)


class _Convolution(torch.autograd.Function):
    """A convolution; under a vmap over networks one product for each."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, moves: Moves) -> Tensor:
        return torch.conv2d(x, weight, None, moves.stride, moves.padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.moves = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        to_x = _ToImages.apply(grad, weight, tuple(x.shape), ctx.moves) if of_x else None  # type: ignore[no-untyped-call]
        kernel = tuple(weight.shape[2:])
        to_weight = _ToWeights.apply(grad, x, kernel, ctx.moves) if of_weight else None  # type: ignore[no-untyped-call]
        return to_x, to_weight, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, moves: Moves) -> Any:
        x, weight = _stacks(info, in_dims, x, weight)
        return convolutions(x, weight, moves), 0


class _ToImages(torch.autograd.Function):
    """The gradient of a convolution's images."""

    @staticmethod
    def forward(grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
        return image_gradients(grad[None], weight[None], shape, moves)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves
    ) -> Any:
        grad, weight = _stacks(info, in_dims, grad, weight)
        return image_gradients(grad, weight, shape, moves), 0


class _ToWeights(torch.autograd.Function):
    """The gradient of a convolution's weights."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
        return weight_gradients(grad[None], x[None], kernel, moves)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves
    ) -> Any:
        grad, x = _stacks(info, in_dims, grad, x)
        return weight_gradients(grad, x, kernel, moves), 0


def convolutions(x: Tensor, weight: Tensor, moves: Moves) -> Tensor:
    """[network, image, output, height, width], lying by pixel.

    Of [network, image, input, height, width] and [network, output, input, row, column].
    """
    kernel = (weight.shape[3], weight.shape[4])
    if (kernels := _kernels(x, weight)) is not None:
        by_pixel: Tensor = kernels.convolved(_lying(x), _flat(weight), kernel, *moves)
        return by_pixel.movedim(4, 2)
    seen = seen_by_pixel(x, kernel, moves)
    with rounded_as_convolutions():
        made = seen.flatten(1, 3) @ _flat(weight).mT
    return made.view(*seen.shape[:4], -1).movedim(4, 2)


def weight_gradients(grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
    """[network, output, input, row, column]: what came out by what was seen, summed over pixels."""
    if (kernels := _kernels(grad, x)) is not None:
        made: Tensor = kernels.to_weights(_lying(grad), _lying(x), kernel, *moves)
    else:
        told = grad.movedim(2, 4).flatten(1, 3)  # [network, pixel, output]
        seen = seen_by_pixel(x, kernel, moves).flatten(1, 3)
        with rounded_as_convolutions():
            made = told.mT @ seen
    return made.view(*made.shape[:2], *kernel, x.shape[2]).movedim(4, 2)


def image_gradients(grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
    """[network, image, input, height, width], lying by pixel: each pixel's sum over the taps."""
    (rows, columns), (down, right) = weight.shape[3:], moves.padding
    if (kernels := _kernels(grad, weight)) is not None:
        turned = _flat(weight.transpose(1, 2))
        size = (shape[2], shape[3])
        made: Tensor = kernels.to_images(_lying(grad), turned, size, (rows, columns), *moves)
        return made.movedim(4, 2)
    told = grad.movedim(2, 4)  # [network, image, height, width, output]
    with rounded_as_convolutions():
        taps = told.flatten(1, 3) @ _flat(weight)
    taps = taps.view(*told.shape[:4], rows, columns, -1)
    images, channels, height, width = shape
    wide = taps.new_zeros(len(grad), images, height + 2 * down, width + 2 * right, channels)
    for row in range(rows):
        for column in range(columns):
            _reached(wide, (row, column), told.shape[2:4], moves).add_(taps[..., row, column, :])
    return wide[:, :, down : down + height, right : right + width].movedim(4, 2)


def seen_by_pixel(x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
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
    return weight.movedim(2, 4).flatten(2).contiguous()


def _lying(maps: Tensor) -> Tensor:
    """[network, image, height, width, channel], without gaps."""
    return maps.movedim(2, 4).contiguous()


def _kernels(*tensors: Tensor) -> Any:
    """Kernels that may be handed these, or None; they round as convolutions may be rounded."""
    if not torch.backends.cudnn.allow_tf32 or not gpu.plain_on_gpu(*tensors):
        return None
    small = all(tensor[0].numel() < 2**31 for tensor in tensors)
    return gpu.kernels("kernels.convolution_stacks") if small else None


def _stacks(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Tensors with the networks first; what all have in common is repeated without a copy."""
    return [
        one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
        for one, dim in zip(tensors, in_dims, strict=False)
    ]
