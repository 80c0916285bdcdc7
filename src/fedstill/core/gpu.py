"""What may be handed to kernels of our own for a GPU, and where they are."""

from __future__ import annotations

import importlib
import importlib.util
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


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on a device, without waiting until all is done there that was begun before.

    What a host sends by `to` is waited for, and so is all that stands before it in the stream.
    """
    if torch.device(device).type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def kernels(module: str) -> Any:
    """A module of kernels under `fedstill`, or None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"fedstill.{module}")
