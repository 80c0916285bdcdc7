"""Convolutions as matrix products, for gradients of single examples on a GPU.

Under a vmap over examples the gradient of a convolution's weights is a convolution of as many
groups as there are examples, which GPUs are slow at. As a product of matrices it is a product for
each example, which they are fast at. Values are the same but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _AsProducts(TorchFunctionMode):
    """Every plain two-dimensional convolution that is called inside is made as a product."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.conv2d and (made := _product(*args, **given)) is not None:
            return made
        return func(*args, **given)


@contextmanager
def as_products() -> Iterator[None]:
    """Inside, convolutions are matrix products, whose factors may be rounded as theirs are."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        with _AsProducts():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """[example, channel, height, width]; None where it has groups, gaps, or padding by a word."""
    (rows, columns), steps, gaps = weight.shape[2:], _pair(stride), _pair(dilation)
    if groups != 1 or gaps != (1, 1) or isinstance(padding, str) or x.dim() != 4:
        return None
    down, right = _pair(padding)
    wide = F.pad(x, (right, right, down, down))
    # [example, channel, height, width, row, column]: views, copied once for the product.
    seen = wide.unfold(2, rows, steps[0]).unfold(3, columns, steps[1])
    height, width = seen.shape[2:4]
    laid = seen.permute(0, 1, 4, 5, 2, 3).reshape(x.shape[0], -1, height * width)
    made = weight.flatten(1) @ laid  # [example, channel, pixel]
    if bias is not None:
        made = made + bias.unsqueeze(1)
    return made.reshape(x.shape[0], weight.shape[0], height, width)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    one = list(value)
    return (one[0], one[0]) if len(one) == 1 else (one[0], one[1])
