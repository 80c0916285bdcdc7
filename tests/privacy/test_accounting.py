"""From noise to epsilon, and a ledger that refuses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from statistics import NormalDist

import pytest
from scipy.special import log_ndtr

from fedstill.core.errors import BadValue
from fedstill.core.node import COUNTS
from fedstill.core.release import Spending, Use
from fedstill.privacy import accounting
from fedstill.privacy.accounting import (
    COUNTS_SHARE,
    Releases,
    accountant,
    delta_of,
    epsilon_of,
    epsilon_of_releases,
    mu_of,
    sigma_for,
    sigma_of_plan,
)
from fedstill.privacy.ledger import BudgetSpent, Ledger, calibrated, composed


def row(sigma: float, count: int = 1, *, node: str = "a", rate: float = 1.0) -> Spending:
    return Spending(1, "synthesize", node, "class sums", sigma, rate, count)


def test_the_closed_form_is_the_accountants() -> None:
    dp = pytest.importorskip("dp_accounting")
    for sigma, count in ((1.0, 1), (4.0, 10), (20.0, 100)):
        pld = dp.pld.PLDAccountant(
            dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
        )
        pld.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma), count))
        mine = epsilon_of(math.sqrt(count) / sigma, 1e-5)
        assert mine == pytest.approx(pld.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.02, 0.01), (6, 1.5), (600, 30), (900, 35)])
def test_delta_is_that_of_scipy_also_where_its_two_terms_lie_far_out(
    epsilon: float, mu: float
) -> None:
    near = log_ndtr(mu / 2 - epsilon / mu)
    far = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
    exact = math.exp(near) * -math.expm1(far - near)
    assert delta_of(epsilon, mu) == pytest.approx(exact, rel=1e-5, abs=0)


def test_releases_of_whole_data_beside_samples_are_paid_for() -> None:
    dp = pytest.importorskip("dp_accounting")
    pld = dp.pld.PLDAccountant(
        dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
    )
    pld.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(6.0), 3))
    pld.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(2.0)), 20)
    both = epsilon_of_releases([Releases(2.0, 0.1, 20), Releases(6.0, 1.0, 3)], 1e-5)
    assert both == pytest.approx(pld.get_epsilon(1e-5), rel=1e-2)
    assert both > 1.2 * epsilon_of_releases([Releases(2.0, 0.1, 20)], 1e-5)


def test_mu_at_the_budgets_that_papers_use() -> None:
    found = [round(mu_of(epsilon, 1e-5), 4) for epsilon in (1, 4, 10)]
    assert found == [0.2681, 0.9249, 2.0004]


def test_epsilon_grows_with_releases_and_falls_with_noise() -> None:
    more = [epsilon_of(math.sqrt(count) / 3, 1e-5) for count in (1, 2, 4, 8)]
    assert more == sorted(more)
    noise = [sigma_for(epsilon, 1e-5, 10) for epsilon in (1, 2, 4, 8)]
    assert noise == sorted(noise, reverse=True)
    for epsilon in (0.1, 1, 10, 50):
        assert epsilon_of(1 / sigma_for(epsilon, 1e-5, 1), 1e-5) == pytest.approx(epsilon)


def test_without_noise_epsilon_is_infinite_and_without_releases_nothing() -> None:
    assert epsilon_of_releases([Releases(0.0, 1.0, 1)], 1e-5) == math.inf
    assert epsilon_of_releases([], 1e-5) == 0
    assert delta_of(1.0, 0.0) == 0


def test_four_releases_with_twice_the_noise_cost_as_much_as_one() -> None:
    one = epsilon_of_releases([Releases(2.0, 1.0, 1)], 1e-5)
    four = epsilon_of_releases([Releases(4.0, 1.0, 3), Releases(4.0, 1.0, 1)], 1e-5)
    assert four == pytest.approx(one, rel=1e-12)


def test_a_sampled_plan_costs_its_budget_and_less_than_the_whole_data_would() -> None:
    pytest.importorskip("dp_accounting")
    plan = [Releases(1.0, 0.1, 30)]
    sigma = sigma_of_plan(plan, 4.0, 1e-5)
    spent = epsilon_of_releases([Releases(sigma, 0.1, 30)], 1e-5)
    assert 3.98 < spent <= 4.0
    assert sigma < sigma_for(4.0, 1e-5, 30)


@pytest.mark.parametrize("records", [1000, 5000, 6956, 7600])
def test_the_noise_of_samples_uses_the_budget_up_and_is_found_in_a_few_questions(
    records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    plan, asked = [Releases(1.0, 256 / records, 200)], []
    real = accounting._accounted

    def counted(squared: float, sampled: tuple[Releases, ...], delta: float) -> float:
        asked.append(sampled)
        return real(squared, sampled, delta)

    monkeypatch.setattr(accounting, "_accounted", counted)
    sigma = sigma_of_plan(plan, 4.0, 1e-5)
    assert len(asked) <= 6
    assert 0.999 * 4 <= epsilon_of_releases([plan[0]._replace(sigma=sigma)], 1e-5) <= 4


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("first", [0.05, 0.7, 3.0, 400.0])
def test_a_search_ends_within_a_thousandth_of_any_falling_cost(power: float, first: float) -> None:
    def steep_then_flat(sigma: float) -> float:
        return 2 / sigma**power + 0.5 * math.exp(-sigma)

    found = accounting._searched(steep_then_flat, first, 1.0)
    assert 0.999 <= steep_then_flat(found) <= 1


def test_a_missing_accountant_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(BadValue, match=r"pip install 'fedstill\[dp\]'"):
        epsilon_of_releases([Releases(1.234, 0.1, 3)], 1e-5)
    assert epsilon_of_releases([Releases(1.234, 1.0, 3)], 1e-5) > 0  # whole data need none


def test_a_calibrated_plan_spends_exactly_the_budget() -> None:
    uses = [Use("class sums", 4)] * 6
    sigma = calibrated(uses, 4.0, 1e-5)
    assert sigma == pytest.approx(math.sqrt(24) / 0.92493, rel=1e-4)
    assert composed([row(sigma, 4)] * 6, 1e-5) == pytest.approx(4.0)


def test_uses_with_noise_of_their_own_keep_it_and_the_others_get_the_rest() -> None:
    # mu² = 0.8555; counts with sigma 5 take 0.04 of it, so four releases have 0.8155.
    sigma = calibrated([Use("counts", 1, sigma=5.0), Use("class sums", 4)], 4.0, 1e-5)
    assert sigma == pytest.approx(math.sqrt(4 / (mu_of(4.0, 1e-5) ** 2 - 0.04)))
    assert composed([row(5.0), row(sigma, 4)], 1e-5) == pytest.approx(4.0)


def test_counts_that_cost_the_whole_budget_leave_nothing() -> None:
    with pytest.raises(BadValue, match="nothing is left"):
        calibrated([Use("counts", 1, sigma=0.5), Use("class sums", 4)], 1.0, 1e-5)


def test_the_ledger_refuses_before_it_writes() -> None:
    ledger = Ledger(4.0, 1e-5)
    sigma = sigma_for(4.0, 1e-5, 3)
    for _ in range(3):
        ledger.spend(row(sigma))
    with pytest.raises(BudgetSpent, match=r"a: synthesize in round 1 would bring epsilon to 4\.72"):
        ledger.spend(row(sigma))
    assert len(ledger.rows["a"]) == 3
    assert ledger.epsilons() == {"a": pytest.approx(4.0)}


def test_clients_hold_other_records_so_each_has_the_whole_budget() -> None:
    ledger = Ledger(4.0, 1e-5)
    sigma = sigma_for(4.0, 1e-5, 1)
    ledger.spend(row(sigma))
    ledger.spend(row(sigma, node="b"))
    assert set(ledger.epsilons()) == {"a", "b"}


def test_what_was_planned_is_granted_without_adding_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.privacy.ledger.composed", lambda *_: math.inf)
    ledger = Ledger(4.0, 1e-5, planned={"a": [row(2.0, 5, rate=0.1)]})
    ledger.spend(row(2.0, 3, rate=0.1))
    ledger.spend(row(2.0, 2, rate=0.1))
    with pytest.raises(BudgetSpent):
        ledger.spend(row(2.0, 1, rate=0.1))


Cost = Callable[[list[float]], Sequence[float]]  # δ at each of rising ε


def together(counts: float, costs: Sequence[Cost], epsilon: float) -> float:
    """The δ at ε of noisy counts with this μ and then of the worst of several that may follow.

    Which follows is chosen by the counts, so by their privacy loss, in the worst way. By the
    trapezoidal rule over losses.
    """
    law = NormalDist(counts**2 / 2, counts)
    losses = [law.mean + counts * (8 - at / 50) for at in range(801)]
    every = [cost([epsilon - loss for loss in losses]) for cost in costs]
    worst = [max(each) for each in zip(*every, strict=True)]
    return sum(law.pdf(loss) * cost for loss, cost in zip(losses, worst, strict=True)) * counts / 50


def sampled_cost(sigma: float, rate: float, number: int) -> Cost:
    dp = accountant()
    total = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
    total.compose(dp.SelfComposedDpEvent(event, number))
    return lambda epsilons: [float(cost) for cost in total.get_delta(epsilons)]


def test_rates_that_follow_from_noisy_counts_cost_no_more_than_the_budget() -> None:
    """Each of them, added up as if it were fixed in advance, would; the worse of two would not."""
    pytest.importorskip("dp_accounting")
    epsilon, delta = 4.0, 1e-5
    counts = mu_of(epsilon, delta) * math.sqrt(COUNTS_SHARE)
    kinds = [(0.002, 10), (1.0, 4)]

    def worst(found: Callable[[Releases], float]) -> float:
        costs = [
            sampled_cost(found(Releases(1.0, rate, number)), rate, number) for rate, number in kinds
        ]
        return together(counts, costs, epsilon)

    told = [Releases(1 / counts, 1.0, 1)]
    assert worst(lambda plan: sigma_of_plan([plan], epsilon, delta, told)) > 1.05 * delta
    after = worst(lambda plan: sigma_of_plan([plan], epsilon, delta, counts=counts))
    assert after <= delta


@pytest.mark.parametrize("number", [4, 200])
def test_what_follows_from_counts_costs_its_budget_and_a_little_more_than_if_it_were_fixed(
    number: int,
) -> None:
    pytest.importorskip("dp_accounting")
    counts = 1 / (mu_of(4.0, 1e-5) * math.sqrt(COUNTS_SHARE))
    told, sgd = Use(COUNTS, 1, sigma=counts), Use("DP-SGD", number, 0.05)
    sigma = calibrated([told, sgd], 4.0, 1e-5)
    rows = [
        Spending(1, "update", "a", COUNTS, counts, 1.0, 1),
        Spending(1, "update", "a", "DP-SGD", sigma, 0.05, number),
    ]
    assert 3.99 < composed(rows, 1e-5) <= 4.0
    fixed = calibrated([told._replace(mechanism="another"), sgd], 4.0, 1e-5)
    assert fixed < sigma < 1.15 * fixed


def test_after_counts_releases_cost_no_less_where_an_accountant_runs_out_of_numbers() -> None:
    """Of an immense ε it says that δ is no number, or minus infinity, which was taken for zero."""
    pytest.importorskip("dp_accounting")
    counts, sampled = mu_of(1000.0, 1e-5) * math.sqrt(COUNTS_SHARE), Releases(0.09, 0.5, 10)
    fixed = epsilon_of_releases([sampled, Releases(1 / counts, 1.0, 1)], 1e-5)
    assert 650 < fixed <= epsilon_of_releases([sampled], 1e-5, counts)


def test_beyond_a_large_budget_counts_and_what_follows_are_added_up_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No δ is asked for at hundreds of ε, at which an accountant takes minutes and has none."""
    pytest.importorskip("dp_accounting")

    def never(total: object, grid: object) -> list[float]:
        raise AssertionError("δ was looked at point by point")

    monkeypatch.setattr(accounting, "_deltas", never)
    delta, sgd = 1e-5, Releases(0.3, 0.02, 20)
    counts = mu_of(501.0, delta) * math.sqrt(COUNTS_SHARE)
    apart = epsilon_of(counts, delta / 2) + epsilon_of_releases([sgd], delta / 2)
    assert epsilon_of_releases([sgd], delta, counts) == apart
    assert apart > epsilon_of_releases([sgd, Releases(1 / counts, 1.0, 1)], delta)  # to be safe
    for epsilon in (4.0, 499.0):  # up to there nothing is different
        counts = mu_of(epsilon, delta) * math.sqrt(COUNTS_SHARE)
        with pytest.raises(AssertionError, match="point by point"):
            epsilon_of_releases([sgd], delta, counts)


