"""Pools of random networks: how large, drawn when, kept how long."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from fedstill.core.records import Weights
from fedstill.models import MLP
from fedstill.parts import random_networks


@pytest.mark.parametrize(
    ("numbers", "count"), [(1, 8), (320_010, 8), (1_000_000, 4), (11_000_000, 1), (0, 8)]
)
def test_a_pool_is_small_where_networks_are_large(numbers: int, count: int) -> None:
    assert random_networks.size(numbers, "cuda:1") == count
    assert random_networks.size(numbers, "cpu") == 1


def test_a_pool_is_drawn_once_and_the_latest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_networks, "size", lambda numbers, device: 4)
    asked: list[int] = []

    def draw(rng: Generator, count: int) -> list[Weights]:
        asked.append(count)
        return [{"a": one} for one in torch.rand(count, generator=rng)]

    network = random_networks.networks(5, draw, 2**20, "cpu")
    first = [float(network(step)["a"]) for step in range(8)]
    assert asked == [4, 4] and len(set(first)) == 8
    assert [float(network(step)["a"]) for step in range(8)] == first and asked == [4] * 4
    another = random_networks.networks(6, draw, 2**20, "cpu")
    assert float(another(0)["a"]) not in first


def test_networks_that_are_drawn_together_follow_the_laws_of_one() -> None:
    model = MLP((1, 4, 4), 3, hidden=(5,))
    drawn = model.samples(torch.Generator().manual_seed(0), 500)
    initial = model.initial()
    assert len(drawn) == 500 and all(one.keys() == initial.keys() for one in drawn)
    weights = torch.stack([one["head.weight"] for one in drawn])
    bound = initial["head.weight"].scale
    assert weights.shape[1:] == initial["head.weight"].shape
    assert 0.99 * bound < weights.max() <= bound and -bound <= weights.min() < -0.99 * bound
    assert abs(float(weights.mean())) < 0.02 * bound
