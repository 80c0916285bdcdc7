"""Kernels for a GPU, tested on any machine: by Triton's interpreter where no GPU is.

The interpreter runs a kernel's programs one after another on the host (`conftest.py` asks for it
before Triton is imported). It tells whether indices, masks and arithmetic are right; not how fast a
kernel is, whether programs race, nor how the tensor cores of a GPU round.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from fedstill.core.seeds import generator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AROUND = 4096  # numbers before and behind a guarded tensor
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def interpreting() -> bool:
    """Whether kernels are run by the interpreter, and not compiled for a GPU."""
    if not HAS_TRITON:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def noise(*shape: int, of: str = "noise") -> Tensor:
    """Normal numbers, guarded."""
    return guarded(torch.randn(shape, generator=generator(11, of, *shape)))


def guarded(tensor: Tensor) -> Tensor:
    """The same on the device, between numbers that spoil whatever they come into.

    A kernel that reads beside its tensor makes a result of NaN, or of nonsense where numbers are
    whole; `untouched` tells whether one has written there.
    """
    whole = torch.full((tensor.numel() + 2 * AROUND,), _spoil(tensor.dtype), dtype=tensor.dtype)
    whole[AROUND : AROUND + tensor.numel()] = tensor.flatten()
    return whole.to(DEVICE)[AROUND : AROUND + tensor.numel()].view(tensor.shape)


def untouched(*tensors: Tensor) -> bool:
    """Whether what lies around guarded tensors is as it was."""
    return all(_whole_around(tensor) for tensor in tensors)


def _whole_around(tensor: Tensor) -> bool:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    sides = torch.cat([whole[:AROUND], whole[-AROUND:]])
    wanted = torch.full_like(sides, _spoil(tensor.dtype))
    return torch.allclose(sides, wanted, rtol=0, atol=0, equal_nan=True)


def _spoil(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 119
