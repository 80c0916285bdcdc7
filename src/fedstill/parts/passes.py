"""Several batches shown to one network: passes that are the same and cost less; no losses."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core import Model, Weights, trees
from fedstill.core.gpu import plain_on_gpu


def features_of_both(
    model: Model, weights: Weights, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """[example, feature] of two batches; statistics of norm layers are those of the first alone.

    A GPU is shown both at once, where examples do not mix: half the launches, and twice the work
    in each. A CPU gains nothing by that, and its sums over examples would round differently.
    """
    apart = model.couples or model.draws
    if not apart and plain_on_gpu(first, second, *weights.values()):
        found = model.features(weights, torch.cat([first, second]))
        return found[: len(first)], found[len(first) :]
    return model.features(weights, first), model.train().features(weights, second)


def features_at_rest(model: Model, weights: Weights, x: Tensor) -> Tensor:
    """[example, feature] that pass no gradient on.

    They are computed as those that do, so what is compared with them is rounded alike.
    """
    return model.features(trees.detach(weights), x).detach()
