"""The strict interpreter notices what a kernel does wrong; other tests of kernels rely on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interpreted import DEVICE, guarded, needs_triton, noise
from roundings import near, near_on_the_whole, within
from strict_interpreter import strictly

pytestmark = [needs_triton, pytest.mark.skipif(DEVICE != "cpu", reason="no interpreter on a GPU")]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with strictly():
        yield


@triton.jit
def _copy(given, made, count, first, NUMBERS: tl.constexpr, MASKED: tl.constexpr):
    place = first + tl.arange(0, NUMBERS)
    if MASKED:
        here = place < count
        tl.store(made + place, tl.load(given + place, mask=here, other=0.0), mask=here)
    else:
        tl.store(made + place, tl.load(given + place))


@triton.jit
def _larger(given, made, NUMBERS: tl.constexpr):
    place = tl.arange(0, NUMBERS)
    tl.store(made + place, tl.maximum(tl.load(given + place), 0.0))


def copied(given: torch.Tensor, made: torch.Tensor, *more: Any) -> None:
    with torch.cuda.device_of(given):  # type: ignore[no-untyped-call]
        _copy[(1,)](given, made, *more)


def test_a_kernel_that_keeps_to_its_tensors_is_let_through() -> None:
    given = noise(5)
    made = torch.empty_like(given)
    copied(given, made, 5, 0, 8, True)
    assert torch.equal(made, given)


@pytest.mark.parametrize(("count", "first", "masked"), [(6, 0, True), (5, -1, True), (5, 0, False)])
def test_reading_or_writing_beside_a_tensor_is_noticed(
    count: int, first: int, masked: bool
) -> None:
    given, larger = noise(5), noise(9, of="larger")
    with pytest.raises(Exception, match="beside the tensors of the launch"):
        copied(given, larger[1:], count, first, 8, masked)
    with pytest.raises(Exception, match="beside the tensors of the launch"):
        copied(larger[1:], given, count, first, 8, masked)


def test_what_is_not_written_is_no_number() -> None:
    given = noise(5)
    for made in (torch.empty_like(given), given.new_empty(5), torch.empty(5, device=DEVICE)):
        copied(given, made, 3, 0, 8, True)
        assert made.isnan().tolist() == [False, False, False, True, True]


def test_the_larger_of_none_and_a_number_is_the_number_unless_asked_otherwise() -> None:
    given = guarded(torch.tensor([float("nan"), -1.0, 2.0, 0.5]))
    made = torch.empty_like(given)
    with torch.cuda.device_of(given):  # type: ignore[no-untyped-call]
        _larger[(1,)](given, made, 4)
    assert made.tolist() == [0.0, 0.0, 2.0, 0.5]


def test_a_launch_without_a_chosen_device_is_noticed() -> None:
    given = noise(5)
    with pytest.raises(AssertionError, match="no device was chosen"):
        _copy[(1,)](given, torch.empty_like(given), 5, 0, 8, True)


def test_what_is_written_around_a_result_is_noticed_in_the_end() -> None:
    with pytest.raises(AssertionError), strictly():
        made = torch.empty(3, device=DEVICE)
        torch.as_strided(made, (1,), (1,), made.storage_offset() - 1).zero_()


def test_numbers_that_are_further_off_than_roundings_make_them_are_not_near() -> None:
    exact = torch.linspace(1, 2, 9).double()
    for share, enough in ((2.0**-12, True), (2.0**-9, False)):
        off = exact * (1 + share)
        assert near(off, exact, roundings=1) == enough
        assert near_on_the_whole(off, exact, roundings=1) == enough
        assert within(off.half(), exact, 0.0, 1) == enough
    one = exact.clone()
    one[3] *= 1.001
    assert near_on_the_whole(one, exact, roundings=1) and not near(one, exact, roundings=1)
    assert not near(exact[1:], exact) and not within(exact.float(), exact * 1.00001, 1.0, 1)
    assert not near(exact * float("nan"), exact, also=9)
