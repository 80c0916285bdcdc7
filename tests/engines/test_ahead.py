"""Batches for recordings are made for many steps at once and handed out some at a time."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.data import Batch, Data, Lazy, Plan
from fedstill.core.seeds import generator
from fedstill.engines.loops import ahead as batches_ahead
from fedstill.engines.loops.ahead import TOGETHER, Ahead

EXAMPLES = torch.arange(50.0)


def plan(count: int, size: int = 2, epochs: int = 1) -> Plan:
    some = EXAMPLES[:count].unsqueeze(1)
    return Data.of(some, torch.arange(count)).batches(size, generator(0), epochs=epochs)


def counted(plan: Plan) -> tuple[Lazy[Batch], list[tuple[int, int]]]:
    asked: list[tuple[int, int]] = []

    def many(step: int, count: int) -> Batch | None:
        asked.append((step, count))
        return plan.ahead(step, count)

    return Lazy(len(plan), plan.__getitem__, many), asked


def test_what_is_handed_out_is_what_the_plan_gives() -> None:
    own = plan(40)  # twenty steps
    ahead = Ahead(own)
    for step in range(0, 20, TOGETHER):
        made, expected = ahead.at(step), own.ahead(step, TOGETHER)
        assert torch.equal(made.x, expected.x) and torch.equal(made.y, expected.y)  # type: ignore


def test_after_the_first_time_batches_are_made_for_as_many_steps_as_bytes_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_ahead, "AT_ONCE", 8 * 24)  # two numbers, two labels
    batches, asked = counted(plan(50))  # twenty-five steps
    ahead = Ahead(batches)
    for step in range(0, 24, TOGETHER):
        assert ahead.at(step) is not None
    assert ahead.at(24) is None  # a single one is left
    assert asked == [(0, 4), (4, 8), (12, 8), (20, 4)]


def test_steps_that_are_not_alike_are_asked_for_in_smaller_numbers() -> None:
    batches, asked = counted(plan(21, epochs=2))  # eleven steps, the last of one example, twice
    ahead = Ahead(batches)
    assert [ahead.at(step) is None for step in (0, 4, 8)] == [False, False, True]
    assert [ahead.at(step) is None for step in (11, 15, 19)] == [False, False, True]
    assert asked[:4] == [(0, 4), (4, 16), (4, 8), (4, 4)]


def test_batches_that_are_not_made_at_once_are_left_to_single_steps() -> None:
    assert Ahead([1, 2, 3, 4, 5]).at(0) is None
    assert Ahead(Lazy(8, lambda step: step)).at(0) is None
