"""Several batches shown to one network: passes that are the same and cost less; no losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core import Model, Weights, trees
from fedstill.core.gpu import plain_on_gpu


class Seen(NamedTuple):
    """What a network makes of two batches, and of one at rest."""

    features: Tensor  # [example, feature] of the first
    first: Tensor  # [example, class], logits
    second: Tensor
    resting: Tensor  # [example, feature] of those that pass no gradient on


def all_seen(
    model: Model, weights: Weights, first: Tensor, second: Tensor, resting: Tensor
) -> Seen:
    """Logits of two batches, features of one, and those of a batch at rest, which may be empty.

    Norm layers' statistics are the first's alone. A GPU is shown all at once, where examples do
    not mix: fewer launches, and more work in each. A CPU gains nothing by that, and its sums over
    examples would round differently.
    """
    apart = model.couples or model.draws
    if not apart and plain_on_gpu(first, second, resting, *weights.values()):
        found, still = together(model, weights, torch.cat([first, second, resting]), len(resting))
        own, other = torch.split(model.head(weights, found), [len(first), len(second)])
        return Seen(found[: len(first)], own, other, still)
    features = model.features(weights, first)
    told = model.train().features(weights, second)
    still = features_at_rest(model.train(), weights, resting) if len(resting) else features[:0]
    return Seen(features, model.head(weights, features), model.head(weights, told), still)


def together(
    model: Model, weights: Weights, x: Tensor, resting: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Features of examples of which the last ones rest, or none does."""
    if resting:
        return model.features_beside(weights, x, resting)
    found = model.features(weights, x)
    return found, found[:0].detach()


def features_at_rest(model: Model, weights: Weights, x: Tensor) -> Tensor:
    """[example, feature] that pass no gradient on.

    They are computed as those that do, so what is compared with them is rounded alike.
    """
    return model.features(trees.detach(weights), x).detach()
