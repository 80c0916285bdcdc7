"""Augmentation as one or two kernels, with its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.seeds import generator
from fedstill.parts import augment
from fedstill.parts.augment import DEFAULT, OPERATIONS, Draws
from interpreted import guarded, needs_triton, noise, untouched

pytestmark = needs_triton
EXACT = ("crop", "cutout", "flip")  # pixels that are fetched as they are, or not at all
STRATEGIES = [*OPERATIONS, DEFAULT, "color_cutout", "crop_cutout_flip", "crop_rotate"]
SETS = 2
# Places are right to some 2**-22 of a pixel; four shares are fetched, up to nine told back.
NEAR = 2e-5


@pytest.fixture
def kernels() -> Any:
    return gpu.kernels("kernels.augment")


def drawn(strategy: str, shape: tuple[int, ...], seed: int = 7) -> Draws:
    draws = augment.draw(
        generator(seed), strategy, groups=SETS, image=(shape[1], shape[2]), mode="multi"
    )
    return Draws(*(guarded(part) for part in draws))


def double(draws: Draws) -> Draws:
    return Draws(draws.operation, *(part.double() for part in draws[1:]))


def outputs(apply: Any, x: Tensor, draws: Draws, told: Tensor) -> list[Tensor]:
    """What comes out, a gradient, and the gradient of that one."""
    x = x.detach().requires_grad_()
    out = apply(x, draws)
    (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * told).sum(), x)
    return [out.detach(), first.detach(), second]


def check_agree(kernels: Any, x: Tensor, draws: Draws, only: str) -> list[Tensor]:
    """Kernels give what the operations give in double precision; what they give is returned."""
    told, may = noise(*x.shape, of="told"), set(augment.operations(only))
    found = outputs(lambda x, draws: kernels.apply(x, draws, may), x, draws, told)
    wanted = outputs(
        lambda x, draws: augment.apply(x, draws, only=only),
        x.double(),
        double(draws),
        told.double(),
    )
    for one, other in zip(wanted, found, strict=True):
        near = NEAR * float(one.abs().max())
        assert torch.allclose(one, other.double(), rtol=1e-5, atol=near)
    assert untouched(told)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_give_what_the_operations_give(strategy: str, kernels: Any) -> None:
    """With colours three channels are held at once, of four; else one follows another."""
    shape = (3 if "color" in strategy else 2, 7, 5)
    x, draws = noise(SETS, 1, *shape), drawn(strategy, shape)
    check_agree(kernels, x, draws, strategy)
    assert untouched(x, *draws)


@pytest.mark.parametrize("strategy", [DEFAULT, "flip_rotate"])
def test_the_images_of_a_set_are_changed_alike(strategy: str, kernels: Any) -> None:
    x, draws = noise(SETS, 3, 1, 5, 6), drawn(strategy, (1, 5, 6))
    with torch.no_grad():
        found = kernels.apply(x, draws, set(augment.operations(strategy)))
        wanted = augment.apply(x.double(), double(draws), only=strategy)
    assert torch.allclose(wanted, found.double(), rtol=1e-5, atol=NEAR)


# Powers of two, one row or column, and the largest that there may be.
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 1, 1), (2, 1, 9), (1, 9, 1), (4, 64, 64)])
def test_images_of_other_sizes_are_changed_as_the_operations_do(
    shape: tuple[int, int, int], kernels: Any
) -> None:
    check_agree(kernels, noise(SETS, 1, *shape), drawn(DEFAULT, shape), DEFAULT)


@pytest.mark.parametrize("strategy", EXACT)
def test_pixels_that_only_move_keep_every_bit(strategy: str, kernels: Any) -> None:
    x, draws = noise(SETS, 1, 3, 6, 7), drawn(strategy, (3, 6, 7))
    found = kernels.apply(x, draws, {strategy})
    assert torch.equal(found.double(), augment.apply(x.double(), double(draws), only=strategy))


@pytest.mark.parametrize("only", [*OPERATIONS, DEFAULT])
def test_no_bit_is_changed_of_what_was_not_drawn(only: str, kernels: Any) -> None:
    x, told = noise(SETS, 1, 3, 7, 6).requires_grad_(), noise(SETS, 1, 3, 7, 6, of="told")
    out = kernels.apply(x, drawn("none", (3, 7, 6)), set(augment.operations(only)))
    assert torch.equal(out, x)
    assert torch.equal(torch.autograd.grad(out, x, told)[0], told)


def with_values(draws: Draws, **values: Iterable[Any]) -> Draws:
    kept = {
        name: guarded(torch.tensor(value, dtype=torch.float32)) for name, value in values.items()
    }
    return draws._replace(**kept)


@pytest.mark.parametrize(
    ("factors", "with_color"),
    [((2 / 3, 2 / 3), False), ((2 / 3, 2 / 3), True), ((0.67, 2.5), True), ((1.0, 3.0), False)],
)
def test_the_gradient_finds_all_pixels_that_were_fetched_at_any_scale(
    factors: tuple[float, float], with_color: bool, kernels: Any
) -> None:
    """Factors are 2/3 or more."""
    draws = drawn("color_crop_flip" if with_color else "crop_flip", (1, 8, 7))
    draws = with_values(draws, scale=[factors, factors[::-1]])
    only = "color_crop_flip_scale" if with_color else "crop_flip_scale"
    check_agree(kernels, noise(SETS, 1, 1, 8, 7), draws, only)


def test_the_gradient_finds_all_pixels_that_were_fetched_at_any_angle(kernels: Any) -> None:
    for angles in ([[0.8], [-2.0]], [[3.14], [1.5]]):
        draws = with_values(drawn("none", (1, 8, 7)), rotate=angles)
        check_agree(kernels, noise(SETS, 1, 1, 8, 7), draws, "rotate")


def test_holes_and_shifts_beyond_the_border_leave_nothing(kernels: Any) -> None:
    draws = with_values(
        drawn("none", (2, 5, 6)), crop=[[9, -9], [2, 1]], cutout=[[0, 5, 0, 6], [-3, 99, 0, 3]]
    )
    found = check_agree(kernels, noise(SETS, 1, 2, 5, 6), draws, "crop_cutout")
    assert (found[0][0] == 0).all() and (found[0][1] != 0).any()


def test_images_slopes_and_draws_are_taken_however_they_lie(kernels: Any) -> None:
    x, draws = noise(SETS, 1, 6, 7, 3).permute(0, 1, 4, 3, 2), drawn(DEFAULT, (3, 7, 6))
    turned = Draws(draws.operation, *(part.T.contiguous().T for part in draws[1:]))
    free = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(kernels.apply(free, turned, set(OPERATIONS)).sum(), free)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(augment.apply(exact, double(turned)).sum(), exact)
    assert torch.allclose(wanted, slope.double(), rtol=1e-5, atol=NEAR * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((1, 1, 4, 64, 64), True),
        ((2, 3, 1, 1, 4096), True),
        ((1, 1, 5, 8, 8), False),
        ((1, 1, 3, 64, 65), False),
        ((2, 0, 3, 8, 8), False),
        ((0, 2, 3, 8, 8), False),
        ((1, 3, 8, 8), False),
    ],
)
def test_images_that_no_program_holds_are_not_taken(
    shape: tuple[int, ...], taken: bool, kernels: Any
) -> None:
    assert kernels.takes(torch.empty(shape, device="meta")) == taken
