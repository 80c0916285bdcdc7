"""Noise that nobody else can draw again."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch

from fedstill.core import Data, Node, seeds
from fedstill.core.release import Spending, Terms, Use
from fedstill.core.secret import Secret
from fedstill.models.mlp import MLP
from fedstill.parts.learning import private_training

OWN = Secret(bytes(range(32)))


def granted(round: int, step: str, use: Use, earlier: Any) -> Spending:
    return Spending(round, step, "c1", use.mechanism, 1.0, use.rate, use.releases)


def sealed(key: bytes | None) -> Node[None]:
    data = Data.of(torch.zeros(300, 4), torch.arange(300) % 3)
    one: Node[None] = Node("c1", 1, None, model=MLP((4,), 3), data=data, key=key)
    one.seal(Terms(1.0, 1.0, 1, 2.0, 10.0), granted)
    return one


def test_noise_of_a_site_is_not_drawn_by_generators_of_which_there_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch keeps 32 bits of a seed on a host: all its streams can be tried in some hours."""
    alike = [torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32)]
    assert torch.equal(*(torch.randn(9, generator=rng) for rng in alike))

    def used(*names: Any, **options: Any) -> torch.Generator:
        raise AssertionError("a generator of torch was used")

    monkeypatch.setattr(seeds, "generator", used)
    one = sealed(b"k" * 32)
    one.data.counts(3)
    start = {name: torch.zeros(law.shape) for name, law in one.model.initial().items()}
    batches, _ = private_training(one, one.model, start, 30)
    assert 0 < int((batches[0].share > 0).sum()) < 300
    assert all(torch.isfinite(noise).all() for noise in batches[0].noise.values())
    with pytest.raises(AssertionError, match="generator of torch"):  # what is simulated may
        sealed(None).data.counts(3)


def test_normal_numbers_are_normal_and_those_of_other_names_are_others() -> None:
    drawn = OWN.normal(torch.empty(200_000, dtype=torch.float64), "a")
    ordered, law = drawn.sort().values, NormalDist()
    for share in (1e-4, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 1e-4):
        found = float((ordered <= law.inv_cdf(share)).double().mean())
        assert abs(found - share) < 5 * (share * (1 - share) / 200_000) ** 0.5
    again, other = (OWN.normal(torch.empty_like(drawn), name) for name in ("a", "b"))
    assert torch.equal(again, drawn)
    assert abs(float((other * drawn).mean())) < 5 / 200_000**0.5
    assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 5 / 200_000**0.5
    assert not torch.equal(Secret(b"x" * 32).normal(torch.empty_like(drawn), "a"), drawn)


def test_uniform_numbers_are_uniform_and_nothing_can_be_asked_for() -> None:
    drawn = OWN.uniform(200_000, 3)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    for share in (0.01, 0.5, 0.9):
        assert abs(float((drawn < share).double().mean()) - share) < 0.005
    assert OWN.normal(torch.empty(0, 3)).shape == (0, 3)


def test_what_is_simulated_is_drawn_as_torch_draws_it() -> None:
    rng = seeds.generator(7, "a")
    assert torch.equal(Secret(7).normal(torch.empty(3, 5), "a"), torch.randn(3, 5, generator=rng))


def test_a_secret_does_not_show_itself_in_a_message_of_an_error() -> None:
    assert repr(OWN) == "Secret()"
