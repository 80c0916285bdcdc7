"""Opinions: what networks say of data that others hold as well; no training."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from fedstill.core.data import Data, Plan
from fedstill.core.model import Model
from fedstill.core.records import Weights

CHUNK = 1024


@torch.no_grad()
def opinions(model: Model, weights: Weights, data: Data) -> Tensor:
    """[example, class], logits of every example in evaluation mode."""
    still = model.evaluating
    return torch.cat([still(weights, batch.x) for batch in data.chunks(CHUNK)])


def passes(data: Data, size: int, rng: Generator, *, steps: int) -> Plan:
    """So many batches, in as many passes over the data as that takes."""
    epochs = math.ceil(steps / math.ceil(len(data) / size))
    plan = data.batches(size, rng, epochs=epochs)
    return Plan(data, plan.rows[:steps])
