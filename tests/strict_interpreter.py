"""Triton's interpreter, as hard on kernels as a GPU is, and harder.

Memory for results is handed out spoiled and guarded: what a kernel leaves out is no number, and
what it writes beside a result is noticed. And the larger of a number and none is the number, as
on a GPU, unless a kernel asks for the other; the interpreter alone would hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from interpreted import AROUND, DEVICE, guarded, untouched

FRESH = (torch.empty, torch.empty_like, Tensor.new_empty)


@contextmanager
def strictly() -> Iterator[None]:
    """Inside kernels are run so; on a GPU only their memory is."""
    with pytest.MonkeyPatch.context() as patch, _Spoiled() as memory:
        if DEVICE == "cpu":
            interpreter = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
            patch.setattr(interpreter, "create_maxnumf", _either(np.fmax))
            patch.setattr(interpreter, "create_minnumf", _either(np.fmin))
        yield
    assert untouched(*memory.made)


def _either(chosen: Callable[..., Any]) -> Callable[..., Any]:
    return lambda builder, one, other: builder.binary_op(one, other, chosen)


class _Spoiled(TorchFunctionMode):
    """Memory handed out unset is full of what spoils a result, and guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in FRESH or not made.numel():
            return made
        number = float("nan") if made.is_floating_point() else 119
        whole = guarded(torch.full((made.numel(),), number, dtype=made.dtype))
        self.made.append(whole)
        return made.set_(whole.untyped_storage(), AROUND, made.shape, made.stride())
