"""Losses against closed forms and against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core.seeds import generator
from fedstill.parts.losses import (
    class_square_error,
    cross_correlation,
    divergence,
    diversity,
    hinton,
    mmd,
    model_contrast,
    row_divergences,
    selected,
    soft_cross_entropy,
    standardised,
    statistics_gap,
    supervised_contrastive,
    transferability,
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
    grad = torch.func.grad(lambda f: supervised_contrastive(f, torch.tensor(labels)))(features)
    assert torch.isfinite(grad).all()


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
    grad = torch.func.grad(lambda x: mmd(x, same))(same)
    assert torch.isfinite(grad).all() and float(mmd(same, same)) == 0


# Soft labels


def test_soft_cross_entropy_is_a_mean_over_rows_and_classes() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    targets = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    expected = (math.log(4) + 0.5 * math.log(2) + 0.5 * math.log(2)) / 4
    assert float(soft_cross_entropy(logits, targets)) == pytest.approx(expected)


# Diversity


def test_equal_outputs_have_no_diversity() -> None:
    noise = torch.rand(4, 3, generator=generator(0))
    assert float(diversity(noise, torch.ones(4, 5))) == 1


def test_two_outputs_have_a_closed_form() -> None:
    # d(noise) = (1 + 9) / 2, d(outputs) = (2 + 4 + 0) / 3, and half of the four pairs are a row
    # with itself.
    noise = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    outputs = torch.tensor([[0.0, 0.0, 1.0], [2.0, -4.0, 1.0]])
    assert float(diversity(noise, outputs)) == pytest.approx(math.exp(-5 * 2 / 2))


def test_diversity_equals_plain_loops_and_has_a_slope() -> None:
    noise, outputs = rows(6, "noise"), rows(6, "outputs", 7)
    total = 0.0
    for i in range(6):
        for j in range(6):
            far = float((noise[i] - noise[j]).square().mean())
            total += far * float((outputs[i] - outputs[j]).abs().mean())
    assert float(diversity(noise, outputs)) == pytest.approx(math.exp(-total / 36))
    grad = torch.func.grad(lambda x: diversity(noise, x))(outputs)
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0
    images = outputs.reshape(6, 7, 1)
    assert float(diversity(noise, images)) == pytest.approx(float(diversity(noise, outputs)))


def test_diversity_can_be_stacked() -> None:
    noise, outputs = rows(6, "noise"), torch.stack([rows(6, name, 7) for name in "ab"])
    together = torch.func.vmap(diversity, in_dims=(None, 0))(noise, outputs)
    for each, found in zip(outputs, together, strict=True):
        assert float(found) == pytest.approx(float(diversity(noise, each)))


# Towards a class's row


def test_the_distance_to_a_class_is_the_mean_over_rows_and_entries() -> None:
    outputs = torch.tensor([[1.0, 3.0], [0.0, 4.0]])
    targets = torch.tensor([[0.0, 0.0], [9.0, 9.0], [0.0, 2.0]])
    loss = class_square_error(outputs, torch.tensor([0, 2]), targets, torch.ones(3).bool())
    assert float(loss) == pytest.approx((1 + 9 + 0 + 4) / 4)


def test_a_class_without_a_row_adds_nothing_but_counts_in_the_mean() -> None:
    outputs = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    known = torch.tensor([True, False])
    loss = class_square_error(outputs, torch.tensor([0, 1]), torch.zeros(2, 2), known)
    assert float(loss) == pytest.approx((1 + 9) / 4)
    nobody = class_square_error(outputs, torch.tensor([0, 1]), torch.zeros(2, 2), known & ~known)
    assert float(nobody) == 0


# Model contrast


def test_the_contrast_is_the_log_share_of_the_near_one() -> None:
    own, near, far = rows(6, "own"), rows(6, "near"), rows(6, "far")
    loss = model_contrast(own, near, far, temperature=0.5)
    each = []
    for z, g, p in zip(own, near, far, strict=True):
        alike = [float(z @ other / z.norm() / other.norm()) / 0.5 for other in (g, p)]
        each.append(-math.log(math.exp(alike[0]) / (math.exp(alike[0]) + math.exp(alike[1]))))
    assert float(loss) == pytest.approx(sum(each) / 6)


def test_the_contrast_of_two_equal_models_is_log_two_without_a_slope() -> None:
    own, other = rows(4, "own"), rows(4, "other")
    loss = torch.func.grad(lambda z: model_contrast(z, other, other, temperature=0.5))
    assert float(model_contrast(own, other, other, temperature=0.5)) == pytest.approx(math.log(2))
    assert loss(own).abs().max() < 1e-12


def test_the_contrast_falls_from_far_to_near_whatever_the_lengths() -> None:
    near, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 7.0]])
    losses = [
        float(model_contrast(own, near, far, temperature=0.5))
        for own in (far, near + far / 7, 100 * near)
    ]
    assert losses == pytest.approx([math.log(1 + math.exp(2)), math.log(2),
                                    math.log(1 + math.exp(-2))])  # fmt: skip


# Distillation


def plain_hinton(
    student: Tensor, teacher: Tensor, labels: list[int], temperature: float, share: float
) -> list[float]:
    """Row by row and class by class, as the formula is read."""
    losses = []
    for s, t, y in zip(student.tolist(), teacher.tolist(), labels, strict=True):

        def chances(logits: list[float], heat: float) -> list[float]:
            grown = [math.exp(value / heat) for value in logits]
            return [value / sum(grown) for value in grown]

        hard = -math.log(chances(s, 1.0)[y])
        pairs = zip(chances(t, temperature), chances(s, temperature), strict=True)
        soft = sum(p * math.log(p / q) for p, q in pairs)
        losses.append((1 - share) * hard + share * temperature**2 * soft)
    return losses


@pytest.mark.parametrize(("temperature", "share"), [(20.0, 0.9), (1.0, 1.0), (3.0, 0.0)])
def test_distillation_is_the_formula_row_by_row(temperature: float, share: float) -> None:
    student, teacher, labels = rows(4, "student"), rows(4, "teacher"), [0, 4, 2, 2]
    expected = plain_hinton(student, teacher, labels, temperature, share)
    found = hinton(
        student, teacher, torch.tensor(labels), temperature=temperature, soft_share=share
    )
    assert float(found) == pytest.approx(sum(expected) / 4, rel=1e-9)


def test_the_mean_over_elements_divides_the_divergence_by_the_classes_and_nothing_else() -> None:
    student, teacher, labels = rows(4, "student"), rows(4, "teacher"), torch.tensor([0, 4, 2, 2])

    def loss(share: float, reduction: Any) -> float:
        return float(
            hinton(student, teacher, labels, temperature=2.0, soft_share=share, reduction=reduction)
        )

    assert loss(1.0, "elements") == pytest.approx(loss(1.0, "rows") / 5)
    assert loss(0.0, "elements") == loss(0.0, "rows")


def test_ten_classes_at_temperature_20_and_share_09_weigh_the_divergence_36_times() -> None:
    student, teacher = rows(3, "student", 10), rows(3, "teacher", 10)
    labels = torch.tensor([1, 2, 3])
    whole = hinton(student, teacher, labels, temperature=20.0, soft_share=0.9, reduction="elements")
    hard = torch.nn.functional.cross_entropy(student, labels)
    cool = hinton(student / 20, teacher / 20, labels, temperature=1.0, soft_share=1.0)
    assert float(whole) == pytest.approx(float(0.1 * hard + 36 * cool))


def test_a_row_of_weight_zero_contributes_nothing_but_counts_in_the_mean() -> None:
    student, teacher, labels = rows(4, "student"), rows(4, "teacher"), torch.tensor([0, 4, 2, 2])
    given = {"temperature": 2.0, "soft_share": 0.5}
    weighted = hinton(student, teacher, labels, weight=torch.tensor([1.0, 0, 0, 0]), **given)
    first = hinton(student[:1], teacher[:1], labels[:1], **given)
    assert float(weighted) == pytest.approx(float(first) / 4)
    assert float(hinton(student, teacher, labels, weight=torch.zeros(4), **given)) == 0


def test_the_teacher_is_not_taught() -> None:
    student, teacher = rows(3, "student").requires_grad_(), rows(3, "teacher").requires_grad_()
    hinton(student, teacher, torch.tensor([0, 1, 2]), temperature=2.0, soft_share=0.5).backward()
    assert student.grad is not None and teacher.grad is None


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
    (grad,) = torch.autograd.grad(loss, student)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()
    if count == 1:
        assert float(grad.abs().max()) == 0.0


# Distillation without data


@pytest.mark.parametrize("temperature", [1.0, 10.0])
def test_row_divergences_are_kl_at_a_temperature_without_its_square(temperature: float) -> None:
    teacher, student = rows(3, "teacher"), rows(3, "student")
    found = row_divergences(student, teacher, temperature=temperature)
    for row in range(3):
        p = [math.exp(v / temperature) for v in teacher[row].tolist()]
        q = [math.exp(v / temperature) for v in student[row].tolist()]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert float(found[row]) == pytest.approx(by_hand)
    assert float(found.mean()) == pytest.approx(
        float(divergence(student / temperature, teacher / temperature))
    )


STUDENT = torch.tensor([[2.0, 0, 0], [0, 2, 0], [2, 0, 0], [0, 0, 2]])
TEACHER = torch.tensor([[0, 2.0, 0], [0, 3, 0], [0, 2, 0], [0, 2, 0]])
LABELS = torch.tensor([1, 1, 0, 2])
# Row 0: the teacher is right, the student wrong. Row 1: both are right. Row 2: the student is
# right, the teacher wrong. Row 3: as row 2.


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        ("wrong_student", [1, 0, 0, 0]), ("disagreement", [1, 0, 1, 1]), ("all", [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_transferability_counts_the_selected_rows_over_all(selection: Any, kept: list[int]) -> None:
    assert selected(STUDENT, TEACHER, LABELS, selection).tolist() == kept
    found = transferability(STUDENT, TEACHER, LABELS, selection=selection, temperature=2.0)
    each = row_divergences(STUDENT, TEACHER, temperature=2.0)
    assert float(found) == pytest.approx(-float((each * torch.tensor(kept)).sum()) / 4)


def test_an_empty_selection_has_no_loss_and_no_slope() -> None:
    for detached in (False, True):

        def loss(student: Tensor, teacher: Tensor, detached: bool = detached) -> Tensor:
            labels = torch.tensor([0, 0, 0])
            return transferability(
                student, teacher, labels, selection="wrong_student", temperature=10.0,
                detached=detached,
            )  # fmt: skip

        right = torch.tensor([[3.0, 0, 0]] * 3)
        stacked = torch.stack([right, 2 * right])
        assert loss(right, right).item() == 0
        grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(stacked, stacked)
        for grad in grads:
            assert (grad == 0).all()


def test_transferability_passes_gradients_through_both_or_the_ensemble_alone() -> None:
    def grads(detached: bool) -> tuple[Tensor, Tensor]:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            return transferability(
                student, teacher, LABELS, selection="all", temperature=1.0, detached=detached
            )

        both: tuple[Tensor, Tensor] = torch.func.grad(loss, argnums=(0, 1))(STUDENT, TEACHER)
        return both

    assert all(grad.abs().sum() > 0 for grad in grads(False))
    student, teacher = grads(True)
    assert not student.any() and teacher.abs().sum() > 0


def test_the_detached_form_is_the_other_divergence_over_the_selected_rows() -> None:
    found = transferability(
        STUDENT, TEACHER, LABELS, selection="disagreement", temperature=2.0, detached=True
    )
    each = row_divergences(TEACHER, STUDENT, temperature=2.0)[[0, 2, 3]]
    assert float(found) == pytest.approx(-float(each.mean()))


def test_diversity_by_squares_is_the_mean_over_pairs() -> None:
    noise, outputs = rows(4, "noise", 2), rows(4, "outputs", 6)
    total = 0.0
    for j in range(4):
        for k in range(4):
            near = float((noise[j] - noise[k]).square().mean())
            total += near * float((outputs[j] - outputs[k]).square().mean())
    found = diversity(noise, outputs.reshape(4, 1, 2, 3), apart_by="square")
    assert float(found) == pytest.approx(math.exp(-total / 16))


def test_the_statistics_gap_sums_norms_over_layers() -> None:
    own = {"a.running_mean": torch.tensor([0.0, 0]), "a.running_var": torch.tensor([1.0, 1])}
    seen = {"a.running_mean": torch.tensor([3.0, 4]), "a.running_var": torch.tensor([1.0, 3])}
    assert float(statistics_gap(seen, own)) == 7
    grad = torch.func.grad(lambda mean: statistics_gap({"a.running_mean": mean}, own))
    assert grad(own["a.running_mean"]).tolist() == [0, 0]  # finite where nothing is apart
    assert float(statistics_gap({}, own)) == 0


def test_one_right_selects_where_exactly_one_says_the_label() -> None:
    says = torch.eye(3)
    labels = torch.tensor([0, 0, 0, 0])
    teacher, student = says[[0, 0, 1, 1]], says[[0, 1, 0, 2]]
    assert selected(student, teacher, labels, "one_right").tolist() == [0, 1, 1, 0]
    assert selected(student, teacher, labels, "disagreement").tolist() == [0, 1, 1, 1]
