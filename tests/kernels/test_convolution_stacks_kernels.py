"""Convolutions of many networks at once as kernels, with their gradients.

Factors are rounded to ten bits behind the first; sums are in single precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from fedstill.core.convolutions import Moves
from fedstill.core.seeds import generator
from fedstill.core.stacked_layers import as_one
from fedstill.core.torch_internals import is_wrapped
from interpreted import guarded, needs_triton, noise, untouched

pytestmark = needs_triton
NETWORKS = 2
Pair = tuple[int, int]
STACKS = "kernels.convolution_stacks"
WAYS: list[tuple[Pair, Pair, Pair]] = [  # stride, padding, kernel
    ((1, 1), (0, 0), (3, 3)),
    ((1, 1), (1, 1), (3, 3)),
    ((2, 2), (1, 1), (3, 3)),
    ((2, 2), (0, 0), (1, 1)),
    ((1, 2), (2, 0), (5, 3)),
    ((3, 1), (0, 4), (2, 5)),
]
# Inputs, outputs and images: of 16 inputs and more maps are first turned round; 130 outputs are of
# two programs; 300 taps, and pixels of 9 images, are more than one program sees and weighs.
ALL_WAYS = [(way, (3, 5, 1)) for way in WAYS] + [(way, (20, 5, 1)) for way in WAYS[2:]]
ALL_SIZES = [(WAYS[1], sizes) for sizes in [(1, 1, 1), (34, 3, 1), (1, 2, 9)]]
ALL_SIZES += [(WAYS[3], sizes) for sizes in [(16, 1, 1), (1, 130, 2)]]


def whole(*shape: int, of: str = "whole") -> Tensor:
    """Whole numbers from -4 to 4, which ten bits hold and no sum here rounds."""
    return guarded(torch.randint(-4, 5, shape, generator=generator(2, of, *shape)).float())


def framework(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, moves: Moves) -> list[Tensor]:
    """What comes out, and the gradients of weights, bias and images, in double precision."""
    made = []
    for one in zip(x.double(), weight.double(), bias.double(), grad.double(), strict=True):
        free = [tensor.clone().requires_grad_() for tensor in one[:3]]
        out = F.conv2d(*free, *moves)
        made.append([out.detach(), *torch.autograd.grad(out, [free[1], free[2], free[0]], one[3])])
    return [torch.stack(tensors) for tensors in zip(*made, strict=True)]


def ours(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, moves: Moves) -> list[Tensor]:
    """The same by kernels."""
    kernels, (rows, columns) = gpu.kernels(STACKS), weight.shape[3:]
    return [
        kernels.convolved(x, weight, bias, *moves),
        *kernels.to_weights(grad, x, (rows, columns), *moves),
        kernels.to_images(grad, weight, (x.shape[3], x.shape[4]), *moves),
    ]


def drawn(draw: Any, sizes: tuple[int, ...], moves: Moves, kernel: Pair) -> Any:
    """Images, weights, bias and a gradient of so many inputs, outputs and images of 7 x 9."""
    inputs, outputs, images = sizes
    sides = zip((7, 9), kernel, *moves, strict=True)
    high, wide = ((side + 2 * pad - taps) // step + 1 for side, taps, step, pad in sides)
    return (
        draw(NETWORKS, images, inputs, 7, 9),
        draw(NETWORKS, outputs, inputs, *kernel, of="weight"),
        draw(NETWORKS, outputs, of="bias"),
        draw(NETWORKS, images, outputs, high, wide, of="grad"),
    )


@pytest.mark.parametrize(("way", "sizes"), ALL_WAYS + ALL_SIZES)
def test_whole_numbers_are_summed_exactly(way: tuple[Pair, ...], sizes: tuple[int, ...]) -> None:
    stride, padding, kernel = way
    moves = Moves(stride, padding)
    given = drawn(whole, sizes, moves, kernel)
    found = ours(*given, moves)
    for one, other in zip(framework(*given, moves), found, strict=True):
        assert torch.equal(other.double(), one) and other[0].is_contiguous()
    assert untouched(*given)


def ten_bits(values: Tensor) -> Tensor:
    """The nearest numbers with ten bits behind the first; of two as near, the larger in size."""
    mantissa, exponent = torch.frexp(values)
    whole = (mantissa.abs() * 2**11 + 0.5).floor()
    return torch.ldexp(whole.copysign(values) / 2**11, exponent)


@pytest.mark.parametrize("inputs", [3, 20])
def test_factors_are_rounded_to_the_nearest_of_ten_bits(inputs: int) -> None:
    moves = Moves((1, 1), (1, 1))
    x, weight, bias, grad = drawn(noise, (inputs, 5, 4), moves, (3, 3))
    rounded = ten_bits(x), ten_bits(weight), bias, ten_bits(grad)
    wanted = framework(*rounded, moves)
    wanted[2] = framework(x, weight, bias, ten_bits(grad), moves)[2]  # the bias's is a sum of these
    sizes = framework(*(tensor.abs() for tensor in rounded), moves)
    for one, other, most in zip(wanted, ours(x, weight, bias, grad, moves), sizes, strict=True):
        # A sum of n products may be off by n half bits of their sizes' sum; the longest here, of a
        # weight, is of 4 * 7 * 9.
        assert ((other.double() - one).abs() <= 4 * 7 * 9 * 2**-24 * most).all()


def test_without_a_bias_nothing_is_added() -> None:
    x, weight, bias, _ = drawn(whole, (3, 5, 1), moves := Moves((1, 1), (0, 0)), (3, 3))
    found = gpu.kernels(STACKS).convolved(x, weight, None, *moves)
    assert torch.equal(found + bias[:, None, :, None, None], ours(x, weight, bias, found, moves)[0])


@pytest.mark.parametrize("inputs", [3, 20])
def test_tensors_are_taken_however_they_lie(inputs: int) -> None:
    """Images that all networks share, maps by pixel, and gradients that are one number."""
    moves = Moves((1, 1), (1, 1))
    x, weight, bias, grad = drawn(whole, (inputs, 5, 2), moves, (3, 3))
    by_pixel = x[0].contiguous(memory_format=torch.channels_last).expand(x.shape)
    turned = weight.transpose(3, 4).contiguous().transpose(3, 4)
    narrow = torch.stack([bias, -bias], 2)[..., 0]
    single = grad[0, 0, 0, 0, 0].expand(grad.shape)
    networks_within = grad.transpose(0, 1).contiguous().transpose(0, 1)
    columns = torch.cat([grad, grad], 4)[..., ::2]
    for told in (single, networks_within, columns):
        given = by_pixel, turned, narrow, told
        for one, other in zip(framework(*given, moves), ours(*given, moves), strict=True):
            assert torch.equal(other.double(), one)


@pytest.mark.parametrize("inputs", [3, 20])
@pytest.mark.parametrize("sides", [(6, 1), (1, 6), (1, 1)])
def test_maps_of_one_column_are_read_pixel_by_pixel(inputs: int, sides: tuple[int, int]) -> None:
    """Such a map counts as contiguous whatever the distance of its columns is said to be."""
    x = whole(NETWORKS, 2, inputs, *sides[::-1]).transpose(3, 4)
    grad = whole(NETWORKS, 2, 4, *sides[::-1], of="grad").transpose(3, 4)
    weight, bias = whole(NETWORKS, 4, inputs, 1, 1, of="weight"), whole(NETWORKS, 4, of="bias")
    given, moves = (x, weight, bias, grad), Moves((1, 1), (0, 0))
    for one, other in zip(framework(*given, moves), ours(*given, moves), strict=True):
        assert torch.equal(other.double(), one)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("inputs", [3, 20])
def test_what_is_no_number_stays_so_and_spoils_what_sees_it_alone(inputs: int) -> None:
    x, weight = guarded(torch.ones(2, 1, inputs, 4, 4)), guarded(torch.ones(2, 5, inputs, 3, 3))
    x[1, 0, 0, 0, 0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)  # all bits
    x[1, 0, 0, 3, 3] = float("inf")
    made = gpu.kernels(STACKS).convolved(x, weight, None, (1, 1), (0, 0))
    assert made[1, 0, 0].isnan().tolist() == [[True, False], [False, False]]
    assert made[1, 0, 0, 1, 1] == float("inf") and made[1, 0, 0, 0, 1] == 9 * inputs
    assert (made[0] == 9 * inputs).all()


def test_maps_of_more_pixels_than_a_grid_has_places_for_are_not_turned_round() -> None:
    """The second axis of a grid has 65,535 places, of 64 pixels each."""
    large = torch.empty(1, 1, 16, 2048, 2048, device="meta")
    maps, ready = gpu.kernels(STACKS)._turned(large)
    assert maps is large and not ready


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of single precision are handed to kernels on any machine."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(
        gpu,
        "plain_on_gpu",
        lambda *given: all(t.dtype == torch.float32 and not is_wrapped(t) for t in given),
    )


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("way", "common"), [(WAYS[1], False), (WAYS[2], True)])
def test_gradients_and_their_gradients_pass_through_stacks(
    way: tuple[Pair, ...], common: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty on the length of a gradient: each kernel is the gradient of another."""
    stride, padding, kernel = way
    weights = [noise(NETWORKS, 4, 3, *kernel), noise(NETWORKS, 4, of="bias")]
    images = noise(3, NETWORKS, 3, 6, 7)[:, 0] if common else noise(3, NETWORKS, 3, 6, 7)
    asked: set[str] = set()
    kernels = gpu.kernels(STACKS)
    for name in ("convolved", "to_images", "to_weights"):
        plain = getattr(kernels, name)
        monkeypatch.setattr(
            kernels,
            name,
            lambda *given, plain=plain, name=name: (asked.add(name), plain(*given))[1],
        )

    def penalty(weights: list[Tensor], images: Tensor) -> Tensor:
        with torch.enable_grad():
            maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding)
            told = torch.autograd.grad(maps.square().sum(), [*weights, images], create_graph=True)
        return sum((one.square().sum() for one in told), start=images.new_zeros(()))

    many = torch.func.vmap(
        torch.func.grad(penalty, argnums=(0, 1)), in_dims=(0, None if common else 1)
    )
    exact = many([one.double() for one in weights], images.double())
    assert not asked
    with as_one():
        found = many(weights, images)
    assert asked == {"convolved", "to_images", "to_weights"}
    for one, other in zip([*exact[0], exact[1]], [*found[0], found[1]], strict=True):
        # Four products on the way, of two factors each, right to 2**-11 of themselves.
        assert (other.double() - one).abs().max() < 4 * 2 * 2**-11 * one.abs().max()
