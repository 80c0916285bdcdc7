"""Metrics by hand, and beside those of scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.metrics import METRICS
from fedstill.metrics.classification import (
    accuracy,
    auroc,
    balanced_accuracy,
    brier,
    calibration_error,
    loss,
    macro_f1,
    recall,
)


def drawn(examples: int, classes: int, held: int | None = None) -> tuple[Tensor, Tensor]:
    """Labels of the first `held` classes and logits that know something of them."""
    rng = torch.Generator().manual_seed(examples * 100 + classes)
    labels = torch.randint(held or classes, (examples,), generator=rng)
    logits = torch.randn(examples, classes, generator=rng)
    logits[torch.arange(examples), labels] += 1
    return labels, logits


def logits_of(*answers: int, classes: int = 3, sure: float = 2.0) -> Tensor:
    """An example for each answer, which gets a larger logit than the rest."""
    logits = torch.zeros(len(answers), classes)
    logits[torch.arange(len(answers)), torch.tensor(answers)] = sure
    return logits


def test_accuracy_and_loss_are_means_over_examples() -> None:
    labels, logits = torch.tensor([0, 1, 1, 0]), logits_of(0, 1, 0, 0, classes=2, sure=math.log(3))
    assert accuracy(labels, logits) == 3 / 4  # chances 3/4 and 1/4
    assert loss(labels, logits) == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4)


def test_macro_f1_leaves_out_classes_that_nobody_has_or_says() -> None:
    labels, logits = torch.tensor([0, 0, 1, 1]), logits_of(0, 1, 1, 1, classes=5)
    # Class 0: one of two found, one answer: 2 / 3. Class 1: both found, three answers: 4 / 5.
    assert macro_f1(labels, logits) == pytest.approx((2 / 3 + 4 / 5) / 2)
    said = logits_of(0, 2, 1, 1, classes=5)  # class 2 is said, but nobody's: 0
    assert macro_f1(labels, said) == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_recall_is_by_class_and_its_mean_is_the_balanced_accuracy() -> None:
    labels, logits = torch.tensor([0, 0, 0, 2]), logits_of(0, 1, 1, 2, classes=4)
    assert recall(labels, logits) == {"0": pytest.approx(1 / 3), "2": 1.0}
    assert balanced_accuracy(labels, logits) == pytest.approx((1 / 3 + 1) / 2)


def test_confusions_are_counted_by_class_and_answer_and_only_where_any_are() -> None:
    labels = torch.tensor([0, 0, 0, 2])
    logits = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0]])
    found = METRICS["confusion"](labels, logits)
    assert found == {"0.0": 2, "0.1": 1, "2.2": 1}


def test_area_counts_pairs_in_the_right_order_and_ties_half() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    values = torch.tensor([1.0, 2.0, 2.0, 3.0])
    logits = torch.stack([torch.zeros(4), values], 1)
    # Pairs of a second-class and a first-class example: 2 > 1, 2 = 2, 3 > 1, 3 > 2.
    assert auroc(labels, logits) == (1 + 0.5 + 1 + 1) / 4


def test_area_is_undefined_where_all_examples_are_of_one_class() -> None:
    for classes in (2, 3):
        assert math.isnan(auroc(torch.ones(4, dtype=torch.int64), torch.randn(4, classes)))


def test_area_does_not_tie_what_single_precision_would_round_to_one() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2])
    logits = torch.zeros(5, 3)
    logits[:, 0] = torch.tensor([40.0, 41.0, 42.0, 39.0, 38.0])
    # Class 0 is in perfect order; of the others, each has one example below the rest.
    first = auroc(labels, logits)
    assert first == pytest.approx((1 + 3 / 4 + 1) / 3)


def test_models_that_fell_apart_have_no_area() -> None:
    labels, logits = torch.tensor([0, 1]), torch.full((2, 2), math.nan)
    assert math.isnan(auroc(labels, logits))


def test_calibration_error_is_the_gap_of_each_bin_weighted_by_its_examples() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    sure, unsure = math.log(9), math.log(1.5)  # chances 0.9 and 0.6
    logits = torch.tensor([[sure, 0.0], [sure, 0.0], [sure, 0.0], [0.0, unsure]])
    # The bin of 0.9 has two right of three, that of 0.6 one right of one.
    assert calibration_error(labels, logits) == pytest.approx(
        3 / 4 * abs(2 / 3 - 0.9) + 1 / 4 * (1 - 0.6)
    )


def test_a_bin_holds_its_upper_end() -> None:
    labels = torch.tensor([0, 1])
    chances = torch.tensor([[10 / 15, 5 / 15], [0.66, 0.34]], dtype=torch.float64)
    # Confidences 10/15 and 0.66 share the bin (9/15, 10/15]: one of two is right.
    assert calibration_error(labels, chances.log()) == pytest.approx(abs(1 - 10 / 15 - 0.66) / 2)


def test_brier_is_the_squared_distance_to_the_class() -> None:
    labels, logits = torch.tensor([0, 1]), logits_of(0, 0, classes=2, sure=math.log(3))
    assert brier(labels, logits) == pytest.approx((2 * 0.25**2 + 2 * 0.75**2) / 2)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_they_are_those_of_scikit_learn(classes: int) -> None:
    known: Any = pytest.importorskip("sklearn.metrics")
    labels, logits = drawn(200, classes)
    chances = logits.double().softmax(1).numpy()
    truth, said = labels.numpy(), logits.argmax(1).numpy()
    assert accuracy(labels, logits) == pytest.approx(known.accuracy_score(truth, said))
    assert loss(labels, logits) == pytest.approx(known.log_loss(truth, chances), rel=1e-6)
    assert macro_f1(labels, logits) == pytest.approx(known.f1_score(truth, said, average="macro"))
    balanced = known.balanced_accuracy_score(truth, said)
    assert balanced_accuracy(labels, logits) == pytest.approx(balanced)
    each = known.recall_score(truth, said, average=None)
    assert list(recall(labels, logits).values()) == pytest.approx(list(each))
    scores, how = (chances[:, 1], {}) if classes == 2 else (chances, {"multi_class": "ovr"})
    area = known.roc_auc_score(truth, scores, average="macro", **how)
    assert auroc(labels, logits) == pytest.approx(area)


def test_area_with_many_ties_is_that_of_scikit_learn() -> None:
    known: Any = pytest.importorskip("sklearn.metrics")
    labels, logits = drawn(300, 2)
    logits = logits.round()
    area = known.roc_auc_score(labels.numpy(), (logits[:, 1] - logits[:, 0]).numpy())
    assert auroc(labels, logits) == pytest.approx(area)


def test_area_without_examples_of_some_classes_is_the_mean_over_the_others() -> None:
    known: Any = pytest.importorskip("sklearn.metrics")
    labels, logits = drawn(200, 5, held=3)
    chances = logits.double().softmax(1).numpy()
    areas = [known.roc_auc_score((labels == c).numpy(), chances[:, c]) for c in range(3)]
    assert auroc(labels, logits) == pytest.approx(sum(areas) / 3)


def test_all_are_functions_of_labels_and_logits_that_give_numbers() -> None:
    labels, logits = drawn(30, 4)
    for name, metric in METRICS.items():
        value = metric(labels, logits)
        numbers = value.values() if isinstance(value, dict) else [value]
        assert all(isinstance(number, float) for number in numbers), name
        assert (metric.__doc__ or "").strip(), name
