"""Noise that nobody else can draw again."""

from __future__ import annotations

from decimal import Decimal
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
    assert OWN.normal(torch.empty(0, 3)).shape == (0, 3) and OWN.uniform(0).shape == (0,)


def test_what_is_simulated_is_drawn_as_torch_draws_it() -> None:
    rng = seeds.generator(7, "a")
    assert torch.equal(Secret(7).normal(torch.empty(3, 5), "a"), torch.randn(3, 5, generator=rng))


def test_a_secret_does_not_show_itself_in_a_message_of_an_error() -> None:
    assert repr(OWN) == "Secret()"


def test_whole_numbers_are_normal_ones_rounded_down_and_every_bit_is_as_likely() -> None:
    drawn = OWN.normal(torch.empty(200_000, dtype=torch.float64), "a")
    steps = OWN.whole(torch.empty(200_000), 20, "a")
    assert torch.equal(steps, (drawn * 2**20).floor().long())
    fine = OWN.whole(torch.empty(20_000), 53, "b")
    for bit in range(48):
        assert abs(float(((fine >> bit) & 1).double().mean()) - 0.5) < 0.02
    drawn = torch.randn(9, generator=seeds.generator(7, "a"))
    simulated = Secret(7).whole(torch.empty(9), 20, "a")
    assert torch.equal(simulated, (drawn.double() * 2**20).floor().long())
    assert steps.dtype == simulated.dtype == torch.long


def test_whole_parts_and_fractions_of_normal_numbers_have_their_chances() -> None:
    """A cell of a hundredth: its share of a million numbers is that of the normal law."""
    steps = OWN.whole(torch.empty(1_000_000), 7, "cells")
    law = NormalDist()
    found = torch.bincount(steps + 1000, minlength=2000)
    for cell in (-400, -256, -129, -128, -1, 0, 1, 127, 128, 255, 256, 383, 384):
        chance = law.cdf((cell + 1) / 128) - law.cdf(cell / 128)
        assert abs(float(found[cell + 1000]) - 1e6 * chance) < 5 * (1e6 * chance) ** 0.5 + 5


@pytest.mark.parametrize("whole", [0, 2])
def test_a_number_that_is_tried_is_kept_with_its_chance_to_one_part_in_2_to_the_40(
    whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fraction = 2**52 + 12345
    x = Decimal(2 * fraction + 1) / 2**54
    chance = int((-x * (2 * whole + x) / 2).exp() * 2**63)
    within = {0: 2**62, 2: int(0.94 * 2**63)}[whole]  # of the first number of 63 bits
    for off, kept in ((-(2**20), True), (2**20, False)):
        tries = [[within, fraction, chance + off], [2**62, 7, 0]]
        numbers = iter([torch.tensor(tried) for tried in tries])
        monkeypatch.setattr(Secret, "_numbers", lambda self, count, names, n=numbers: next(n))
        steps = int(OWN.whole(torch.empty(()), 53))
        assert steps == (whole * 2**53 + fraction if kept else 7)


def test_a_generator_of_a_site_depends_on_its_secret_and_on_every_name() -> None:
    drawn = [OWN, Secret(b"x" * 32)]
    seen = {one.generator(*names).initial_seed() for one in drawn for names in [("a", 1), ("a", 2)]}
    assert len(seen) == 4
    assert OWN.generator("a", 1).initial_seed() in seen


def test_noise_of_counts_is_rounded_after_all_its_bits_were_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = int(0.15 * 2**40)  # ten times that is a little less than one and a half
    monkeypatch.setattr(
        Secret, "whole", lambda self, into, bits: torch.full_like(into, drawn, dtype=torch.long)
    )
    assert sealed(b"k" * 32).data.counts(3).tolist() == [101, 101, 101]


def test_counts_are_noised_by_whole_numbers() -> None:
    told = [sealed(bytes([key]) * 32).data.counts(3) for key in range(200)]
    noise = torch.stack(told).double() - 100
    assert abs(float(noise.mean())) < 5 * 10 / 600**0.5
    assert float(noise.std()) == pytest.approx(10, rel=0.15)
