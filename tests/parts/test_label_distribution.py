"""Dynamic weighting and label sampling, against counts by hand."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import Data
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.parts.label_distribution import (
    counts_table,
    dynamic_shares,
    label_distribution,
    miscounted,
    used_labels,
)

COUNTS = torch.tensor([[6.0, 0, 2, 0], [3, 4, 0, 0], [0, 4, 1, 0]])  # the last class: nobody


def test_the_label_law_is_each_labels_share_of_all_examples_used() -> None:
    assert label_distribution(COUNTS).tolist() == pytest.approx([9 / 20, 8 / 20, 3 / 20, 0])


def test_a_clients_share_is_its_part_of_a_label() -> None:
    shares = dynamic_shares(COUNTS)
    by_hand = [[6 / 9, 0, 2 / 3, 0], [3 / 9, 4 / 8, 0, 0], [0, 4 / 8, 1 / 3, 0]]
    assert torch.allclose(shares, torch.tensor(by_hand))
    assert shares.sum(0).tolist() == pytest.approx([1, 1, 1, 0])


def test_a_label_that_nobody_used_is_never_drawn() -> None:
    drawn = torch.multinomial(
        label_distribution(COUNTS), 1000, replacement=True, generator=generator(0)
    )
    assert set(drawn.tolist()) == {0, 1, 2}


def test_every_use_of_an_example_counts() -> None:
    data = Data.of(torch.zeros(5, 2), torch.tensor([0, 0, 2, 2, 2]))
    assert used_labels(Data().batches(2, generator(0)), 4).tolist() == [0, 0, 0, 0]
    assert used_labels(data.batches(2, generator(0), epochs=3), 4).tolist() == [6, 0, 9, 0]
    assert used_labels(data.batches(5, generator(0)), 4).tolist() == [2, 0, 3, 0]
    assert int(used_labels(data.batches(2, generator(0), steps=1), 4).sum()) == 2


def test_counts_are_a_table_in_the_order_of_the_clients() -> None:
    table = counts_table({"a": torch.tensor([1, 0]), "b": torch.tensor([0, 0])})
    assert table.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (torch.tensor([1, 2, 3]), "counts [3] labels, there are 2 classes"),
        (torch.tensor([[1, 2]]), "counts [1, 2] labels, there are 2 classes"),
        (torch.tensor([3, -1]), "counts [3, -1]: counts are whole numbers from 0"),
        (torch.tensor([1.5, 0.5]), "counts [1.5, 0.5]: counts are whole numbers from 0"),
        (torch.tensor([1.0, torch.nan]), "counts [1.0, nan]: counts are whole numbers from 0"),
        (torch.tensor([torch.inf, 1.0]), "counts [inf, 1.0]: counts are whole numbers from 0"),
        (torch.tensor([2, 3]), "counts 5 labels, but used 2 examples"),
        (torch.tensor([1.0, 1.0]), None),
        (torch.tensor([2, 0]), None),
    ],
)
def test_counts_that_cannot_be_are_recognised(said: torch.Tensor, why: str | None) -> None:
    assert miscounted(said, 2, used=2) == why


def test_without_a_number_of_examples_any_sum_can_be() -> None:
    assert miscounted(torch.tensor([2, 3]), 2) is None


def test_counts_that_add_up_to_nothing_are_refused() -> None:
    with pytest.raises(BadValue, match="the label counts of a, b add up to 0"):
        counts_table({"a": torch.zeros(2), "b": torch.zeros(2)})
