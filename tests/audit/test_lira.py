"""The likelihood-ratio attack against laws that one knows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedstill.audit import lira
from fedstill.audit.statistics import curve
from fedstill.core.errors import BadValue


def runs(number: int, records: int = 400, *, shift: float = 1.0, seed: int = 0):
    """Each record has a level of its own, far apart from others'; inside it is `shift` higher."""
    rng = np.random.default_rng(seed)
    inside = rng.random((number, records)) < 0.5
    level = 10 * rng.normal(size=records)
    return level + shift * inside + rng.normal(size=inside.shape), inside


def test_with_many_shadows_the_attack_is_the_best_test_of_two_normal_laws() -> None:
    statistic, inside = runs(128)
    best = stats.norm.cdf(1 / math.sqrt(2))  # 0.760
    assert curve(lira.online(statistic, inside), inside).auc == pytest.approx(best, abs=0.015)
    assert curve(lira.offline(statistic, inside), inside).auc == pytest.approx(best, abs=0.015)
    assert curve(statistic, inside).auc < 0.55  # a common threshold drowns in the levels


def test_with_few_shadows_one_variance_for_all_records_is_the_better_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistic, inside = runs(10)
    pooled = curve(lira.online(statistic, inside), inside).auc
    monkeypatch.setattr(lira, "ENOUGH", 2)
    alone = curve(lira.online(statistic, inside), inside).auc
    assert pooled > alone + 0.01


@pytest.mark.parametrize("attack", [lira.online, lira.offline])
@pytest.mark.parametrize("number", [8, 40])
def test_a_score_does_not_know_whether_its_own_record_was_inside(attack, number: int) -> None:
    statistic, inside = runs(number, 30)
    turned = inside.copy()
    turned[3] = ~inside[3]
    before, after = attack(statistic, inside)[3], attack(statistic, turned)[3]
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)


def test_offline_shadows_never_held_the_record() -> None:
    statistic, inside = runs(40, 30)
    changed = statistic + np.where(inside, 5.0, 0.0)
    changed[7] = statistic[7]
    before, after = lira.offline(statistic, inside)[7], lira.offline(changed, inside)[7]
    assert after == pytest.approx(before)


def test_three_runs_are_counted_by_hand() -> None:
    """The second run is the target; of the others one held the record and one did not."""
    statistic = np.array([[4.0, 0.0], [3.0, 0.0], [1.0, 2.0]])
    inside = np.array([[True, True], [True, False], [False, False]])
    law = lira.law(statistic, inside)
    assert law.mean[1].tolist() == [4.0, 0.0]
    assert law.known[1].tolist() == [True, True]
    assert lira.law(statistic, ~inside).mean[1].tolist() == [1.0, 2.0]


def test_where_no_other_run_tells_of_a_record_the_score_is_nothing() -> None:
    statistic, inside = runs(6, 4)
    inside[:, 0] = [True, False, False, False, False, False]
    assert lira.online(statistic, inside)[0, 0] == 0.0  # nobody else held it


def test_a_statistic_that_is_always_the_same_tells_nothing() -> None:
    _, inside = runs(8)
    assert curve(lira.online(np.ones(inside.shape), inside), inside).auc == 0.5


def test_what_is_no_table_of_runs_is_refused() -> None:
    with pytest.raises(BadValue, match=r"\[run, record\]"):
        lira.online(np.zeros(3), np.zeros(3, dtype=bool))
    with pytest.raises(BadValue, match="at least 3"):
        lira.online(np.zeros((2, 5)), np.zeros((2, 5), dtype=bool))
