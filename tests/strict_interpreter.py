"""Triton's interpreter, as hard on kernels as a GPU is, and harder.

Memory for results is handed out spoiled and guarded: what a kernel leaves out is no number, and
what it writes beside a result is noticed. So is all that is read or written outside of a launch's
tensors, also where nothing comes of it. The larger of a number and none is the number, as on a GPU,
unless a kernel asks for the other; the interpreter alone would hide that. A launch is told the
device of its tensors, where several GPUs would have it on the first one. And it has no more
programs along an axis than a GPU takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.core.torch_internals import is_wrapped
from interpreted import AROUND, DEVICE, guarded, untouched

FRESH = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
ALONG = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # programs that a GPU takes along each axis


@contextmanager
def strictly() -> Iterator[None]:
    """Inside kernels are run so; on a GPU only their memory is."""
    made: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        for place, name in FRESH:
            patch.setattr(place, name, _spoiled(getattr(place, name), made))
        if DEVICE == "cpu":
            _harden(patch, pytest.importorskip("triton.runtime.interpreter"))
        yield
    assert untouched(*made)


def _harden(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    builder, launches = interpreter.InterpreterBuilder, interpreter.GridExecutor
    patch.setattr(builder, "create_maxnumf", _either(np.fmax))
    patch.setattr(builder, "create_minnumf", _either(np.fmin))
    patch.setattr(builder, "create_masked_load", _inside(builder.create_masked_load, 0))
    patch.setattr(builder, "create_masked_store", _inside(builder.create_masked_store, 1))
    patch.setattr(launches, "__call__", _watched(launches.__call__))
    patch.setattr(torch.cuda, "device_of", _chosen)


def _either(larger: Callable[..., Any]) -> Callable[..., Any]:
    return lambda builder, one, other: builder.binary_op(one, other, larger)


_chosen_now: list[Tensor] = []


@contextmanager
def _chosen(tensor: Tensor) -> Iterator[None]:
    """In place of `torch.cuda.device_of`, which does nothing without a GPU."""
    _chosen_now.append(tensor)
    try:
        yield
    finally:
        _chosen_now.pop()


_spans: list[tuple[int, int]] = []  # where the tensors of a launch begin and end
_by_address: list[Tensor] = []  # tensors that kernels know by a number alone


@contextmanager
def by_address(*tensors: Tensor) -> Iterator[None]:
    """Inside launches may read these too, of which they are handed addresses."""
    _by_address.extend(tensors)
    try:
        yield
    finally:
        _by_address.clear()


@contextmanager
def short_axes(most: int) -> Iterator[None]:
    """As on a GPU that takes so few programs along the second and third axis of a launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strict_interpreter.ALONG", (ALONG[0], most, most))
        patch.setattr("fedstill.kernels.grids.PLACES", most)
        yield


def _watched(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Launches are where a device was chosen; on the way back the framework chooses it."""

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        assert _chosen_now or torch._C._current_graph_task_id() >= 0, "no device was chosen"
        fits = all(count <= most for count, most in zip(executor.grid, ALONG, strict=False))
        assert fits, f"more programs along an axis than a GPU takes: {executor.grid}"
        tensors = [one for one in (*args, *_by_address) if isinstance(one, Tensor)]
        _spans[:] = [_span(tensor) for tensor in tensors if tensor.numel()]
        return launch(executor, *args, **kwargs)

    return launched


def _span(tensor: Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    numbers = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + numbers * tensor.element_size()


def _inside(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """Reading or writing, of which the mask comes so many places after the pointers."""

    def accessed(builder: Any, pointers: Any, *rest: Any) -> Any:
        asked = np.broadcast_to(rest[mask_at].data, pointers.data.shape).astype(bool)
        places, known = pointers.data[asked], np.zeros(int(asked.sum()), dtype=bool)
        for begin, end in _spans:
            known |= (places >= begin) & (places < end)
        assert known.all(), "beside the tensors of the launch"
        return access(builder, pointers, *rest)

    return accessed


def _spoiled(make: Callable[..., Tensor], made: list[Tensor]) -> Callable[..., Tensor]:
    """As `make` hands out memory, but guarded and full of what spoils a result."""

    def handed_out(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if not tensor.numel() or tensor.device.type != DEVICE or is_wrapped(tensor):
            return tensor
        number = float("nan") if tensor.is_floating_point() else 119
        whole = guarded(torch.full((tensor.numel(),), number, dtype=tensor.dtype))
        made.append(whole)
        return tensor.set_(whole.untyped_storage(), AROUND, tensor.shape, tensor.stride())

    return handed_out
