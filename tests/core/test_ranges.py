"""Ranges: what each kind of number allows, and how a fault is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from fedstill.core import ranges
from fedstill.core.errors import unknown
from fedstill.core.ranges import Count, Fraction, NonNegative, Positive, Range, Share, Whole


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Positive, [1e-9, 3, 2.5], [0, -1]),
        (NonNegative, [0, 0.0, 7], [-1e-9]),
        (Share, [0, 0.5, 1], [-0.1, 1.1]),
        (Fraction, [0, 0.999], [1, -0.1]),
        (Count, [1, 10], [0, -1]),
        (Whole, [0, 10], [-1]),
    ],
    ids=["positive", "non-negative", "share", "fraction", "count", "whole"],
)
def test_ends_of_a_range_are_in_or_out_as_written(
    kind: Any, good: list[float], bad: list[float]
) -> None:
    assert [ranges.fault("n", value, kind) for value in good] == [None] * len(good)
    for value in bad:
        assert str(ranges.fault("n", value, kind)).startswith(f"n = {value!r}: must be ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_must_be_finite(value: float) -> None:
    assert ranges.fault("lr", value, Positive) == f"lr = {value!r}: must be a finite number"


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (Count, 2.0, "a whole number"),
        (Count, True, "a whole number"),
        (Positive, True, "a number"),
        (Positive, "0.1", "a number"),
        (Positive, None, "a number"),
        (str, 3, "text"),
        (bool, 1, "true or false"),
        (tuple[int, ...], [1, 2], "tuple"),
    ],
)
def test_a_value_of_another_kind_is_refused(hint: Any, value: Any, wanted: str) -> None:
    assert ranges.fault("field", value, hint) == f"field = {value!r}: must be {wanted}"


@pytest.mark.parametrize(
    ("hint", "value", "written"),
    [
        (Count, np.int64(2), "a whole number of Python; write int(…) around it"),
        (Positive, np.float32(0.5), "a number of Python; write float(…) around it"),
        (Positive, torch.tensor(0.5), "a number of Python; write float(…) around it"),
    ],
)
def test_a_number_of_another_library_is_refused_with_what_to_write(
    hint: Any, value: Any, written: str
) -> None:
    assert ranges.fault("field", value, hint) == f"field = {value!r}: must be {written}"


def test_a_range_reads_as_a_sentence() -> None:
    assert str(Range(0, open_low=True)) == "above 0"
    assert str(Range(1)) == "at least 1"
    assert str(Range(0, 1, open_high=True)) == "in [0, 1)"
    assert str(Range(0, 1, open_low=True)) == "in (0, 1]"


def test_a_choice_that_does_not_exist_is_answered_with_the_nearest() -> None:
    line = ranges.fault("start", "noize", Literal["real", "noise"])
    assert line == (
        "start = 'noize': unknown choice 'noize'; did you mean 'noise'? known: noise, real"
    )
    assert ranges.fault("start", "noise", Literal["real", "noise"]) is None


def test_a_name_in_capitals_is_near_the_same_name_without() -> None:
    assert "did you mean 'scaffold'?" in unknown("method", "SCAFFOLD", ("fedavg", "scaffold"))
    assert "did you mean 'server_lr'?" in unknown("key", "server_learning_rate", ("server_lr", "a"))
    assert "did you mean 'DIGITS'?" in unknown("data set", "digits", ("DIGITS", "svhn"))


def test_a_choice_is_not_mistaken_for_an_equal_value_of_another_kind() -> None:
    assert ranges.fault("level", True, Literal[1, 2]) is not None


def test_an_option_may_be_absent_and_is_checked_when_it_is_there() -> None:
    option = Annotated[int, Range(1)] | None
    assert ranges.fault("count", None, option) is None
    assert ranges.fault("count", 2, option) is None
    assert ranges.fault("count", 0, option) == "count = 0: must be at least 1"


@dataclass(frozen=True)
class Options:
    lr: Positive = 0.1
    count: Count = 1
    kind: Literal["a", "b"] = "a"


def test_all_faults_of_an_object_are_found_at_once() -> None:
    assert ranges.faults(Options()) == []
    found = ranges.faults(Options(lr=0, count=0, kind="c"))  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in found] == ["lr = 0", "count = 0", "kind = 'c'"]
