"""A GPU kernel of weighted means over the images of each class; imported only where Triton is.

The framework's operations would write all outputs once more, times their shares, before they are
summed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedstill.kernels.grids import fitting

IMAGES = 32  # that a program reads at a time
FEATURES = 64  # of a program


def class_means(outputs: Tensor, share: Tensor) -> Tensor:
    """(outputs * share).sum(1) for [class, image, feature] and [class, image].

    There is a gradient for outputs, none for shares; the sum is in a fixed order.
    """
    return _Means.apply(outputs, share)  # type: ignore[no-untyped-call,no-any-return]


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        classes, images, features = outputs.shape
        means = outputs.new_empty(classes, features)
        across = triton.cdiv(features, FEATURES)
        with torch.cuda.device_of(outputs):  # type: ignore[no-untyped-call]
            for some in fitting(outputs.contiguous(), share.contiguous(), means):
                _add_up[(across, len(some[0]))](
                    *some, images, features, IMAGES, FEATURES, num_warps=4
                )
        return means

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return grad.unsqueeze(1) * share.unsqueeze(2), None


@triton.jit(do_not_specialize=["images"])
def _add_up(outputs, share, means, images, features, IMAGES: tl.constexpr, FEATURES: tl.constexpr):
    """Some features of one class."""
    one = tl.program_id(1)
    image = tl.arange(0, IMAGES)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    known = feature < features
    outputs += one.to(tl.int64) * images * features
    total = tl.zeros([IMAGES, FEATURES], tl.float32)
    for first in range(0, images, IMAGES):
        there = first + image < images
        weight = tl.load(share + one * images + first + image, mask=there, other=0.0)
        where = outputs + (first + image)[:, None] * features + feature[None, :]
        total += tl.load(where, mask=there[:, None] & known[None, :], other=0.0) * weight[:, None]
    tl.store(means + one * features + feature, tl.sum(total, 0), mask=known)
