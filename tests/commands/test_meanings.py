"""Every option of every method says what it means and what it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from fedstill.commands.meanings import COMMON, meaning_of, options_of
from fedstill.core.ranges import Count, Fraction, Positive, in_words
from fedstill.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_option_has_a_meaning_and_a_range(name: str) -> None:
    for option in options_of(METHODS[name]):
        assert len(option.meaning.split()) >= 2, f"say beside {option.name} what it means"
        assert option.range


def test_every_common_word_is_an_option_of_some_method() -> None:
    used = {option.name for kind in METHODS.values() for option in options_of(kind)}
    assert set(COMMON) <= used


@dataclass(frozen=True)
class Parent:
    lr: Positive = 0.1
    # how far it goes,
    # in steps
    reach: Count = 1
    pull: float = 0.5  # towards the middle


@dataclass(frozen=True)
class Child(Parent):
    pull: float = 0.7
    lr: Positive = 0.2  # and of the head


def test_a_meaning_stands_above_or_beside_its_field_and_is_inherited() -> None:
    assert meaning_of(Parent, "reach") == "how far it goes, in steps"
    assert meaning_of(Child, "pull") == "towards the middle"
    assert meaning_of(Parent, "lr") == COMMON["lr"]
    assert meaning_of(Child, "lr") == f"{COMMON['lr']}; and of the head"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Positive, "above 0"),
        (Count, "integer, at least 1"),
        (Fraction, "in [0, 1)"),
        (Literal["real", "noise"], "real, noise"),
        (bool, "true, false"),
        (Count | None, "integer, at least 1 or nothing"),
        (tuple[float, ...], "a list"),
        (str, "text"),
    ],
)
def test_what_a_field_may_hold_is_said_in_few_words(hint: object, words: str) -> None:
    assert in_words(hint) == words
