"""Bias, ReLU and max-pooling of maps that lie pixel by pixel; also without a bias."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu, precision
from fedstill.core.model import Norm
from fedstill.models import by_pixel as by_pixel_networks
from fedstill.models.conv4 import Conv4
from interpreted import DEVICE, guarded, needs_triton, noise, untouched

pytestmark = needs_triton
# Few, odd sides, one of all; more channels than a program's (128); more pixels than a program's.
SIZES = [(2, 3, 4, 6), (3, 2, 5, 7), (1, 1, 2, 2), (1, 130, 2, 4), (2, 5, 17, 12)]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def pools() -> Any:
    return gpu.kernels("kernels.pixel_pools")


def by_pixel(*size: int, of: str = "maps", dtype: torch.dtype = torch.float32) -> Tensor:
    """Guarded maps [image, channel, y, x], all channels of a pixel side by side."""
    images, channels, height, width = size
    laid = noise(images, height, width, channels, of=of)
    return guarded(laid.cpu().to(dtype)).permute(0, 3, 1, 2)


def exact(maps: Tensor, bias: Tensor, pooled: bool) -> Tensor:
    return without(maps + bias[:, None, None], pooled)


def without(maps: Tensor, pooled: bool) -> Tensor:
    made = F.relu(maps)
    return F.max_pool2d(made, 2) if pooled else made


def agree(pools: Any, maps: Tensor, bias: Tensor, pooled: bool) -> None:
    """All but sums of gradients are single numbers, rounded once or not at all."""
    free, offset = maps.detach().double().requires_grad_(), bias.double().requires_grad_()
    wanted = exact(free, offset, pooled)
    plain, own = maps.detach().requires_grad_(), bias.detach().requires_grad_()
    found = pools.activated(plain, own, pooled=pooled)
    with torch.no_grad():
        assert torch.equal(pools.activated(plain, own, pooled=pooled), found)
    assert found.dtype == maps.dtype and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, wanted.to(maps.dtype))
    told = by_pixel(*found.shape, of="told", dtype=maps.dtype)
    to_maps, to_bias = torch.autograd.grad(wanted, [free, offset], told.double())
    slope, sums = torch.autograd.grad(found, [plain, own], told)
    assert torch.equal(slope, to_maps.to(maps.dtype))
    step = torch.finfo(bias.dtype).eps  # besides, sums of up to 408 numbers of 2**-24 each
    assert torch.allclose(sums.double(), to_bias, rtol=step, atol=step + 1e-4)
    assert sums.dtype == bias.dtype and untouched(told)


@pytest.mark.parametrize("dtype", DTYPES, ids=["single", "half"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
@pytest.mark.parametrize("size", SIZES)
def test_activations_and_their_gradients_are_those_of_the_operations(
    size: tuple[int, ...], pooled: bool, dtype: torch.dtype, pools: Any
) -> None:
    maps, bias = by_pixel(*size, dtype=dtype), noise(size[1], of="bias").to(dtype)
    bias = guarded(bias.cpu())
    agree(pools, maps, bias, pooled)
    assert untouched(maps, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=["single", "half"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
@pytest.mark.parametrize("size", SIZES)
def test_without_a_bias_nothing_is_rounded(
    size: tuple[int, ...], pooled: bool, dtype: torch.dtype, pools: Any
) -> None:
    maps = by_pixel(*size, dtype=dtype)
    free, plain = (maps.detach().clone().requires_grad_() for _ in range(2))
    found, wanted = pools.activated(plain, None, pooled=pooled), without(free, pooled)
    assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(pools.activated(maps, None, pooled=pooled), found)
    told = by_pixel(*found.shape, of="told", dtype=dtype)
    (slope,) = torch.autograd.grad(found, plain, told)
    assert torch.equal(slope, torch.autograd.grad(wanted, free, told)[0])
    assert untouched(maps, told)


def test_without_a_bias_maps_are_taken_however_they_lie(pools: Any) -> None:
    for maps in (noise(2, 3, 6, 5).transpose(2, 3), noise(2, 3, 6, 10)[..., ::2]):
        free, plain = (maps.detach().requires_grad_() for _ in range(2))
        found, wanted = pools.activated(plain, None, pooled=True), without(free, True)
        assert torch.equal(found, wanted)
        told = noise(1, of="told").expand(found.shape)  # one number for all
        (slope,) = torch.autograd.grad(found, plain, told)
        assert torch.equal(slope, torch.autograd.grad(wanted, free, told)[0])


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_without_a_bias_gradients_have_gradients(pooled: bool, pools: Any) -> None:
    bent = []
    ours = partial(pools.activated, bias=None)
    for make in (partial(ours, pooled=pooled), partial(without, pooled=pooled)):
        maps = by_pixel(2, 3, 5, 4).requires_grad_()
        (first,) = torch.autograd.grad(make(maps).pow(3).sum(), maps, create_graph=True)
        bent.append(torch.autograd.grad(first.square().sum(), maps)[0])
    assert torch.equal(*bent) and float(bent[0].norm()) > 0


def test_without_a_bias_no_images_make_no_maps(pools: Any) -> None:
    maps = by_pixel(0, 3, 4, 4).requires_grad_()
    made = pools.activated(maps, None, pooled=True)
    assert made.shape == (0, 3, 2, 2)
    assert torch.autograd.grad(made.sum(), maps)[0].shape == maps.shape


def test_without_a_bias_what_is_no_number_is_seen(pools: Any) -> None:
    maps = by_pixel(1, 2, 4, 4)
    maps[0, 0] = float("nan")
    maps[0, 1, 0, 3] = float("nan")
    found, wanted = pools.activated(maps.requires_grad_(), None, pooled=True), without(maps, True)
    assert torch.equal(found.isnan(), wanted.isnan()) and found.isnan().sum() == 5
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    (slope,) = torch.autograd.grad(found.sum(), maps)
    assert slope[0, 0].sum() == 4  # all of the first channel
    assert slope[0, 1].sum() == (found[0, 1].isnan() | (found[0, 1] > 0)).sum()


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_a_program_that_takes_pixels_in_turns_gives_the_same(
    pooled: bool, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where there are enough programs to keep a GPU busy: four times 32 pixels."""
    monkeypatch.setattr(pools, "PROGRAMS", 1)
    assert pools._programs(150, 3, 4)[:2] == ((2, 1), 4)
    agree(pools, by_pixel(3, 3, 10, 21), noise(3, of="bias"), pooled)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_maps_and_constants_are_taken_however_they_lie(pooled: bool, pools: Any) -> None:
    bias = noise(3, 2, of="bias")[:, 1]
    agree(pools, noise(2, 3, 6, 5).transpose(2, 3), bias, pooled)
    agree(pools, noise(2, 3, 6, 10)[..., ::2], bias[:1].expand(3), pooled)
    maps = by_pixel(2, 3, 6, 5).requires_grad_()
    made = pools.activated(maps, bias, pooled=pooled)
    (slope,) = torch.autograd.grad(made.sum(), maps)  # what is told is one number for all
    free = maps.detach().double().requires_grad_()
    wanted = torch.autograd.grad(exact(free, bias.double(), pooled).sum(), free)[0]
    assert torch.equal(slope.double(), wanted)


