"""SCAFFOLD's controls by hand."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import Weights
from fedstill.models import ConvNet
from fedstill.parts import controls


def w(*numbers: float) -> Weights:
    return {"w": torch.tensor(numbers)}


def test_a_control_starts_at_zero_and_leaves_statistics_out() -> None:
    weights = ConvNet((1, 8, 8), 3, depth=1, width=2, norm="batch").init(0)
    fresh = controls.fresh(weights)
    assert not any("running" in name for name in fresh)
    assert {name: t.shape for name, t in fresh.items()} == {
        name: t.shape for name, t in weights.items() if "running" not in name
    }
    assert not any(tensor.any() for tensor in fresh.values())


def test_the_slope_of_the_correction_is_the_drift() -> None:
    drift, weights = w(0.5, -2.0), {**w(3.0, 4.0), "running_mean": torch.tensor([7.0])}
    assert float(controls.correction(drift, weights)) == 0.5 * 3 - 2 * 4
    found = torch.func.grad(lambda now: controls.correction(drift, now))(weights)
    assert found["w"].tolist() == [0.5, -2.0] and not found["running_mean"].any()


def test_a_change_is_the_mean_gradient_of_the_way_less_the_common_control() -> None:
    # c_i⁺ - c_i = (start - reached) / (steps · lr) - c
    found = controls.change(w(1.0, 0.5), w(2.0, 2.0), w(1.0, 4.0), steps=5, lr=0.1)
    assert found["w"].tolist() == pytest.approx([1 / 0.5 - 1, -2 / 0.5 - 0.5])


def test_without_steps_nothing_changes() -> None:
    assert controls.change(w(1.0), w(2.0), w(2.0), steps=0, lr=0.1)["w"].tolist() == [0]


def test_an_empty_control_stays_empty() -> None:
    assert controls.change({}, w(2.0), w(1.0), steps=3, lr=0.1) == {}
    assert controls.renewed({}, [{}, {}], clients=4) == {}


def test_the_common_control_counts_all_clients_and_not_only_those_awake() -> None:
    found = controls.renewed(w(1.0), [w(4.0), w(8.0)], clients=6)
    assert found["w"].tolist() == pytest.approx([1 + (4 + 8) / 6])


@pytest.mark.parametrize("rate", [0.0, 1e-40])
def test_a_rate_that_has_decayed_to_nothing_leaves_a_control_as_it_is(rate: float) -> None:
    assert controls.change(w(1.0), w(2.0), w(2.0), steps=5, lr=rate)["w"].tolist() == [0]
