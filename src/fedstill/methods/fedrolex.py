"""FedRolex: weak clients train a window of units that rolls over the whole network.

Alam, Liu, Yan, Zhang. FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction. NeurIPS 2022. Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedstill.core import Node, NodeId
from fedstill.methods.heterofl import HeteroFL
from fedstill.parts import submodels


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """HeteroFL whose clients hold a window of units that moves on by one every round."""

    presets: ClassVar = {"small": {"lr": 0.1, "batch_size": 8, "rho": 2}}

    def units(self, server: Node[Any], client: NodeId) -> submodels.Units:
        """A window around each layer; it begins at the first unit and moves on by one a round."""
        return submodels.rolling_units(self.narrowed(server, client), server.round - 1)