@pytest.mark.parametrize("biased", [True, False])
def test_of_equal_numbers_the_first_hears(biased: bool, pools: Any) -> None:
    """In all sixteen ways in which four pixels are large or small."""
    large = torch.arange(16).unsqueeze(1) // torch.tensor([1, 2, 4, 8]) % 2
    maps = guarded(large.view(16, 1, 2, 2).float() + (not biased)).requires_grad_()
    bias = torch.ones(1, device=maps.device) if biased else None
    made = pools.activated(maps, bias, pooled=True)
    (slope,) = torch.autograd.grad(made.sum(), maps)
    assert torch.equal(slope.view(16, 4).argmax(1), maps.view(16, 4).argmax(1))
    assert (slope.view(16, 4).sum(1) == 1).all() and (slope.view(16, 4).amax(1) == 1).all()


@pytest.mark.usefixtures("device_is_chosen")
def test_a_bias_has_a_share_of_its_gradient(pools: Any) -> None:
    maps, bias = by_pixel(2, 3, 4, 4), noise(3, of="bias")
    told = by_pixel(2, 3, 2, 2, of="told")
    whole, half = (pools._backward(maps, bias, told, True, scale) for scale in (1.0, 0.5))
    assert torch.equal(whole[0], half[0]) and torch.equal(whole[1], 2 * half[1])


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_gradients_have_gradients(pooled: bool, pools: Any) -> None:
    maps, bias = by_pixel(2, 3, 5, 4), noise(3, of="bias")
    bent = []
    for dtype in (torch.float64, torch.float32):
        free, offset = (one.to(dtype).detach().requires_grad_() for one in (maps, bias))
        single = dtype == torch.float32
        made = (
            pools.activated(free, offset, pooled=pooled) if single else exact(free, offset, pooled)
        )
        first = torch.autograd.grad(made.pow(3).sum(), [free, offset], create_graph=True)
        length = torch.stack([one.square().sum() for one in first]).sum()
        bent.append(torch.autograd.grad(length, [free, offset]))
    for one, other in zip(*bent, strict=True):
        assert torch.allclose(one, other.double(), rtol=1e-5, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_no_images_make_no_maps_and_say_nothing(pooled: bool, pools: Any) -> None:
    maps, bias = by_pixel(0, 3, 4, 4), noise(3, of="bias").requires_grad_()
    made = pools.activated(maps, bias, pooled=pooled)
    assert made.shape == (0, 3, *((2, 2) if pooled else (4, 4)))
    assert (torch.autograd.grad(made.sum(), bias)[0] == 0).all()


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "whole"])
def test_what_is_no_number_is_seen_and_what_is_told_to_it_is_not_lost(
    pooled: bool, pools: Any
) -> None:
    maps, bias = by_pixel(1, 2, 4, 4), noise(2, of="bias").requires_grad_()
    maps[0, 0] = float("nan")
    maps[0, 1, 0, 0] = float("nan")
    made = pools.activated(maps.requires_grad_(), bias, pooled=pooled)
    assert made[0, 0].isnan().all() and made[0, 1].isnan().sum() == 1
    to_maps, to_bias = torch.autograd.grad(made.sum(), [maps, bias])
    heard = made.shape[2] * made.shape[3]  # all of the first channel
    assert to_maps[0, 0].sum() == heard and to_bias[0] == heard
    assert to_bias[1] == (made[0, 1].isnan() | (made[0, 1] > 0)).sum()


