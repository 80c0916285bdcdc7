"""What may be handed to kernels of our own, and where those for a GPU are."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedstill.core.torch_internals import is_wrapped


def plain_on_gpu(*tensors: Tensor) -> bool:
    """Whether kernels may be handed these: single precision, outside of `torch.func`."""
    return all(
        tensor.is_cuda and tensor.dtype == torch.float32 and not is_wrapped(tensor)
        for tensor in tensors
    )


def plain_on_cpu(*tensors: Tensor) -> bool:
    """Whether these are ordinary numbers on a CPU, outside of `torch.func`."""
    return all(
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and not is_wrapped(tensor)
        for tensor in tensors
    )


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on a device, without waiting until all is done there that was begun before.

    What a host sends by `to` is waited for, and so is all that stands before it in the stream.
    """
    if torch.device(device).type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


_wanted: ContextVar[list[Tensor] | None] = ContextVar("wanted", default=None)


@contextmanager
def wanted(places: Sequence[Tensor]) -> Iterator[None]:
    """Inside, what is read by one step alone may be made in these places, where it is wanted."""
    before = _wanted.set(list(places))
    try:
        yield
    finally:
        _wanted.reset(before)


def place(shape: Sequence[int], device: torch.device) -> Tensor:
    """Memory for numbers that one step reads: a place where they are wanted, or a new one.

    Every place is given away once.
    """
    places = _wanted.get() or []
    for number, tensor in enumerate(places):
        alike = tensor.shape == torch.Size(shape) and tensor.dtype == torch.float32
        if alike and tensor.device == device and tensor.is_contiguous():
            return places.pop(number)
    return torch.empty(tuple(shape), device=device)


Capability = tuple[int, int]
LEAST: Capability = (8, 0)  # what Triton is made for; on older ones it leaves tensor cores idle


def kernels(module: str, *tensors: Tensor) -> Any:
    """A module of kernels under `fedstill`, or None where Triton is not installed.

    None as well where a GPU is too old for them: one that these tensors are on or, without
    tensors, the current one. There torch's own operations compute the same.
    """
    devices = {tensor.device for tensor in tensors} or {current()}
    return None if any(map(is_too_old, devices)) else _loaded(module)


def current() -> torch.device:
    """The GPU that is used where none is named, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_too_old(device: torch.device) -> bool:
    """Whether kernels of ours are not for this GPU."""
    return device.type == "cuda" and capability(device) < LEAST


def capability(device: torch.device) -> Capability:
    """The generation of a GPU, as NVIDIA counts them."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _capability(index: int) -> Capability:
    return torch.cuda.get_device_capability(index)


@cache
def _loaded(module: str) -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"fedstill.{module}")
