"""Half: sixteen bits for every entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from fedstill.channels.coded import Parts, fitting
from fedstill.channels.tensors import TensorChannel

LARGEST = 65504.0  # of float16


@dataclass(frozen=True, kw_only=True)
class Half(TensorChannel):
    """Entries as float16, about three decimal digits; half the bytes.

    Where an entry is too large for float16, the whole tensor is divided by the power of two that
    makes it fit, and multiplied again on arrival. Entries below 6e-8 times that become zero.
    """

    def encode(self, tensor: Tensor, rng: Generator) -> Parts:
        largest = tensor.abs().amax().float()
        power = torch.log2(largest / LARGEST).ceil().clamp(min=0)
        factor = torch.exp2(power)
        return {"values": (tensor / factor).to(torch.float16), "factor": factor}

    def decode(self, parts: Parts, shape: tuple[int, ...]) -> Tensor:
        values, factor = fitting(parts, values=shape, factor=[])
        return values.float() * factor
