"""The lies of the contract, for the forms of messages that methods send only when asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedstill.core import Message, Weights
from fedstill.methods import METHODS
from fedstill.testing import check, worlds
from fedstill.testing.lies import lies

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("feddm", {"client_weight": "examples"}),
    ("fedproto", {"weighting": "examples"}),
    ("fedproto", {"inference": "prototype"}),
    ("heterofl", {"masked": True}),
    ("fedlgd", {"local_update": "scaffold", "global_start": "averaged_statistics"}),
    ("desa", {"combination": "union"}),
    ("desa", {"combination": "union", "mix": "flood", "mix_steps": 2}),
    ("desa", {"mix": "fastmix", "mix_steps": 2}),
    ("desa", {"anchors": "generator"}),
    ("vhl", {"sharing": "images"}),
    ("dfrd", {"role": "data_free"}),
    ("feddf", {"average": False}),
]


@pytest.mark.parametrize(("name", "values"), FORMS)
def test_every_form_of_a_message_is_looked_at(name: str, values: dict[str, Any]) -> None:
    kind = METHODS[name]
    check(kind(**{**kind.presets["small"], **values}), only=["content"])


def test_statistics_of_static_norms_are_looked_at() -> None:
    method = METHODS["heterofl"](lr=0.1, batch_size=8, rho=2, norm_statistics="clients")
    check(method, world=worlds.pictures(norm="static"), only=["content"])


class Word(Message):
    """A tensor, a table and a number."""

    values: torch.Tensor
    named: dict[str, torch.Tensor]
    count: int
    weights: Weights


def test_each_field_is_lied_about_in_every_way() -> None:
    word = Word(torch.zeros(3), {"a": torch.tensor([1, 2])}, 5, {"w": torch.zeros(1)})
    told = {(lie.field, lie.what) for lie in lies(word)}
    assert {what for field, what in told if field == "values"} == {
        "its first row alone", "one row more", "one axis more", "another type",
        "values of 1e30", "NaN",
    }  # fmt: skip
    assert {what for field, what in told if field == "named"} == {"with one more name"}
    assert ("weights", "without 'w'") in told
    assert ("named.a", "values of -1") in told and ("count", "-1 in place of 5") in told
    assert word.values.sum() == 0 and word.count == 5, "the message itself stays as it was"
