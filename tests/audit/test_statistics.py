"""Curves, exact intervals and lower bounds against closed forms and other libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fedstill.audit import statistics
from fedstill.audit.statistics import Told, clopper_pearson, curve, one_run, one_run_epsilon
from fedstill.core.errors import BadValue

INSIDE = np.array([True, True, False, True, False, False])


def test_a_curve_of_six_records_is_what_one_counts_by_hand() -> None:
    found = curve([6, 5, 4, 3, 2, 1], INSIDE)
    assert found.true.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 1, 1, 1])
    assert found.false.tolist() == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 2 / 3, 1])
    assert found.auc == pytest.approx(8 / 9)  # of nine pairs one is in the wrong order
    assert found.true_at(0.001) == pytest.approx(2 / 3)
    assert found.true_at(0.34) == 1.0
    assert found.balanced == pytest.approx((1 + 2 / 3) / 2)


def test_equal_scores_are_accepted_together() -> None:
    found = curve([1.0] * 6, INSIDE)
    assert found.auc == 0.5
    assert found.true_at(0.01) == 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.booleans())
def test_curves_and_areas_are_those_of_scikit_learn(seed: int, records: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    inside = rng.random(records) < 0.5
    inside[:2] = [True, False]
    scores = rng.integers(0, 5, records) if ties else rng.normal(size=records)
    found = curve(scores, inside)
    false, true, _ = roc_curve(inside, scores, drop_intermediate=False)
    assert found.false == pytest.approx(false)
    assert found.true == pytest.approx(true)
    assert found.auc == pytest.approx(roc_auc_score(inside, scores))


def test_two_normal_laws_have_the_area_of_their_distance() -> None:
    rng = np.random.default_rng(0)
    inside = np.arange(200_000) % 2 == 0
    found = curve(rng.normal(size=inside.size) + 1.0 * inside, inside)
    assert found.auc == pytest.approx(stats.norm.cdf(1 / math.sqrt(2)), abs=0.003)
    at_one_percent = stats.norm.cdf(1.0 + stats.norm.ppf(0.01))
    assert found.true_at(0.01) == pytest.approx(at_one_percent, abs=0.004)


def test_a_thinned_curve_keeps_its_ends_and_few_points() -> None:
    rng = np.random.default_rng(1)
    points = curve(rng.normal(size=5000), rng.random(5000) < 0.5).thinned(100)
    assert len(points) <= 100
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("scores", "inside", "words"),
    [
        ([1.0, 2.0], [True], "2 scores for 1 records"),
        ([1.0, math.nan], [True, False], "1 scores of an attack are not finite"),
        ([1.0, 2.0], [True, True], "on the same side"),
    ],
)
def test_scores_that_say_nothing_are_refused(scores: list, inside: list, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        curve(scores, inside)


def test_exact_intervals_have_their_closed_forms_at_the_ends() -> None:
    # None of n: (1 - p)^n = 2.5 %; all of n likewise from below.
    assert clopper_pearson(0, 20) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert clopper_pearson(20, 20) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    found = stats.binomtest(7, 20).proportion_ci(0.95, method="exact")
    assert clopper_pearson(7, 20) == (pytest.approx(found.low), pytest.approx(found.high))


def test_an_exact_interval_holds_the_truth_as_often_as_it_says() -> None:
    share, trials = 0.03, 200
    chances = stats.binom.pmf(range(trials + 1), trials, share)
    held = [low <= share <= high for low, high in (clopper_pearson(k, trials) for k in range(201))]
    assert chances[held].sum() >= 0.95


def test_mu_of_many_guesses_comes_near_the_truth_from_below() -> None:
    mu, trials = 1.0, 10**7
    above = stats.norm.sf(-mu / 2), stats.norm.sf(mu / 2)  # a threshold in the middle
    found = Told(round(above[0] * trials), trials, round(above[1] * trials), trials).mu()
    assert 0.995 * mu < found < mu


def test_guesses_without_meaning_prove_nothing() -> None:
    assert Told(50, 100, 50, 100).mu() == 0.0
    assert Told(50, 100, 50, 100).epsilon(1e-5) == 0.0
    assert Told(0, 100, 0, 100).epsilon(1e-5) == 0.0


def test_epsilon_of_a_rate_is_the_logarithm_of_the_quotient() -> None:
    found = Told(500, 1000, 10, 1000)
    least, most = clopper_pearson(500, 1000)[0], clopper_pearson(10, 1000)[1]
    assert found.epsilon(0.01) == pytest.approx(math.log((least - 0.01) / most))


def test_all_guesses_right_prove_what_one_can_solve_for() -> None:
    # Without delta: q^r = 5 %, q = 1 / (1 + e^-epsilon).
    q = 0.05 ** (1 / 100)
    assert one_run_epsilon(1000, 100, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


def test_delta_and_more_confidence_only_lower_the_bound() -> None:
    plain = one_run_epsilon(1000, 100, 95, 0.0)
    assert 0 < one_run_epsilon(1000, 100, 95, 1e-4) < plain
    assert 0 < one_run_epsilon(1000, 100, 95, 0.0, confidence=0.999) < plain


def test_half_of_the_guesses_right_prove_nothing() -> None:
    assert one_run_epsilon(1000, 100, 50, 1e-5) == 0.0
    assert one_run_epsilon(1000, 100, 58, 0.0) == 0.0  # 58 or more of 100 coins: 6.7 %
    assert one_run_epsilon(1000, 100, 59, 0.0) > 0.0  # 4.4 %


def test_guesses_in_and_out_are_counted_as_asked_for() -> None:
    scores, inside = np.arange(10.0)[::-1], np.array([True] * 4 + [False] * 6)
    assert one_run(scores, inside, guessed_in=5, guessed_out=0, delta=0.0).right == 4
    assert one_run(scores, inside, guessed_in=0, guessed_out=6, delta=0.0).right == 6
    assert one_run(scores, inside, guessed_in=2, guessed_out=2, delta=0.0).right == 4
    with pytest.raises(BadValue, match="guesses in"):
        one_run(scores, inside, guessed_in=8, guessed_out=8, delta=0.0)


def test_the_bound_of_one_run_fails_no_more_often_than_it_says() -> None:
    """Randomised response with epsilon 1 on 400 coins, guessed as it answers, 400 times."""
    epsilon, rng = 1.0, np.random.default_rng(3)
    keeps = rng.random((400, 400)) < 1 / (1 + math.exp(-epsilon))
    inside = rng.random((400, 400)) < 0.5
    answers = np.where(keeps, inside, ~inside) + 0.1 * rng.random((400, 400))
    bounds = [
        one_run(a, i, guessed_in=50, guessed_out=50, delta=0.0).epsilon
        for a, i in zip(answers, inside, strict=True)
    ]
    assert np.mean(np.array(bounds) > epsilon) <= 0.075  # 5 %, and two and a half deviations
    assert np.mean(bounds) > 0.5


def test_what_an_audit_of_a_size_can_show_is_told_beforehand() -> None:
    q = 0.05 ** (1 / 640)
    most = statistics.most_one_run_can_show(640, 0.0, 1000)
    assert most == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
