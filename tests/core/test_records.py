"""Records: what is counted, what cannot change, and what is found by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from fedstill.core.records import (
    Message,
    Positional,
    State,
    Weights,
    is_buffer,
    open_fields,
    positional_fields,
)


class Inner(Message):
    images: Tensor
    labels: Positional
    examples: int


class Outer(Message):
    weights: Weights
    labels: Positional
    picked: Positional | None
    missing: Tensor | None
    share: float
    name: str
    inner: tuple[Inner, ...]


class Empty(State):
    """Nothing."""


def inner() -> Inner:
    """Six floats, two labels and a number."""
    return Inner(torch.zeros(2, 3), torch.tensor([0, 1]), 5)


def outer() -> Outer:
    return Outer(
        weights={"head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3)},
        labels=torch.zeros(7, dtype=torch.long),
        picked=torch.zeros(2, dtype=torch.uint8),
        missing=None,
        share=0.5,
        name="é",
        inner=(inner(), inner()),
    )


def test_floats_count_tensors_and_scalars_but_neither_positions_nor_none_nor_text() -> None:
    assert outer().floats() == {
        "weights": 3 * 4 + 3,
        "labels": 0,
        "picked": 0,
        "missing": 0,
        "share": 1,
        "name": 0,
        "inner": 2 * (2 * 3 + 1),
    }


def test_bytes_count_everything_at_its_own_size() -> None:
    assert outer().bytes() == {
        "weights": 4 * (3 * 4 + 3),
        "labels": 8 * 7,
        "picked": 1 * 2,
        "missing": 0,
        "share": 8,
        "name": 2,  # é is two bytes
        "inner": 2 * (4 * 6 + 8 * 2 + 8),
    }


def test_half_precision_is_as_many_floats_and_half_the_bytes() -> None:
    record = inner().replace(images=torch.zeros(2, 3, dtype=torch.float16))
    assert record.floats()["images"] == 6
    assert record.bytes()["images"] == 12


def test_a_record_without_fields_counts_nothing() -> None:
    assert Empty().floats() == {}
    assert Empty().bytes() == {}


def test_positions_are_found_behind_an_option() -> None:
    assert positional_fields(Outer) == {"labels", "picked"}


def test_a_field_of_a_record_cannot_be_set() -> None:
    with pytest.raises(FrozenInstanceError):
        inner().examples = 6  # type: ignore[misc]


def test_replace_gives_a_new_record_and_leaves_the_old_one() -> None:
    old = inner()
    new = old.replace(examples=6)
    assert (old.examples, new.examples) == (5, 6)
    assert new.images is old.images
    assert type(new) is Inner


def test_replace_refuses_a_field_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="picture"):
        inner().replace(picture=torch.zeros(1))


def test_a_message_that_extends_another_keeps_its_fields_in_front() -> None:
    class Longer(Inner):
        steps: int

    longer = Longer(torch.zeros(1), torch.zeros(1), 2, 3)
    assert list(longer.floats()) == ["images", "labels", "examples", "steps"]


class Envelope(Message):
    """Holds a message of any kind."""

    content: Message
    steps: int


def test_a_record_in_a_field_of_any_kind_is_counted_by_its_own_fields() -> None:
    held = Envelope(inner(), 3)
    assert held.floats() == {"images": 6, "labels": 0, "examples": 1, "steps": 1}
    assert held.bytes() == {"images": 24, "labels": 16, "examples": 8, "steps": 8}
    assert list(held.tensors()) == ["content.images", "content.labels"]


def test_a_field_that_both_have_is_counted_twice_under_two_names() -> None:
    twice = Envelope(Envelope(inner(), 3), 4)
    assert twice.floats() == {
        "images": 6, "labels": 0, "examples": 1, "content.steps": 1, "steps": 1,
    }  # fmt: skip
    assert open_fields(Envelope) == {"content"} and open_fields(Outer) == frozenset()
    assert twice.held_kinds() == [Envelope, Inner]


def test_tensors_are_found_under_dotted_names() -> None:
    assert list(outer().tensors()) == [
        "weights.head.weight",
        "weights.head.bias",
        "labels",
        "picked",
        "inner.0.images",
        "inner.0.labels",
        "inner.1.images",
        "inner.1.labels",
    ]


def test_statistics_are_told_from_parameters_by_the_last_part_of_the_name() -> None:
    assert is_buffer("norm0.running_mean")
    assert is_buffer("num_batches_tracked")
    assert not is_buffer("running_mean.weight")
    assert not is_buffer("head.bias")
