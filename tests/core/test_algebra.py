"""Algebra: laws of means and products, and what integers keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import algebra, trees
from fedstill.core.records import Weights
from fedstill.core.seeds import generator

CUDA = torch.cuda.is_available()
initial = settings(max_examples=30, deadline=None, derandomize=True)
names = st.integers(0, 10_000)
shares = st.lists(st.floats(0.1, 100), min_size=1, max_size=5)


def weights(name: int, rows: int = 3) -> Weights:
    rng = generator(0, "algebra", name)
    return {
        "layer.weight": torch.randn(rows, 2, generator=rng, dtype=torch.float64),
        "norm.running_mean": torch.randn(rows, generator=rng, dtype=torch.float64),
        "norm.num_batches_tracked": torch.tensor(name),
    }


def close(left: Weights, right: Weights) -> bool:
    return all(torch.allclose(left[n], right[n], rtol=1e-12, atol=1e-12) for n in left)


@initial
@given(name=names, shares=shares)
def test_the_mean_of_equal_things_is_the_thing(name: int, shares: list[float]) -> None:
    assert close(algebra.mean([weights(name)] * len(shares), shares), weights(name))


@initial
@given(name=names, shares=shares, factor=st.floats(-3, 3))
def test_the_mean_is_linear(name: int, shares: list[float], factor: float) -> None:
    left = [weights(name + i) for i in range(len(shares))]
    right = [weights(name + 100 + i) for i in range(len(shares))]
    together = algebra.mean(
        [algebra.add(a, b, factor) for a, b in zip(left, right, strict=True)], shares
    )
    apart = algebra.add(algebra.mean(left, shares), algebra.mean(right, shares), factor)
    assert close(together, apart)


@initial
@given(name=names, shares=shares, factor=st.floats(0.01, 100))
def test_only_the_proportions_of_shares_matter(
    name: int, shares: list[float], factor: float
) -> None:
    items = [weights(name + i) for i in range(len(shares))]
    larger = [factor * share for share in shares]
    plain, scaled = algebra.mean(items, shares), algebra.mean(items, larger)
    assert close(plain, scaled)


@initial
@given(name=names, factor=st.floats(-3, 3))
def test_the_dot_product_is_symmetric_and_linear(name: int, factor: float) -> None:
    a, b, c = weights(name), weights(name + 1), weights(name + 2)
    assert float(algebra.dot(a, b)) == pytest.approx(float(algebra.dot(b, a)))
    expected = float(algebra.dot(a, b)) + factor * float(algebra.dot(a, c))
    assert float(algebra.dot(a, algebra.add(b, c, factor))) == pytest.approx(expected, abs=1e-9)


@initial
@given(name=names)
def test_a_square_is_a_thing_times_itself(name: int) -> None:
    assert float(algebra.square(weights(name))) == pytest.approx(
        float(algebra.dot(weights(name), weights(name)))
    )


@initial
@given(name=names)
def test_subtracting_what_was_added_gives_the_start(name: int) -> None:
    a, b = weights(name), weights(name + 1)
    assert close(algebra.sub(algebra.add(a, b), b), a)


def test_a_weighted_mean_by_hand() -> None:
    items = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([5.0, 8.0])}]
    assert algebra.mean(items, [3, 1])["w"].tolist() == [(3 * 1 + 5) / 4, 8 / 4]
    assert algebra.mean(items)["w"].tolist() == [3, 4]


def tensors(name: int, *kinds: torch.dtype) -> Weights:
    """Small and large ones, a number and nothing, of every kind."""
    rng = generator(0, "bits", name)
    shapes = ((), (3,), (5, 7), (0,), (2, 3, 3, 3), (trees.SMALL + 1,))
    return {
        f"{kind}.{shape}": torch.randn(shape, generator=rng).to(kind)
        for kind in kinds
        for shape in shapes
    }


def one_by_one(items: list[Weights], shares: list[float]) -> Weights:
    """The mean as one writes it down."""
    total = sum(shares)
    made = {name: tensor * (shares[0] / total) for name, tensor in items[0].items()}
    for item, share in zip(items[1:], shares[1:], strict=True):
        made = {name: tensor + item[name] * (share / total) for name, tensor in made.items()}
    return made


def same_bits(left: Weights, right: Weights) -> bool:
    return list(left) == list(right) and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def test_a_mean_has_the_bits_of_products_added_one_after_another() -> None:
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for count in (1, 2, 5):
        items = [tensors(name, *kinds) for name in range(count)]
        shares = [0.1 + 3.7 * name for name in range(count)]
        assert same_bits(algebra.mean(items, shares), one_by_one(items, shares))


def test_a_mean_pairs_tensors_by_name_whatever_their_order() -> None:
    first, second = tensors(0, torch.float32), tensors(1, torch.float32)
    turned = dict(reversed(second.items()))
    assert same_bits(algebra.mean([first, turned]), one_by_one([first, second], [1, 1]))


def test_a_mean_of_tensors_that_differ_in_kind_or_lie_otherwise_is_the_same() -> None:
    first, second = tensors(0, torch.float32), tensors(1, torch.float32)
    second = {name: tensor.double() for name, tensor in second.items()}
    assert same_bits(algebra.mean([first, second], [1, 2]), one_by_one([first, second], [1, 2]))
    items = [
        {"w": torch.randn(4, 3, generator=generator(i)).t(), "v": torch.ones(3)} for i in (0, 1)
    ]
    made = algebra.mean(items, [1, 2])
    assert same_bits(made, one_by_one(items, [1, 2])) and made["w"].stride() == (1, 3)


def test_the_tensors_of_a_mean_share_no_memory() -> None:
    made = algebra.mean([tensors(0, torch.float32), tensors(1, torch.float32)])
    places = [tensor.untyped_storage().data_ptr() for tensor in made.values() if tensor.numel()]
    assert len(set(places)) == len(places)


def test_products_by_hand() -> None:
    left = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    right = {"a": torch.tensor([4.0, 5.0]), "b": torch.tensor([[-6.0]])}
    assert float(algebra.dot(left, right)) == 1 * 4 + 2 * 5 - 3 * 6
    assert float(algebra.square(left)) == 1 + 4 + 9


def test_whole_numbers_are_taken_from_the_first_and_never_mixed() -> None:
    first, second = weights(4), weights(9)
    counted = "norm.num_batches_tracked"
    for made in (
        algebra.mean([first, second]),
        algebra.add(first, second),
        algebra.sub(first, second),
        algebra.scale(first, 0.5),
    ):
        assert made[counted] == 4
        assert made[counted].dtype == torch.long
    assert algebra.square({"w": torch.tensor([2.0]), "n": torch.tensor([100])}) == 4


def test_a_mean_of_nothing_or_with_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean needs items"):
        algebra.mean([])
    with pytest.raises(ValueError, match=r"got \[0.0, 0.0\]"):
        algebra.mean([weights(0), weights(1)], [0, 0])


def test_a_moving_average_in_closed_form() -> None:
    def at(number: float) -> dict[str, torch.Tensor]:
        return {"w": torch.tensor([number]), "n": torch.tensor(int(number))}

    average = at(8.0)
    for number in (1.0, 2.0, 3.0):
        average = algebra.moving_average(average, at(number), 0.5)
    assert average["w"].item() == 8 / 8 + 1 / 8 + 2 / 4 + 3 / 2
    assert average["n"].item() == 3  # whole numbers are the latest
    assert algebra.moving_average(at(8.0), at(2.0), 1.0)["w"].item() == 8


def test_zeros_have_the_same_shapes_and_kinds() -> None:
    nothing = algebra.zeros(weights(3))
    assert all(not tensor.any() for tensor in nothing.values())
    assert {n: t.shape for n, t in nothing.items()} == {n: t.shape for n, t in weights(3).items()}


def test_the_trainable_part_leaves_statistics_out() -> None:
    assert list(algebra.parameters(weights(0))) == ["layer.weight"]


def test_nothing_given_is_written_into() -> None:
    first, second = weights(1), weights(2)
    algebra.mean([first, second], [1, 2])
    algebra.add(first, second)
    algebra.scale(first, 3.0)
    assert all(torch.equal(first[n], weights(1)[n]) for n in first)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="needs a GPU"))],
)
def test_several_trees_are_looked_at_together(device: str) -> None:
    fine = {"a": torch.ones(3, device=device), "n": torch.arange(2, device=device)}
    large = {"a": torch.full((4,), 3e38, device=device)}  # whose sum is infinite
    bad = {**fine, "b": torch.tensor([1.0, math.nan], device=device)}
    worse = {**large, "c": torch.tensor([-math.inf], device=device)}
    assert algebra.not_finite_each([fine, bad, {}, large, worse]) == [[], ["b"], [], [], ["c"]]
    assert algebra.not_finite_each([]) == [] and algebra.not_finite_each([{}, {}]) == [[], []]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_tree_may_lie_on_two_devices() -> None:
    tree = {"a": torch.ones(3, device="cuda"), "b": torch.ones(2)}
    bad = {**tree, "b": torch.tensor([math.nan, 1.0]), "c": torch.full((2,), math.inf).cuda()}
    assert algebra.not_finite(tree) == [] and algebra.not_finite(bad) == ["b", "c"]
    assert algebra.not_finite_each([tree, bad]) == [[], ["b", "c"]]


def rows_of(stack: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"weights": row} for row in stack.unbind()]


def test_rows_of_one_stack_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    look = algebra._norms_are_within
    monkeypatch.setattr(
        algebra, "_norms_are_within", lambda tensors, most: seen.append(1) or look(tensors, most)
    )
    assert algebra.not_finite_each(rows_of(torch.ones(50, 4)), 10.0**6) == [[]] * 50
    assert len(seen) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e7])
def test_a_bad_row_of_a_stack_is_found_and_no_other(bad: float) -> None:
    stack = torch.ones(4, 3)
    stack[2, 1] = bad
    assert algebra.not_finite_each(rows_of(stack), 1e6) == [[], [], ["weights"], []]
    sent = [row for place, row in enumerate(rows_of(stack)) if place != 2]
    assert algebra.not_finite_each(sent, 1e6) == [[], [], []]


def test_rows_that_are_many_together_are_looked_at_one_by_one() -> None:
    assert algebra.not_finite_each(rows_of(torch.full((9, 1), 5.0)), 6.0) == [[]] * 9


def test_a_view_that_shows_more_than_its_tensor_is_looked_at_itself() -> None:
    memory = torch.tensor([1.0, math.nan])
    part = torch.empty(0).set_(memory.untyped_storage(), 0, (1,))
    beyond = [{"x": part.as_strided((1,), (1,), 1)} for _ in range(4)]
    assert algebra.not_finite_each(beyond) == [["x"]] * 4
    whole = torch.full((4,), 0x7FC00000, dtype=torch.int32)  # NaN, read as a float
    assert algebra.not_finite_each([{"x": whole.view(torch.float32)}] * 4) == [["x"]] * 4


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_mean_of_many_on_a_gpu_is_that_of_the_host_bit_for_bit() -> None:
    shapes = [(3, 5), (2000,), (), (0, 4)]
    rng = generator(3, "many")
    many = [
        {str(at): torch.randn(shape, generator=rng) for at, shape in enumerate(shapes)}
        | {"count": torch.tensor(at)}
        for at in range(9)
    ]
    shares = [0.3 + at for at in range(9)]
    there = [trees.to(item, "cuda") for item in many]
    there[4]["1"] = there[4]["1"].double()[::1].float()  # lies elsewhere
    found = algebra.mean(there, shares)
    wanted = algebra.mean(many, shares)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].cpu(), tensor)
    there[5]["0"] = there[5]["0"].t().contiguous().t()  # with gaps: no kernel is for it
    assert torch.equal(algebra.mean(there, shares)["0"].cpu(), wanted["0"])
