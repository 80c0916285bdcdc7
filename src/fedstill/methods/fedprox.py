"""FedProx: FedAvg with a proximal term that keeps clients near the global weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks.
MLSys 2020. Equation 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedstill.core import Batch, Model, Weights
from fedstill.core.ranges import NonNegative
from fedstill.methods.fedavg import FedAvg
from fedstill.parts.drift import proximal


@dataclass(frozen=True)
class FedProx(FedAvg):
    """The local loss gains mu/2 · ||w - w_global||² over all trainable parameters."""

    mu: NonNegative = 0.01  # weight of the proximal term

    def objective(
        self,
        model: Model,
        weights: Weights,
        batch: Batch,
        start: Weights,
        class_weights: Tensor | None = None,
    ) -> Tensor:
        task = super().objective(model, weights, batch, start, class_weights)
        return task + proximal(weights, start, self.mu)
