"""First blocks of ConvNets that are trained in half precision, whose maps are not stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_references import rounded_first_block
from fedstill.core import gpu
from fedstill.models.by_pixel import GAIN
from interpreted import guarded, needs_triton, noise, untouched
from roundings import HALF, near_on_the_whole

pytestmark = needs_triton
# images, inputs, outputs, height, width, padding
SHAPES = [(2, 3, 5, 4, 6, 1), (1, 1, 17, 2, 4, 3), (1, 2, 33, 4, 2, 2), (1, 3, 1, 2, 2, 1)]
LARGE = (1, 1, 70, 12, 14, 3)  # more pooled pixels than a program takes, and more channels
PLACES = [(2, 0), (0, 1), (None, 0), (0, None)]  # of members among the axes: images and weights


def first() -> Any:
    return gpu.kernels("kernels.stacked_first")


def inputs(shape: tuple[int, ...], *members: int) -> list[Tensor]:
    """Images, which are no longer about zero, weights, scale and shift."""
    images, channels, outputs, height, width, _ = shape
    x = guarded(noise(*members, images, channels, height, width).cpu() + 0.5)
    return [
        x, noise(*members, outputs, channels, 3, 3, of="weight"),
        noise(*members, outputs, of="scale"), noise(*members, outputs, of="shift"),
    ]  # fmt: skip


def pooled_size(shape: tuple[int, ...]) -> tuple[int, ...]:
    images, _, outputs, height, width, padding = shape
    return images, outputs, height // 2 + padding - 1, width // 2 + padding - 1


def are_right(every: list[Tensor], padding: int, told: Tensor, made: Tensor, slopes: Any) -> bool:
    """Whether a network's pooled maps and gradients of all that goes in are exact but for rounding.

    Those of images are made by weights that are rounded once more, and of two parts that nearly
    cancel: what patches are told, and what the norm takes of it.
    """
    exact = [one.detach().double().requires_grad_() for one in every]
    wanted = rounded_first_block(*exact, padding)
    x, *others = torch.autograd.grad(wanted, exact, told.double() / GAIN)
    part = rounded_first_block(*exact, padding, fixed=True)
    (heard,) = torch.autograd.grad(part, exact[0], told.double() / GAIN)
    size = heard.norm() + (x - heard).norm()
    return (
        near_on_the_whole(made, wanted, roundings=1)
        and bool((slopes[0] - x).norm() <= 2 * HALF * size)
        and all(
            near_on_the_whole(*pair, roundings=0.1) for pair in zip(slopes[1:], others, strict=True)
        )
    )


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
def test_the_block_of_a_network_alone_is_the_plain_operations_rounded(
    shape: tuple[int, ...],
) -> None:
    moved = [one.requires_grad_() for one in inputs(shape)]
    found = first().block(*moved, shape[-1])
    told = guarded(noise(*pooled_size(shape), of="told").cpu().half())
    slopes = torch.autograd.grad(found, moved, told)
    assert found.dtype == torch.float16 and all(one.dtype == torch.float32 for one in slopes)
    assert are_right(moved, shape[-1], told, found, slopes)
    assert untouched(told, *(one.detach() for one in moved))


@pytest.mark.parametrize(("shape", "dims"), list(zip(SHAPES, PLACES, strict=True)), ids=str)
def test_blocks_of_a_stack_are_those_of_each_network(
    shape: tuple[int, ...], dims: tuple[int | None, int | None]
) -> None:
    """Under a vmap: images, weights or nothing shared, members along any axis."""
    members, alone = inputs(shape, 2), inputs(shape)
    axes = (dims[0], *[dims[1]] * 3)
    every = [
        one if axis is None else many.movedim(0, axis)
        for one, many, axis in zip(alone, members, axes, strict=True)
    ]
    told = guarded(noise(2, *pooled_size(shape), of="told").cpu().half())

    def loss(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, told: Tensor) -> Any:
        made = first().block(x, weight, scale, shift, shape[-1])
        return (made * told).sum(), made

    taken = torch.func.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    slopes, made = torch.func.vmap(taken, in_dims=(*axes, 0))(*every, told)
    for member in range(2):
        own = zip(every, axes, strict=True)
        mine = [one if axis is None else one.select(axis, member) for one, axis in own]
        its_slopes = [one[member] for one in slopes]
        assert are_right(mine, shape[-1], told[member], made[member], its_slopes)
    assert untouched(told, *every)


@pytest.mark.parametrize("padding", [1, 3])
def test_launches_for_a_stack_take_images_in_any_order_and_pooled_maps_too(padding: int) -> None:
    shape = (2, 3, 5, 4, 2, padding)
    x, weight, scale, shift = inputs(shape, 2)
    turned = guarded(x.cpu().permute(4, 1, 0, 3, 2)).permute(2, 1, 4, 3, 0)
    made, *kept = first().forward(turned, weight, scale, shift, padding)
    told = guarded(noise(*made.permute(0, 1, 3, 4, 2).shape, of="told").cpu().half())
    grad = told.permute(0, 1, 4, 2, 3)
    slopes = first().slopes(grad, turned, weight, scale, *kept, padding)
    to_x = first().image_slopes(grad, turned, weight, scale, shift, *kept[:-1], padding)
    for member in range(2):
        mine = [one[member] for one in (x, weight, scale, shift)]
        its_slopes = [one[member] for one in (to_x, *slopes)]
        assert are_right(mine, padding, grad[member], made[member], its_slopes)
    assert untouched(told, turned, weight, scale, shift)


def test_a_block_tells_images_only_if_they_ask_and_nobody_twice() -> None:
    x, *tensors = inputs(SHAPES[0])
    moved = [one.requires_grad_() for one in tensors]
    told = noise(*pooled_size(SHAPES[0]), of="told").half().requires_grad_()
    alone = torch.autograd.grad(first().block(x, *moved, 1), moved, told, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        alone[0].sum().backward()
    found = first().block(x.requires_grad_(), *moved, 1)
    to_x, *others = torch.autograd.grad(found, (x, *moved), told)
    assert to_x.shape == x.shape
    assert all(torch.equal(one, other) for one, other in zip(alone, others, strict=True))


def test_what_is_not_a_number_stays_so() -> None:
    x, *tensors = inputs((3, 1, 2, 2, 2, 1))
    x[1, 0, 1, 1] = float("nan")
    found = first().block(x, *tensors, 1).flatten(1)
    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("shape", "padding", "taken"),
    [
        ((3, 32, 32), 1, True),
        ((1, 28, 28), 3, True),
        ((4, 8, 8), 1, False),
        ((3, 32, 34), 1, False),
    ],
)
def test_few_colours_and_small_images_are_taken(
    shape: tuple[int, ...], padding: int, taken: bool
) -> None:
    assert first().takes(torch.zeros(2, *shape), padding) == taken
