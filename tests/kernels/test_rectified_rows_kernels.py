"""Networks without norm in half precision: convolutions with bias, ReLU and pooling in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import gpu
from fedstill.models.by_pixel import GAIN
from interpreted import guarded, needs_triton, noise, untouched
from roundings import both_ways, halved, near_on_the_whole, within

pytestmark = needs_triton
LYING = torch.channels_last


def rectified() -> Any:
    return gpu.kernels("kernels.rectified")


def lying_by_pixel(tensor: Tensor) -> Tensor:
    """In half precision with a pixel's channels side by side, guarded."""
    return guarded(tensor.cpu().half().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((2, 3, 5, 7), 2), ((1, 1, 1, 1), 0), ((3, 2, 16, 11), 1), ((0, 3, 4, 4), 1)],
)
@pytest.mark.usefixtures("device_is_chosen")
def test_images_get_zeros_around_them(shape: tuple[int, ...], padding: int) -> None:
    x = noise(shape[0], shape[1], shape[3], shape[2]).transpose(2, 3)
    found = rectified().padded(x, padding)
    assert torch.equal(found, F.pad(x, [padding] * 4).half())
    assert untouched(x)


@pytest.mark.usefixtures("device_is_chosen")
def test_weights_are_turned_round_and_back() -> None:
    shapes = [(5, 3, 3, 3), (2, 7, 5, 5), (0, 2, 1, 1), (1, 16, 1, 1), (4, 12, 2, 3)]  # five
    tensors = [noise(*shape).transpose(2, 3) for shape in shapes]
    halves = rectified().turned(tensors, torch.float16, 4.0)
    for one, other in zip(halves, tensors, strict=True):
        assert one.is_contiguous(memory_format=LYING) and torch.equal(one, (other * 4).half())
    back = rectified().turned(halves, torch.float32, 0.25)
    for one, other in zip(back, tensors, strict=True):
        assert one.is_contiguous() and torch.equal(one, (other * 4).half().float() / 4)
    assert untouched(*tensors) and rectified().turned([], torch.float16) == []


# images, inputs, outputs, height, width, kernel, how many are kept, tiles
SMALL = (16, 16, 2, 4)
BLOCKS = [
    (2, 3, 20, 8, 6, 5, 1, None),  # taps in two products
    (1, 1, 5, 4, 4, 3, 1, None),
    (3, 5, 17, 7, 9, 4, 0, SMALL),
    (2, 3, 33, 20, 6, 3, 2, SMALL),
    (1, 1, 130, 3, 5, 2, 1, None),
]


