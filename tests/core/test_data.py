"""Data: plans cover, gathers are exact, and stacked gathers are the single ones side by side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedstill.core import trees
from fedstill.core.data import (
    Batch,
    Batches,
    Data,
    Lazy,
    Plan,
    Pool,
    Rows,
    in_pools,
    in_pools_at_once,
)
from fedstill.core.seeds import generator


def pool(start: int, count: int, width: int = 2) -> Pool:
    """Examples that can be told apart: example i is [i, i, ...] with label i modulo 3."""
    number = torch.arange(start, start + count)
    return Pool(number.float().unsqueeze(1).expand(count, width).contiguous(), number % 3)


def of(pool: Pool, *rows: int) -> Data:
    return Data((Rows(pool, torch.tensor(rows, dtype=torch.long)),))


def numbers(x: Tensor) -> list[int]:
    return [int(row[0]) for row in x]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(count=st.integers(0, 20), size=st.integers(1, 25), epochs=st.integers(1, 3))
def test_every_epoch_sees_every_example_exactly_once(count: int, size: int, epochs: int) -> None:
    plan = pool(0, count).all().batches(size, generator(0, count, size), epochs=epochs)
    per_epoch = -(-count // size)
    assert len(plan) == epochs * per_epoch
    for epoch in range(epochs):
        seen = [i for b in plan[epoch * per_epoch : (epoch + 1) * per_epoch] for i in numbers(b.x)]
        assert sorted(seen) == list(range(count))


def test_only_the_last_batch_of_an_epoch_is_smaller() -> None:
    plan = pool(0, 7).all().batches(3, generator(0), epochs=2)
    assert [len(batch.y) for batch in plan] == [3, 3, 1, 3, 3, 1]


def test_each_epoch_has_an_order_of_its_own() -> None:
    plan = pool(0, 20).all().batches(20, generator(0), epochs=2)
    assert numbers(plan[0].x) != numbers(plan[1].x)


def test_a_plan_with_the_same_generator_is_the_same_plan() -> None:
    first, second = (pool(0, 9).all().batches(4, generator(5)) for _ in range(2))
    assert [numbers(b.x) for b in first] == [numbers(b.x) for b in second]


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7])
def test_steps_cut_as_many_epochs_as_they_need(steps: int) -> None:
    data = pool(0, 10).all()
    plan = data.batches(4, generator(0, "plan"), steps=steps)
    long = data.batches(4, generator(0, "plan"), epochs=3)
    assert len(plan) == steps
    assert all(torch.equal(one, other) for one, other in zip(plan.rows, long.rows, strict=False))


def test_no_examples_make_no_batches() -> None:
    assert list(Data().batches(4, generator(0), epochs=3)) == []
    assert len(Data()) == 0 and Data().labels.shape == (0,)


def test_bytes_are_normalised_by_hand() -> None:
    stored = torch.tensor([[[[0, 51]], [[102, 255]]]], dtype=torch.uint8)  # [1, 2, 1, 2]
    mean, std = (
        torch.tensor([0.5, 0.2]).reshape(2, 1, 1),
        torch.tensor([0.25, 0.4]).reshape(2, 1, 1),
    )
    x = Pool(stored, torch.tensor([1]), mean, std).all().all().x
    red = [(0 / 255 - 0.5) / 0.25, (51 / 255 - 0.5) / 0.25]
    green = [(102 / 255 - 0.2) / 0.4, (255 / 255 - 0.2) / 0.4]
    assert x.flatten().tolist() == pytest.approx([*red, *green])
    assert stored.flatten().tolist() == [0, 51, 102, 255]


def test_a_batch_has_the_bits_of_indexing_and_the_stored_bytes_stay() -> None:
    stored = torch.randint(0, 256, (9, 3, 4, 4), dtype=torch.uint8, generator=generator(0))
    before, shape = stored.clone(), (-1, 1, 1)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.7, 0.9])
    held = Pool(stored, torch.arange(9), mean.reshape(shape), std.reshape(shape))
    for rows in (torch.tensor([4, 0, 4]), torch.tensor([[8, 1], [2, 2]]), torch.tensor(3)):
        x, y = held.all().take(rows)
        by_hand = (stored[rows].float() / 255.0 - mean.reshape(shape)) / std.reshape(shape)
        assert torch.equal(x, by_hand) and torch.equal(y, rows)
    assert torch.equal(stored, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 50, 40)])
def test_a_batch_on_a_gpu_has_the_bits_of_one_on_a_cpu(shape: tuple[int, int, int]) -> None:
    stored = torch.randint(256, (50, *shape), generator=generator(0), dtype=torch.uint8)
    mean = torch.rand(shape[0], 1, 1, generator=generator(1))
    pool = Pool(stored, torch.arange(50), mean, mean / 3 + 0.1)
    rows = torch.randint(50, (4, 7), generator=generator(2))
    found, expected = pool.to("cuda").take(rows.cuda()), pool.take(rows)
    assert torch.equal(found.x.cpu(), expected.x) and torch.equal(found.y.cpu(), expected.y)
    assert pool.to("cuda").take(rows[:0].cuda()).x.shape == (0, 7, *shape)


def test_floats_that_are_normalised_are_not_written_into() -> None:
    stored = torch.tensor([[1.0], [3.0]])
    held = Pool(stored, torch.arange(2), torch.tensor(1.0), torch.tensor(2.0))
    assert held.normalised(stored).tolist() == [[0.0], [1.0]]
    assert stored.tolist() == [[1.0], [3.0]]


def test_bytes_without_mean_and_deviation_lie_between_zero_and_one() -> None:
    x = Pool(torch.tensor([[0], [255]], dtype=torch.uint8), torch.tensor([0, 0])).all().all().x
    assert x.flatten().tolist() == [0, 1]


def test_floats_are_taken_as_they_are_stored() -> None:
    assert torch.equal(
        Data.of(torch.tensor([[300.0]]), torch.tensor([0])).all().x, torch.tensor([[300.0]])
    )


def test_examples_of_several_pools_are_gathered_from_whichever_holds_them() -> None:
    mixed = of(pool(0, 5), 4, 1) + Data((Rows(pool(50, 3), torch.zeros(0, dtype=torch.long)),))
    mixed += of(pool(10, 5), 2) + of(pool(20, 5), 0, 3, 3)
    everything = [4, 1, 12, 20, 23, 23]
    assert len(mixed) == 6
    assert numbers(mixed.all().x) == everything
    assert mixed.labels.tolist() == [number % 3 for number in everything]
    picked = mixed.take(torch.tensor([5, 0, 2, 2, 1]))
    assert numbers(picked.x) == [23, 4, 12, 12, 1]
    assert picked.y.tolist() == [23 % 3, 4 % 3, 12 % 3, 12 % 3, 1]


def test_a_gather_keeps_the_shape_of_its_index() -> None:
    index = torch.tensor([[0, 2], [1, 1]])
    for data in (of(pool(0, 5), 4, 1, 3), of(pool(0, 5), 4) + of(pool(0, 5), 1, 3)):
        batch = data.take(index)
        assert batch.x.shape == (2, 2, 2)
        assert batch.x[..., 0].tolist() == [[4, 3], [1, 1]]
        assert batch.y.tolist() == [[1, 0], [1, 1]]


def test_each_pool_normalises_its_own_examples() -> None:
    dark = Pool(
        torch.zeros(1, 1, dtype=torch.uint8),
        torch.tensor([0]),
        torch.tensor(0.5),
        torch.tensor(0.5),
    )
    plain = Pool(torch.full((1, 1), 9.0), torch.tensor([1]))
    assert (dark.all() + plain.all()).all().x.flatten().tolist() == [(0 - 0.5) / 0.5, 9.0]


def test_a_batch_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no examples"):
        Data().all()


@pytest.mark.parametrize("mixed", [False, True], ids=["one pool", "two pools"])
def test_a_subset_is_in_the_order_asked_for(mixed: bool) -> None:
    data = of(pool(0, 9), 8, 6) + of(pool(0, 9), 4) if mixed else of(pool(0, 9), 8, 6, 4)
    assert numbers(data.subset(torch.tensor([2, 0])).all().x) == [4, 8]


def test_chunks_walk_through_everything_in_order() -> None:
    chunks = [numbers(batch.x) for batch in pool(0, 5).all().chunks(2)]
    assert chunks == [[0, 1], [2, 3], [4]]


def test_counts_and_places_by_class() -> None:
    data = of(pool(0, 9), 0, 3, 4, 6)  # labels 0, 0, 1, 0
    assert data.counts(4).tolist() == [3, 1, 0, 0]
    assert [rows.tolist() for rows in data.by_class(3)] == [[0, 1, 3], [2], []]


def test_made_batches_have_a_length_and_an_end() -> None:
    made = Lazy(3, lambda step: step * step)
    assert list(made) == [0, 1, 4]
    assert made[1:] == [1, 4]
    for beyond in (3, -1):
        with pytest.raises(IndexError):
            made[beyond]


def single_gathers(plans: list[Plan], step: int) -> dict[int, Batch]:
    return {place: plan[step] for place, plan in enumerate(plans)}


def assert_side_by_side(groups: list[tuple[list[int], Batch]], expected: dict[int, Batch]) -> None:
    """Every plan is in one group, with the very batch it has alone."""
    assert sorted(place for places, _ in groups for place in places) == sorted(expected)
    for places, stacked in groups:
        for row, place in enumerate(places):
            assert torch.equal(stacked.x[row], expected[place].x)
            assert torch.equal(stacked.y[row], expected[place].y)


def plans_of(*data: Data, size: int = 4) -> list[Plan]:
    return [d.batches(size, generator(0, "plan", i)) for i, d in enumerate(data)]


def test_plans_over_one_pool_are_gathered_together() -> None:
    shared = pool(0, 12)
    plans = plans_of(of(shared, *range(6)), of(shared, *range(3, 9)), of(shared, *range(6, 12)))
    for step in range(2):
        groups = Plan.together(plans)(len(plans), step)
        assert [places for places, _ in groups] == [[0, 1, 2]]
        assert_side_by_side(groups, single_gathers(plans, step))


def test_plans_over_different_pools_are_laid_behind_each_other() -> None:
    shared = pool(0, 12)
    plans = plans_of(of(shared, *range(6)), pool(100, 6).all(), of(shared, *range(6, 12)))
    groups = Plan.together(plans)(len(plans), 0)
    assert [sorted(places) for places, _ in groups] == [[0, 1, 2]]
    assert_side_by_side(groups, single_gathers(plans, 0))


def test_ragged_plans_fall_into_groups_of_equal_size() -> None:
    shared = pool(0, 12)
    plans = plans_of(
        of(shared, *range(6)), of(shared, *range(7)), of(shared, *range(2, 8)), pool(50, 7).all()
    )
    groups = Plan.together(plans)(len(plans), 1)  # the second batches have 2, 3, 2 and 3 examples
    assert sorted(sorted(places) for places, _ in groups) == [[0, 2], [1, 3]]
    assert_side_by_side(groups, single_gathers(plans, 1))


def test_plans_over_mixed_data_and_other_batches_are_stacked_by_shape() -> None:
    mixed = of(pool(0, 5), 0, 1) + of(pool(10, 5), 0, 1)
    plans = [*plans_of(mixed, pool(30, 4).all()), Lazy(1, lambda step: pool(0, 4).all().all())]
    groups = Plan.together(plans)(len(plans), 0)
    assert_side_by_side(groups, single_gathers(plans, 0))


def test_batches_of_any_kind_are_stacked_by_shape() -> None:
    plans = [[{"x": torch.full((n,), float(i))}] for i, n in enumerate((2, 3, 2))]
    groups = Batches.together(plans)(len(plans), 0)
    assert [places for places, _ in groups] == [[0, 2], [1]]
    assert trees.tensors(groups[0][1])[0].tolist() == [[0, 0], [2, 2]]


def test_a_pool_moves_with_its_statistics() -> None:
    moved = Pool(torch.zeros(1, 1), torch.zeros(1), torch.tensor(0.5), torch.tensor(0.5)).to("meta")
    kept = [moved.stored, moved.labels, moved.mean, moved.std]
    assert {tensor.device.type for tensor in kept if tensor is not None} == {"meta"}
    assert Pool(torch.zeros(1, 1), torch.zeros(1)).to("meta").mean is None


def test_examples_without_classes_are_known_by_their_place() -> None:
    stored = torch.tensor([[0], [51], [255]], dtype=torch.uint8)
    public = Data.unlabelled(stored, torch.tensor(0.2), torch.tensor(0.5))
    batch = public.take(torch.tensor([2, 1]))
    assert batch.y.tolist() == [2, 1]
    assert batch.x.flatten().tolist() == pytest.approx([1.6, 0.0])
    assert public.subset(torch.tensor([1, 2])).labels.tolist() == [1, 2]


def test_batches_made_ahead_are_those_made_one_by_one() -> None:
    data = of(pool(0, 20), *range(11)) + of(pool(50, 9), *range(8))
    plan = data.batches(4, generator(0, "ahead"))  # four batches of 4 and one of 3
    four = plan.ahead(0, 4)
    assert four is not None
    for step in range(4):
        assert torch.equal(four.x[step], plan[step].x) and torch.equal(four.y[step], plan[step].y)
    assert plan.ahead(1, 4) is None  # the last one is smaller
    assert Lazy(3, lambda step: step).ahead(0, 2) is None


def test_rows_of_many_parties_are_looked_up_at_once_as_one_by_one() -> None:
    # One party's examples are rows 5, 3, 9 of a pool, another's 2, 7; both look at the places told.
    held = pool(0, 10)
    parts = [Rows(held, torch.tensor(rows)) for rows in ([5, 3, 9], [2, 7])]
    parts.append(parts[0])
    orders = [torch.tensor(order) for order in ([2, 0], [1, 0, 1], [1])]
    assert in_pools(parts, orders).tolist() == [9, 5, 7, 2, 7, 3]
    assert in_pools_at_once(parts, orders).tolist() == [9, 5, 7, 2, 7, 3]


def test_steps_without_examples_ahead_are_not_made_together() -> None:
    plan = pool(0, 7).all().batches(3, generator(0))
    assert plan.sizes == [3, 3, 1]
    ahead = plan.ahead(0, 2)
    assert ahead is not None and torch.equal(ahead.x[1], plan[1].x)
    assert plan.ahead(1, 2) is None and plan.ahead(3, 2) is None


def test_inputs_are_those_of_a_batch_without_its_labels() -> None:
    index = torch.tensor([[2, 0], [1, 1]])
    alone, both = pool(0, 4).all(), pool(0, 2).all() + pool(5, 3).all()
    for data in (alone, both):
        assert torch.equal(data.inputs(index), data.take(index).x)
    with pytest.raises(ValueError, match="no examples to take; ask len"):
        Data().inputs(index)
