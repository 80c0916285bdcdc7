"""Anchors: sets by their makers, the mean over holders by sums, and streams of batches."""

from __future__ import annotations

import pytest
import torch

from fedstill.core import Batch, Data, algebra
from fedstill.core.seeds import generator
from fedstill.parts.anchors import Sets, beside, over_holders, spread, stream


def known(**rows: list[float]) -> Sets:
    """For each maker one image of one number for the classes 0, 2, …"""
    return Sets(
        {maker: torch.tensor(row).reshape(-1, 1, 1) for maker, row in rows.items()},
        {maker: 2 * torch.arange(len(row)) for maker, row in rows.items()},
    )


def numbers(sets: Sets) -> list[tuple[str, list[float], list[int]]]:
    """Everything in some sets, in order."""
    assert [*sets.images] == [*sets.classes]
    return [(m, sets.images[m].flatten().tolist(), sets.classes[m].tolist()) for m in sets.images]


def test_sets_heard_are_joined_in_the_order_of_their_makers() -> None:
    own = known(b=[1.0])
    joined = own.joined([known(c=[2.0, 3.0], a=[4.0]), known(b=[5.0, 6.0], c=[7.0])])
    assert numbers(joined) == [("a", [4], [0]), ("b", [1], [0]), ("c", [2, 3], [0, 2])]
    assert numbers(own) == [("b", [1], [0])]  # unchanged
    assert numbers(joined.beyond(own)) == [("a", [4], [0]), ("c", [2, 3], [0, 2])]
    assert numbers(own.joined([])) == numbers(own)


def test_a_single_set_is_that_of_its_maker() -> None:
    one = Sets.of("a", torch.tensor([[[4.0]]]), torch.tensor([0]))
    assert numbers(one) == numbers(known(a=[4.0]))


def test_the_set_that_all_share_is_shown_and_of_several_the_own_one() -> None:
    def shown(sets: Sets, node: str) -> dict[str, list[float]]:
        return {name: x.flatten().tolist() for name, (x, _) in sets.pictures_at(node).items()}

    assert shown(known(mean=[4.0]), "a") == {"global": [4]}
    assert shown(known(a=[1.0], b=[2.0, 3.0]), "b") == {"own": [2, 3]}
    assert shown(known(a=[1.0], b=[2.0]), "c") == {} and shown(known(), "c") == {}


def test_images_change_and_classes_stay() -> None:
    assert numbers(known(a=[1.0, 2.0]).mapped(lambda x: 3 * x)) == [("a", [3, 6], [0, 2])]


def test_sums_of_sets_are_over_makers() -> None:
    sums = known(a=[1.0, 2.0], b=[4.0]).sums(4)
    assert sums["images"].flatten().tolist() == [5, 0, 2, 0]
    assert sums["held"].tolist() == [2, 0, 1, 0]


def test_sets_are_labelled_image_by_image_and_laid_one_after_the_other() -> None:
    pairs = Sets.of("b", torch.arange(4.0).reshape(2, 2, 1), torch.tensor([2, 1]))
    sets = pairs.joined([known(a=[9.0])])
    each, every = sets.labelled(), sets.together((1,), "cpu").all()
    assert each["b"].all().x.flatten().tolist() == [0, 1, 2, 3]
    assert each["b"].all().y.tolist() == [2, 2, 1, 1]
    assert every.x.flatten().tolist() == [9, 0, 1, 2, 3]
    assert every.y.tolist() == [0, 2, 2, 1, 1]


def test_no_sets_together_are_no_examples() -> None:
    none = Sets({}, {}).together((3, 2), "cpu")
    assert len(none) == 0 and none.all().x.shape == (0, 3, 2)
    assert none.all().y.dtype == torch.long


def test_a_set_is_laid_out_over_all_classes() -> None:
    made = spread(torch.tensor([[[2.0]], [[5.0]]]), torch.tensor([3, 0]), 4)
    assert made["images"].flatten().tolist() == [5, 0, 0, 2]
    assert made["held"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sums_or_means_of_sets_give_the_mean_over_holders(scale: float) -> None:
    # Class 0: 2 and 4; class 1: nobody; class 3: 8 alone.
    one = spread(torch.tensor([[[2.0]], [[8.0]]]), torch.tensor([0, 3]), 4)
    other = spread(torch.tensor([[[4.0]]]), torch.tensor([0]), 4)
    images, classes = over_holders(algebra.scale(algebra.add(one, other), scale), 0.5 * scale)
    assert classes.tolist() == [0, 3]
    assert images.flatten().tolist() == [3, 8]


def test_batches_are_cut_from_one_order_after_another() -> None:
    found = stream(5, 2, 5, generator(0))
    assert found.shape == (5, 2)
    assert sorted(found.flatten()[:5].tolist()) == sorted(found.flatten()[5:].tolist())
    assert sorted(found.flatten()[:5].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("count", "size", "steps"), [(0, 0, 3), (4, 4, 2), (3, 2, 0)])
def test_no_things_or_no_steps_are_no_trouble(count: int, size: int, steps: int) -> None:
    assert stream(count, size, steps, generator(0)).shape == (steps, size)


def test_beside_the_batches_of_a_plan_stands_what_was_drawn_for_their_steps() -> None:
    data = Data.of(torch.arange(10.0).unsqueeze(1), torch.arange(10))
    plan = data.batches(4, generator(0), epochs=1)  # of 4, 4 and 2 examples
    drawn = torch.tensor([7, 8, 9])

    def make(batch: Batch, step: int | slice) -> tuple[Batch, torch.Tensor]:
        return batch, drawn[step]

    found = beside(plan, make)
    assert len(found) == 3
    assert [row.item() for _, row in found] == [7, 8, 9]
    assert all(torch.equal(found[i][0].y, plan[i].y) for i in range(3))
    ahead = found.ahead(0, 2)
    assert ahead is not None and ahead[1].tolist() == [7, 8]
    assert torch.equal(ahead[0].y, torch.stack([plan[0].y, plan[1].y]))
    assert found.ahead(1, 2) is None  # these are not alike