def first_of(case: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    images, inputs, outputs, height, width, kernel, _, tiles = case
    seen = guarded(noise(images, inputs, height, width).cpu().half())
    weight = noise(outputs, kernel, kernel, inputs, of="weight").permute(0, 3, 1, 2)
    bias = noise(2 * outputs, of="bias")[::2]
    return seen, weight, bias, {} if tiles is None else {"tiles": rectified().Tiles(*tiles)}


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.usefixtures("device_is_chosen")
def test_the_first_block_is_exact_but_for_rounding_and_tells_which_pixel_was_the_largest(
    case: Any,
) -> None:
    seen, weight, bias, tiles = first_of(case)
    made, corners = rectified().first_block(seen, weight, bias, case[6], **tiles)
    maps = F.conv2d(halved(seen), halved(weight))
    exact, where = F.max_pool2d(maps, 2, return_indices=True)
    exact = F.relu(exact + bias.double()[:, None, None])
    sums = F.conv2d(halved(seen).abs(), halved(weight).abs())
    sums = F.max_pool2d(sums, 2) + bias.double().abs()[:, None, None]
    assert made.dtype == torch.float16 and made.is_contiguous(memory_format=LYING)
    assert within(made, exact, sums, weight[0].numel())
    corner = where // maps.shape[3] % 2 * 2 + where % maps.shape[3] % 2
    wanted = torch.where(exact > 0, corner, 4)[: case[6]].permute(0, 2, 3, 1)
    assert torch.equal(corners.long(), wanted)
    assert untouched(seen, weight, bias)


@pytest.mark.usefixtures("device_is_chosen")
def test_of_equal_pixels_the_first_is_the_largest_and_none_where_nothing_comes_out() -> None:
    seen = guarded(torch.ones(1, 1, 4, 6).half())
    weight = guarded(torch.tensor([1.0, 1.0, 0.0]).view(3, 1, 1, 1))
    bias = guarded(torch.tensor([1.0, -2.0, 0.0]))
    _, corners = rectified().first_block(seen, weight, bias, 1)
    assert (corners.cpu() == torch.tensor([0, 4, 4])).all()


@pytest.mark.parametrize("case", BLOCKS, ids=str)
@pytest.mark.usefixtures("device_is_chosen")
def test_gradients_of_the_first_block_are_sums_over_the_pixels_that_were_largest(case: Any) -> None:
    seen, weight, bias, tiles = first_of(case)
    _, corners = rectified().first_block(seen, weight, bias, len(seen), **tiles)
    corners = guarded(corners.cpu())
    count, high, wide, outputs = corners.shape
    told = guarded(noise(count, outputs, high, wide, of="told").cpu().half())
    to_weight, to_bias = rectified().first_slopes(told, seen, weight, corners, **tiles)
    four = torch.arange(4, device=told.device)
    mine = (corners.permute(0, 3, 1, 2)[..., None] == four) * halved(told)[..., None]
    spread = mine.view(*told.shape, 2, 2).transpose(3, 4).reshape(*told.shape[:2], 2 * high, -1)

    def summed(seen: Tensor, told: Tensor) -> Tensor:
        return torch.nn.grad.conv2d_weight(seen, weight.shape, told) / GAIN

    exact, sums = summed(halved(seen), spread), summed(halved(seen).abs(), spread.abs())
    pixels = 4 * count * high * wide
    assert to_weight.dtype == torch.float32 and within(to_weight, exact, sums, pixels)
    exact, sums = (one.sum((0, 2, 3)) / GAIN for one in (spread, spread.abs()))
    assert within(to_bias, exact, sums, pixels)
    assert untouched(seen, told, corners)


@pytest.mark.parametrize(
    ("images", "inputs", "outputs", "height", "width", "side", "padding"),
    [
        (3, 64, 64, 7, 9, 5, 2), (1, 128, 64, 6, 5, 5, 0), (2, 64, 128, 3, 1, 6, 3),
        (0, 64, 64, 5, 5, 5, 2), (2, 5, 7, 5, 4, 3, 1),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("device_is_chosen")
def test_a_convolution_and_its_way_back_are_exact_but_for_rounding(
    images: int, inputs: int, outputs: int, height: int, width: int, side: int, padding: int
) -> None:
    """Of large kernels; others are the framework's."""
    maps = lying_by_pixel(noise(images, inputs, height, width))
    weight = lying_by_pixel(noise(outputs, inputs, side, side, of="weight") / 8)
    made = rectified().convolved(maps, weight, padding)
    exact = F.conv2d(halved(maps), halved(weight), padding=padding)
    sums = F.conv2d(halved(maps).abs(), halved(weight).abs(), padding=padding)
    assert made.dtype == torch.float16 and made.is_contiguous(memory_format=LYING)
    assert within(made, exact, sums, inputs * side * side)
    if side < rectified().LARGE:
        return
    grad = guarded(noise(*made.shape, of="told").cpu().half())
    back = rectified().convolved_back(grad, weight, padding)

    def heard(weight: Tensor, grad: Tensor) -> Tensor:
        return F.conv_transpose2d(grad, weight, padding=padding)

    exact = heard(halved(weight), halved(grad))
    sums = heard(halved(weight).abs(), halved(grad).abs())
    assert back.is_contiguous(memory_format=LYING)
    assert within(back, exact, sums, outputs * side * side)
    assert untouched(maps, weight, grad)


# inputs, height, width; then of each convolution its outputs, kernel, padding and whether pooled
ROWS = [
    ((3, 12, 8), [(9, 5, 4, True), (17, 3, 1, True), (5, 3, 1, False)]),
    ((1, 5, 7), [(64, 4, 1, True), (64, 5, 2, True)]),  # odd maps are pooled, a kernel of ours
    ((2, 4, 6), [(7, 3, 1, True), (20, 1, 0, False)]),
    ((3, 4, 4), [(6, 3, 1, True)]),
]


class Row:
    """Weights and biases, drawn so that maps stay as large as they are."""

    def __init__(self, row: Any):
        self.shape, convolutions = row
        self.forms = [form[2:] for form in convolutions]
        widths = [self.shape[0], *(form[0] for form in convolutions)]
        sides = [form[1] for form in convolutions]
        self.weights = [
            guarded(noise(out, taken, side, side).cpu() / (taken * side * side) ** 0.5)
            for taken, out, side in zip(widths, widths[1:], sides, strict=False)
        ]
        self.biases = [guarded(noise(2 * out, of="bias").cpu() / 4)[::2] for out in widths[1:]]
        self.tensors = [one.requires_grad_() for one in (*self.weights, *self.biases)]

    def features(self, x: Tensor, resting: int = 0) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor]
        found = rectified().features(x, self.weights, self.biases, self.forms, resting)
        return found


def plain(x: Tensor, tensors: Sequence[Tensor], forms: Any) -> Tensor:
    """Features in double precision, rounded where kernels round."""
    x, count = halved(x), len(forms)
    for number, (padding, pooled) in enumerate(forms):
        weight, bias = tensors[number], tensors[count + number]
        if number:
            x = both_ways(F.conv2d(x, both_ways(weight), padding=padding))
        else:
            x = F.conv2d(x, halved(weight), padding=padding)
        x = F.max_pool2d(x, 2) if pooled else x
        x = both_ways(F.relu(x + bias[:, None, None]))
    return x.flatten(1)


def twice_as_exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().double().requires_grad_() for one in tensors]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("resting", [0, 2])
def test_features_and_gradients_are_those_of_the_plain_operations_rounded(
    row: Any, resting: int
) -> None:
    own, moving = Row(row), 3 - resting
    x = noise(3, *own.shape)
    found, still = own.features(x, resting)
    exact = twice_as_exact(own.tensors)
    wanted = plain(x.double(), exact, own.forms)
    assert found.dtype == still.dtype == torch.float32 and not still.requires_grad
    for one, other in ((found, wanted[:moving]), (still, wanted[moving:])):
        assert near_on_the_whole(one, other, roundings=1)
    told = noise(*reversed(found.shape), of="told").t()
    slopes = torch.autograd.grad(found, own.tensors, told)
    hoped = torch.autograd.grad(wanted[:moving], exact, told.double())
    # The framework's convolutions may add up in half precision: up to two roundings are seen.
    roundings = 4 if len(own.forms) > 1 else 1
    for one, other in zip(slopes, hoped, strict=True):
        assert one.dtype == torch.float32 and near_on_the_whole(one, other, roundings=roundings)
    with torch.no_grad():
        again = own.features(x, resting)
    assert torch.equal(again[0], found) and torch.equal(again[1], still)
    assert untouched(x, *(one.detach() for one in own.tensors))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_gradients_of_gradients_are_those_of_the_plain_operations(row: Any) -> None:
    own = Row(row)
    x, exact = noise(2, *own.shape), twice_as_exact(own.tensors)
    told = noise(*own.features(x)[0].shape, of="told")

    def twice(features: Tensor, tensors: Sequence[Tensor], told: Tensor) -> tuple[Tensor, ...]:
        slopes = torch.autograd.grad(features, tensors, told, create_graph=True)
        length = torch.stack([slope.square().sum() for slope in slopes]).sum()
        return torch.autograd.grad(length, tensors, allow_unused=True, materialize_grads=True)

    found = twice(own.features(x)[0], own.tensors, told)
    wanted = twice(unrounded(x.double(), exact, own.forms), exact, told.double())
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def unrounded(x: Tensor, tensors: Sequence[Tensor], forms: Any) -> Tensor:
    count = len(forms)
    for weight, bias, form in zip(tensors[:count], tensors[count:], forms, strict=True):
        x = F.relu(F.conv2d(x, weight, bias, padding=form[0]))
        x = F.max_pool2d(x, 2) if form[1] else x
    return x.flatten(1)


@pytest.mark.parametrize("images", [0, 2])
def test_where_no_image_moves_nobody_tells_weights_anything(images: int) -> None:
    own = Row(ROWS[0])
    found, still = own.features(noise(images, *own.shape), images)
    assert found.shape == (0, still.shape[1]) and len(still) == images
    for slope, one in zip(torch.autograd.grad(found.sum(), own.tensors), own.tensors, strict=True):
        assert slope.shape == one.shape and not slope.any()


def test_what_is_not_a_number_stays_so() -> None:
    own = Row(ROWS[2])
    x = noise(3, *own.shape)
    x[1, 0, 2, 3] = float("nan")
    assert own.features(x)[0].isnan().any(1).tolist() == [False, True, False]


def test_maps_that_are_no_numbers_tell_weights_what_they_hear() -> None:
    """As the framework's ReLU does: what is not a number is not below zero."""
    own = Row(ROWS[3])
    with torch.no_grad():
        own.biases[0][1] = float("nan")
    found, _ = own.features(noise(2, *own.shape))
    slopes = torch.autograd.grad(found, own.tensors, found.detach())
    for slope in slopes:
        lost = slope.reshape(6, -1).isnan()
        assert lost.all(1).tolist() == lost.any(1).tolist() == [False, True] + 4 * [False]


def test_few_taps_and_even_maps_that_are_pooled_are_taken() -> None:
    taken, x = rectified().takes, torch.zeros(2, 3, 8, 8)
    weight = torch.zeros(6, 3, 5, 5)
    assert taken(x, weight, 2, True) and not taken(x, weight, 2, False)
    assert not taken(x[..., 1:], weight, 2, True) and not taken(x[:, :, 1:], weight, 2, True)
    assert not taken(torch.zeros(2, 4, 8, 8), torch.zeros(6, 4, 5, 5), 2, True)
    many = x[:1].expand(2**31 // (6 * 64) + 1, 3, 8, 8)
    assert taken(many[:-1], weight, 2, True) and not taken(many, weight, 2, True)
