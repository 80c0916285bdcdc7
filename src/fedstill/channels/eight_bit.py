"""EightBit: one of 256 levels for every entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from fedstill.channels.coded import Parts, fitting
from fedstill.channels.tensors import TensorChannel

LEVELS = 255  # steps between the smallest and the largest entry


@dataclass(frozen=True, kw_only=True)
class EightBit(TensorChannel):
    """Entries as one of 256 equal steps from the smallest to the largest; a quarter of the bytes.

    The steps are those of a whole tensor or of each row (slice of the first axis: of a layer's
    weights, one output channel). With `stochastic` rounding goes up or down by chance so that the
    mean is exact, as in Alistarh, Grubic, Li, Tomioka, Vojnović. QSGD: Communication-Efficient SGD
    via Gradient Quantization and Encoding. NeurIPS 2017, section 3.1; here on a uniform grid.
    An entry moves by at most one step, without chance by half a step.
    """

    per: Literal["tensor", "row"] = "tensor"
    stochastic: bool = False

    def encode(self, tensor: Tensor, rng: Generator) -> Parts:
        rows = self._rows(tensor).float()
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        step = (high - low) / LEVELS
        # A tensor of equal entries has steps of zero; any divisor then gives level 0.
        levels = (rows - low) / torch.where(step > 0, step, torch.ones_like(step))
        if self.stochastic:
            levels = (levels + torch.rand(levels.shape, generator=rng).to(levels)).floor()
        codes = levels.round().clamp(0, LEVELS).to(torch.uint8)
        return {"levels": codes.reshape(tensor.shape), "low": low.flatten(), "step": step.flatten()}

    def decode(self, parts: Parts, shape: tuple[int, ...]) -> Tensor:
        (levels,) = fitting(parts, levels=shape)
        rows = self._rows(levels).float()
        step, low = fitting(parts, step=[len(rows)], low=[len(rows)])
        return rows * step.unsqueeze(1) + low.unsqueeze(1)

    def worth(self, tensor: Tensor) -> bool:
        rows = len(tensor) if self.per == "row" and tensor.dim() > 1 else 1
        return tensor.numel() + 8 * rows < tensor.nbytes

    def _rows(self, tensor: Tensor) -> Tensor:
        """[row, entry]; a vector is one row."""
        many = self.per == "row" and tensor.dim() > 1
        return tensor.reshape(len(tensor), -1) if many else tensor.reshape(1, -1)
