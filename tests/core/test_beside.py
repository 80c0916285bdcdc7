"""Work of the host beside other work: the same results, and faults that are not lost."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from fedstill.core.beside import at_once, begun
from fedstill.core.seeds import BLOCK, fill_normal, generator


def drawn(purpose: str) -> torch.Tensor:
    return torch.randn(1000, generator=generator(0, purpose))


def test_draws_beside_each_other_are_those_in_turn() -> None:
    beside = begun(lambda: drawn("one"), "cuda")  # the name of a device, which need not be there
    other = drawn("other")
    assert torch.equal(beside(), drawn("one")) and torch.equal(other, drawn("other"))


def test_only_a_gpu_is_worth_a_thread() -> None:
    assert begun(threading.get_ident, "cpu")() == threading.get_ident()
    assert begun(threading.get_ident, "cuda")() != threading.get_ident()


def test_a_fault_shows_where_the_result_is_asked_for() -> None:
    failing = begun(lambda: 1 // 0, "cuda")
    with pytest.raises(ZeroDivisionError):
        failing()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_works_at_once_are_all_done_and_a_fault_of_one_shows(device: str) -> None:
    done: list[int] = []
    at_once([partial(done.append, number) for number in range(20)], device)
    assert sorted(done) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        at_once([lambda: 1 // 0, lambda: 1], device)


def test_works_at_once_may_be_asked_for_beside_others() -> None:
    def both() -> torch.Tensor:
        numbers = torch.empty(2 * BLOCK)
        fill_normal(numbers, 1, "cuda")
        return numbers

    some = [begun(both, "cuda") for _ in range(5)]  # more than there are threads for them
    first, *others = [one() for one in some]
    assert all(torch.equal(first, other) for other in others)


def test_normal_numbers_are_the_same_whether_threads_draw_them_or_not() -> None:
    in_turn, at_the_same_time = torch.empty(3 * BLOCK + 7), torch.empty(3 * BLOCK + 7)
    fill_normal(in_turn, 5)
    fill_normal(at_the_same_time, 5, "cuda")
    assert torch.equal(in_turn, at_the_same_time)


def test_blocks_of_normal_numbers_differ_and_few_are_those_of_one_generator() -> None:
    numbers = torch.empty(2, BLOCK)
    fill_normal(numbers, 5)
    assert torch.equal(numbers[0], torch.randn(BLOCK, generator=generator(5)))
    first, second = numbers
    assert abs(float(torch.corrcoef(numbers)[0, 1])) < 0.02
    assert abs(float(second.mean())) < 0.02 and abs(float(second.std()) - 1) < 0.02
    assert not torch.equal(first, second)
