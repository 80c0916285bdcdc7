"""The block of a ConvNet that stays as it is, in half precision and by pixel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_references import activation, certain, pooled
from fedstill.core import gpu
from interpreted import guarded, needs_triton, noise, untouched
from roundings import SINGLE, near

pytestmark = needs_triton

# Of one pooled pixel, of fifteen and more channels than a program's, of more pixels than a
# program of one warp takes, of more than a program of four.
SIZES = [(1, 1, 2, 2), (3, 40, 6, 10), (2, 3, 8, 10), (1, 33, 16, 16), (1, 9, 32, 32)]


def kernels() -> Any:
    return gpu.kernels("kernels.half_blocks")


def norm(channels: int) -> tuple[Tensor, Tensor]:
    """A scale and a shift, of which some are below zero."""
    return noise(channels, of="scale"), noise(channels, of="shift")


def maps_of(size: tuple[int, ...], dtype: torch.dtype = torch.half) -> Tensor:
    """Guarded maps that lie by pixel."""
    images, channels, height, width = size
    by_pixel = guarded(noise(images, height, width, channels).cpu().to(dtype))
    return by_pixel.permute(0, 3, 1, 2).requires_grad_()


def told(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    shape = (*size[:2], size[2] // 2, size[3] // 2)
    return guarded(noise(*shape, of="told").cpu().to(dtype))


@pytest.mark.parametrize("last", [False, True], ids=["between", "last"])
@pytest.mark.parametrize("size", SIZES)
def test_a_block_and_its_gradient_are_those_of_the_operations_rounded_once(
    size: tuple[int, ...], last: bool
) -> None:
    maps, (scale, shift) = maps_of(size), norm(size[1])
    exact = maps.detach().double().requires_grad_()
    found = kernels().norm_relu_pool(maps, scale, shift, last=last)
    wanted = pooled(exact, scale, shift)
    assert near(found, wanted, roundings=0 if last else 1)
    order = torch.contiguous_format if last else torch.channels_last
    assert found.dtype == (torch.float32 if last else torch.float16)
    assert found.is_contiguous(memory_format=order)
    with torch.no_grad():
        assert torch.equal(kernels().norm_relu_pool(maps, scale, shift, last=last), found)
    grad = certain(told(size, found.dtype), activation(exact, scale, shift), SINGLE)
    (slope,) = torch.autograd.grad(found, maps, grad)
    (slope_wanted,) = torch.autograd.grad(wanted, exact, grad.double())
    assert slope.dtype == torch.half and near(slope, slope_wanted, roundings=1)
    assert untouched(maps, scale, shift)


@pytest.mark.parametrize("last", [False, True], ids=["between", "last"])
@pytest.mark.parametrize("size", [(3, 40, 6, 10), (2, 3, 8, 10)])
def test_maps_in_single_precision_are_not_rounded(size: tuple[int, ...], last: bool) -> None:
    maps, (scale, shift) = maps_of(size, torch.float32), norm(size[1])
    with torch.no_grad():
        found = kernels().norm_relu_pool(maps, scale, shift, last=last)
    assert found.dtype == torch.float32 and near(found, pooled(maps, scale, shift))
    assert untouched(maps, scale, shift)


def test_maps_scale_shift_and_what_is_told_may_lie_as_they_like() -> None:
    channelwise = guarded(noise(2, 5, 4, 6).cpu().half())[:, 1:4].requires_grad_()
    scale, shift = noise(3, 2, of="scale")[:, 0], noise(6, of="shift")[::2]
    exact = channelwise.detach().double().requires_grad_()
    wanted = pooled(exact, scale, shift)
    (slope_wanted,) = torch.autograd.grad(wanted.sum(), exact)
    for last in (False, True):
        found = kernels().norm_relu_pool(channelwise, scale, shift, last=last)
        assert near(found, wanted, roundings=1)
        (slope,) = torch.autograd.grad(found.sum(), channelwise)  # one number, that lies once
        assert near(slope, slope_wanted, roundings=1)


def test_no_images_have_no_maps() -> None:
    maps = maps_of((0, 3, 6, 4))
    found = kernels().norm_relu_pool(maps, *norm(3))
    assert found.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(found.sum(), maps)[0].shape == (0, 3, 6, 4)


@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_of_a_map_that_is_not_finite_nothing_is_a_number_and_others_do_not_feel_it(
    wild: float,
) -> None:
    maps, both = maps_of((2, 3, 4, 4)), norm(3)
    whole = kernels().norm_relu_pool(maps, *both).detach()
    with torch.no_grad():
        maps[1, 2, 0, 1] = wild
    found = kernels().norm_relu_pool(maps, *both)
    (to_maps,) = torch.autograd.grad(found, maps, told((2, 3, 4, 4), torch.half))
    assert to_maps[1, 2].isnan().all() and not to_maps[1, :2].isnan().any()
    assert not to_maps[0].isnan().any()
    assert found[1, 2].isnan().all()
    assert torch.equal(found[1, :2], whole[1, :2]) and torch.equal(found[0], whole[0])


def test_a_gradient_of_the_gradient_is_refused_where_gains_would_spoil_it() -> None:
    maps = maps_of((2, 3, 4, 4))
    made = kernels().norm_relu_pool(maps, *norm(3), last=True)
    (grad,) = torch.autograd.grad(made.square().sum(), maps, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        torch.autograd.grad(grad.sum(), maps)


def test_a_gain_multiplies_the_gradient_on_its_way_back_and_nothing_else() -> None:
    given = noise(3, 2).requires_grad_()
    found = kernels().gained(given, 8.0)
    assert torch.equal(found, given)
    (slope,) = torch.autograd.grad(found.sum(), given)
    assert torch.equal(slope, torch.full_like(slope, 8.0))
    at_rest = given.detach()
    assert kernels().gained(at_rest, 8.0) is at_rest
    with torch.no_grad():
        assert kernels().gained(given, 8.0) is given


@pytest.mark.parametrize("channels", [1, 3, 33, 128, 200])
@pytest.mark.parametrize("side", [2, 6, 16, 32, 64])
def test_a_program_takes_all_pooled_pixels_of_so_many_channels_as_it_has_room_for(
    channels: int, side: int
) -> None:
    for tiles in (kernels().norm_tiles, kernels().pooling_tiles):
        places, together, warps = tiles(channels, side, side)
        assert places >= (side // 2) ** 2 and places * together <= max(8192, places)
        assert together & (together - 1) == 0 and together < 2 * channels and warps in (1, 4, 8)
