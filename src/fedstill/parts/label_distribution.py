"""Label counts: what each client learnt from, and the weights and frequencies that follow (DFRD).

Counts are of examples used in training: one that is used twice counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedstill.core.data import Plan
from fedstill.core.errors import BadValue
from fedstill.core.records import NodeId


def used_labels(plan: Plan, classes: int) -> Tensor:
    """[class], how many examples of each class a plan holds, repeats counted; on the host."""
    if not len(plan):
        return torch.zeros(classes, dtype=torch.long)
    return torch.bincount(plan.data.labels.cpu()[plan.order], minlength=classes)


def miscounted(said: Tensor, classes: int, *, used: int | None = None) -> str | None:
    """Why these cannot be the label counts of a client that used so many examples, or None."""
    if tuple(said.shape) != (classes,):
        return f"counts {list(said.shape)} labels, there are {classes} classes"
    exact = said.double()
    if not bool((torch.isfinite(exact) & (exact >= 0) & (exact == exact.round())).all()):
        return f"counts {said.tolist()}: counts are whole numbers from 0"
    total = int(exact.sum())
    if used is not None and total != used:
        return f"counts {total} labels, but used {used} examples"
    return None


def counts_table(counts: Mapping[NodeId, Tensor]) -> Tensor:
    """[client, class] from what clients say."""
    table = torch.stack([said.float() for said in counts.values()])
    if not bool(table.sum() > 0):
        raise BadValue(f"the label counts of {', '.join(counts)} add up to 0: nobody learnt")
    return table


def label_distribution(counts: Tensor) -> Tensor:
    """p(y) = n_y / Σ n, [class] from counts [client, class]; a class nobody used has none."""
    totals = counts.sum(0)
    return totals / totals.sum()


def dynamic_shares(counts: Tensor) -> Tensor:
    """τ_{i,y} = n_{i,y} / Σ_i n_{i,y}, [client, class]; zero for a class that nobody used."""
    totals = counts.sum(0)
    return counts / torch.where(totals > 0, totals, torch.ones_like(totals))


def alike(clients: int, classes: int) -> tuple[Tensor, Tensor]:
    """Equal shares of clients [client, class], and equal frequencies of labels [class]."""
    return torch.full((clients, classes), 1 / clients), torch.full((classes,), 1 / classes)
