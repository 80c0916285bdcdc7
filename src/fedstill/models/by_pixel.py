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

from fedstill.core.gpu import kernels, plain_on_gpu
from fedstill.core.model import Network, Norm
from fedstill.core.pools import max_pool
from fedstill.core.precision import half_asked_for, pass_will_do
from fedstill.core.records import Weights
from fedstill.core.torch_internals import is_wrapped

GAIN = 1024.0  # of gradients in half precision; a power of two rounds nothing

BY_BATCH = ("batch", "static", "none")  # norms that the framework makes by pixel
NORMS, POOLS = "kernels.pixel_norms", "kernels.pixel_pools"  # kernels of what it does not

TYPES = (torch.float16, torch.float32)

Back = Callable[[Tensor], Tensor]


def taken(norm: Norm, *tensors: Tensor) -> bool:
    """Whether networks with this norm can compute by pixel; others would turn maps round.

    On the GPU of these tensors or, without tensors, on the current one.
    """
    return norm in BY_BATCH or (norm == "instance" and kernels(NORMS, *tensors) is not None)


def normed(
    network: Network, weights: Weights, name: str, x: Tensor, norm: Norm,
    added: Tensor | None = None, *, relu: bool = True,
) -> Tensor:  # fmt: skip
    """relu(norm(x) + added), where `added` and the activation may be left out.

    Instance norm of maps by pixel on a GPU is one kernel with what comes after it.
    """
    if norm == "instance":
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        others = (scale, shift) if added is None else (scale, shift, added)
        if _lie_by_pixel(x, *others) and (ours := kernels(NORMS, x)) is not None:
            fused: Tensor = ours.normed(x, scale, shift, added, relu=relu)
            return fused
    x = network.normalise(weights, name, x, norm)
    x = x if added is None else x + added
    return F.relu(x) if relu else x


def convolved(x: Tensor, weight: Tensor, bias: Tensor, *, padding: int, pooled: bool) -> Tensor:
    """relu(conv2d(x) + bias); if so, the largest of each 2x2.

    All that comes after the convolution is one kernel for maps by pixel on a GPU.
    """
    if _lie_by_pixel(x, weight, bias) and (ours := kernels(POOLS, x)) is not None:
        fused: Tensor = ours.activated(F.conv2d(x, weight, padding=padding), bias, pooled=pooled)
        return fused
    x = F.relu(F.conv2d(x, weight, bias, padding=padding))
    return max_pool(x) if pooled else x


def pooled(x: Tensor) -> Tensor:
    """The largest of each 2x2 of relu(x): one kernel for maps by pixel on a GPU."""
    if _lie_by_pixel(x) and (ours := kernels(POOLS, x)) is not None:
        fused: Tensor = ours.activated(x, None, pooled=True)
        return fused
    return max_pool(F.relu(x))


def _lie_by_pixel(x: Tensor, *others: Tensor) -> bool:
    """Whether kernels for maps by pixel may be handed these."""
    known = (t.is_cuda and t.dtype in TYPES and not is_wrapped(t) for t in (x, *others))
    return all(known) and x.is_contiguous(memory_format=torch.channels_last)


def entered(weights: Weights, x: Tensor, *, first: str, norm: Norm) -> tuple[Weights, Tensor, Back]:
    """Weights and images as convolutions want them, and the way back for maps.

    `first` names the weights of the convolution that sees the images. Without a gradient nothing
    is rounded unless all is. All is left as it was off a GPU, under `torch.func`, and with norms
    that want another order.
    """
    if weights[first].dtype != torch.float16:  # else they were `halved` for such a pass
        if not (taken(norm, x) and plain_on_gpu(x, *weights.values())):
            return weights, x, _as_it_is
        if not pass_will_do(x):
            turned = {
                name: _turned(tensor, tensor.dtype, 1.0) if tensor.dim() == 4 else tensor
                for name, tensor in weights.items()
            }
            return turned, _turned(x, x.dtype, 1.0), _as_it_is
    image = _turned(x, torch.float16, GAIN, _filled(x))
    return _all_halved(weights, first), image, _back


@torch.no_grad()
def halved(weights: Weights, *, first: str, norm: Norm) -> Weights:
    """Weights and constants of convolutions as `entered` halves them; none where it would not."""
    some = weights.values()
    if not (half_asked_for() and taken(norm, *some) and plain_on_gpu(*some)):
        return {}
    found = _all_halved(weights, first)
    return {name: tensor for name, tensor in found.items() if tensor.dtype == torch.float16}


def _filled(x: Tensor) -> int:
    """Channels to be added: tensor cores take them in eights."""
    return -x.shape[1] % 8


def _all_halved(weights: Weights, first: str) -> Weights:
    found = {name: _halved(weights, name) for name in weights if name != first}
    filled = _filled(weights[first])
    return {**found, first: _turned(weights[first], torch.float16, GAIN, filled)}


def _halved(weights: Weights, name: str) -> Tensor:
    """Weights and constants of convolutions in half precision; those of norms stay single."""
    tensor, layer = weights[name], name.rpartition(".")[0]
    inner = weights.get(f"{layer}.weight", tensor).dim()
    if inner == 2:  # a linear layer is outside
        return tensor
    dtype = torch.float16 if inner == 4 else tensor.dtype
    return _turned(tensor, dtype, GAIN)


def _turned(tensor: Tensor, dtype: torch.dtype, gain: float, filled: int = 0) -> Tensor:
    return _Turned.apply(tensor, dtype, gain, filled)  # type: ignore[no-untyped-call,no-any-return]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _back(x: Tensor) -> Tensor:
    return _Back.apply(x)  # type: ignore[no-untyped-call,no-any-return]


class _Turned(torch.autograd.Function):
    """The same numbers by pixel, in another type; gradients come back louder by `gain`.

    After a pixel's channels come so many of zeros as are to be `filled`.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype, gain: float, filled: int) -> Tensor:
        ctx.dtype, ctx.gain, ctx.filled = tensor.dtype, gain, filled
        order = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        if filled:
            count, channels, height, width = tensor.shape
            made = torch.empty(
                (count, channels + filled, height, width), dtype=dtype, device=tensor.device,
                memory_format=order,
            )  # fmt: skip
            made.zero_()[:, :channels] = tensor
            return made
        turned = tensor.to(dtype, memory_format=order)
        return tensor.view_as(tensor) if turned is tensor else turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad[:, : grad.shape[1] - ctx.filled] if ctx.filled else grad
        grad = grad.to(ctx.dtype, memory_format=torch.contiguous_format)
        return grad if ctx.gain == 1 else grad / ctx.gain, None, None, None


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
