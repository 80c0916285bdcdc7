"""The first block of a ConvNet in half precision, whose maps are never stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_references import FirstBlock, first_block
from fedstill.core import gpu
from interpreted import DEVICE, guarded, interpreting, needs_triton, noise, untouched
from roundings import near

pytestmark = needs_triton
triton = pytest.importorskip("triton")

# Inputs, height, width, padding, channels, images: one pooled pixel; no padding; more channels
# than each kernel takes at a time; more pooled pixels than that, and not in full tiles.
SIZES = [
    (1, 2, 2, 1, 1, 1),
    (3, 4, 6, 0, 5, 2),
    (1, 6, 4, 3, 40, 2),
    (2, 4, 6, 2, 17, 2),
    (3, 22, 14, 1, 3, 1),
    (1, 4, 4, 1, 70, 1),
]


def kernels() -> Any:
    return gpu.kernels("kernels.first_blocks")


_image = kernels()._image


def drawn(size: tuple[int, ...], of: str = "") -> list[Tensor]:
    """Images, which are light, weights, scale and shift of one network."""
    inputs, height, width, _, channels, images = size
    x = guarded(2 + noise(images, inputs, height, width, of=f"images{of}").cpu())
    weight = noise(channels, inputs, 3, 3, of=f"weight{of}")
    both = noise(channels, of=f"scale{of}"), noise(channels, of=f"shift{of}")
    return [x.requires_grad_(), weight, *both]


def told(exact: FirstBlock) -> Tensor:
    """In half precision; nothing where rounding decides what is cut."""
    return exact.certain(noise(*exact.pooled.shape, of="told").half())


@pytest.mark.parametrize("size", SIZES)
def test_a_block_and_the_gradient_of_its_images_are_those_of_the_operations_rounded(
    size: tuple[int, ...],
) -> None:
    given, padding = drawn(size), size[3]
    assert kernels().takes(given[0], padding)
    exact = first_block(*given, padding=padding)
    found = kernels().block(*given, padding)
    assert found.dtype == torch.half
    assert near(found, exact.pooled, roundings=1, also=exact.pooled_off)
    with torch.no_grad():
        assert torch.equal(kernels().block(*given, padding), found)
    grad = told(exact)
    (slope,) = torch.autograd.grad(found, given[:1], grad)
    wanted, *_ = exact.slopes(grad)
    assert slope.dtype == torch.float32
    assert near(slope, wanted, also=exact.slopes_off(grad))
    assert untouched(*given)


@pytest.mark.parametrize(
    ("size", "shared"),
    [
        ((3, 4, 6, 0, 5, 2), "nothing"),
        ((1, 6, 4, 3, 17, 3), "images"),
        ((2, 10, 14, 1, 20, 1), "nothing"),
    ],
)
def test_gradients_of_a_stack_are_each_images_own_and_unrounded_but_for_what_goes_in(
    size: tuple[int, ...], shared: str
) -> None:
    padding, count, taps = size[3], size[5], kernels().taps(size[0])
    members = [drawn(size, of=f" of {member}") for member in range(2)]
    if shared == "images":
        members[1][0] = members[0][0]
    exact = [first_block(*one, padding=padding) for one in members]
    stack = stacked(members)
    if shared == "images":
        stack[0] = stack[0][0].expand(2, *stack[0].shape[1:])
    spread = torch.empty((2, count, taps, taps), device=DEVICE)
    made, *norm = kernels().forward(*stack, padding=padding, spread=spread)
    grad, kept = torch.stack([told(one) for one in exact]), kernels().Norm(*norm)
    of_images = kernels().image_slopes(grad, *stack, kept, padding=padding)
    of_weights, of_both = kernels().weight_slopes_by_image(
        grad, *stack[:3], kept, spread, padding=padding, gain=1.0
    )
    for member, one in enumerate(exact):
        assert near(made[member], one.pooled, roundings=1, also=one.pooled_off)
        also = one.slopes_off(grad[member])
        assert near(of_images[member], one.slopes(grad[member])[0], also=also)
        for image in range(count):
            weight, *both = one.slopes_of_one(grad[member], image)
            assert near(of_weights[member, image], weight.flatten(1), also=1e-4)
            assert near(of_both[member, image], torch.stack(both), also=1e-4)
    assert untouched(*stack)


def stacked(members: list[list[Tensor]]) -> list[Tensor]:
    parts = zip(*members, strict=True)
    return [guarded(torch.stack([one.detach().cpu() for one in some])) for some in parts]


@pytest.mark.skipif(not interpreting(), reason="the compiler refuses tiles that small")
def test_small_tiles_make_what_large_ones_make() -> None:
    given = [one.detach()[None] for one in drawn((3, 10, 12, 1, 37, 1))]
    small = kernels().Tiles(16, 16, 4)
    spreads = [torch.empty((1, 1, 32, 32), device=given[0].device) for _ in range(2)]
    found = []
    for tiles, spread in zip((None, small), spreads, strict=True):
        made, *norm = kernels().forward(
            *given, padding=1, spread=spread, tiles=tiles, moments=tiles
        )
        kept, grad = kernels().Norm(*norm), noise(*made.shape, of="told").half()
        to_images = kernels().image_slopes(
            grad, *given, kept, padding=1, tiles=tiles, folding=tiles
        )
        rest = kernels().weight_slopes_by_image(
            grad, *given[:3], kept, spread, padding=1, gain=4.0, tiles=tiles
        )
        levels = kept.levels[..., :3]  # of up to three colours; nothing is written behind them
        found.append([made, levels, *kept[1:], spread, to_images, *rest])
    for one, other in zip(*found, strict=True):
        rounded = 2 if one.dtype == torch.half else 0  # to the one side, and to the other
        assert near(one, other.double(), roundings=rounded)


def test_a_gain_divides_the_gradient_of_images() -> None:
    given, size = drawn((1, 4, 4, 1, 3, 2)), (2, 3, 2, 2)
    plain, gained = (
        torch.autograd.grad(kernels().block(*given, 1, gain), given[:1], noise(*size).half())[0]
        for gain in (1.0, 1024.0)
    )
    assert torch.equal(plain, gained * 1024)


def test_images_weights_scale_and_shift_may_lie_as_they_like() -> None:
    plain = drawn((3, 4, 6, 1, 3, 2))
    turned = guarded(plain[0].detach().permute(0, 2, 3, 1).cpu()).permute(0, 3, 1, 2)
    weight = guarded(plain[1].permute(2, 3, 1, 0).cpu()).permute(3, 2, 0, 1)
    both = [guarded(torch.stack([one, one], 1).cpu())[:, 0] for one in plain[2:]]
    found, wanted = [], []
    for given, places in ((plain, wanted), ([turned.requires_grad_(), weight, *both], found)):
        made = kernels().block(*given, 1)
        # What is told is one number, that lies once in memory.
        places += [made, *torch.autograd.grad(made.sum(), given[:1])]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_only_images_of_a_member_that_do_not_lie_in_a_row_are_copied() -> None:
    images = noise(2, 3, 1, 4, 4)
    shared, one = images[:1].expand(5, 3, 1, 4, 4), images[:, 1:2]
    for row in (images, shared, one, images[:, :2]):
        assert kernels().in_a_row(row).data_ptr() == row.data_ptr()
    for other in (
        images[:, ::2],
        images.mT,
        images.movedim(0, 1).contiguous().movedim(1, 0)[:, :2],
    ):
        made = kernels().in_a_row(other)
        assert made.is_contiguous() and torch.equal(made, other)


@triton.jit
def _begins(found, one, each, apart, size: triton.language.constexpr):
    where = triton.language.zeros([1], triton.language.int64)
    place = triton.language.arange(0, 1)
    triton.language.store(found + place, _image(where, one, each, apart, size))


def test_more_images_than_32_bits_count_the_numbers_of_have_their_places() -> None:
    found = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    each, size = 1_000_000, 3 * 32 * 32
    for one in (each - 1, 2 * each - 1):
        with torch.cuda.device_of(found):
            _begins[(1,)](found, one, each, each * size, size)
        assert found.item() == one * size


def test_no_images_have_no_maps() -> None:
    given = drawn((3, 4, 6, 1, 5, 0))
    made = kernels().block(*given, 1)
    assert made.shape == (0, 5, 2, 3)
    assert torch.autograd.grad(made.sum(), given[:1])[0].shape == (0, 3, 4, 6)
    with torch.no_grad():
        assert kernels().block(*given, 1).shape == (0, 5, 2, 3)


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), 1e6])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_image_beyond_half_precision_has_no_finite_maps_and_others_do_not_feel_it(
    wild: float,
) -> None:
    given, grad = drawn((1, 2, 4, 1, 2, 2)), noise(2, 2, 1, 2).half()
    whole = kernels().block(*given, 1)
    (slope,) = torch.autograd.grad(whole, given[:1], grad)
    with torch.no_grad():
        given[0][1, 0, 1, 2] = wild
    found = kernels().block(*given, 1)
    (moved,) = torch.autograd.grad(found, given[:1], grad)
    assert not found[1].isfinite().any() and not moved[1].isfinite().any()
    for one, other in ((found, whole), (moved, slope)):
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("spread", [0.0, 1e-3])
@pytest.mark.parametrize("level", [0.0, 0.7])
def test_images_of_hardly_more_than_one_colour_are_taken(level: float, spread: float) -> None:
    given = drawn((3, 4, 6, 1, 5, 1))
    with torch.no_grad():
        given[0].copy_(level + spread * noise(1, 3, 4, 6))
    exact = first_block(*given, padding=1)
    found = kernels().block(*given, 1)
    assert near(found, exact.pooled, roundings=1, also=exact.pooled_off)
    grad = told(exact)
    (slope,) = torch.autograd.grad(found, given[:1], grad)
    assert near(slope, exact.slopes(grad)[0], also=exact.slopes_off(grad))


def test_a_gradient_of_the_gradient_is_refused() -> None:
    given = drawn((1, 4, 4, 1, 3, 1))
    made = kernels().block(*given, 1).float()
    (grad,) = torch.autograd.grad(made.square().sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        torch.autograd.grad(grad.sum(), given[:1])


@pytest.mark.parametrize(
    ("shape", "padding", "taken"),
    [
        ((1, 28, 28), 3, True),
        ((3, 32, 32), 1, True),
        ((5, 3, 32, 32), 1, True),
        ((3, 34, 34), 1, False),
        ((3, 32, 32), 2, False),
        ((4, 8, 8), 1, False),
    ],
)
def test_images_of_up_to_three_colours_and_1024_places_are_taken(
    shape: tuple[int, ...], padding: int, taken: bool
) -> None:
    assert kernels().takes(torch.zeros(shape), padding) == taken


@pytest.mark.parametrize("places", [1, 40, 256])
@pytest.mark.parametrize("channels", [1, 16, 33, 128])
@pytest.mark.parametrize("kind", ["moment", "pooling", "telling", "folding", "weighing"])
def test_tiles_are_powers_of_two_that_a_matrix_product_takes(
    kind: str, channels: int, places: int
) -> None:
    tiles = getattr(kernels(), f"{kind}_tiles")(places, channels)
    for number in tiles[:2]:
        assert 16 <= number <= 64 and number & (number - 1) == 0
