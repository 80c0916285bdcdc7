"""Trees: only tensors are touched, and structure survives."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.records import Message


class Pair(NamedTuple):
    left: Tensor
    word: str


class Note(Message):
    picture: Tensor | None
    names: tuple[str, ...]


def tree(fill: float = 1.0) -> dict[str, Any]:
    return {
        "a": torch.full((2,), fill),
        "b": [torch.full((3,), fill), None, 7],
        "c": (Pair(torch.full((1,), fill), "left"),),
        "d": Note(torch.full((2, 2), fill), ("x", "y")),
    }


def test_mapping_changes_tensors_and_keeps_everything_else() -> None:
    doubled = trees.map_tensors(lambda tensor: 2 * tensor, tree())
    assert [float(t.flatten()[0]) for t in trees.tensors(doubled)] == [2, 2, 2, 2]
    assert doubled["b"][1:] == [None, 7]
    assert isinstance(doubled["c"][0], Pair) and doubled["c"][0].word == "left"
    assert isinstance(doubled["d"], Note) and doubled["d"].names == ("x", "y")


def test_mapping_several_trees_pairs_dicts_by_key_and_not_by_order() -> None:
    left = {"a": torch.tensor(1.0), "b": torch.tensor(10.0)}
    right = {"b": torch.tensor(20.0), "a": torch.tensor(2.0)}
    total = trees.map_tensors(lambda x, y: x + y, left, right)
    assert {name: float(value) for name, value in total.items()} == {"a": 3, "b": 30}


def test_mapping_lists_of_unequal_length_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        trees.map_tensors(lambda x, y: x, [torch.zeros(1)] * 2, [torch.zeros(1)])


def test_names_follow_keys_fields_and_places() -> None:
    assert [name for name, _ in trees.named_tensors(tree())] == [
        "a", "b.0", "c.0.left", "d.picture",
    ]  # fmt: skip


def test_taking_the_tensors_out_and_putting_them_back_gives_the_same_tree() -> None:
    before = tree()
    after = trees.with_tensors(before, trees.tensors(before))
    assert all(a is b for a, b in zip(trees.tensors(before), trees.tensors(after), strict=True))
    assert trees.shape(before) == trees.shape(after)


def test_stacking_and_unstacking_give_the_rows_back() -> None:
    rows = [tree(1.0), tree(2.0), tree(3.0)]
    stacked = trees.stack(rows)
    assert stacked["d"].picture.shape == (3, 2, 2)
    for row, again in zip(rows, trees.unstack(stacked, 3), strict=True):
        assert all(map(torch.equal, trees.tensors(row), trees.tensors(again)))


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(3), "n": 1},
        {"a": torch.zeros(2, dtype=torch.float64), "n": 1},
        {"a": torch.zeros(2), "n": 2},
        {"b": torch.zeros(2), "n": 1},
        {"a": None, "n": 1},
        {"a": (torch.zeros(2),), "n": 1},
    ],
    ids=["size", "dtype", "plain value", "name", "none", "nesting"],
)
def test_trees_that_cannot_be_stacked_have_another_shape(other: dict[str, Any]) -> None:
    one = {"a": torch.zeros(2), "n": 1}
    assert trees.shape(one) == trees.shape({"a": torch.ones(2), "n": 1})
    assert trees.shape(one) != trees.shape(other)


def test_shapes_can_be_looked_up() -> None:
    assert len({trees.shape(tree(1.0)), trees.shape(tree(2.0))}) == 1


def test_detaching_cuts_every_tensor_off_its_graph() -> None:
    grown = trees.map_tensors(lambda tensor: tensor.clone().requires_grad_() * 2, tree())
    assert all(tensor.requires_grad for tensor in trees.tensors(grown))
    assert not any(tensor.requires_grad for tensor in trees.tensors(trees.detach(grown)))


def test_moving_to_a_device_moves_every_tensor() -> None:
    moved = trees.to(tree(), "meta")
    assert {tensor.device.type for tensor in trees.tensors(moved)} == {"meta"}


def test_a_dict_that_many_trees_hold_is_looked_at_once() -> None:
    weights = {"w": torch.zeros(2, 3)}
    known: dict[int, Any] = {}
    first, second = (trees.shape((weights, number), known) for number in (1, 2))
    assert (first, second) == (trees.shape((weights, 1)), trees.shape((weights, 2)))
    assert first[1][0] is second[1][0] and list(known) == [id(weights)]


def test_columns_of_a_branch_that_all_share_are_those_of_equal_branches() -> None:
    common = tree()
    shared = [{"start": common, "own": torch.full((1,), float(i))} for i in range(3)]
    apart = [{"start": tree(), "own": torch.full((1,), float(i))} for i in range(3)]
    found, wanted = trees.columns(shared), trees.columns(apart)
    assert [len(rows) for rows in found] == [3] * 5
    for rows, others in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True))
    assert all(row is trees.tensors(common)[0] for row in found[0])


def test_trees_are_the_same_when_they_hold_the_same_objects() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    assert trees.same(({"a": one}, ()), ({"a": one}, ()))
    assert not trees.same(({"a": one}, ()), ({"a": other}, ()))
    assert not trees.same({"a": one}, {"b": one})
    assert not trees.same((one,), [one])
    assert not trees.same((one,), (one, one))
