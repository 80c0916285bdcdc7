"""Anchors: the mean over holders by sums, and streams of batches."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import algebra
from fedstill.core.seeds import generator
from fedstill.parts.anchors import over_holders, spread, stream


def test_a_set_is_laid_out_over_all_classes() -> None:
    made = spread(torch.tensor([[[2.0]], [[5.0]]]), torch.tensor([3, 0]), 4)
    assert made["images"].flatten().tolist() == [5, 0, 0, 2]
    assert made["held"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sums_or_means_of_sets_give_the_mean_over_holders(scale: float) -> None:
    # Class 0: 2 and 4; class 1: nobody; class 3: 8 alone.
    one = spread(torch.tensor([[[2.0]], [[8.0]]]), torch.tensor([0, 3]), 4)
    other = spread(torch.tensor([[[4.0]]]), torch.tensor([0]), 4)
    images, classes = over_holders(algebra.scale(algebra.add(one, other), scale), 0.5 * scale)
    assert classes.tolist() == [0, 3]
    assert images.flatten().tolist() == [3, 8]


def test_batches_are_cut_from_one_order_after_another() -> None:
    found = stream(5, 2, 5, generator(0))
    assert found.shape == (5, 2)
    assert sorted(found.flatten()[:5].tolist()) == sorted(found.flatten()[5:].tolist())
    assert sorted(found.flatten()[:5].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("count", "size", "steps"), [(0, 0, 3), (4, 4, 2), (3, 2, 0)])
def test_no_things_or_no_steps_are_no_trouble(count: int, size: int, steps: int) -> None:
    assert stream(count, size, steps, generator(0)).shape == (steps, size)
