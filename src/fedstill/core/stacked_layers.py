"""Layers of many networks at once, on a GPU that trains them as a stack; no loops.

Under a vmap over networks torch makes some layers in a way that GPUs are slow at. Convolutions are
kernels of ours (`core.stacked_convolutions`), and so are pools over windows of 2x2, which remember
in one byte where the largest stood.
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
from fedstill.core.pools import windows_of_two
from fedstill.core.stacked_convolutions import convolved, with_networks_first
from fedstill.core.torch_internals import in_gradient_under_vmap, is_stacked, unwrapped


@contextmanager
def as_one() -> Iterator[None]:
    """Inside, layers of a stack of networks that are trained are those of all of them at once.

    Others stay the framework's: convolutions with groups, gaps between taps or padding by a word,
    or on a GPU that has no kernels of ours or is not to round, and pools over other windows.
    """
    with _AsOne():
        yield


class _AsOne(TorchFunctionMode):
    """Sees every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        layer = _LAYERS.get(func)
        if layer is not None and in_gradient_under_vmap():
            made = layer(*args, **given)
            if made is not None:
                return made
        return func(*args, **given)


def _pooled(input: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """max_pool2d over windows of 2x2 side by side; None where it is of another kind."""
    if not windows_of_two(*args, **options) or not is_stacked(input):
        return None
    if min(input.shape[-2:]) < 2 or not input.numel() or _kernels(unwrapped(input)) is None:
        return None
    made: Tensor = _Pool.apply(input)[0]  # type: ignore[no-untyped-call]
    return made


_LAYERS: dict[Any, Callable[..., Tensor | None]] = {
    torch.conv2d: convolved,
    torch.max_pool2d: _pooled,
    F.max_pool2d: _pooled,
}


class _Pool(torch.autograd.Function):
    """The largest of each window of maps, and which of the four it is."""

    @staticmethod
    def forward(maps: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _kernels(maps).pooled(maps)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.size = tuple(inputs[0].shape[-2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (which,) = ctx.saved_tensors
        found: Tensor = _Spread.apply(grad, which, ctx.size)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def vmap(info: Any, in_dims: Any, maps: Tensor) -> Any:
        return _Pool.forward(maps.movedim(in_dims[0], 0)), (0, 0)


class _Spread(torch.autograd.Function):
    """The gradient of maps of which the largest of each window were taken."""

    @staticmethod
    def forward(grad: Tensor, which: Tensor, size: tuple[int, int]) -> Tensor:
        found: Tensor = _kernels(grad).spread(grad, which, size)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, maps: Tensor) -> tuple[Tensor, None, None]:
        (which,) = ctx.saved_tensors
        return picked(maps, which), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad: Tensor, which: Tensor, size: tuple[int, int]) -> Any:
        grad, which = with_networks_first(info, in_dims, grad, which)
        return _Spread.forward(grad, which, size), 0


def picked(maps: Tensor, which: Tensor) -> Tensor:
    """Of each window of maps [..., height, width] the number that stands at `which` of the four."""
    high, wide = which.shape[-2:]
    rows = maps[..., : 2 * high, : 2 * wide].unflatten(-1, (wide, 2)).unflatten(-3, (high, 2))  # type: ignore[no-untyped-call]
    windows = rows.transpose(-3, -2).flatten(-2)  # [..., height, width, window]
    found: Tensor = windows.gather(-1, which.long().unsqueeze(-1)).squeeze(-1)
    return found


def _kernels(maps: Tensor) -> Any:
    """Kernels that may be handed maps, or None."""
    return gpu.kernels("kernels.map_pools", maps) if gpu.plain_on_gpu(maps) else None
