"""Examples of several plans fetched at once are those of each plan by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from fedstill.core.data import Batch, Data, Plan, Pool, Rows
from fedstill.core.fetched import Fetched, bytes_each, fetched
from fedstill.core.seeds import generator

GREY = Pool(
    torch.randint(256, (40, 1, 3, 3), generator=generator(0), dtype=torch.uint8),
    torch.arange(40) % 4,
    torch.full((1, 1, 1), 0.5),
    torch.full((1, 1, 1), 0.25),
)


def plans(counts: Sequence[int], pool: Pool = GREY, size: int = 4) -> list[Plan]:
    """Clients with so many examples, one's rows behind the other's."""
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    parts = [torch.arange(*pair) for pair in pairwise(ends)]
    return [
        Data((Rows(pool, rows),)).batches(size, generator(place), epochs=2)
        for place, rows in enumerate(parts)
    ]


def assert_same(left: Batch | None, right: Batch | None) -> None:
    assert left is not None and right is not None
    assert torch.equal(left.x, right.x) and torch.equal(left.y, right.y)


def test_every_batch_is_the_plans_own() -> None:
    own = plans([9, 4, 12])
    found = fetched(own, most=10**6)
    for plan, made in zip(own, found, strict=True):
        assert isinstance(made, Fetched)
        assert len(made) == len(plan)
        for step in range(len(plan)):
            assert_same(made[step], plan[step])
    assert_same(found[2].ahead(1, 5), own[2].ahead(1, 5))  # type: ignore[attr-defined]
    assert found[0].ahead(1, 2) is None  # of four examples, then of one  # type: ignore


def test_where_bytes_do_not_suffice_plans_stay_as_they_are() -> None:
    own = plans([9, 4])
    assert bytes_each(GREY) == 4 * 9 + 8
    needed = 2 * 13 * bytes_each(GREY)  # two epochs of thirteen examples
    assert fetched(own, most=needed - 1) == own
    assert all(isinstance(plan, Fetched) for plan in fetched(own, most=needed))


def test_plans_of_other_pools_and_other_batches_are_left_alone() -> None:
    other = Pool(GREY.stored.float(), GREY.labels)
    some: list[Any] = [*plans([8, 8]), *plans([8], other), ["a batch"]]
    found = fetched(some, most=10**6)
    assert [isinstance(plan, Fetched) for plan in found] == [True, True, False, False]
    assert found[2:] == some[2:]
