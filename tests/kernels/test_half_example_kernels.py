"""Blocks of a ConvNet in half precision for gradients of single examples, and the first of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from block_references import EPS, activation, certain, first_block, pooled
from fedstill.core import asides, gpu
from interpreted import guarded, needs_triton, noise, untouched
from roundings import SINGLE, halved, near, near_on_the_whole

pytestmark = needs_triton

# Examples, images, inputs, height, width, padding, channels: fewer numbers than a tile has, and
# more; one tap of all inputs in a tile, and taps that share one.
SIZES = [
    (1, 1, 1, 2, 2, 1, 1),
    (2, 2, 3, 4, 6, 0, 5),
    (3, 1, 5, 4, 4, 2, 20),
    (2, 1, 32, 4, 2, 1, 33),
    (1, 1, 1, 4, 4, 3, 130),
]
HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.half], ids=["single", "half"])


def blocks() -> Any:
    return gpu.kernels("kernels.half_example_blocks")


def first() -> Any:
    return gpu.kernels("kernels.half_example_first")


def drawn(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of examples what goes in, in half precision by pixel; weights, scale and shift of all."""
    examples, images, inputs, height, width, _, channels = size
    x = noise(examples, images, height, width, inputs, of="x").cpu().to(dtype)
    x = guarded(x.permute(0, 1, 4, 2, 3)) if dtype == torch.float32 else by_pixel(x)
    weight = noise(channels, inputs, 3, 3, of="weight")
    return [x, weight, noise(channels, of="scale"), noise(channels, of="shift")]


def by_pixel(turned: Tensor) -> Tensor:
    """[…, channel, y, x] of guarded [..., y, x, channel]."""
    return guarded(turned).movedim(-1, -3)


def of_stack(weights: list[Tensor], examples: int) -> list[Tensor]:
    return [one.expand(examples, *one.shape) for one in weights]


