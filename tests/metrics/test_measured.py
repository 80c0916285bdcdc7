"""Chosen metrics, measured on several test sets at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import Data
from fedstill.core.errors import BadValue, FedstillError
from fedstill.metrics import METRICS, chosen, counting, lowest, measured
from fedstill.metrics.measured import CHUNK


def errors(labels: Tensor, logits: Tensor) -> int:
    """How many answers are wrong."""
    return int((logits.argmax(1) != labels).sum())


def sides(labels: Tensor, logits: Tensor) -> dict[str, float]:
    """Two numbers at once."""
    return {"left": float(logits[:, 0].sum()), "right": float(logits[:, 1].sum())}


def always_zero(x: Tensor) -> Tensor:
    """Logits of two classes that say 0."""
    return torch.tensor([1.0, 0.0]).expand(len(x), 2)


def labelled(*labels: int) -> Data:
    return Data.of(torch.zeros(len(labels), 1), torch.tensor(labels))


def test_accuracy_and_loss_come_first_whatever_is_named() -> None:
    assert list(chosen(["auroc"])) == ["accuracy", "loss", "auroc"]
    assert list(chosen(["macro_f1", "accuracy", errors])) == [
        *("accuracy", "loss", "macro_f1", "errors")
    ]
    assert chosen(["auroc"])["auroc"] is METRICS["auroc"]


def test_a_name_that_is_unknown_gets_the_nearest_one() -> None:
    with pytest.raises(BadValue, match="metrics: unknown metric 'aucroc'; did you mean 'auroc'"):
        chosen(["aucroc"])


def test_a_function_needs_a_name_that_no_other_has() -> None:
    with pytest.raises(BadValue, match="has no name to stand in tables"):
        chosen([lambda labels, logits: 0.0])

    def accuracy(labels: Tensor, logits: Tensor) -> float:
        return 0.0

    with pytest.raises(BadValue, match="two functions are named 'accuracy'"):
        chosen([accuracy])
    assert list(chosen([errors, errors])) == ["accuracy", "loss", "errors"]


def test_a_metric_says_itself_whether_lower_is_better() -> None:
    def cost(labels: Tensor, logits: Tensor) -> float:
        return 0.0

    cost.lower_is_better = True  # type: ignore[attr-defined]
    assert lowest(["auroc", "calibration_error", cost, errors]) == [
        *("loss", "calibration_error", "cost")
    ]


def test_of_the_metrics_that_are_ready_three_are_best_where_they_are_lowest_and_one_counts() -> (
    None
):
    assert lowest(list(METRICS)) == ["loss", "calibration_error", "brier"]
    assert counting(list(METRICS)) == ["confusion"]


@pytest.mark.parametrize("metrics", ["accuracy", errors])
def test_one_metric_outside_of_a_list_is_refused(metrics: Any) -> None:
    with pytest.raises(BadValue, match=r"metrics must be a list, such as \['accuracy'\]"):
        chosen(metrics)


def test_each_set_has_its_own_numbers_though_they_pass_together() -> None:
    passes: list[int] = []

    def predict(x: Tensor) -> Tensor:
        passes.append(len(x))
        return always_zero(x)

    tests = [labelled(0, 0, 1), labelled(1, 1)]
    found = measured(predict, tests, chosen([errors, sides]))
    assert passes == [5]
    assert [each["accuracy"] for each in found] == [2 / 3, 0]
    assert [each["errors"] for each in found] == [1, 2]
    assert [each["sides.left"] for each in found] == [3, 2]
    assert list(found[0]) == ["accuracy", "loss", "errors", "sides.left", "sides.right"]


def test_other_metrics_see_a_large_set_whole_and_change_nothing_of_the_two() -> None:
    tests = [labelled(*[0] * CHUNK, *[1] * 10)]
    (plain,) = measured(always_zero, tests, chosen([]))
    (more,) = measured(always_zero, tests, chosen([errors]))
    assert more == {**plain, "errors": 10}


def test_logits_are_gathered_only_where_they_are_asked_for(monkeypatch: Any) -> None:
    moved: list[int] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: moved.append(t.numel()) or plain(t))
    measured(always_zero, [labelled(0, 1)], chosen([]))
    assert moved == []
    measured(always_zero, [labelled(0, 1)], chosen([errors]))
    assert moved == [2, 4]


def test_what_is_undefined_is_nan_and_what_is_no_number_is_refused() -> None:
    (found,) = measured(always_zero, [labelled(0, 0)], chosen(["auroc"]))
    assert math.isnan(found["auroc"])

    def broken(labels: Tensor, logits: Tensor) -> float:
        raise ZeroDivisionError("none")

    def talkative(labels: Tensor, logits: Tensor) -> Any:
        return "much"

    with pytest.raises(FedstillError, match=r"metric 'broken' failed on labels of shape \[2\] and"):
        measured(always_zero, [labelled(0, 0)], chosen([broken]))
    with pytest.raises(FedstillError, match="metric 'talkative' returned 'much'; expected a numb"):
        measured(always_zero, [labelled(0, 0)], chosen([talkative]))

    def by_example(labels: Tensor, logits: Tensor) -> Any:
        return logits

    with pytest.raises(FedstillError, match=r"returned a Tensor of shape \[2, \d\]; expected a n"):
        measured(always_zero, [labelled(0, 0)], chosen([by_example]))


def test_no_test_set_has_no_scores() -> None:
    assert measured(always_zero, [], chosen(["auroc"])) == []
