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
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor

from fedstill.core.errors import BadValue

Precision = Literal["single", "tf32", "half", "half_throughout"]
HALVES = ("half", "half_throughout")

_now: Precision = "tf32"
_of_examples = False  # whether half precision was asked for and gradients are of single examples


def other_defaults() -> list[str]:
    """What a program has told torch that nothing here computes with; a line each."""
    wrong = []
    if (kind := torch.get_default_dtype()) is not torch.float32:
        wrong.append(
            f"torch's default type is {kind}, but runs compute in single precision; call "
            "torch.set_default_dtype(torch.float32)"
        )
    if (device := torch.get_default_device()).type != "cpu":
        wrong.append(
            f"torch's default device is {device}, but data and draws begin on the host; call "
            "torch.set_default_device(None), and name the device to Execution(device=…)"
        )
    if torch.is_inference_mode_enabled():
        wrong.append(
            "torch.inference_mode() is on, inside which torch keeps no gradients and nothing is "
            "trained; call run outside torch.inference_mode()"
        )
    try:
        _asked_of_torch()
    except BadValue as error:
        wrong += error.faults
    return wrong


def _asked_of_torch() -> tuple[str, bool]:
    """What a program has asked of matrix products and of convolutions."""
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError as error:  # torch's newer switches say what its older ones cannot
        raise BadValue(
            "torch's fp32_precision was set for single operations, which a run could not give "
            'back; call torch.set_float32_matmul_precision("highest") and set '
            "torch.backends.cudnn.allow_tf32 = True, then say Execution(precision=…) to the run"
        ) from error


@contextmanager
def as_written(kind: str) -> Iterator[None]:
    """Without the autocast that a program may have around its call, on a kind of device."""
    with ExitStack() as inside:
        for each in {"cpu", kind}:
            if torch.is_autocast_enabled(each):
                inside.enter_context(torch.autocast(each, enabled=False))
        yield


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
    before, (products, convolutions) = _now, _asked_of_torch()
    torch.set_float32_matmul_precision("highest")  # else products on a CPU may be rounded too
    use(precision)
    try:
        yield
    finally:
        _now, torch.backends.cudnn.allow_tf32 = before, convolutions
        torch.set_float32_matmul_precision(products)


@contextmanager
def of_examples() -> Iterator[None]:
    """Inside, gradients are of single examples, for which a network may have kernels in half.

    All else that would be made in half precision is made in `tf32`.
    """
    global _of_examples
    precision, before = _now, _of_examples
    _of_examples = half_asked_for()
    if _of_examples:
        use("tf32")
    try:
        yield
    finally:
        _of_examples = before
        if precision in HALVES:
            use(precision)


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
