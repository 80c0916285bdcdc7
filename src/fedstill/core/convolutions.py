"""Layers whose weights have a gradient for every example; no mechanism.

Under a vmap over examples torch makes the gradient of a convolution's weights as a convolution of
as many groups as there are examples, which GPUs are slow at. Here it is a product of matrices for
each example, with as many operations as the gradient of the whole batch has. Values are the same
but for the order of sums. Forward and towards the images a convolution stays one, over all
examples. Of a linear layer that sees one row of each example, that gradient is a product of two
vectors, and as such it lies aside (`core.asides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from fedstill.core import asides, gpu
from fedstill.core.torch_internals import in_gradient_of_examples


class Moves(NamedTuple):
    """How a convolution goes over its images."""

    stride: tuple[int, int]
    padding: tuple[int, int]


@contextmanager
def by_example() -> Iterator[None]:
    """Inside, layers under a vmap of gradients know gradients of single examples.

    These are convolutions without groups, gaps between taps or padding by a word, and linear layers
    of one row; others stay as they are.
    """
    with _ByExample():
        yield


class _ByExample(TorchFunctionMode):
    """Sees every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.conv2d and in_gradient_of_examples():
            made = _convolved(*args, **given)
            if made is not None:
                return made
        if func is F.linear and in_gradient_of_examples():
            made = _linear(*args, **given)
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
    if moves is None:
        return None
    made: Tensor = _Convolution.apply(input, weight, moves)  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias.view(-1, 1, 1)


def moves_of(input: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Moves | None:
    """How conv2d is asked to go; None with groups, gaps between taps or padding by a word."""
    if groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
        return None
    return Moves(pair(stride), pair(padding))


def pair(value: Any) -> tuple[int, int]:
    """What a layer is told of both axes, or of each."""
    if isinstance(value, int):
        return value, value
    one = list(value)
    return (one[0], one[0]) if len(one) == 1 else (one[0], one[1])


class _Convolution(torch.autograd.Function):
    """A convolution whose gradient is made by the two functions below."""

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
        if in_dims[1] is not None:
            each = torch.func.vmap(_Convolution.forward, in_dims=(*in_dims[:2], None))
            return each(x, weight, moves), 0
        x = x.movedim(in_dims[0], 0)
        made = _Convolution.forward(x.flatten(0, 1), weight, moves)
        return made.view(*x.shape[:2], *made.shape[1:]), 0


class _ToImages(torch.autograd.Function):
    """The gradient of a convolution's images, for all examples at once."""

    @staticmethod
    def forward(grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves) -> Tensor:
        made: Tensor = conv2d_input(shape, weight, grad, moves.stride, moves.padding)  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, grad: Tensor, weight: Tensor, shape: tuple[int, ...], moves: Moves
    ) -> Any:
        if in_dims[1] is not None:
            each = torch.func.vmap(_ToImages.forward, in_dims=(*in_dims[:2], None, None))
            return each(grad, weight, shape, moves), 0
        grad = grad.movedim(in_dims[0], 0)
        folded = (grad.shape[0] * grad.shape[1], *shape[1:])
        made = _ToImages.forward(grad.flatten(0, 1), weight, folded, moves)
        return made.view(*grad.shape[:2], *made.shape[1:]), 0


class _ToWeights(torch.autograd.Function):
    """The gradient of a convolution's weights: under the vmap, one for each example."""

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
        grad, x = (
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip((grad, x), in_dims, strict=False)
        )
        return weight_gradients(grad, x, kernel, moves), 0


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """linear of [1, input]; None where it is of another kind."""
    if input.dim() != 2 or len(input) != 1:
        return None
    made: Tensor = _Linear.apply(input[0], weight)  # type: ignore[no-untyped-call]
    return (made if bias is None else made + bias).unsqueeze(0)


class _Linear(torch.autograd.Function):
    """A matrix by a row."""

    @staticmethod
    def forward(row: Tensor, weight: Tensor) -> Tensor:
        return weight @ row

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        row, weight = ctx.saved_tensors
        of_row, of_weight = ctx.needs_input_grad
        to_weight = _Products.apply(grad, row, weight) if of_weight else None  # type: ignore[no-untyped-call]
        return grad @ weight if of_row else None, to_weight

    @staticmethod
    def vmap(info: Any, in_dims: Any, row: Tensor, weight: Tensor) -> Any:
        if in_dims[1] is not None:
            return torch.func.vmap(_Linear.forward, in_dims=in_dims)(row, weight), 0
        return F.linear(row.movedim(in_dims[0], 0), weight), 0


class _Products(torch.autograd.Function):
    """The gradient of a matrix that a row went through: a product of two vectors."""

    @staticmethod
    def forward(grad: Tensor, row: Tensor, weight: Tensor) -> Tensor:
        return torch.outer(grad, row)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Tensor, row: Tensor, weight: Tensor) -> Any:
        told, seen = (
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip((grad, row), in_dims, strict=False)
        )
        place = asides.wanted(weight) if in_dims[2] is None and told.dim() == 2 else None
        found = asides.Outer(told, seen)
        return found.whole() if place is None else asides.put(place, found, found.squares()), 0


def weight_gradients(grad: Tensor, x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
    """[example, output, input, row, column] of [example, image, channel, height, width] each.

    A product of matrices for each example: what came out by what was seen, summed over pixels.
    """
    told = grad.transpose(1, 2).flatten(2)  # [example, output, pixel]
    with rounded_as_convolutions():
        made = told @ _seen(x, kernel, moves).mT
    return made.view(*made.shape[:2], x.shape[2], *kernel)


def _seen(x: Tensor, kernel: tuple[int, int], moves: Moves) -> Tensor:
    """[example, input · row · column, pixel], what each tap of a kernel sees."""
    (rows, columns), (down, right) = kernel, moves.padding
    usual = (kernel, moves.stride) == ((3, 3), (1, 1)) and down == right
    usual = usual and x.shape[-2] * x.shape[-1] <= 64 * 64  # a map is one program's
    kernels = gpu.kernels("kernels.example_blocks", x) if usual and gpu.plain_on_gpu(x) else None
    if kernels is not None:
        made: Tensor = kernels.patches(x, down)
        return made
    wide = F.pad(x, (right, right, down, down)) if down or right else x
    # [example, image, input, height, width, row, column]: views, copied once for the product.
    seen = wide.unfold(3, rows, moves.stride[0]).unfold(4, columns, moves.stride[1])
    return seen.permute(0, 2, 5, 6, 1, 3, 4).flatten(4).flatten(1, 3)


@contextmanager
def rounded_as_convolutions() -> Iterator[None]:
    """Inside, factors of products are rounded as those of convolutions are."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
