"""Robust rules: arithmetic by hand, and what each of them promises."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedstill.core import Batch, algebra, trees
from fedstill.core.seeds import generator
from fedstill.methods.feddm import Up
from fedstill.models import MLP
from fedstill.parts.class_tables import ClassTable
from fedstill.parts.opinions import mean_over_speakers
from fedstill.parts.outliers import believed
from fedstill.parts.robust import (
    Aggregation,
    Rule,
    geometric_shares,
    inner_products,
    krum,
    squared_distances,
    trimmed,
)
from fedstill.parts.sent_sets import believed_sets

RULES: tuple[Rule, ...] = get_args(Rule)
ROBUST = RULES[1:]


def rows(*values: Any) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(value, dtype=torch.float32)} for value in values]


def joined(rule: Rule, items: list[dict[str, Tensor]], **options: Any) -> list[float]:
    start = options.pop("start", None)
    made = Aggregation(rule, **options).joined(items, None, start)
    return made["w"].flatten().tolist()  # type: ignore[no-any-return]


def test_the_mean_is_that_of_before_bit_for_bit() -> None:
    rng = generator(1)
    items = [{"w": torch.randn(7, 5, generator=rng), "n": torch.tensor(3)} for _ in range(4)]
    shares = [1.0, 5.0, 2.0, 7.0]
    found, wanted = Aggregation().joined(items, shares), algebra.mean(items, shares)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_median_entry_by_entry() -> None:
    # First entries 1, 2, 9: 2. Second entries 5, 7, 6: 6.
    assert joined("median", rows([1, 5], [2, 7], [9, 6])) == [2, 6]
    assert joined("median", rows([1], [2], [4], [9])) == [3], "the mean of the two in the middle"
    assert joined("median", rows([1])) == [1] and joined("median", rows([1], [3])) == [2]


def test_the_trimmed_mean_cuts_both_ends_of_each_entry() -> None:
    # Of 1, 2, 3, 4, 100 one is cut at either end: (2 + 3 + 4) / 3.
    assert joined("trimmed_mean", rows([1], [2], [3], [4], [100]), byzantine=1) == [3]
    assert joined("trimmed_mean", rows([1], [2], [6], [4], [100]), byzantine=2) == [4]
    assert joined("trimmed_mean", rows([1], [2], [6]), byzantine=5) == [2], "one is always left"
    assert joined("trimmed_mean", rows([1], [2], [6]), byzantine=0) == [3], "the mean"


def test_krum_keeps_those_whose_neighbours_are_near() -> None:
    # Points 0, 1, 3, 4, 20 on a line, f = 1: each counts its two nearest. Squares: 0: 1 + 9;
    # 1: 1 + 4; 3: 1 + 4; 4: 1 + 9; 20: 256 + 289. All but the last are kept.
    items = rows([0], [1], [3], [4], [20])
    distances = squared_distances(inner_products(items))
    assert torch.allclose(distances[0], torch.tensor([0.0, 1, 9, 16, 400], dtype=torch.float64))
    assert krum(distances, 1) == [0, 1, 2, 3]
    assert joined("multi_krum", items, byzantine=1) == [2]
    # Five stand one liar at most; of three all are kept.
    assert krum(distances, 4) == [0, 1, 2, 3]
    assert krum(squared_distances(inner_products(rows([0], [1], [50]))), 1) == [0, 1, 2]


def test_krum_counts_neither_more_nor_fewer_neighbours_than_the_paper() -> None:
    # Points 0, 3, 5, 11, 12, f = 1: two nearest. Squares: 0: 9 + 25; 3: 4 + 9; 5: 4 + 25;
    # 11: 1 + 36; 12: 1 + 49, the largest. By one neighbour, by three or by all, 0 would go.
    items = rows([0], [3], [5], [11], [12])
    assert krum(squared_distances(inner_products(items)), 1) == [0, 1, 2, 3]


def test_the_geometric_median_is_that_of_steps_in_plain_coordinates() -> None:
    points = torch.randn(6, 3, generator=generator(3), dtype=torch.float64) + torch.tensor(
        [5, 0, -2]
    )
    middle = points.mean(0)
    for _ in range(2000):  # Weiszfeld: the mean by the inverse distances
        near = 1 / (points - middle).norm(dim=1)
        middle = (near.unsqueeze(1) * points).sum(0) / near.sum()
    found = joined("geometric_median", rows(*points.tolist()))
    assert found == pytest.approx(middle.tolist(), abs=1e-3)


def test_a_lie_whose_square_is_beyond_single_precision_is_left_out_too() -> None:
    items = rows([0], [3], [5], [7], [1e30])
    assert torch.isfinite(inner_products(items)).all()
    assert krum(squared_distances(inner_products(items)), 1) == [0, 1, 2, 3]
    assert joined("multi_krum", items, byzantine=1) == [3.75]
    assert joined("geometric_median", items) == pytest.approx([5.0], abs=0.1)


def test_the_geometric_median_on_a_line_is_the_median_and_in_a_plane_fermats_point() -> None:
    assert joined("geometric_median", rows([0], [1], [100])) == pytest.approx([1.0], abs=1e-3)
    # Four corners of a square and any point inside: the crossing of the diagonals.
    corners = rows([0, 0], [2, 0], [2, 2], [0, 2])
    assert joined("geometric_median", corners) == pytest.approx([1, 1], abs=1e-5)
    # An equilateral triangle: its centre, (1, 1 / sqrt(3)).
    triangle = rows([0, 0], [2, 0], [1, 3**0.5])
    assert joined("geometric_median", triangle) == pytest.approx([1, 3**-0.5], abs=1e-5)
    assert geometric_shares(inner_products(rows([5], [5]))) == [0.5, 0.5], "all alike"


def test_a_bound_cuts_changes_to_its_length() -> None:
    # From (1, 1): changes (3, 4) of length 5 and (0, 1); with bound 1 they are (0.6, 0.8), (0, 1).
    start = rows([1, 1])[0]
    items = rows([4, 5], [1, 2])
    assert joined("norm_bound", items, bound=1.0, start=start) == pytest.approx([1.3, 1.9])
    # Without a bound it is the median of the lengths 1, 2, 30: changes 1, 2, 2, mean 5/3.
    lengths = rows([2], [3], [31])
    assert joined("norm_bound", lengths, start=rows([1])[0]) == pytest.approx([1 + 5 / 3])


@pytest.mark.parametrize("rule", RULES)
def test_of_equal_items_every_rule_makes_the_item(rule: Rule) -> None:
    weights = {"w": torch.randn(3, 4, generator=generator(2)), "bn.running_var": torch.ones(3)}
    made = Aggregation(rule).joined([weights] * 5, None, algebra.zeros(weights))
    assert all(torch.allclose(made[name], weights[name], atol=1e-6) for name in weights)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("liars", [1, 2, 3])
def test_a_few_liars_move_a_robust_rule_little_and_the_mean_far(rule: Rule, liars: int) -> None:
    rng = generator(3)
    start = {"w": torch.zeros(50)}
    honest = [{"w": 1 + 0.1 * torch.randn(50, generator=rng)} for _ in range(10 - liars)]
    items = [*honest, *[{"w": torch.full((50,), -1e6)} for _ in range(liars)]]
    found = Aggregation(rule, byzantine=liars).joined(items, None, start)["w"]
    # A bound lets each liar pull by as much as an honest client pushes.
    reach = 2 * liars / 10 + 0.2 if rule == "norm_bound" else 0.2
    assert float((found - 1).abs().max()) < reach, rule
    assert float(algebra.mean(items)["w"].mean()) < -9e4


@pytest.mark.parametrize("rule", ROBUST)
def test_statistics_and_whole_numbers_are_medians_in_every_robust_rule(rule: Rule) -> None:
    def item(weight: float, mean: float, count: int) -> dict[str, Tensor]:
        return {
            "w": torch.tensor([weight]),
            "bn.running_var": torch.tensor([mean]),
            "bn.num_batches_tracked": torch.tensor(count),
            "seen": torch.tensor(count),
        }

    # Who sends common weights and wild statistics is not noticed by lengths or distances.
    items = [item(1.0, 1.0, 5), item(1.1, 2.0, 6), item(0.9, 3.0, 7), item(1.0, 1e9, 10**12),
             item(1.0, 2.5, 6)]  # fmt: skip
    made = Aggregation(rule, byzantine=1).joined(items, None, item(0.0, 1.0, 0))
    expected = (2.0 + 2.5 + 3.0) / 3 if rule == "trimmed_mean" else 2.5
    assert float(made["bn.running_var"]) == pytest.approx(expected)
    for name in ("bn.num_batches_tracked", "seen"):
        assert int(made[name]) == 6 and made[name].dtype == torch.int64
    weights = [{"w": one["w"]} for one in items]
    alone = Aggregation(rule, byzantine=1).joined(weights, None, {"w": torch.zeros(1)})
    assert torch.equal(made["w"], alone["w"])


@pytest.mark.parametrize("rule", ROBUST)
def test_robust_rules_count_everybody_alike_and_in_any_order(rule: Rule) -> None:
    rng = generator(4)
    items = [{"w": torch.randn(20, generator=rng)} for _ in range(6)]
    how, start = Aggregation(rule, byzantine=1), {"w": torch.zeros(20)}
    plain = how.joined(items, None, start)["w"]
    assert torch.equal(how.joined(items, [1e12, 1, 1, 1, 1, 1], start)["w"], plain)
    assert torch.allclose(how.joined(items[::-1], None, start)["w"], plain, atol=1e-6)


def test_whole_trees_are_trimmed() -> None:
    trees_of = [{"a": (torch.tensor([i]), torch.tensor(float(i)))} for i in (1, 2, 9)]
    made = trimmed(trees_of, 1)
    assert [tensor.tolist() for tensor in trees.tensors(made)] == [[2], 2.0]


def test_a_bound_without_its_rule_is_refused() -> None:
    (line,) = Aggregation("median", bound=1.0).faults()
    assert line == 'bound = 1.0: is of aggregation = "norm_bound"; leave it out'


def test_rows_of_a_class_are_joined_over_its_holders() -> None:
    empty = ClassTable.empty(3, 2, "cpu")
    sent = [torch.tensor([[1.0, 1.0], [5.0, 5.0]]), torch.tensor([[2.0, 2.0]]),
            torch.tensor([[90.0, -90.0]])]  # fmt: skip
    classes = [torch.tensor([0, 2]), torch.tensor([0]), torch.tensor([0])]
    table = empty.renewed(sent, classes, how=Aggregation("median"))
    assert table.rows.tolist() == [[2, 1], [0, 0], [5, 5]]
    assert table.known.tolist() == [True, False, True]


def test_opinions_are_joined_over_those_who_spoke() -> None:
    said = [{"set": torch.full((2, 3), value)} for value in (1.0, 2.0, 60.0)]
    found, heard = mean_over_speakers(said, {"set": 2}, 3, "cpu", Aggregation("median"))
    assert found.tolist() == [[2.0] * 3] * 2 and heard.tolist() == [1, 1]
    plain, _ = mean_over_speakers(said, {"set": 2}, 3, "cpu")
    assert plain.tolist() == [[21.0] * 3] * 2


def test_a_set_whose_labels_were_turned_is_left_out_class_by_class() -> None:
    model, rng = MLP((4,), 2, hidden=(8,)), generator(5)
    weights = model.init(0)
    centres = torch.tensor([[3.0, 0, 0, 0], [0, 3.0, 0, 0]])
    sets = {}
    for name in "abcde":
        y = torch.tensor([0, 0, 1, 1])
        sets[name] = Batch(centres[y] + 0.1 * torch.randn(4, 4, generator=rng), y)
    sets["e"] = Batch(sets["e"].x, 1 - sets["e"].y)
    kept = believed(sets, model, weights, Aggregation("multi_krum", byzantine=1))
    assert {name: mask.tolist() for name, mask in kept.items()} == {
        **dict.fromkeys("abcd", [True] * 4), "e": [False] * 4,
    }  # fmt: skip
    sets["e"] = Batch(sets["e"].x[:2], torch.tensor([0, 0]))  # images of 0 as 0: all is well
    kept = believed(sets, model, weights, Aggregation("multi_krum", byzantine=0))
    assert all(bool(mask.all()) for mask in kept.values())


def test_sets_are_all_taken_for_a_mean_and_only_those_believed_by_a_robust_rule() -> None:
    model, rng = MLP((4,), 2, hidden=(8,)), generator(5)
    centres, labels = 3 * torch.eye(4)[:2], torch.tensor([0, 0, 1, 1])
    counts = torch.tensor([5.0, 5.0, 7.0, 7.0])
    sent = {
        name: Up(centres[labels] + 0.1 * torch.randn(4, 4, generator=rng), labels, counts)
        for name in "abcde"
    }
    sent["d"] = sent["d"].replace(images=sent["d"].images * torch.tensor([1, 1, 1, 50]).view(4, 1))
    sent["e"] = sent["e"].replace(labels=1 - labels)
    weights = model.init(0)
    assert believed_sets(sent, model, weights, Aggregation("mean")) == sent
    found = believed_sets(sent, model, weights, Aggregation("multi_krum", byzantine=1))
    assert [*found] == ["a", "b", "c", "d", "e"]
    # Of class 1 d lies furthest, of class 0 e: each is left with its other class.
    assert found["a"].labels.tolist() == [0, 0, 1, 1]
    assert (found["d"].labels.tolist(), found["d"].counts.tolist()) == ([0, 0], [5.0, 5.0])
    assert torch.equal(found["d"].images, sent["d"].images[:2])
    assert found["e"].labels.tolist() == [1, 1]
    alone = {name: up for name, up in sent.items() if name != "d"}
    alone["f"] = sent["a"]
    assert [*believed_sets(alone, model, weights, Aggregation("multi_krum", byzantine=1))] == [
        "a", "b", "c", "f",
    ]  # fmt: skip
