"""Blocks of a ConvNet in a row, of which some images pass no gradient on; only where Triton is.

Each block is that of `stacked_blocks`, the first one that of `stacked_first`. Images at rest go
through with the others, in the same launches; for the gradient nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstill.kernels import stacked_blocks as blocks
from fedstill.kernels import stacked_first as first
from fedstill.models.by_pixel import GAIN

EACH = 3  # tensors of a block: weights, scale and shift


def features(
    x: Tensor, weights: Sequence[Sequence[Tensor]], paddings: Sequence[int], resting: int
) -> tuple[Tensor, Tensor]:
    """[image, feature] of images in single precision, and of the last ones, which are at rest.

    Gradients are those of the blocks' tensors, from the images that are not at rest.
    """
    flat = [tensor for block in weights for tensor in block]
    return _Row.apply(x, tuple(paddings), resting, *flat)  # type: ignore[no-untyped-call,no-any-return]


class _Row(torch.autograd.Function):
    """The row with its gradient, of first order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, paddings: tuple[int, ...], resting: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept, held, lengths = len(x) - resting, [], []
        begins = first.takes(x, paddings[0])
        maps = x[None]
        for number, padding in enumerate(paddings):
            weight, scale, shift = _own(tensors, number)
            if number == 0 and begins:
                made, *more = first.forward(maps, weight, scale, shift, padding)
                more = [one[:, :kept] for one in more]
            else:
                made, *more, laid = blocks._forward(maps, weight, scale, shift, padding)
                more = [*(one[:, :kept] for one in more), laid]
            held += [maps[:, :kept], *more]
            lengths.append(1 + len(more))
            maps = made
        ctx.paddings, ctx.lengths, ctx.begins, ctx.shape = paddings, lengths, begins, maps.shape[2:]
        ctx.save_for_backward(*tensors, *held)
        found, still = (one.float().flatten(1) for one in (maps[0, :kept], maps[0, kept:]))
        ctx.mark_non_differentiable(still)
        return found, still

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        count = EACH * len(ctx.paddings)
        tensors, held = ctx.saved_tensors[:count], list(ctx.saved_tensors[count:])
        if not len(grad):  # nobody tells them anything
            return None, None, None, *map(torch.zeros_like, tensors)
        told = (grad.view(1, len(grad), *ctx.shape) * GAIN).half()
        found: list[Tensor] = []
        for number in reversed(range(len(ctx.paddings))):
            weight, scale, shift = _own(tensors, number)
            seen, *more = held[-ctx.lengths[number] :]
            del held[-ctx.lengths[number] :]
            padding = ctx.paddings[number]
            if number == 0 and ctx.begins:
                slopes = first.slopes(told, seen, weight, scale, *more, padding)
            else:
                *norm, laid = more
                to_scale, to_shift, told = blocks.norm_slopes(
                    told, scale, shift, norm[0], norm[1], norm[2]
                )
                slopes = (blocks.weight_slopes(told, seen, padding), to_scale, to_shift)
                told = blocks.image_slopes(told, seen, laid, padding) if number else told
            found = [*(one[0] for one in slopes), *found]
        return None, None, None, *found


def _own(tensors: Sequence[Tensor], number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, scale and shift of a block, as those of a stack of one."""
    weight, scale, shift = tensors[EACH * number :][:EACH]
    return weight[None], scale[None], shift[None]
