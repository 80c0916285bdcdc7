"""Stacks, batches and classes that are more than a launch has room for along its short axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import gpu
from interpreted import DEVICE, guarded, interpreting, needs_triton, noise
from strict_interpreter import short_axes

pytestmark = needs_triton
MANY, ROOM = 5, 2  # more than twice what there is room for, and no multiple of it
Made = Tensor | tuple[Tensor, ...]


def of(module: str) -> Any:
    return gpu.kernels(f"kernels.{module}")


def squares() -> Made:
    return of("example_blocks").squares(noise(MANY, 7))  # type: ignore[no-any-return]


def weighted_sum() -> Made:
    """Whole numbers, whose sums are exact in any order."""
    examples = MANY * of("example_blocks").SHARE
    rows = guarded(torch.arange(examples * 3).view(examples, 3).float())
    return of("example_blocks").weighted_sum(rows, guarded(torch.arange(examples) % 4.0))  # type: ignore[no-any-return]


def patches() -> Made:
    return of("example_blocks").patches(noise(2, MANY, 3, 4, 4), 1)  # type: ignore[no-any-return]


def class_means() -> Made:
    return of("class_means").class_means(noise(MANY, 3, 4), noise(MANY, 3, of="share"))  # type: ignore[no-any-return]


def laid_out() -> Made:
    return of("stacked_blocks").laid_out(noise(MANY, 3, 2, 3, 3))  # type: ignore[no-any-return]


def stacked_convolution() -> Made:
    laid = guarded(of("stacked_blocks").laid_out(noise(MANY, 3, 2, 3, 3)).cpu())
    return of("stacked_blocks").convolved(noise(3, MANY, 2, 4, 4).transpose(0, 1), laid, 1)  # type: ignore[no-any-return]


def stacked_weight_slopes() -> Made:
    grad = noise(MANY, 2, 3, 4, 4, of="told").half()
    return of("stacked_blocks").weight_slopes(grad, noise(MANY, 2, 2, 4, 4), 1)  # type: ignore[no-any-return]


def squared_weight_slopes() -> Made:
    grad = noise(MANY, 2, 3, 4, 4, of="told").half()
    return of("stacked_blocks").squared_weight_slopes(grad, noise(MANY, 2, 2, 4, 4), 1)  # type: ignore[no-any-return]


def convolved() -> Made:
    x, weight = noise(MANY, 2, 3, 4, 4), noise(MANY, 2, 3, 3, 3, of="weight")
    return of("convolution_stacks").convolved(x, weight, noise(MANY, 2), (1, 1), (1, 1))  # type: ignore[no-any-return]


def to_images() -> Made:
    grad, weight = noise(MANY, 2, 2, 4, 4), noise(MANY, 2, 3, 3, 3, of="weight")
    return of("convolution_stacks").to_images(grad, weight, (4, 4), (1, 1), (1, 1))  # type: ignore[no-any-return]


def to_weights() -> Made:
    grad, x = noise(MANY, 2, 2, 4, 4), noise(MANY, 2, 17, 4, 4, of="seen")
    return of("convolution_stacks").to_weights(grad, x, (3, 3), (1, 1), (1, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        squares, weighted_sum, patches, class_means, laid_out, stacked_convolution,
        stacked_weight_slopes, squared_weight_slopes, convolved, to_images, to_weights,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_more_than_an_axis_has_room_for_is_made_in_several_launches(
    make: Callable[[], Made],
) -> None:
    wanted = make()
    with short_axes(ROOM):
        found = make()
    for one, other in zip(_each(found), _each(wanted), strict=True):
        assert torch.equal(one, other)


def _each(made: Made) -> Iterator[Tensor]:
    yield from [made] if isinstance(made, Tensor) else made


FAR = 2**30


@pytest.mark.parametrize(
    ("shape", "stride", "long"),
    [
        ((50, 32, 128, 32, 32), (2**22, 2**17, 1, 2**12, 2**7), False),  # a network of many
        ((2**11, 2**20), (2**20, 1), False),  # far together, near each for itself
        ((1, 2**30), (0, 1), False),
        ((1, 2**30 + 1), (0, 1), True),
        ((1, 2**12, 2**20), (0, 0, 1), False),  # one for all
        ((1, 3, 8), (0, FAR, 1), True),  # few, with much between them
        ((0, 3, 8), (0, FAR, 1), True),
        ((1, 1, 8), (0, 4 * FAR, 1), False),
    ],
)
def test_places_are_counted_in_64_bits_where_a_member_of_a_stack_is_that_large(
    shape: tuple[int, ...], stride: tuple[int, ...], long: bool
) -> None:
    near = torch.empty(2, 3, device="meta")
    one = torch.empty_strided(shape, stride, device="meta")
    assert (of("grids").long(one), of("grids").long(near, one)) == (long, long)


def test_examples_too_large_for_a_launch_are_fetched_by_the_framework() -> None:
    largest = 2**16 - 1
    assert of("gather").takes(torch.empty(0, 1, largest, 1024, device="meta"))
    assert not of("gather").takes(torch.empty(0, 1, largest + 1, 1024, device="meta"))


@pytest.mark.skipif(DEVICE != "cpu" or not interpreting(), reason="needs the interpreter")
def test_a_launch_of_more_programs_than_a_gpu_takes_is_noticed() -> None:
    rows = torch.ones(2**16, 1)
    found = torch.ones(2**16, 1, dtype=torch.float64)
    with (
        torch.cuda.device_of(rows),  # type: ignore[no-untyped-call]
        pytest.raises(AssertionError, match="more programs along an axis than a GPU takes"),
    ):
        of("example_blocks")._square[(1, 2**16)](rows, found, 1, 2048)
