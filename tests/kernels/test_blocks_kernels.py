"""The block of a ConvNet in single precision: norm, activation and pooling as one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_references import pooled
from fedstill.core import gpu, precision
from fedstill.models.convnet import ConvNet
from interpreted import guarded, needs_triton, noise, untouched
from roundings import near

pytestmark = needs_triton


def block(*inputs: Tensor) -> Any:
    return gpu.kernels("kernels.blocks").norm_relu_pool(*inputs)


def drawn(size: tuple[int, ...]) -> list[Tensor]:
    """Maps, scale and shift; of the last two some are below zero."""
    channels = size[1]
    parts = [noise(*size, of="maps"), noise(channels, of="scale"), noise(channels, of="shift")]
    return [one.requires_grad_() for one in parts]


def told(size: tuple[int, ...]) -> Tensor:
    return noise(*size[:2], size[2] // 2, size[3] // 2, of="told")


def in_double(inputs: list[Tensor]) -> list[Tensor]:
    return [one.detach().double().requires_grad_() for one in inputs]


# Even, of one pooled pixel, odd both ways, odd one way, of more than one warp.
SIZES = [(2, 3, 8, 8), (1, 1, 2, 2), (3, 5, 7, 5), (2, 1, 3, 2), (1, 3, 33, 18)]


@pytest.mark.parametrize("size", SIZES)
def test_a_block_and_its_gradients_are_those_of_the_operations(size: tuple[int, ...]) -> None:
    inputs, grad = drawn(size), told(size)
    exact = in_double(inputs)
    found, wanted = block(*inputs), pooled(*exact)
    assert near(found, wanted) and found.is_contiguous()
    with torch.no_grad():
        assert torch.equal(block(*inputs), found)
    slopes = torch.autograd.grad(found, inputs, grad)
    for one, other in zip(slopes, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert near(one, other)
    assert untouched(grad, *inputs)


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_of_the_gradient_is_that_of_the_operations(size: tuple[int, ...]) -> None:
    inputs = drawn(size)
    found = []
    for made, free in ((block(*inputs), inputs), (pooled(*(own := in_double(inputs))), own)):
        grad = told(size).to(made.dtype).requires_grad_()
        first = torch.autograd.grad(made, free, grad, create_graph=True)
        length = torch.stack([one.square().sum() for one in first]).sum()
        found.append([*first, *torch.autograd.grad(length, [*free, grad])])
    for one, other in zip(*found, strict=True):
        assert near(one, other, also=1e-4 * float(other.detach().abs().max()))


def test_gradients_of_gradients_reach_maps_that_were_transposed() -> None:
    source, *others = drawn((2, 3, 6, 4))
    source = source.detach().transpose(2, 3).contiguous().requires_grad_()
    found = []
    for make, own in ((block, [source, *others]), (pooled, in_double([source, *others]))):
        made = make(own[0].transpose(2, 3), *own[1:]).sum()
        (first,) = torch.autograd.grad(made, own[:1], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), own[0])[0])
    assert near(found[0], found[1], also=1e-4 * float(found[1].abs().max()))


def test_maps_scale_shift_and_what_is_told_may_lie_as_they_like() -> None:
    maps = noise(4, 6, 3, 2).permute(3, 2, 0, 1)  # [2, 3, 4, 6]
    scale, shift = noise(3, 2, of="scale")[:, 0], noise(6, of="shift")[::2]
    free = [one.requires_grad_() for one in (maps, scale, shift)]
    exact = in_double(free)
    found, wanted = block(*free), pooled(*exact)
    assert near(found, wanted)
    with torch.no_grad():
        assert torch.equal(block(*free), found)
    slopes = torch.autograd.grad(found.sum(), free)  # told one number, that lies once in memory
    for one, other in zip(slopes, torch.autograd.grad(wanted.sum(), exact), strict=True):
        assert near(one, other)


def test_no_images_have_no_maps_and_tell_scale_and_shift_nothing() -> None:
    inputs = drawn((0, 3, 6, 4))
    found = block(*inputs)
    assert found.shape == (0, 3, 3, 2)
    to_maps, *others = torch.autograd.grad(found.sum(), inputs)
    assert to_maps.shape == (0, 3, 6, 4)
    assert all(torch.equal(one, torch.zeros(3, device=one.device)) for one in others)


def test_a_map_of_one_colour_is_its_shift() -> None:
    shift = guarded(torch.tensor([0.5, -0.5]))
    found = block(guarded(torch.full((1, 2, 4, 4), 0.75)), noise(2), shift)
    # The mean may be rounded, and what is left is divided by a deviation of almost nothing.
    torch.testing.assert_close(found[0, 0], torch.full_like(found[0, 0], 0.5), atol=1e-5, rtol=0)
    assert found[0, 1].unique().item() == 0


@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_of_a_map_that_is_not_finite_nothing_is_a_number_and_others_do_not_feel_it(
    wild: float,
) -> None:
    inputs = drawn((2, 3, 4, 4))
    whole = block(*inputs).detach()
    with torch.no_grad():
        inputs[0][1, 2, 0, 1] = wild
    found = block(*inputs)
    assert found[1, 2].isnan().all()
    (to_maps,) = torch.autograd.grad(found, inputs[:1], told((2, 3, 4, 4)))
    assert to_maps[1, 2].isnan().all() and not to_maps[0].isnan().any()
    found, whole = (one.detach().clone() for one in (found, whole))
    found[1, 2] = whole[1, 2] = 0
    assert torch.equal(found, whole)


@pytest.mark.parametrize("moving", [False, True])
def test_larger_maps_than_a_program_can_hold_are_left_to_the_operations(
    moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ConvNet((1, 1026, 1024), 2, depth=1, width=1)
    weights = {name: tensor.requires_grad_(moving) for name, tensor in model.init(0).items()}
    x = torch.linspace(-1, 1, 1026 * 1024).view(1, 1, 1026, 1024)
    with torch.set_grad_enabled(moving):
        wanted = model(weights, x)
        monkeypatch.setattr(Tensor, "is_cuda", True)
        assert torch.equal(model(weights, x), wanted)
        with precision.using("half_throughout"):
            assert torch.allclose(model(weights, x), wanted)
