"""What one step alone reads may be made where it is wanted, each place for one thing."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import gpu
from fedstill.core.data import Pool

CPU = torch.device("cpu")


def test_a_place_that_is_wanted_is_given_away_once() -> None:
    wanted = torch.ones(2, 3)
    with gpu.wanted([torch.ones(3, 2), wanted]):
        assert gpu.place((2, 3), CPU) is wanted
        assert gpu.place((2, 3), CPU) is not wanted
    assert gpu.place((2, 3), CPU) is not wanted


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).T, torch.ones(2, 3, device="meta")],
    ids=["other numbers", "lies otherwise", "elsewhere"],
)
def test_what_is_unlike_is_no_place(other: torch.Tensor) -> None:
    with gpu.wanted([other]):
        assert gpu.place((2, 3), CPU) is not other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_examples_are_fetched_to_where_they_are_wanted_only_if_fleeting() -> None:
    stored = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(2, 3, 4, 4)
    middle = torch.full((3, 1, 1), 0.5)
    pool = Pool(stored, torch.zeros(2, dtype=torch.long), middle, middle).to("cuda")
    rows, wanted = torch.tensor([1, 0, 1], device="cuda"), torch.zeros(3, 3, 4, 4, device="cuda")
    with gpu.wanted([wanted]):
        kept, fleeting = pool.inputs(rows), pool.inputs(rows, fleeting=True)
    assert fleeting is wanted and kept is not wanted
    assert torch.equal(kept, fleeting)
