"""The mechanisms' own code, with and without one record: as private as the ledger says, no more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedstill.audit.mechanism import MECHANISMS, Trials, audited, mechanism
from fedstill.core.errors import BadValue
from fedstill.privacy.accounting import mu_of

TRIALS = Trials(number=60_000)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_what_leaks_is_nine_tenths_of_what_the_ledger_says_and_no_more(
    name: str, epsilon: float
) -> None:
    found = audited(name, MECHANISMS[name], TRIALS, epsilon)
    assert 0.9 * epsilon <= found.epsilon_at_least <= epsilon
    assert not found.refutes


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_a_copy_with_a_tenth_of_the_noise_is_caught(name: str) -> None:
    found = audited(name, MECHANISMS[name], TRIALS, 4.0, noise=0.1)
    assert found.control
    assert found.caught
    assert found.epsilon_at_least > 8.0


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_scores_are_normal_around_one_with_the_record_and_around_zero_without(name: str) -> None:
    sigma = 1.5
    scores, inside = MECHANISMS[name](sigma, 20_000, 5)
    assert len(scores) >= 20_000
    error = 4 * sigma / np.sqrt(len(scores) / 2)
    assert scores[inside].mean() == pytest.approx(1.0, abs=error)
    assert scores[~inside].mean() == pytest.approx(0.0, abs=error)
    assert scores[~inside].std() == pytest.approx(sigma, rel=0.05)


def test_an_audit_is_written_with_its_controls(tmp_path: Path) -> None:
    def honest(sigma: float, number: int, seed: int):
        rng = np.random.default_rng(seed)
        inside = rng.random(number) < 0.5
        return inside + sigma * rng.normal(size=number), inside

    result = mechanism(Trials((4.0,), number=20_000), tmp_path, mechanisms={"honest": honest})
    assert not result.missed
    assert not result.refuted
    told = json.loads((tmp_path / "audit.json").read_text())
    assert [row["control"] for row in told["findings"]] == [False, True]
    assert told["findings"][0]["mu_ledger"] == pytest.approx(mu_of(4.0, 1e-5))


def test_a_mechanism_with_half_of_its_noise_is_refuted() -> None:
    def careless(sigma: float, number: int, seed: int):
        rng = np.random.default_rng(seed)
        inside = rng.random(number) < 0.5
        return inside + sigma / 2 * rng.normal(size=number), inside

    result = mechanism(Trials((4.0,), number=20_000), mechanisms={"careless": careless})
    assert [found.subject for found in result.refuted] == ["careless"]


@pytest.mark.parametrize("values", [{"epsilons": (0.0,)}, {"epsilons": ()}, {"delta": 0.0}])
def test_budgets_that_make_no_sense_are_refused(values: dict) -> None:
    with pytest.raises(BadValue):
        Trials(**values)