def test_a_search_ends_also_if_it_begins_where_the_cost_is_infinite() -> None:
    found = accounting._searched(lambda sigma: 2 / sigma if sigma > 1 else math.inf, 0.3, 1.0)
    assert 0.999 <= 2 / found <= 1


def test_a_search_ends_soon_behind_a_cost_that_jumps_over_the_budget() -> None:
    asked: list[float] = []

    def jumping(sigma: float) -> float:
        asked.append(sigma)
        return 0.6 if sigma > math.pi else math.inf

    assert math.pi < accounting._searched(jumping, 0.5, 1.0) < math.pi * 1.0002
    assert len(asked) < 30


def test_releases_of_whole_data_cost_the_same_whatever_the_counts_are() -> None:
    counts = 1 / (mu_of(4.0, 1e-5) * math.sqrt(COUNTS_SHARE))
    sigma = calibrated([Use(COUNTS, 1, sigma=counts), Use("class sums", 4)], 4.0, 1e-5)
    assert sigma == pytest.approx(sigma_for(4.0, 1e-5, 4) / math.sqrt(1 - COUNTS_SHARE))
    # But a batch that happens to hold all records follows from them, and so does its noise.
    whole = calibrated([Use(COUNTS, 1, sigma=counts), Use("DP-SGD", 4)], 4.0, 1e-5)
    assert sigma < whole < 1.1 * sigma


