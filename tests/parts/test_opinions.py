"""Opinions: every example once, in order, in evaluation mode; passes of a given length."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.seeds import generator
from fedstill.parts import opinions as module
from fedstill.parts.opinions import opinions, passes
from worlds import pictures


def test_opinions_are_logits_in_evaluation_mode_in_the_order_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)  # does not divide the set
    world = pictures(norm="batch")
    weights = world.server_model.init(0)
    said = opinions(world.server_model.learning({}), weights, world.public)
    assert torch.allclose(said, world.server_model(weights, world.public.all().x), atol=1e-6)
    assert not said.requires_grad


@pytest.mark.parametrize(("steps", "size"), [(0, 10), (2, 10), (5, 10), (3, 100), (48, 1)])
def test_so_many_batches_are_made_in_whole_passes(steps: int, size: int) -> None:
    public = pictures().public  # 24 examples
    plan = passes(public, size, generator(0), steps=steps)
    assert len(plan) == steps
    per_pass = -(-24 // size)
    for begin in range(0, steps - per_pass + 1, per_pass):
        seen = torch.cat(plan.rows[begin : begin + per_pass])
        assert sorted(seen.tolist()) == list(range(24))
