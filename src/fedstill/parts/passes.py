"""Several batches shown to one network: passes that are the same and cost less; no losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core import Model, Weights, trees
from fedstill.core.gpu import plain_on_gpu


class Seen(NamedTuple):
    """What a network makes of two batches."""

    features: Tensor  # [example, feature] of the first
    first: Tensor  # [example, class], logits
    second: Tensor


def both_seen(model: Model, weights: Weights, first: Tensor, second: Tensor) -> Seen:
    """Logits of two batches and features of one; norm layers' statistics are the first's alone.

    A GPU is shown both at once, where examples do not mix: half the launches, and twice the work
    in each. A CPU gains nothing by that, and its sums over examples would round differently.
    """
    apart = model.couples or model.draws
    if not apart and plain_on_gpu(first, second, *weights.values()):
        found = model.features(weights, torch.cat([first, second]))
        logits = torch.split(model.head(weights, found), [len(first), len(second)])
        return Seen(found[: len(first)], *logits)
    features = model.features(weights, first)
    told = model.train().features(weights, second)
    return Seen(features, model.head(weights, features), model.head(weights, told))


def features_at_rest(model: Model, weights: Weights, x: Tensor) -> Tensor:
    """[example, feature] that pass no gradient on.

    They are computed as those that do, so what is compared with them is rounded alike.
    """
    return model.features(trees.detach(weights), x).detach()
