"""Opinions: every example once, in order, in evaluation mode; means of them; passes."""

from __future__ import annotations

import pytest
import torch

from fedstill.parts import opinions as module
from fedstill.parts.opinions import mean_over_speakers, opinions
from worlds import pictures


def test_opinions_are_logits_in_evaluation_mode_in_the_order_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)  # does not divide the set
    world = pictures(norm="batch")
    weights = world.server_model.init(0)
    said = opinions(world.server_model.train({}), weights, world.public)
    assert torch.allclose(said, world.server_model(weights, world.public.all().x), atol=1e-6)
    assert not said.requires_grad


def test_means_are_over_those_who_spoke_of_a_set() -> None:
    one = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[3.0, 0.0], [5.0, 0.0]])}
    other = {"a": torch.tensor([[3.0, 6.0]]), "d": torch.tensor([[9.0, 9.0]])}
    mean, heard = mean_over_speakers([one, other], {"a": 1, "b": 2, "c": 1}, 2, "cpu")
    assert mean.tolist() == [[2, 4], [3, 0], [5, 0], [0, 0]]
    assert heard.tolist() == [1, 1, 1, 0]


def test_who_means_another_set_by_the_name_is_left_out() -> None:
    one, other = {"a": torch.ones(2, 3)}, {"a": torch.full((1, 3), 5.0)}
    mean, heard = mean_over_speakers([one, other], {"a": 1}, 3, "cpu")
    assert mean.tolist() == [[5, 5, 5]] and heard.tolist() == [1]
    mean, heard = mean_over_speakers([one], {"a": 1}, 3, "cpu")
    assert mean.tolist() == [[0, 0, 0]] and heard.tolist() == [0]


@pytest.mark.parametrize("sizes", [{}, {"a": 0}])
def test_of_no_examples_nothing_is_said(sizes: dict[str, int]) -> None:
    mean, heard = mean_over_speakers([{}], sizes, 3, "cpu")
    assert mean.shape == (0, 3) and heard.shape == (0,)
