"""Pools over windows of 2x2 on a CPU.

Torch goes through them window by window there, which takes as long as the convolutions of a narrow
network. Here whole rows and columns are compared or added. Results are torch's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedstill.core.convolutions import pair
from fedstill.core.gpu import plain_on_cpu
from fedstill.core.unfolding import differentiable_gradients


class Quickly(TorchFunctionMode):
    """Within it, pools over windows of 2x2 on a CPU are those of this file.

    `found` says whether there were any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        pool = _POOLS.get(func)
        made = pool(*args, **given) if pool is not None else None
        if made is None:
            return func(*args, **given)
        self.found = True
        return made


def windows_of_two(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Whether max_pool2d is asked for windows of 2x2 side by side, and for nothing else."""
    windows = pair(kernel_size) == pair(stride or kernel_size) == (2, 2)
    alone = pair(padding) == (0, 0) and pair(dilation) == (1, 1)
    return windows and alone and not ceil_mode and not return_indices


def max_pool(maps: Tensor) -> Tensor:
    """max_pool2d(maps, 2), bit for bit."""
    return _largest(maps) if _fit(maps) else F.max_pool2d(maps, 2)


def avg_pool(maps: Tensor) -> Tensor:
    """avg_pool2d(maps, 2), bit for bit."""
    return _mean(maps) if _fit(maps) else F.avg_pool2d(maps, 2)


def averaged(maps: Tensor) -> Tensor:
    """avg_pool2d(maps, 2) without a gradient, by torch's order of sums."""
    height, width = (side // 2 * 2 for side in maps.shape[2:])
    upper, lower = maps[:, :, 0:height:2], maps[:, :, 1:height:2]
    total = upper[..., 0:width:2] + upper[..., 1:width:2]
    return total.add_(lower[..., 0:width:2]).add_(lower[..., 1:width:2]).mul_(0.25)


def spread(grad: Tensor, maps: Tensor) -> Tensor:
    """The gradient of maps that were averaged: a quarter of each number for its 2x2, else zero."""
    made, height, width = _place(grad, maps)
    quarter, rows = grad * 0.25, made[:, :, 0:height:2]
    rows[..., 0:width:2] = quarter
    rows[..., 1:width:2] = quarter
    made[:, :, 1:height:2] = rows
    return made


def _mean(maps: Tensor) -> Tensor:
    if torch.is_grad_enabled() and maps.requires_grad:
        return _Mean.apply(maps)  # type: ignore[no-untyped-call,no-any-return]
    return averaged(maps)


def _largest(maps: Tensor) -> Tensor:
    if torch.is_grad_enabled() and maps.requires_grad:
        return _Largest.apply(maps)  # type: ignore[no-untyped-call,no-any-return]
    return _by_columns(maps)[1]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> Tensor:
        ctx.save_for_backward(maps)
        return averaged(maps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (maps,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(lambda x: F.avg_pool2d(x, 2), (maps,), grad)[0]
        return spread(grad, maps)


class _Largest(torch.autograd.Function):
    """The first of the largest numbers of a window gets its gradient, as torch has it."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> Tensor:
        columns, made = _by_columns(maps)
        ctx.save_for_backward(maps, columns)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        maps, columns = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(lambda x: F.max_pool2d(x, 2), (maps,), grad)[0]
        made, height, width = _place(grad, maps)
        to_columns = torch.empty_like(columns)
        upper, lower = to_columns[:, :, 0::2], to_columns[:, :, 1::2]
        torch.mul(grad, columns[:, :, 0::2] >= columns[:, :, 1::2], out=upper)
        torch.sub(grad, upper, out=lower)
        lines = maps[:, :, :height]
        left, right = made[:, :, :height, 0:width:2], made[:, :, :height, 1:width:2]
        torch.mul(to_columns, lines[..., 0:width:2] >= lines[..., 1:width:2], out=left)
        torch.sub(to_columns, left, out=right)
        return made


def _by_columns(maps: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of each two columns, and of these the larger of each two rows."""
    height, width = (side // 2 * 2 for side in maps.shape[2:])
    lines = maps[:, :, :height]
    columns = torch.maximum(lines[..., 0:width:2], lines[..., 1:width:2])
    return columns, torch.maximum(columns[:, :, 0::2], columns[:, :, 1::2])


def _place(grad: Tensor, maps: Tensor) -> tuple[Tensor, int, int]:
    """Memory for a gradient of maps, zero where a last row or column is odd, and what is pooled."""
    height, width = (2 * side for side in grad.shape[2:])
    odd = (height, width) != tuple(maps.shape[2:])
    return torch.zeros_like(maps) if odd else torch.empty_like(maps), height, width


def _fit(maps: Tensor) -> bool:
    """Whether torch would go through these window by window; in other orders it does not."""
    if maps.dim() != 4 or not plain_on_cpu(maps) or not maps.numel():
        return False
    return maps.is_contiguous() and min(maps.shape[2:]) >= 2


def _asked_for_max(input: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """max_pool2d; None where it is of another kind."""
    return _largest(input) if windows_of_two(*args, **options) and _fit(input) else None


def _asked_for_avg(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    """avg_pool2d; None where it is of another kind."""
    usual = windows_of_two(kernel_size, stride, padding, ceil_mode=ceil_mode)
    return _mean(input) if usual and divisor_override is None and _fit(input) else None


_POOLS: dict[Any, Callable[..., Tensor | None]] = {
    torch.max_pool2d: _asked_for_max,
    F.max_pool2d: _asked_for_max,
    F.avg_pool2d: _asked_for_avg,
}
