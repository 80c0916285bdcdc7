"""How exactly a GPU computes; on a CPU all is single precision.

`single`: every product in single precision. `tf32`: convolutions round their factors to ten bits
and add up in single precision, as torch does unless told otherwise; matrix products stay exact.
`half`: matrix products as convolutions, and the maps of convolutional networks (ConvNet, AlexNet,
conv4, resnet18, preresnet18) in half precision, where weights are trained, images matched or a pass
says that rounding does no harm: as many bits, half the memory. Evaluation is not rounded.
`half_throughout`: as `half`, and so is every pass without a gradient, such as evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["single", "tf32", "half", "half_throughout"]
HALVES = ("half", "half_throughout")

_now: Precision = "tf32"
_of_examples = False  # whether half precision was asked for and gradients are of single examples


def use(precision: Precision) -> None:
    """Compute like this from now on, in the whole process."""
    global _now
    _now = precision
    torch.backends.cudnn.allow_tf32 = precision != "single"
    torch.backends.cuda.matmul.allow_tf32 = precision in HALVES


@contextmanager
def using(precision: Precision) -> Iterator[None]:
    """Compute like this inside, in the whole process; afterwards as before."""
    global _now
    before = _now, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    use(precision)
    try:
        yield
    finally:
        _now, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def of_examples() -> Iterator[None]:
    """Inside, gradients are of single examples, for which a network may have kernels in half.

    All else that would be made in half precision is made in `tf32`.
    """
    global _of_examples
    before, _of_examples = _of_examples, half_asked_for()
    try:
        with using("tf32") if half_asked_for() else nullcontext():
            yield
    finally:
        _of_examples = before


def half_asked_for() -> bool:
    """Whether half precision is to be used where it does no harm."""
    return _now in HALVES


def half_will_do_for_examples(x: Tensor) -> bool:
    """Whether a pass whose gradients are of single examples may be made in half precision."""
    return _of_examples and x.is_cuda and x.dtype == torch.float32


def half_will_do(x: Tensor) -> bool:
    """Whether a pass over these may be made in half precision."""
    return half_asked_for() and x.is_cuda and x.dtype == torch.float32


def pass_will_do(x: Tensor) -> bool:
    """As `half_will_do`, for a pass of which nothing is said: with a gradient, or any at all."""
    return half_will_do(x) and (torch.is_grad_enabled() or _now == "half_throughout")
