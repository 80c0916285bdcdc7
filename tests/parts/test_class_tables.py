"""Means by class: over examples, over holders, and over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Data, Model, Node, Weights
from fedstill.core.errors import BadValue
from fedstill.core.release import Spending, Terms
from fedstill.core.seeds import generator
from fedstill.models import MLP, ConvNet
from fedstill.parts import class_tables
from fedstill.parts.class_tables import (
    ClassMeans,
    ClassTable,
    Features,
    class_averages,
    exact_averages,
)
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


def private(model: Model, data: Data, clip: float) -> Node[None]:
    """A node with private records and no noise."""
    node: Node[None] = Node("c", 1, None, model=model, data=data)
    row = Spending(1, "tell", "c", "class sums", 0.0, 1.0, 1)
    node.seal(Terms(clip, 1.0, 1, 0.0, None), lambda round, step, use, earlier: row)
    return node


def test_private_averages_without_noise_are_clipped_differences_from_what_is_known() -> None:
    model, x = MLP((2,), 3, hidden=()), torch.tensor([[1.0, 0.0], [3.0, 2.0], [4.0, 5.0]])
    data = Data.of(x, torch.tensor([2, 2, 0]))
    known = ClassTable(torch.tensor([[16.0, 22.0], [7.0, 7.0], [1.0, 0.0]]), torch.ones(3).bool())
    wide = finished(class_averages(private(model, data, 1e3), Squares(model), model.init(0), known))
    assert torch.allclose(wide.rows, torch.tensor([[16.0, 25.0], [5.0, 2.0]]), atol=1e-4)
    assert wide.classes.tolist() == [0, 2] and wide.counts.tolist() == [1, 2]
    # Differences are (0, 3) of class 0, (0, 0) and (8, 4) of class 2; at most 2 of each is left.
    close = finished(
        class_averages(private(model, data, 2.0), Squares(model), model.init(0), known)
    )
    long = torch.tensor([8.0, 4.0]) * 2 / 80**0.5
    want = torch.stack([torch.tensor([16.0, 24.0]), torch.tensor([1.0, 0.0]) + long / 2])
    assert torch.allclose(close.rows, want, atol=1e-4)


@pytest.mark.parametrize(("norm", "training"), [("static", False), ("batch", True)])
def test_private_averages_of_a_network_that_mixes_examples_are_refused(
    norm: Any, training: bool
) -> None:
    model = ConvNet((1, 4, 4), 3, depth=1, width=2, norm=norm, training=training)
    data = Data.of(torch.zeros(3, 1, 4, 4), torch.arange(3))
    known = ClassTable.empty(3, 8, "cpu")
    with pytest.raises(BadValue, match="answers by the whole batch; use another norm"):
        finished(class_averages(private(model, data, 1.0), Features(model), model.init(0), known))


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