@pytest.mark.parametrize("half", [False, True], ids=["single", "half"])
@pytest.mark.parametrize("last_pool", [False, True])
@pytest.mark.parametrize("norm", ["static", "batch", "none", "instance"])
def test_conv4_pools_by_the_kernel(
    norm: Norm, last_pool: bool, half: bool, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the framework's operations: bit for bit, where those always sum in one order."""
    model = Conv4((3, 20, 18), 5, (4, 8, 8, 12), norm=norm, last_pool=last_pool)
    weights = {name: tensor.to(DEVICE) for name, tensor in model.init(1).items()}
    moving = {name: t.requires_grad_() for name, t in weights.items() if "running" not in name}
    if DEVICE == "cpu":
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    called: list[Tensor] = []

    def counted(maps: Tensor, bias: Tensor | None, *, pooled: bool) -> Tensor:
        assert bias is None and pooled
        assert maps.dtype == (torch.float16 if half else torch.float32)
        called.append(maps)
        return activated(maps, None, pooled=True)

    def passed() -> list[Tensor]:
        x = noise(4, 3, 20, 18).requires_grad_()
        logits = model.train()(weights, x)
        slopes = torch.autograd.grad(
            logits.square().sum(), [x, *moving.values()], materialize_grads=True
        )
        return [logits.detach(), *slopes]

    activated = pools.activated
    monkeypatch.setattr(pools, "activated", counted)
    with precision.using("half" if half else "single"):
        found = passed()
        assert len(called) == (4 if last_pool else 3)
        norms = {by_pixel_networks.NORMS: gpu.kernels(by_pixel_networks.NORMS)}
        monkeypatch.setattr(by_pixel_networks, "kernels", lambda name, *_: norms.get(name))
        wanted = passed()
    assert len(called) == (4 if last_pool else 3)
    most = 0.0 if DEVICE == "cpu" else 1e-2 if half else 1e-4
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= most * float(other.norm())
