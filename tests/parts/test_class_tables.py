"""Means by class: over examples, over holders, and over time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedstill.core import Data, Model, Node, Weights
from fedstill.core.release import Spending, Terms
from fedstill.core.seeds import generator
from fedstill.models import MLP
from fedstill.parts import class_tables
from fedstill.parts.class_tables import ClassMeans, ClassTable, class_averages, exact_averages
from fedstill.testing.worlds import finished


def test_averages_are_the_means_of_the_classes_held() -> None:
    x = torch.tensor([[1.0, 0.0], [3.0, 2.0], [10.0, 10.0]])
    means = exact_averages(lambda x: 2 * x, Data.of(x, torch.tensor([3, 3, 1])), 5)
    assert means.classes.tolist() == [1, 3] and means.counts.tolist() == [1, 2]
    assert means.rows.tolist() == [[20, 20], [4, 2]]


def test_averages_do_not_depend_on_how_the_pass_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = generator(0, "cut")
    x, y = torch.randn(50, 4, generator=rng), torch.randint(3, (50,), generator=rng)
    whole = exact_averages(torch.tanh, Data.of(x, y), 3)
    monkeypatch.setattr(class_tables, "CHUNK", 7)
    cut = exact_averages(torch.tanh, Data.of(x, y), 3)
    assert torch.allclose(whole.rows, cut.rows, atol=1e-6)
    for row, c in enumerate(whole.classes.tolist()):
        assert torch.allclose(whole.rows[row], torch.tanh(x[y == c]).mean(0), atol=1e-6)


@dataclass(frozen=True)
class Squares:
    """The squares of features."""

    model: Model

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        return self.model.features(weights, x).square()


def test_anything_that_looks_at_examples_can_be_averaged() -> None:
    model, x = MLP((2,), 3, hidden=()), torch.tensor([[1.0, 0.0], [3.0, 2.0], [4.0, 5.0]])
    node: Node[None] = Node("c", 1, None, model=model, data=Data.of(x, torch.tensor([2, 2, 0])))
    nothing = ClassTable.empty(3, 2, "cpu")
    means = finished(class_averages(node, Squares(model), model.init(0), nothing))
    assert means.rows.tolist() == [[16, 25], [5, 2]] and means.classes.tolist() == [0, 2]


def seen_by_nobody(node: Node[None]) -> ClassMeans:
    """What is averaged of a node without examples."""
    nothing = ClassTable.empty(3, 2, "cpu")
    means: ClassMeans = finished(
        class_averages(node, Squares(node.model), node.model.init(0), nothing)
    )
    return means


def test_without_examples_there_is_no_class_to_average() -> None:
    node: Node[None] = Node("c", 1, None, model=MLP((2,), 3, hidden=()))
    means = seen_by_nobody(node)
    assert means.rows.shape == (0, 2) and not len(means.classes) and not len(means.counts)


def test_without_examples_noise_is_averaged_where_labels_are_private() -> None:
    node: Node[None] = Node("c", 1, None, model=MLP((2,), 3, hidden=()), seed=3)
    terms = Terms(1.0, 1.0, 1, sigma=1.0, counts_sigma=20.0)
    row = Spending(1, "", "c", "class sums", 1.0, 1.0, 1)
    node.seal(terms, lambda *asked: row)
    means = seen_by_nobody(node)
    held = node.data.counts(3).nonzero().flatten()
    assert len(held) and means.classes.tolist() == held.tolist()
    assert means.rows.shape == (len(held), 2) and means.rows.abs().min() > 0


def test_a_table_takes_the_plain_mean_over_holders() -> None:
    table = ClassTable.empty(4, 1, "cpu")
    assert not table.known.any()
    rows = [torch.tensor([[2.0], [8.0]]), torch.tensor([[4.0]])]
    table = table.renewed(rows, [torch.tensor([0, 3]), torch.tensor([0])])
    assert table.rows.flatten().tolist() == [3, 0, 0, 8]
    assert table.known.tolist() == [True, False, False, True]


def test_a_table_takes_the_mean_by_counts() -> None:
    rows = [torch.tensor([[2.0], [8.0]]), torch.tensor([[4.0]])]
    counts = [torch.tensor([3, 7]), torch.tensor([1])]
    table = ClassTable.empty(4, 1, "cpu").renewed(
        rows, [torch.tensor([0, 3]), torch.tensor([0])], counts
    )
    assert table.rows.flatten().tolist() == [2.5, 0, 0, 8]  # (3 · 2 + 1 · 4) / 4


def test_a_class_that_was_not_sent_keeps_its_value() -> None:
    table = ClassTable.empty(3, 1, "cpu").renewed([torch.tensor([[5.0]])], [torch.tensor([2])])
    later = table.renewed([torch.tensor([[1.0]])], [torch.tensor([0])])
    assert later.rows.flatten().tolist() == [1, 0, 5]
    assert later.known.tolist() == [True, False, True]
    assert table.known.tolist() == [False, False, True]  # the old one is as it was


def test_a_table_counts_its_rows_alone() -> None:
    assert ClassTable.empty(10, 512, "cpu").floats() == {"rows": 5120, "known": 0}
