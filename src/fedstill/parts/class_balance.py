"""Unbalanced classes: what a mistake on each class costs, and rare classes drawn more often."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from fedstill.core import Data, Model
from fedstill.core.ranges import fault

ClassWeights = Literal["none", "balanced"] | tuple[float, ...]
"""What the loss of an example of each class is multiplied by.

`balanced` is n / (k · n_c) for a client with n examples of k classes, n_c of them of class c: every
class that it holds counts alike, and the mean over its examples is one. A list has a number for
each class, the same for every client.
"""

Sampling = Literal["shuffled", "balanced"]
"""`balanced` draws the class of every example first, each that a client holds alike."""

UNSAFE = (
    'sampling = "balanced" draws rare records more often, and DP-SGD accounts for draws that are '
    'alike for all; use class_weights = "balanced"'
)


def unfit_weights(given: ClassWeights, model: Model) -> list[str]:
    """Why weights do not go with what a model tells apart, as lines for `Method.unfit`."""
    if isinstance(given, str):
        return []
    wrong = [fault("class_weights", value, float) for value in given]
    if not any(wrong):
        wrong = [f"class_weights has {value!r}; none is below 0" for value in given if value < 0]
    if len(given) != model.classes:
        wrong.append(f"class_weights has {len(given)} numbers for {model.classes} classes")
    elif not any(wrong) and not math.fsum(given):
        wrong.append("class_weights are all 0, so nothing would be learnt")
    return [line for line in wrong if line]


def weights_of(given: ClassWeights, data: Data, classes: int) -> dict[str, Any]:
    """What an objective is given: `class_weights` [class], or nothing where all count alike.

    Counts of private examples are as others may know them.
    """
    if given == "none" or not len(data):
        return {}
    if not isinstance(given, str):
        return {"class_weights": torch.tensor(given, dtype=torch.float32)}
    counts = data.counts(classes).double()
    held = int((counts > 0).sum())
    return {"class_weights": (counts.sum() / (max(1, held) * counts.clamp(min=1))).float()}