def test_samples_that_were_not_planned_are_refused_though_the_budget_would_do() -> None:
    plan = {"a": [row(5.0, 10, rate=0.1)]}
    ledger = Ledger(4.0, 1e-5, plan)
    ledger.spend(row(5.0, 6, rate=0.1))
    ledger.spend(row(5.0, 4, rate=0.1))
    with pytest.raises(BudgetSpent, match=r"1 releases of .* at rate 0\.1 beyond what was planned"):
        ledger.spend(row(5.0, 1, rate=0.1))
    with pytest.raises(BudgetSpent, match="beyond what was planned"):
        ledger.spend(row(5.0, 1, rate=0.2))
    assert sum(each.releases for each in ledger.rows["a"]) == 10


def test_releases_of_whole_data_beyond_a_plan_are_granted_as_far_as_the_budget_goes() -> None:
    ledger = Ledger(4.0, 1e-5, {"a": [row(9.0, 2)], "b": [row(9.0, 2, node="b")]})
    ledger.spend(row(9.0, 5))
    with pytest.raises(BudgetSpent, match="would bring epsilon to"):
        ledger.spend(row(9.0, 500))
    # Samples beside them are refused, also where all before were of whole data.
    ledger.spend(row(9.0, 2, node="b"))
    with pytest.raises(BudgetSpent, match="beyond what was planned"):
        ledger.spend(row(50.0, 1, node="b", rate=0.1))


def test_nothing_planned_needs_no_noise() -> None:
    for uses in ([], [Use("class sums", 0)], [Use(COUNTS, 1, sigma=50.0)]):
        assert calibrated(uses, 4.0, 1e-5) == 0
    few = calibrated([Use("class sums", 4)], 4.0, 1e-5)
    assert calibrated([Use("class sums", 4), Use("DP-SGD", 0, 0.1)], 4.0, 1e-5) == few


def test_a_run_whose_noise_was_found_by_another_version_is_told_to_go_on_with_that() -> None:
    ledger = Ledger(4.0, 1e-5, {"a": [row(5.0, 10, rate=0.1)]})
    ledger.rows["a"] = [row(4.9, 2, rate=0.1)]
    with pytest.raises(BudgetSpent, match=r"a: what it spent before synthesize .* other versions"):
        ledger.spend(row(5.0, 2, rate=0.1))
