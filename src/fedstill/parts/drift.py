"""What a local loss gains so that a client stays near the others: FedProx's term, SCAFFOLD's."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedstill.core.content import Layout, trainable
from fedstill.core.records import Weights
from fedstill.parts import controls
from fedstill.parts.matching import squared_distance

LocalUpdate = Literal["plain", "fedprox", "scaffold"]


def proximal(weights: Weights, start: Weights, mu: float) -> Tensor:
    """mu/2 · ||w - start||² over all trainable parameters."""
    return mu / 2 * squared_distance(weights, start)


def held_near(
    loss: Tensor, how: LocalUpdate, weights: Weights, start: Weights, drift: Weights, *, mu: float
) -> Tensor:
    """A local loss with the term of its kind of local update; plain has none."""
    if how == "scaffold":
        return loss + controls.correction(drift, weights)
    return loss + proximal(weights, start, mu) if how == "fedprox" else loss


def first_control(how: LocalUpdate, weights: Weights) -> Weights:
    """The control with which a party begins; none unless the update is SCAFFOLD's."""
    return controls.fresh(weights) if how == "scaffold" else {}


def control_layout(how: LocalUpdate, weights: Layout) -> Layout:
    """What a control that travels must look like, beside the weights of a network."""
    return trainable(weights) if how == "scaffold" else {}
