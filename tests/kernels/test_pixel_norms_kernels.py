"""Instance norm of maps that lie pixel by pixel, with what is added to it and its activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from interpreted import guarded, needs_triton, noise, untouched

pytestmark = needs_triton
NORMS = "kernels.pixel_norms"
EPS = 1e-5
# Few channels and pixels, and one; more channels than a program's (64); more pixels (1024), in two
# groups of channels.
SIZES = [(2, 3, 5, 7), (1, 1, 1, 2), (3, 2, 1, 1), (1, 70, 3, 2), (1, 18, 33, 32)]
# A map's mean, deviation and slopes are sums of up to 1056 numbers, each rounded to 2**-24.
NEAR = {"rtol": 1e-4, "atol": 1e-5}
HALF = {"rtol": 2**-9, "atol": 2**-9}  # what comes out is rounded to 2**-11, once or twice


def by_pixel(*size: int, of: str = "maps", dtype: torch.dtype = torch.float32) -> Tensor:
    """Guarded maps [image, channel, y, x], all channels of a pixel side by side."""
    images, channels, height, width = size
    laid = noise(images, height, width, channels, of=of)
    return guarded(laid.cpu().to(dtype)).permute(0, 3, 1, 2)


def exact(maps: Tensor, scale: Tensor, shift: Tensor, added: Tensor | None, relu: bool) -> Tensor:
    """The same in plain operations, for double precision."""
    away = maps - maps.mean((2, 3), keepdim=True)
    normal = away / (away.square().mean((2, 3), keepdim=True) + EPS).sqrt()
    made = normal * scale[:, None, None] + shift[:, None, None]
    made = made if added is None else made + added
    return F.relu(made) if relu else made


def moving(*given: Tensor | None) -> list[Tensor]:
    return [one for one in given if one is not None]


def asked(*given: Tensor | None, double: bool) -> list[Tensor | None]:
    """The same, as leaves of their own that want a gradient."""
    return [
        None if one is None else (one.double() if double else one).detach().requires_grad_()
        for one in given
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["single", "half"])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "plain"])
@pytest.mark.parametrize("adds", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize("size", SIZES)
def test_the_norm_and_its_gradient_are_those_of_the_operations(
    size: tuple[int, ...], adds: bool, relu: bool, dtype: torch.dtype
) -> None:
    maps, told = by_pixel(*size, dtype=dtype), by_pixel(*size, of="told", dtype=dtype)
    added = by_pixel(*size, of="added", dtype=dtype) if adds else None
    scale, shift = noise(size[1], of="scale"), noise(size[1], of="shift")
    given = maps, scale, shift, added
    near = NEAR if dtype == torch.float32 else HALF
    free, plain = asked(*given, double=True), asked(*given, double=False)
    wanted = exact(*free, relu)  # type: ignore[arg-type]
    normed = gpu.kernels(NORMS).normed
    found = normed(*plain, relu=relu)
    with torch.no_grad():
        assert torch.equal(normed(*plain, relu=relu), found)
    assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(wanted, found.double(), **near)
    slopes = torch.autograd.grad(found, moving(*plain), told)
    for one, other in zip(
        torch.autograd.grad(wanted, moving(*free), told.double()), slopes, strict=True
    ):
        # Gradients are rounded where they are small beside those that were summed up.
        size_of = float(one.abs().max()) + 1
        assert torch.allclose(one, other.double(), rtol=near["rtol"], atol=near["atol"] * size_of)
    assert untouched(maps, told, scale, shift, *moving(added))


@pytest.mark.parametrize("adds", [True, False], ids=["added", "alone"])
def test_gradients_have_gradients(adds: bool) -> None:
    """The other arm is made of the maps, as in a residual block."""
    maps, scale, shift = by_pixel(2, 3, 5, 4), noise(3, of="scale"), noise(3, of="shift")
    bent = []
    for double in (True, False):
        free, stretch, offset = asked(maps, scale, shift, double=double)
        assert free is not None and stretch is not None and offset is not None
        arm = free.sin() if adds else None
        if double:
            made = exact(free, stretch, offset, arm, True)
        else:
            made = gpu.kernels(NORMS).normed(free, stretch, offset, arm)
        first = torch.autograd.grad(made.pow(3).sum(), [free, stretch, offset], create_graph=True)
        length = torch.stack([one.square().sum() for one in first]).sum()
        bent.append(torch.autograd.grad(length, [free, stretch, offset]))
    for one, other in zip(*bent, strict=True):
        assert (one - other.double()).norm() <= 1e-4 * one.norm()


def test_maps_and_constants_are_taken_however_they_lie() -> None:
    maps, added = noise(2, 3, 5, 4), noise(2, 3, 4, 5, of="added").transpose(2, 3)
    both = torch.stack([noise(3, of="scale"), noise(3, of="shift")], 1)
    found = gpu.kernels(NORMS).normed(maps, both[:, 0], both[:1, 1].expand(3), added)
    doubles = (one.double() for one in (maps, both[:, 0], both[:1, 1].expand(3), added))
    assert torch.allclose(exact(*doubles, True), found.double(), **NEAR)
    free = maps.requires_grad_()
    made = gpu.kernels(NORMS).normed(free, both[:, 0], both[:, 1], added)
    (slope,) = torch.autograd.grad(made.sum(), free)  # what is told is one number for all
    double = maps.detach().double().requires_grad_()
    wanted = exact(double, both[:, 0].double(), both[:, 1].double(), added.double(), True)
    assert torch.allclose(torch.autograd.grad(wanted.sum(), double)[0], slope.double(), **NEAR)


def test_no_images_make_no_maps_and_say_nothing() -> None:
    maps, scale, shift = by_pixel(0, 3, 4, 4).requires_grad_(), noise(3), noise(3, of="shift")
    made = gpu.kernels(NORMS).normed(maps, scale.requires_grad_(), shift)
    assert made.shape == (0, 3, 4, 4)
    assert (torch.autograd.grad(made.sum(), scale)[0] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("large", [False, True], ids=["one part", "parts"])
def test_what_is_no_number_is_seen_in_its_map_alone(large: bool) -> None:
    maps = by_pixel(2, 2, *((33, 32) if large else (4, 3)))
    maps[1, 0, 2, 1] = float("nan")
    scale, shift = noise(2, of="scale"), noise(2, of="shift")
    made = gpu.kernels(NORMS).normed(maps.requires_grad_(), scale, shift)
    (slope,) = torch.autograd.grad(made.sum(), maps)
    for tensor in (made, slope):
        spoiled = tensor.isnan().flatten(2)
        assert spoiled[1, 0].all() and not spoiled[0].any() and not spoiled[1, 1].any()


def test_what_is_told_to_what_is_no_number_is_not_lost() -> None:
    maps, added = by_pixel(1, 1, 3, 3), by_pixel(1, 1, 3, 3, of="added")
    added[0, 0, 1, 1] = float("nan")
    one = torch.ones(1, device=maps.device)
    made = gpu.kernels(NORMS).normed(maps, one, 9 * one, added.requires_grad_())
    (slope,) = torch.autograd.grad(made.sum(), added)
    assert made.isnan().sum() == 1 and (slope == 1).all()
