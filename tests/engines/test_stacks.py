"""Which loops are seen to be alike without a look at their shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.core import SGD, Batch, Loop, Model, Weights
from fedstill.core.loop import Descent
from fedstill.core.seeds import generator
from fedstill.engines.loops.stacks import begin_as_one
from fedstill.models import MLP

MODEL = MLP((2,), 2, hidden=())
START = {"head.weight": torch.randn(2, 2, generator=generator(0, "stacks"))}


def objective(model: Model, weights: Weights, batch: Batch) -> Tensor:
    return weights["head.weight"].square().sum()


def loop(start: Weights = START, lr: float = 0.1, **given: Tensor) -> Loop[tuple[Weights, None]]:
    return Loop(Descent(objective, MODEL, SGD(lr)), (start, None), given, [])


def test_loops_from_a_common_start_begin_as_one() -> None:
    assert begin_as_one(loop(), loop())


def test_loops_that_learn_otherwise_or_elsewhere_do_not() -> None:
    assert not begin_as_one(loop(), loop(lr=0.2))
    assert not begin_as_one(loop(), loop({"head.weight": START["head.weight"].clone()}))
    assert not begin_as_one(loop(near=torch.zeros(1)), loop(near=torch.zeros(2)))
    assert not begin_as_one(loop(), loop(near=torch.zeros(1)))
