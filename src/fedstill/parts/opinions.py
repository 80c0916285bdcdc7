"""Opinions: what networks say of data that others hold as well; no training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedstill.core.data import Data
from fedstill.core.model import Model
from fedstill.core.records import Weights
from fedstill.parts.robust import MEAN, Aggregation

CHUNK = 1024


@torch.no_grad()
def opinions(model: Model, weights: Weights, data: Data) -> Tensor:
    """[example, class], logits of every example in evaluation mode."""
    still = model.evaluating
    return torch.cat([still(weights, batch.x) for batch in data.chunks(CHUNK)])


def mean_opinion(said: Sequence[Tensor], how: Aggregation) -> Tensor:
    """[example, class], the mean of what is said of the same examples, or a robust rule's."""
    return torch.stack(list(said)).mean(0) if how.rule == "mean" else how.joined(said)


def mean_over_speakers(
    said: Sequence[Mapping[str, Tensor]],
    sizes: Mapping[str, int],
    classes: int,
    device: torch.device | str,
    how: Aggregation = MEAN,
) -> tuple[Tensor, Tensor]:
    """[example, class] the mean logits of all who spoke of an example; [example] 1 where any.

    Examples are those of several sets, named with their sizes, one set after the other. Who spoke
    of more or fewer examples of a set means another one, and is left out there. In place of the
    mean may stand a robust rule.
    """
    means = [torch.empty(0, classes, device=device)]
    heard = [torch.empty(0, device=device)]
    for name, size in sizes.items():
        known = [logits[name] for logits in said if name in logits]
        spoken = [rows for rows in known if len(rows) == size]
        silence = torch.zeros(size, classes, device=device)
        means.append(mean_opinion(spoken, how) if spoken else silence)
        heard.append(torch.full((size,), float(bool(spoken)), device=device))
    return torch.cat(means), torch.cat(heard)
