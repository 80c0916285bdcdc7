"""Dropout and its like as functions of a seed that is a tensor; no generator is asked.

A seed that arrives with the batch is data: it can be stacked, recorded, traced and compiled, and a
resumed run finds the same one. Numbers are a hash of the seed, of which call of a pass asks, and
of the place in the result, so they are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = 0xFFFFFFFF  # the lower 32 bits
_PLAIN_ATTENTION = F.scaled_dot_product_attention
_APART = 0x9E3779B9  # an odd number that keeps the calls of a pass apart


def uniform(seed: Tensor, call: int, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1) for one call of a pass; `seed` holds two whole numbers below 2**32."""
    places = torch.arange(math.prod(shape), device=seed.device)
    mixed = _mixed(places ^ seed[0])
    mixed = _mixed((mixed + seed[1] + call * _APART) & _LOW)
    return (mixed >> 8).to(torch.float32).mul(2.0**-24).reshape(tuple(shape))


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the numbers below 2**32 in which every bit depends on all; no overflow."""
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _LOW
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _LOW
    return x ^ (x >> 15)


class Seeded(TorchFunctionMode):
    """Within it, calls that would draw from a global generator draw from a seed instead.

    Without a seed dropout is left out, as in evaluation.
    """

    def __init__(self, seed: Tensor | None):
        super().__init__()
        self.seed = seed
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        instead = _INSTEAD.get(func)
        if instead is None:
            return func(*args, **(kwargs or {}))
        return instead(self, *args, **(kwargs or {}))

    def uniform(self, like: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Fresh numbers where another tensor lies, or None without a seed."""
        if self.seed is None:
            return None
        self.calls += 1
        return uniform(self.seed, self.calls, shape).to(like.dtype)

    def kept(self, x: Tensor, p: float, shape: Sequence[int]) -> Tensor | None:
        """1 with probability 1 - p, else 0; None without a seed."""
        numbers = self.uniform(x, shape)
        return None if numbers is None else (numbers >= p).to(x.dtype)


def _dropout(
    mode: Seeded, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _dropped(mode, input, p, training, input.shape)


def _channel_dropout(
    mode: Seeded, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return _dropped(mode, input, p, training, shape)


def _dropped(mode: Seeded, x: Tensor, p: float, training: bool, shape: Sequence[int]) -> Tensor:
    kept = mode.kept(x, p, shape) if training and p > 0 else None
    if kept is None:
        return x
    return x * kept / (1 - p) if p < 1 else x * 0


def _alpha_dropout(
    mode: Seeded, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _self_normalised(mode, input, p, training, input.shape)


def _alpha_channel_dropout(
    mode: Seeded, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    shape = (*input.shape[:2], *[1] * (input.dim() - 2))
    return _self_normalised(mode, input, p, training, shape)


def _self_normalised(
    mode: Seeded, x: Tensor, p: float, training: bool, shape: Sequence[int]
) -> Tensor:
    """Klambauer et al. 2017: what is dropped takes the lowest value, mean and variance stay."""
    kept = mode.kept(x, p, shape) if training and 0 < p < 1 else None
    if kept is None:
        return x * 0 if training and p == 1 and mode.seed is not None else x
    lowest = -1.7580993408473766
    scale = 1 / math.sqrt((1 - p) * (1 + p * lowest**2))
    return scale * (x * kept + lowest * (1 - kept)) - scale * p * lowest


def _bernoulli(mode: Seeded, self: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    """What `tensor.bernoulli_(p)` returns; the tensor itself is not written."""
    kept = mode.kept(self, 1 - p, self.shape)
    return torch.ones_like(self) * p if kept is None else kept


def _rand_like(mode: Seeded, input: Tensor, **_: Any) -> Tensor:
    numbers = mode.uniform(input, input.shape)
    return torch.full_like(input, 0.5) if numbers is None else numbers


def _randn_like(mode: Seeded, input: Tensor, **_: Any) -> Tensor:
    numbers = mode.uniform(input, input.shape)
    if numbers is None:
        return torch.zeros_like(input)
    # The middle of each of the 2**24 steps, so that neither end is infinite.
    return math.sqrt(2) * torch.erfinv(2 * (numbers + 2.0**-25) - 1)


def _attention(
    mode: Seeded, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Attention, written out where its weights are dropped."""
    if not dropout_p or mode.seed is None:
        return _PLAIN_ATTENTION(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **options
        )
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return _dropped(mode, weights, dropout_p, True, weights.shape) @ value


def _multi_head(mode: Seeded, *args: Any, **options: Any) -> Any:
    """Attention of several heads, which calls functions that draw where no mode reaches."""
    with (
        mock.patch.object(F, "dropout", partial(_dropout, mode)),
        mock.patch.object(F, "scaled_dot_product_attention", partial(_attention, mode)),
    ):
        return F.multi_head_attention_forward(*args, **options)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: _channel_dropout,
    F.dropout2d: _channel_dropout,
    F.dropout3d: _channel_dropout,
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _alpha_channel_dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    torch.Tensor.bernoulli_: _bernoulli,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
}
