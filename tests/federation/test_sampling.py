"""Who is awake is a function of the seed and the round, and over time everybody is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core.errors import BadValue
from fedstill.federation.sampling import Everyone, Sample, Scripted

few = settings(max_examples=80, derandomize=True, deadline=None, database=None)
members = st.lists(st.text(max_size=4), min_size=1, max_size=20, unique=True)
seeds = st.integers(0, 2**40)
rounds = st.integers(0, 1000)
CLIENTS = [f"c{i}" for i in range(10)]


@few
@given(names=members, seed=seeds, round=rounds, data=st.data())
def test_a_sample_has_its_size_and_nobody_twice(
    names: list[str], seed: int, round: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(names)))
    awake = Sample(count=count).awake(round, names, seed)
    assert len(awake) == count
    assert awake == sorted(set(awake))
    assert set(awake) <= set(names)


@few
@given(names=members, seed=seeds, round=rounds, share=st.floats(0.01, 1.0))
def test_the_same_seed_and_round_give_the_same_choice(
    names: list[str], seed: int, round: int, share: float
) -> None:
    before = torch.get_rng_state()
    first = Sample(share=share).awake(round, names, seed)
    assert Sample(share=share).awake(round, names[::-1], seed) == first
    assert 1 <= len(first) <= len(names)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "share, count", [(0.1, 1), (0.01, 1), (0.29, 3), (0.3, 3), (0.5, 5), (1.0, 10)]
)
def test_a_share_is_rounded_and_never_nobody(share: float, count: int) -> None:
    assert len(Sample(share=share).awake(0, CLIENTS, 0)) == count


def test_everybody_is_awake_over_time_and_equally_often() -> None:
    times = dict.fromkeys(CLIENTS, 0)
    for round in range(1000):
        for client in Sample(count=3).awake(round, CLIENTS, 7):
            times[client] += 1
    deviation = (1000 * 0.3 * 0.7) ** 0.5
    assert all(abs(number - 300) < 4 * deviation for number in times.values())


def test_rounds_and_seeds_differ() -> None:
    def chosen(seed: int) -> list[list[str]]:
        return [Sample(count=5).awake(round, CLIENTS, seed) for round in range(20)]

    assert len({tuple(names) for names in chosen(0)}) > 15
    assert chosen(0) != chosen(1)


def test_everyone_is_everyone_in_the_order_of_names() -> None:
    assert Everyone().awake(3, ["b", "a", "c"], 0) == ["a", "b", "c"]
    assert Sample(count=10).awake(0, CLIENTS, 0) == Everyone().awake(0, CLIENTS, 0)


def test_a_script_names_who_is_absent() -> None:
    script = Scripted({1: ["b"], 2: ["a", "b", "c"]})
    assert script.awake(0, ["c", "b", "a"], 0) == ["a", "b", "c"]
    assert script.awake(1, ["c", "b", "a"], 0) == ["a", "c"]
    assert script.awake(2, ["c", "b", "a"], 0) == []


def test_a_script_knows_its_clients() -> None:
    with pytest.raises(BadValue, match="Scripted: unknown client 'c11'; did you mean"):
        Scripted({0: ["c11"]}).awake(0, CLIENTS, 0)


def test_more_clients_than_exist_are_refused_with_both_numbers() -> None:
    with pytest.raises(BadValue, match=r"count = 20 clients asked for .* 10 exist"):
        Sample(count=20).awake(0, CLIENTS, 0)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({}, "give either count or share"),
        ({"count": 3, "share": 0.5}, "give either count or share"),
        ({"count": 0}, "count = 0: must be at least 1"),
        ({"share": 0.0}, "share = 0.0: must be in"),
        ({"share": 1.2}, "share = 1.2: must be in"),
    ],
)
def test_a_sample_needs_one_good_number(values: dict[str, float], reason: str) -> None:
    with pytest.raises(BadValue, match=f"Sample: {reason}"):
        Sample(**values)  # type: ignore[arg-type]