def convolved(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """By inputs that half precision has rounded, in double precision."""
    return F.conv2d(halved(x), halved(weight), padding=padding)


@HALVES
@pytest.mark.parametrize("size", SIZES)
def test_maps_are_a_convolution_rounded_once_and_a_block_makes_of_them_what_operations_do(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    examples, padding = size[0], size[5]
    x, *weights = drawn(size, dtype)
    made, maps, mean, factor, laid = blocks().forward(x, *of_stack(weights, examples), padding)
    weight, scale, shift = weights
    assert torch.equal(laid[0], weight.half().flatten(2).permute(2, 1, 0))
    for example in range(examples):
        own = maps[example].double()
        assert near(maps[example], convolved(x[example], weight, padding), roundings=1)
        assert near(made[example], pooled(own, scale, shift), roundings=1)
        variance, level = torch.var_mean(own, (2, 3), correction=0)
        assert near(mean[example], level, also=SINGLE) and near(
            factor[example], (variance + EPS).rsqrt()
        )
    assert made.dtype == maps.dtype == torch.half and untouched(x, *weights)


def test_a_convolution_in_several_launches_is_that_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, *weights = drawn((3, 2, 3, 4, 6, 1, 5))
    stack, told = of_stack(weights, 3), noise(3, 2, 4, 6, 5, of="told").half().movedim(-1, 2)

    def both() -> list[Tensor]:
        *made, laid = blocks().forward(x, *stack, 1)
        return [*made, blocks().image_slopes(told, x, laid, 1)]

    whole = both()
    for most in (1, 4 * 6 * 5 * 4):  # an image at a time, and four of six
        monkeypatch.setattr(blocks(), "NUMBERS", most)
        for one, other in zip(both(), whole, strict=True):
            assert near(one, other.double(), roundings=2 * (one.dtype == torch.half))


def loud(told: Tensor) -> Tensor:
    """As gradients are inside."""
    return (told * blocks().GAIN).half()


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_norms_are_each_examples_own(size: tuple[int, ...]) -> None:
    examples, images, _, height, width, padding, channels = size
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    maps = by_pixel(noise(examples, images, high, wide, channels, of="maps").cpu().half())
    scale, shift = noise(channels, of="scale"), noise(channels, of="shift")
    told = noise(examples, images, channels, high // 2, wide // 2, of="told").half()
    told = certain(told.flatten(0, 1), activation(maps.flatten(0, 1), scale, shift), SINGLE)
    told = told.view(examples, images, *told.shape[1:])
    variance, mean = torch.var_mean(maps.double(), (3, 4), correction=0)
    moments = guarded(mean.float().cpu()), guarded((variance + EPS).rsqrt().float().cpu())
    both = of_stack([scale, shift], examples)
    found = blocks().norm_slopes(loud(told), *both, maps, *moments)
    for example in range(examples):
        own = [one.double().requires_grad_() for one in (scale, shift, maps[example])]
        made = pooled(own[2], own[0], own[1])
        wanted = torch.autograd.grad(made, own, told[example].double())
        assert near(found[0][example], wanted[0]) and near(found[1][example], wanted[1])
        assert near(found[2][example], wanted[2] * blocks().GAIN, roundings=1)
    assert untouched(maps, scale, shift, *moments)


def taught(size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """What goes in and the weights, and what a convolution's maps are told, by pixel."""
    examples, images, _, height, width, padding, channels = size
    shape = (examples, images, height + 2 * padding - 2, width + 2 * padding - 2, channels)
    return drawn(size, dtype)[:2], by_pixel(noise(*shape, of="told").cpu().half())


@HALVES
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_a_convolutions_input_and_weights_are_the_frameworks(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    (x, weight), told = taught(size, dtype)
    examples, padding, gain = size[0], size[5], blocks().GAIN
    laid = weight.half().flatten(2).permute(2, 1, 0).expand(examples, 9, *weight.shape[1::-1])
    to_x = blocks().image_slopes(told, x, laid, padding)
    to_weight = blocks().own_weight_slopes(told, x, *of_stack([weight], examples), padding)
    assert to_x.dtype == dtype and to_weight.dtype == torch.float32
    for example in range(examples):
        own = [one.half().double().requires_grad_() for one in (x[example], weight)]
        made = F.conv2d(*own, padding=padding)
        seen, weighed = torch.autograd.grad(made, own, told[example].double())
        seen = seen / gain if dtype == torch.float32 else seen
        assert near(to_x[example], seen, roundings=int(dtype == torch.half))
        assert near(to_weight[example], weighed / gain)
    assert untouched(x, weight, told)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(SIZES[1], torch.float32), (SIZES[3], torch.half), ((1, 1, 128, 2, 2, 1, 130), torch.half)],
)
def test_gradients_of_weights_that_lie_aside_are_rounded_and_their_squares_are_of_what_lies_there(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    (x, weight), told = taught(size, dtype)
    stack, padding = of_stack([weight], size[0]), size[5]
    usual = blocks().own_weight_slopes(told, x, *stack, padding)
    with asides.kept([weight]) as kept:
        zeros = blocks().own_weight_slopes(told, x, *stack, padding)
    (aside,) = kept[0]
    assert zeros.shape == usual.shape and not zeros.any()
    assert aside.gradient.dtype == torch.half
    assert near(aside.gradient, usual.double(), roundings=1)
    squares = aside.gradient.double().square().flatten(1).sum(1)
    assert torch.allclose(aside.squares, squares, rtol=1e-6, atol=0)


def taken(made_by: Any, padding: int, told: Tensor, x: Tensor, *weights: Tensor) -> Any:
    """One vmap over examples and one gradient in it: of x, weights, scale and shift."""

    def loss(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, told: Tensor) -> Any:
        made = made_by.block(x, weight, scale, shift, padding)
        return (blocks().in_single(made) * told).sum(), made

    every = None if x.dim() == 4 else 0
    slopes = grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    return vmap(slopes, in_dims=(every, None, None, None, 0))(x, *weights, told)


def by_launches(padding: int, told: Tensor, x: Tensor, *weights: Tensor) -> list[Tensor]:
    """The same by the functions of a block's launches, one after another."""
    stack = of_stack([*weights], len(told))
    _, *kept, laid = blocks().forward(x, *stack, padding)
    *norm, to_maps = blocks().norm_slopes(loud(told), *stack[1:], *kept)
    to_x = blocks().image_slopes(to_maps, x, laid, padding)
    return [to_x, blocks().own_weight_slopes(to_maps, x, stack[0], padding), *norm]


@pytest.mark.parametrize(
    ("size", "shared"),
    [(SIZES[0], True), (SIZES[1], False), (SIZES[2], True), (SIZES[3], False)],
)
def test_a_block_under_a_vmap_gives_every_example_what_its_launches_give(
    size: tuple[int, ...], shared: bool
) -> None:
    (x, *weights), padding = drawn(size), size[5]
    x = x[:1].expand(3, *x.shape[1:]) if shared else x
    shape = blocks().forward(x, *of_stack(weights, len(x)), padding)[0].shape
    told = noise(*shape, of="told")
    found, made = taken(blocks(), padding, told, x[0] if shared else x, *weights)
    assert torch.equal(made, blocks().forward(x, *of_stack(weights, len(x)), padding)[0])
    for one, other in zip(found, by_launches(padding, told, x, *weights), strict=True):
        assert torch.equal(one, other)


ROUNDINGS = 12  # of two blocks: input, weights, maps, what comes out, and two gradients of each


def test_a_block_after_a_block_is_the_operations_but_for_roundings() -> None:
    x, *weights = drawn((2, 1, 3, 8, 8, 1, 6))
    more, told = drawn((2, 1, 6, 4, 4, 1, 7))[1:], noise(2, 1, 7, 2, 2, of="told")

    def rough(x: Tensor, told: Tensor, *flat: Tensor) -> Tensor:
        made = blocks().block(blocks().block(x, *flat[:3], 1), *flat[3:], 1)
        return (blocks().in_single(made) * told).sum()

    def exact(x: Tensor, told: Tensor, *flat: Tensor) -> Tensor:
        for weight, scale, shift in (flat[:3], flat[3:]):
            x = pooled(F.conv2d(x, weight, padding=1), scale, shift)
        return (x * told).sum()

    every, flat = (0, *range(2, 8)), [*weights, *more]
    found = vmap(grad(rough, argnums=every), in_dims=(0, 0, *[None] * 6))(x, told, *flat)
    own = [one.double() for one in flat]
    for example in range(2):
        wanted = grad(exact, argnums=every)(x[example].double(), told[example].double(), *own)
        for one, other in zip(found, wanted, strict=True):
            assert near_on_the_whole(one[example], other, roundings=ROUNDINGS)


@pytest.mark.parametrize(
    ("size", "shared"),
    [
        ((1, 1, 1, 2, 2, 1, 1), False),
        ((2, 2, 3, 4, 4, 0, 3), False),
        ((2, 1, 1, 6, 4, 3, 17), True),
    ],
)
def test_the_first_block_gives_every_example_its_own_gradients(
    size: tuple[int, ...], shared: bool
) -> None:
    (x, *weights), padding = drawn(size), size[5]
    assert first().takes(x, padding)
    exact = [
        first_block(x[0 if shared else one], *weights, padding=padding) for one in range(size[0])
    ]
    told = torch.stack([one.certain(noise(*one.pooled.shape, of="told").half()) for one in exact])
    found, made = taken(first(), padding, told.float(), x[0] if shared else x, *weights)
    for example, one in enumerate(exact):
        to_x, *wanted = one.slopes(told[example])
        assert near(made[example], one.pooled, roundings=1, also=one.pooled_off)
        assert near(found[0][example], to_x, also=one.slopes_off(told[example]))
        for got, other in zip(found[1:], wanted, strict=True):
            assert near(got[example], other, also=1e-4)
    assert untouched(x, *weights)


@pytest.mark.parametrize("module", ["half_example_blocks", "half_example_first"])
def test_gradients_of_weights_alone_are_those_beside_gradients_of_images(module: str) -> None:
    made_by, told = gpu.kernels(f"kernels.{module}"), noise(2, 1, 3, 1, 2, of="told")
    x, *weights = drawn((2, 1, 1, 2, 4, 1, 3))
    (_, *wanted), _ = taken(made_by, 1, told, x, *weights)
    found = of_weights(made_by, told, guarded(x.permute(2, 3, 1, 4, 0).cpu()), weights)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def of_weights(made_by: Any, told: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Gradients of weights, scale and shift, for [input, y, image, x, example]."""

    def loss(weights: list[Tensor], x: Tensor, told: Tensor) -> Tensor:
        made = made_by.block(x.permute(2, 0, 1, 3), *weights, 1)
        return (blocks().in_single(made) * told).sum()

    found: list[Tensor] = vmap(grad(loss), in_dims=(None, 4, 0))(weights, x, told)
    return found


@pytest.mark.parametrize("module", ["half_example_blocks", "half_example_first"])
@pytest.mark.parametrize("wild", [float("nan"), float("inf"), 1e6])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_example_beyond_half_precision_has_no_finite_gradient_and_others_do_not_feel_it(
    module: str, wild: float
) -> None:
    made_by, told = gpu.kernels(f"kernels.{module}"), noise(2, 1, 3, 1, 2, of="told")
    x, weights = noise(1, 2, 1, 4, 2), drawn((2, 1, 1, 2, 4, 1, 3))[1:]
    whole = of_weights(made_by, told, x, weights)
    x[..., 1] *= wild
    found = of_weights(made_by, told, x, weights)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, whole, strict=True))
    assert not found[0][1].isfinite().any()


def test_gradients_enter_blocks_louder_and_in_half_precision() -> None:
    maps = guarded(noise(3, 2).cpu().half()).requires_grad_()
    made = blocks().in_single(maps)
    assert made.dtype == torch.float32 and torch.equal(made, maps.float())
    (slope,) = torch.autograd.grad(made.sum(), maps)
    assert slope.dtype == torch.half and torch.equal(slope, torch.full_like(slope, blocks().GAIN))
