"""Losses against closed forms and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core.seeds import generator
from fedstill.parts.losses import (
    class_mmd,
    cross_correlation,
    divergence,
    mmd,
    soft_cross_entropy,
    standardised,
    supervised_contrastive,
)


def rows(count: int, name: str = "rows", width: int = 5) -> Tensor:
    return torch.randn(count, width, generator=generator(0, name, count), dtype=torch.float64)


# Supervised contrastive


def plain_contrastive(features: Tensor, labels: list[int], temperature: float) -> float:
    """Row by row and pair by pair, as the formula is read."""
    unit = [row / row.norm() for row in features]
    total = 0.0
    for i, anchor in enumerate(unit):
        others = [j for j in range(len(unit)) if j != i]
        partners = [j for j in others if labels[j] == labels[i]]
        if not partners:
            continue
        below = sum(math.exp(float(anchor @ unit[a]) / temperature) for a in others)
        for p in partners:
            share = math.exp(float(anchor @ unit[p]) / temperature) / below
            total -= math.log(share) / len(partners)
    return total / len(unit)


def test_two_points_of_a_class_have_nobody_to_be_told_from() -> None:
    loss = supervised_contrastive(rows(2), torch.tensor([1, 1]))
    assert float(loss) == pytest.approx(0, abs=1e-12)


def test_two_points_and_a_stranger_at_a_right_angle_have_a_closed_form() -> None:
    # The pair is one direction, the stranger orthogonal: each of the pair loses
    # -log(e^(1/t) / (e^(1/t) + 1)), the stranger nothing; the mean is over three rows.
    features = torch.tensor([[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]])
    loss = supervised_contrastive(features, torch.tensor([0, 0, 1]), temperature=0.5)
    each = math.log(1 + math.exp(-2))
    assert float(loss) == pytest.approx(2 * each / 3, rel=1e-5)


def test_a_row_without_a_partner_contributes_nothing_but_counts_in_the_mean() -> None:
    features = torch.eye(3, dtype=torch.float64)
    assert float(supervised_contrastive(features, torch.tensor([0, 1, 2]))) == 0
    pair = supervised_contrastive(features, torch.tensor([0, 0, 2]))
    # All at right angles: each of the pair loses log 2, over three rows.
    assert float(pair) == pytest.approx(2 * math.log(2) / 3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 2), min_size=2, max_size=9),
    temperature=st.sampled_from([0.07, 0.5, 2.0]),
)
def test_the_contrastive_loss_equals_plain_loops(labels: list[int], temperature: float) -> None:
    features = rows(len(labels))
    found = supervised_contrastive(features, torch.tensor(labels), temperature=temperature)
    assert float(found) == pytest.approx(plain_contrastive(features, labels, temperature))


def test_lengths_of_features_do_not_matter() -> None:
    features, labels = rows(6), torch.tensor([0, 1, 0, 1, 2, 0])
    lengths = torch.tensor([0.1, 3.0, 7.0, 1.0, 20.0, 0.5], dtype=torch.float64).unsqueeze(1)
    one = supervised_contrastive(features, labels)
    other = supervised_contrastive(features * lengths, labels)
    assert float(one) == pytest.approx(float(other))


@pytest.mark.parametrize("labels", [[0], [0, 1], [0, 0, 1, 1, 1]])
def test_the_slope_of_the_contrastive_loss_is_finite(labels: list[int]) -> None:
    features = rows(len(labels)).float()
    features[0] = 0  # a dead feature vector
    slope = torch.func.grad(lambda f: supervised_contrastive(f, torch.tensor(labels)))(features)
    assert torch.isfinite(slope).all()


def test_a_single_row_loses_nothing() -> None:
    assert float(supervised_contrastive(rows(1), torch.tensor([4]))) == 0


# Discrepancies


def plain_mmd(left: Tensor, right: Tensor, kernels: int = 5) -> float:
    """Kernel by kernel and pair by pair."""
    joined = torch.cat([left, right])
    every = [float((a - b).square().sum()) for a in joined for b in joined]
    middle = sum(every) / (len(joined) * (len(joined) - 1))

    def mean(one: Tensor, other: Tensor) -> float:
        total = 0.0
        for a in one:
            for b in other:
                for k in range(kernels):
                    width = middle / 2 ** (kernels // 2) * 2**k
                    total += math.exp(-float((a - b).square().sum()) / width)
        return total / (len(one) * len(other))

    return mean(left, left) + mean(right, right) - 2 * mean(left, right)


def test_equal_sets_have_no_discrepancy() -> None:
    left = rows(7)
    assert float(mmd(left, left.flip(0))) == pytest.approx(0, abs=1e-12)


def test_other_sets_have_a_positive_discrepancy() -> None:
    assert float(mmd(rows(7), rows(7) + 1)) > 0.1
    assert float(mmd(rows(7), rows(4, "others"))) > 0


@pytest.mark.parametrize("sizes", [(3, 3), (5, 2), (1, 4)])
def test_the_discrepancy_equals_plain_loops_and_is_symmetric(sizes: tuple[int, int]) -> None:
    left, right = rows(sizes[0]), rows(sizes[1], "others") + 0.3
    assert float(mmd(left, right)) == pytest.approx(plain_mmd(left, right))
    assert float(mmd(left, right)) == pytest.approx(float(mmd(right, left)))


def test_a_set_of_equal_points_has_a_finite_discrepancy() -> None:
    same = torch.ones(3, 2)
    slope = torch.func.grad(lambda x: mmd(x, same))(same)
    assert torch.isfinite(slope).all() and float(mmd(same, same)) == 0


def test_class_discrepancy_is_summed_over_classes_that_both_have() -> None:
    left, right = torch.tensor([[1.0], [3.0], [5.0], [9.0]]), torch.tensor([[1.0], [7.0], [100.0]])
    found = class_mmd(left, torch.tensor([0, 0, 1, 2]), right, torch.tensor([0, 1, 3]), classes=4)
    assert float(found) == (2 - 1) ** 2 + (5 - 7) ** 2


# Soft labels


def test_soft_cross_entropy_is_a_mean_over_rows_and_classes() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    targets = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    expected = (math.log(4) + 0.5 * math.log(2) + 0.5 * math.log(2)) / 4
    assert float(soft_cross_entropy(logits, targets)) == pytest.approx(expected)


# Divergence and cross-correlation


def test_the_divergence_by_hand_is_summed_over_classes_and_averaged_over_rows() -> None:
    teacher = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log() + 3.0  # a common shift says nothing
    student = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    by_hand = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    assert float(divergence(student, teacher)) == pytest.approx(by_hand / 2, abs=1e-6)
    assert float(divergence(teacher, teacher)) == 0.0


def test_the_divergence_is_from_the_teacher_to_the_student() -> None:
    student, teacher = rows(4, "student"), rows(4, "teacher")
    theirs = torch.nn.functional.kl_div(
        student.log_softmax(1), teacher.softmax(1), reduction="batchmean"
    )
    assert float(divergence(student, teacher)) == pytest.approx(float(theirs))


def test_a_standardised_column_by_hand() -> None:
    column = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)  # mean 3, variance 14/3
    made = standardised(column, eps=0.0).flatten().tolist()
    assert made == pytest.approx([x / math.sqrt(14 / 3) for x in (-2.0, -1.0, 3.0)])


def test_opposed_classes_are_what_the_cross_correlation_asks_for() -> None:
    # The trap: Barlow Twins' target off the diagonal is 0, this one's is -1.
    one = torch.tensor([1.0, -1.0, 1.0, -1.0])
    opposed = torch.stack([one, -one], 1)
    independent = torch.stack([one, torch.tensor([1.0, 1.0, -1.0, -1.0])], 1)
    assert float(cross_correlation(opposed, opposed, off_diagonal=0.5)) == pytest.approx(
        0.0, abs=1e-4
    )
    assert float(cross_correlation(independent, independent, off_diagonal=0.5)) == pytest.approx(
        0.5 * 2, abs=1e-4
    )


def test_the_cross_correlation_pair_by_pair() -> None:
    student, teacher = rows(7, "student", 3), rows(7, "teacher", 3)
    total = 0.0
    for u in range(3):
        for v in range(3):
            pair = torch.stack([student[:, u], teacher[:, v]])
            m = float(torch.corrcoef(pair)[0, 1])
            total += (1 - m) ** 2 if u == v else 0.0051 * (1 + m) ** 2
    found = float(cross_correlation(student, teacher, off_diagonal=0.0051))
    assert found == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("count", [1, 6])
def test_a_dead_logit_or_a_single_row_gives_neither_nan_nor_a_slope(count: int) -> None:
    student = rows(count, "student", 3).clone()
    student[:, 1] = 2.5
    student.requires_grad_()
    loss = cross_correlation(student, rows(count, "teacher", 3), off_diagonal=0.0051)
    (slope,) = torch.autograd.grad(loss, student)
    assert torch.isfinite(loss) and torch.isfinite(slope).all()
    if count == 1:
        assert float(slope.abs().max()) == 0.0
