"""Memory that stays where it is: batches of equal shapes share it, and nothing is copied twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.engines.loops import buffers
from fedstill.engines.loops.buffers import Buffers, check_recordable, copy_all
from fedstill.engines.loops.graphs import Unrecordable


def test_batches_of_equal_shapes_share_their_memory() -> None:
    known = Buffers()
    first = known.holding([torch.ones(2), torch.zeros(3)])
    again = known.holding([torch.full((2,), 5.0), torch.ones(3)])
    other = known.holding([torch.ones(4)])
    assert again is first and [place.tolist() for place in first] == [[5, 5], [1, 1, 1]]
    assert len(known.places) == 3 and known.places[2] is other[0]


def test_what_is_in_its_place_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def counted(places: list[Tensor], values: list[Tensor]) -> None:
        copied.append(len(places))

    monkeypatch.setattr(buffers, "copy_each", counted)
    whole = torch.arange(6.0).reshape(2, 3)
    copy_all([whole, whole[1]], [whole.view(2, 3), whole[1]])
    assert copied == []
    copy_all([whole, whole[1]], [whole.clone(), whole[0]])  # other memory, another row
    assert copied == [2]


def test_a_square_beside_its_transpose_is_copied() -> None:
    place = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    copy_all([place], [place.clone().T])
    assert place.tolist() == [[1, 3], [2, 4]]


def test_values_that_lie_in_each_others_places_change_places() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    copy_all([first, second], [second, first])
    assert (first.tolist(), second.tolist()) == ([3, 4], [1, 2])


def test_a_square_is_turned_round_in_its_own_place() -> None:
    place = torch.arange(9.0).reshape(3, 3)
    copy_all([place], [place.T])
    assert place.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_what_lies_elsewhere_is_not_recorded() -> None:
    check_recordable([torch.ones(1)], torch.device("cpu"))
    with pytest.raises(Unrecordable, match="on the host"):
        check_recordable([torch.ones(1)], torch.device("meta"))
