"""What holds clients near the others, by hand."""

from __future__ import annotations

import torch

from fedstill.parts.drift import control_layout, first_control, held_near, proximal

WEIGHTS = {"w": torch.tensor([3.0, 4.0]), "running_mean": torch.tensor([7.0])}
START = {"w": torch.tensor([1.0, 1.0]), "running_mean": torch.tensor([0.0])}
DRIFT = {"w": torch.tensor([0.5, -2.0])}


def test_the_proximal_term_is_half_mu_times_the_squared_way_without_statistics() -> None:
    assert float(proximal(WEIGHTS, START, 0.1)) == 0.05 * torch.tensor(4.0 + 9.0)


def test_each_kind_of_local_update_adds_its_own_term() -> None:
    loss = torch.tensor(10.0)
    gained = {
        how: float(held_near(loss, how, WEIGHTS, START, DRIFT, mu=2.0))
        for how in ("plain", "fedprox", "scaffold")
    }
    assert gained == {"plain": 10, "fedprox": 10 + 13, "scaffold": 10 + 0.5 * 3 - 2 * 4}


def test_only_scaffold_has_a_control_and_it_covers_trainable_parameters() -> None:
    assert first_control("plain", WEIGHTS) == first_control("fedprox", WEIGHTS) == {}
    assert {name: each.tolist() for name, each in first_control("scaffold", WEIGHTS).items()} == {
        "w": [0, 0]
    }
    layout = {name: (tuple(each.shape), each.dtype) for name, each in WEIGHTS.items()}
    assert control_layout("plain", layout) == {}
    assert list(control_layout("scaffold", layout)) == ["w"]
