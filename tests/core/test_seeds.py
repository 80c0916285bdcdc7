"""Seeds: a draw is a function of its names, and moves nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import seeds

word = st.text(alphabet="abc:|/ \\0", max_size=4)
name = st.one_of(word, st.integers(-3, 3))
many = st.lists(name, max_size=4).map(tuple)


def test_a_draw_depends_on_the_seed_and_on_every_name() -> None:
    base = seeds.draw(1, "draw", 2, "update", "c0", "order")
    others = [
        seeds.draw(2, "draw", 2, "update", "c0", "order"),
        seeds.draw(1, "noise", 2, "update", "c0", "order"),
        seeds.draw(1, "draw", 3, "update", "c0", "order"),
        seeds.draw(1, "draw", 2, "learn", "c0", "order"),
        seeds.draw(1, "draw", 2, "update", "c1", "order"),
        seeds.draw(1, "draw", 2, "update", "c0", "start"),
        seeds.draw(1, "draw", 2, "update", "c0"),
    ]
    assert len({base, *others}) == 8


@settings(max_examples=300, deadline=None, derandomize=True)
@given(left=many, right=many)
def test_different_names_never_give_the_same_draw(
    left: tuple[str | int, ...], right: tuple[str | int, ...]
) -> None:
    assert (seeds.draw(0, *left) == seeds.draw(0, *right)) == (left == right)


def test_names_do_not_run_into_each_other() -> None:
    drawn = {
        seeds.draw(0, "a", "b"),
        seeds.draw(0, "ab"),
        seeds.draw(0, "b", "a"),
        seeds.draw(0, "a", "", "b"),
        seeds.draw(0, "1"),
        seeds.draw(0, 1),
        seeds.draw(1),
    }
    assert len(drawn) == 7


def test_a_draw_is_always_the_same_number() -> None:
    # The first eight bytes of sha256("int:0"), halved; another value would move every result.
    assert seeds.draw(0) == 0x669B4C24C93570EB >> 1


@settings(max_examples=50, deadline=None, derandomize=True)
@given(names=many)
def test_a_draw_fits_a_generator(names: tuple[str | int, ...]) -> None:
    assert 0 <= seeds.draw(0, *names) < 2**63
    torch.Generator().manual_seed(seeds.draw(0, *names))


def test_generators_of_different_purposes_do_not_disturb_each_other() -> None:
    alone = torch.randn(5, generator=seeds.generator(0, "a"))
    first, second = seeds.generator(0, "a"), seeds.generator(0, "b")
    torch.randn(100, generator=second)
    assert torch.equal(torch.randn(5, generator=first), alone)
    assert not torch.equal(torch.randn(5, generator=seeds.generator(0, "b")), alone)


def test_the_global_generator_is_not_moved() -> None:
    before = torch.get_rng_state()
    torch.randn(10, generator=seeds.generator(0, "a"))
    assert torch.equal(torch.get_rng_state(), before)
