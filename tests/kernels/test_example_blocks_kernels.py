"""Kernels for gradients of single examples: norms, what taps see, lengths and sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from block_references import pooled
from fedstill.core import gpu
from interpreted import guarded, needs_triton, noise, untouched
from roundings import near

pytestmark = needs_triton


def kernels() -> Any:
    return gpu.kernels("kernels.example_blocks")


def drawn(size: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Maps, of examples or not, scale and shift."""
    channels = size[-3]
    return noise(*size, of="maps"), noise(channels, of="scale"), noise(channels, of="shift")


def pooled_size(size: tuple[int, ...]) -> tuple[int, ...]:
    return (*size[:-2], size[-2] // 2, size[-1] // 2)


def slopes(inputs: tuple[Tensor, ...], told: Tensor) -> tuple[Tensor, ...]:
    """Gradients of one example by the framework, in double precision."""
    own = [one.detach().double().requires_grad_() for one in inputs]
    return torch.autograd.grad(pooled(*own), own, told.double())


@pytest.mark.parametrize("size", [(3, 2, 5, 7, 5), (1, 1, 1, 2, 2), (2, 3, 2, 8, 6)])
def test_every_example_has_gradients_of_its_own(size: tuple[int, ...]) -> None:
    (maps, scale, shift), told = drawn(size), noise(*pooled_size(size), of="told")

    def loss(maps: Tensor, scale: Tensor, shift: Tensor, told: Tensor) -> Any:
        made = kernels().norm_relu_pool(maps, scale, shift)
        return (made * told).sum(), made

    taken = grad(loss, argnums=(0, 1, 2), has_aux=True)
    found, made = vmap(taken, in_dims=(0, None, None, 0))(maps, scale, shift, told)
    for example in range(size[0]):
        inputs = (maps[example], scale, shift)
        assert near(made[example], pooled(*inputs))
        for one, other in zip(found, slopes(inputs, told[example]), strict=True):
            assert near(one[example], other)
    assert untouched(maps, scale, shift, told)


def test_examples_may_lie_along_another_axis_and_scale_and_shift_as_they_like() -> None:
    maps, told = noise(4, 2, 6, 3, 4), noise(4, 2, 3, 2, 3, of="told")
    scale, shift = noise(3, 2, of="scale")[:, 0], noise(6, of="shift")[::2]

    def loss(maps: Tensor, scale: Tensor, shift: Tensor, told: Tensor) -> Tensor:
        made = kernels().norm_relu_pool(maps.permute(1, 3, 0, 2), scale, shift)
        return (made * told).sum()

    taken = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(4, None, None, 0))
    of_maps, *found = taken(maps, scale, shift, told)
    for example in range(4):
        own = maps[..., example].permute(1, 3, 0, 2)
        to_maps, *wanted = slopes((own, scale, shift), told[example])
        assert near(of_maps[example].permute(1, 3, 0, 2), to_maps)
        assert all(near(one[example], other) for one, other in zip(found, wanted, strict=True))


def test_maps_that_are_everybodys_tell_every_example_its_own() -> None:
    (maps, scale, shift), told = drawn((2, 3, 4, 6)), noise(4, 2, 3, 2, 3, of="told")

    def loss(maps: Tensor, scale: Tensor, shift: Tensor, told: Tensor) -> Tensor:
        return (kernels().norm_relu_pool(maps, scale, shift) * told).sum()

    everybodys = (None, None, None, 0)
    found = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=everybodys)(maps, scale, shift, told)
    for example in range(4):
        wanted = slopes((maps, scale, shift), told[example])
        for one, other in zip(found, wanted, strict=True):
            assert near(one[example], other)


def test_without_examples_gradients_are_summed_over_images() -> None:
    inputs, told = drawn((3, 2, 5, 6)), noise(3, 2, 2, 3, of="told")
    free = [one.requires_grad_() for one in inputs]
    made = kernels().norm_relu_pool(*free)
    assert near(made, pooled(*inputs))
    for one, other in zip(torch.autograd.grad(made, free, told), slopes(inputs, told), strict=True):
        assert near(one, other)
    assert untouched(*inputs, told)


@pytest.mark.parametrize(
    ("size", "padding"),
    [((2, 3, 3, 5, 4), 1), ((1, 1, 1, 3, 3), 0), ((3, 1, 2, 8, 8), 2), ((1, 2, 1, 2, 1), 3)],
)
def test_taps_see_what_the_framework_unfolds(size: tuple[int, ...], padding: int) -> None:
    images = noise(*size)
    found = kernels().patches(images, padding)
    wanted = F.unfold(images.flatten(0, 1), 3, padding=padding)
    wanted = wanted.view(*size[:2], *wanted.shape[1:]).transpose(1, 2).flatten(2)
    assert torch.equal(found, wanted)
    turned = images.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    assert torch.equal(kernels().patches(turned, padding), found)
    assert untouched(images)


@pytest.mark.parametrize("shape", [(3, 5), (1, 2049), (2, 2048), (4, 1), (3, 0), (0, 7)])
def test_squares_are_summed_in_double_precision(shape: tuple[int, int]) -> None:
    rows = guarded(1e4 * noise(*shape).cpu() + 1e3)
    wanted = rows.double().square().sum(1)
    found = kernels().squares(rows)
    assert found.dtype == torch.float64 and torch.allclose(found, wanted, rtol=1e-14, atol=0)
    across = guarded(rows.T.cpu()).T
    assert torch.equal(kernels().squares(across), found)
    assert untouched(rows)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_squares_of_a_row_that_is_not_finite_are_not_and_those_of_others_are() -> None:
    rows = noise(4, 3)
    rows[1, 2], rows[2, 0] = float("nan"), float("inf")
    assert kernels().squares(rows).isfinite().tolist() == [True, False, False, True]
    wide = guarded(torch.full((1, 3), 1e30))  # its square is beyond single precision
    assert torch.allclose(kernels().squares(wide), wide.double().square().sum(1))


# Fewer examples than are read at a time, as many as one program adds up, and more; rows of fewer
# numbers than a program's, and of more.
@pytest.mark.parametrize("shape", [(3, 5), (32, 513), (67, 3), (1, 1030), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_rows_are_added_up_each_times_its_factor(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows, factors = guarded(noise(*shape).cpu().to(dtype)), noise(shape[0], of="factors")
    found = kernels().weighted_sum(rows, factors)
    assert found.dtype == torch.float32
    assert near(found, factors.double() @ rows.double())
    across, apart = guarded(rows.T.cpu()).T, noise(shape[0], 2, of="apart")
    assert torch.equal(kernels().weighted_sum(across, factors), found)
    apart[:, 1] = factors
    assert torch.equal(kernels().weighted_sum(rows, apart[:, 1]), found)
    assert untouched(rows, factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_rows_with_the_factor_nothing_leave_no_trace(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [3.0, -1.0]], dtype=dtype)
    found = kernels().weighted_sum(guarded(rows), guarded(torch.tensor([2.0, 0.0, 1.0])))
    assert found.tolist() == [2 + 3, 4 - 1]
