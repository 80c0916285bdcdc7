"""How networks of torch's own operations compute on a GPU: by pixel, and in half precision.

Convolutions there want all channels of a pixel side by side in memory; maps that lie otherwise
are turned round before and after each of them. Where `core.precision` allows half precision, maps
and convolutions are made in it. Weights come in and gradients go out in single precision, in the
usual order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core.gpu import plain_on_gpu
from fedstill.core.model import Norm
from fedstill.core.precision import half_will_do
from fedstill.core.records import Weights

GAIN = 1024.0  # of gradients in half precision; a power of two rounds nothing

BY_BATCH = ("batch", "static", "none")  # norms that take maps by pixel; others turn them round

Back = Callable[[Tensor], Tensor]


def entered(weights: Weights, x: Tensor, *, first: str, norm: Norm) -> tuple[Weights, Tensor, Back]:
    """Weights and images as convolutions want them, and the way back for maps.

    `first` names the weights of the convolution that sees the images. All is left as it was where
    no gradient is asked for, off a GPU, under `torch.func`, and with norms that want another order.
    """
    if not (norm in BY_BATCH and torch.is_grad_enabled() and plain_on_gpu(x, *weights.values())):
        return weights, x, _as_it_is
    if not half_will_do(x):
        turned = {
            name: _turned(tensor, tensor.dtype, 1.0) if tensor.dim() == 4 else tensor
            for name, tensor in weights.items()
        }
        return turned, _turned(x, x.dtype, 1.0), _as_it_is
    filled = -x.shape[1] % 8  # tensor cores take channels in eights
    pad = (0, 0, 0, 0, 0, filled)
    weights = {**weights, first: F.pad(weights[first], pad)}
    halved = {name: _halved(weights, name) for name in weights}
    return halved, _turned(F.pad(x, pad), torch.float16, GAIN), _back


def _halved(weights: Weights, name: str) -> Tensor:
    """Weights and constants of convolutions in half precision; those of norms stay single."""
    tensor, layer = weights[name], name.rpartition(".")[0]
    inner = weights.get(f"{layer}.weight", tensor).dim()
    if inner == 2:  # a linear layer is outside
        return tensor
    dtype = torch.float16 if inner == 4 else tensor.dtype
    return _turned(tensor, dtype, GAIN)


def _turned(tensor: Tensor, dtype: torch.dtype, gain: float) -> Tensor:
    return _Turned.apply(tensor, dtype, gain)  # type: ignore[no-untyped-call,no-any-return]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _back(x: Tensor) -> Tensor:
    return _Back.apply(x)  # type: ignore[no-untyped-call,no-any-return]


class _Turned(torch.autograd.Function):
    """The same numbers by pixel, in another type; gradients come back louder by `gain`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, gain: float) -> Tensor:
        ctx.dtype, ctx.gain = tensor.dtype, gain
        order = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        turned = tensor.to(dtype, memory_format=order)
        return tensor.view_as(tensor) if turned is tensor else turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.to(ctx.dtype, memory_format=torch.contiguous_format)
        return grad if ctx.gain == 1 else grad / ctx.gain, None, None


class _Back(torch.autograd.Function):
    """A map in single precision; its gradient goes in louder by the gain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return x.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        louder: Tensor = (grad * GAIN).to(ctx.dtype)
        return louder
