"""Blocks of stacks of ConvNets in half precision: convolution, norm, ReLU and pooling, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from block_references import EPS, rounded_block
from fedstill.core import gpu
from fedstill.models.by_pixel import GAIN
from interpreted import DEVICE, guarded, needs_triton, noise, untouched
from roundings import halved, near_on_the_whole, within

pytestmark = needs_triton
SMALL = (16, 16, 16, 4, 1)  # tiles of which there are several, each way
# members, images, inputs, outputs, height, width, padding, tiles
CONVOLUTIONS = [
    (2, 3, 5, 7, 5, 3, 1, None),
    (1, 1, 1, 1, 3, 3, 0, None),
    (2, 1, 3, 20, 2, 3, 3, SMALL),
    (1, 1, 16, 17, 4, 5, 1, SMALL),  # a tile of one tap
    (1, 2, 32, 33, 3, 4, 1, None),
    (2, 1, 70, 130, 2, 2, 1, None),
]
KINDS = {"images": None, "maps": 1, "shared": 2, "turned": 3}  # and shares of weights' gradients
SEEN = [(case, kind) for at, case in enumerate(CONVOLUTIONS) for kind in list(KINDS)[at % 2 :: 2]]


def blocks() -> Any:
    return gpu.kernels("kernels.stacked_blocks")


def tiled(tiles: tuple[int, ...] | None) -> Any:
    return blocks().Tiles(*tiles) if tiles else None


def lying_by_pixel(tensor: Tensor) -> Tensor:
    """In half precision with a pixel's channels side by side, guarded."""
    return guarded(tensor.cpu().half().permute(0, 1, 3, 4, 2)).permute(0, 1, 4, 2, 3)


def seen(kind: str, *shape: int) -> Tensor:
    """What a convolution sees: images, a block's maps, one stack for all, or in another order."""
    if kind == "maps":
        return lying_by_pixel(noise(*shape))
    if kind == "shared":
        return noise(*shape[1:]).expand(shape)
    members, images, channels, height, width = shape
    if kind == "turned":
        return noise(width, images, members, channels, height).permute(2, 1, 3, 4, 0)
    return noise(*shape)


def convolution(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    pairs = zip(x, weight, strict=True)
    return torch.stack([F.conv2d(one, other, padding=padding) for one, other in pairs])


def input_slopes(grad: Tensor, weight: Tensor, padding: int, size: Any) -> Tensor:
    made = [
        torch.nn.grad.conv2d_input(size, one, other, padding=padding)
        for one, other in zip(weight, grad, strict=True)
    ]
    return torch.stack(made)


def kernel_slopes(grad: Tensor, x: Tensor, size: Any, padding: int) -> Tensor:
    made = [
        torch.nn.grad.conv2d_weight(one, size, other, padding=padding)
        for one, other in zip(x, grad, strict=True)
    ]
    return torch.stack(made)


@pytest.mark.parametrize(("members", "inputs", "outputs"), [(2, 3, 70), (1, 1, 1), (3, 8, 64)])
def test_weights_are_laid_out_by_tap(members: int, inputs: int, outputs: int) -> None:
    weight = noise(outputs, members, inputs, 3, 3).transpose(0, 1)
    found = blocks().laid_out(weight)
    wanted = weight.half().flatten(3).permute(0, 3, 2, 1)
    assert torch.equal(found, wanted) and found.is_contiguous()
    assert untouched(weight)


@pytest.mark.parametrize(("case", "kind"), SEEN, ids=str)
def test_a_convolution_is_exact_but_for_rounding(case: Any, kind: str) -> None:
    members, images, inputs, outputs, height, width, padding, tiles = case
    x = seen(kind, members, images, inputs, height, width)
    weight = noise(members, outputs, inputs, 3, 3, of="weight")
    laid = guarded(blocks().laid_out(weight).cpu())
    found = blocks().convolved(x, laid, padding, tiled(tiles))
    exact = convolution(halved(x), halved(weight), padding)
    sums = convolution(halved(x).abs(), halved(weight).abs(), padding)
    assert found.dtype == torch.float16 and within(found, exact, sums, 9 * inputs)
    assert found.permute(0, 1, 3, 4, 2).is_contiguous()
    assert untouched(x, laid)


@pytest.mark.parametrize(("case", "kind"), SEEN, ids=str)
def test_the_gradient_of_what_a_convolution_sees_is_exact_but_for_rounding(
    case: Any, kind: str
) -> None:
    """That of images is as loud as outside, that of maps louder."""
    members, images, inputs, outputs, height, width, padding, tiles = case
    x = seen(kind, members, images, inputs, height, width)
    weight = noise(members, outputs, inputs, 3, 3, of="weight")
    laid = guarded(blocks().laid_out(weight).cpu())
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    grad = lying_by_pixel(noise(members, images, outputs, high, wide, of="told"))
    found = blocks().image_slopes(grad, x, laid, padding, tiled(tiles))
    gain, size = (1 if kind == "maps" else GAIN), x.shape[1:]
    exact = input_slopes(halved(grad), halved(weight), padding, size) / gain
    sums = input_slopes(halved(grad).abs(), halved(weight).abs(), padding, size) / gain
    assert found.dtype == x.dtype and within(found, exact, sums, 9 * outputs)
    assert (found.permute(0, 1, 3, 4, 2) if kind == "maps" else found).is_contiguous()
    assert untouched(grad, laid)


@pytest.mark.parametrize(("case", "kind"), SEEN, ids=str)
def test_the_gradient_of_weights_is_exact_but_for_rounding(case: Any, kind: str) -> None:
    members, images, inputs, outputs, height, width, padding, tiles = case
    x = seen(kind, members, images, inputs, height, width)
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    grad = noise(members, images, outputs, high, wide, of="told").half()
    size = (outputs, inputs, 3, 3)
    exact = kernel_slopes(halved(grad), halved(x), size, padding) / GAIN
    sums = kernel_slopes(halved(grad).abs(), halved(x).abs(), size, padding) / GAIN
    for by_tap in (False, True):
        found = blocks().weight_slopes(grad, x, padding, tiled(tiles), KINDS[kind], by_tap=by_tap)
        assert found.dtype == torch.float32 and within(found, exact, sums, images * high * wide)
        assert (found.permute(0, 3, 4, 2, 1) if by_tap else found).is_contiguous()
    assert untouched(x)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_gradients_of_weights_come_with_the_sum_of_their_squares(case: Any) -> None:
    members, images, inputs, outputs, height, width, padding, tiles = case
    x = seen("images", members, images, inputs, height, width)
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    grad = lying_by_pixel(noise(members, images, outputs, high, wide, of="told"))
    found, squares = blocks().squared_weight_slopes(grad, x, padding, tiled(tiles), gain=2.0)
    size = (outputs, inputs, 3, 3)
    exact = kernel_slopes(halved(grad), halved(x), size, padding) / 2
    sums = kernel_slopes(halved(grad).abs(), halved(x).abs(), size, padding) / 2
    assert found.dtype == torch.float16 and within(found, exact, sums, images * high * wide)
    wanted = found.double().square().sum((1, 2, 3, 4))
    assert squares.dtype == torch.float64
    assert torch.allclose(squares, wanted, rtol=128 * 2.0**-24, atol=0)  # sums of up to 128 inputs
    assert untouched(x, grad)


def test_where_there_is_no_image_gradients_of_weights_are_zero() -> None:
    x, laid = noise(2, 0, 3, 4, 4), blocks().laid_out(noise(2, 5, 3, 3, 3))
    maps = blocks().convolved(x, laid, 1)
    assert maps.shape == (2, 0, 5, 4, 4)
    pooled, *kept = blocks().normed(maps, noise(2, 5), noise(2, 5))
    assert pooled.shape == (2, 0, 5, 2, 2)
    to_scale, to_shift, told = blocks().norm_slopes(pooled, noise(2, 5), noise(2, 5), *kept)
    assert blocks().image_slopes(told, x, laid, 1).shape == x.shape
    to_weight = blocks().weight_slopes(told, x, 1)
    for one in (to_scale, to_shift, to_weight):
        assert one.shape[0] == 2 and not one.any()


class Plain:
    """A norm with ReLU and pooling in double precision, and how large what it adds up is."""

    def __init__(self, maps: Tensor, scale: Tensor, shift: Tensor):
        self.maps = halved(maps).requires_grad_()
        self.scale, self.shift = scale.double().requires_grad_(), shift.double().requires_grad_()
        self.mean = self.maps.mean((3, 4), keepdim=True)
        spread = (self.maps - self.mean).square().mean((3, 4), keepdim=True)
        self.factor = (spread + EPS).rsqrt()
        self.normal = (self.maps - self.mean) * self.factor
        each = (slice(None), None, slice(None), None, None)
        self.stretch = self.scale[each]
        self.cut = F.relu(self.normal * self.stretch + self.shift[each])
        self.pooled = F.avg_pool2d(self.cut.flatten(0, 1), 2).view_as(self.maps[..., ::2, ::2])
        # A pixel about its mean is as exact as the larger of the two.
        rough = (self.maps.abs() + self.maps.abs().mean((3, 4), keepdim=True)) * self.factor + 1
        self.rough = rough.detach()
        self.size = (self.rough * self.stretch.abs() + self.shift[each].abs()).detach()

    def spread_out(self, grad: Tensor) -> Tensor:
        """What pixels hear that the ReLU did not cut."""
        quarter = grad.repeat_interleave(2, 3).repeat_interleave(2, 4) / 4
        return torch.where(self.cut > 0, quarter, 0)


def pooled_four(sizes: Tensor) -> Tensor:
    return F.avg_pool2d(sizes.flatten(0, 1), 2).view_as(sizes[..., ::2, ::2])


# members, images, channels, height, width, places, channels and warps of a program
NORMS = [
    (2, 3, 7, 4, 6, None),
    (1, 1, 1, 2, 2, None),
    (3, 2, 20, 2, 4, (2, 8, 4)),
    (1, 2, 33, 6, 10, (16, 16, 4)),
    (2, 1, 130, 2, 2, None),
    (1, 1, 3, 36, 34, None),
]


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_a_norm_with_relu_and_pooling_is_exact_but_for_rounding(case: Any) -> None:
    members, images, channels, height, width, tiles = case
    maps = lying_by_pixel(noise(members, images, channels, height, width) + 0.5)
    scale = noise(channels, members, of="scale").t()
    shift = noise(members, channels, of="shift")
    own = blocks().NormTiles(*tiles) if tiles else None
    pooled, same, mean, factor = blocks().normed(maps, scale, shift, own)
    plain, pixels = Plain(maps, scale, shift), height * width
    assert pooled.dtype == torch.float16 and same is maps
    assert within(pooled, plain.pooled.detach(), pooled_four(plain.size), pixels)
    sums = plain.maps.detach().abs().mean((3, 4))
    assert within(mean, plain.mean.detach()[..., 0, 0], sums, pixels)
    sums = plain.factor.detach()[..., 0, 0] * plain.rough.mean((3, 4))
    assert within(factor, plain.factor.detach()[..., 0, 0], sums, pixels)
    assert untouched(maps, scale, shift)


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_gradients_of_a_norm_with_relu_and_pooling_are_exact_but_for_rounding(case: Any) -> None:
    members, images, channels, height, width, tiles = case
    maps = lying_by_pixel(noise(members, images, channels, height, width) + 0.5)
    scale, shift = noise(members, channels, of="scale"), noise(members, channels, of="shift")
    grad = noise(members, images, channels, height // 2, width // 2, of="told")
    grad = lying_by_pixel(grad) if tiles else guarded(grad.cpu().half())
    own = blocks().NormTiles(*tiles) if tiles else None
    _, *kept = blocks().normed(maps, scale, shift)
    to_both, to_maps = blocks().norm_slopes_by_image(grad, scale, shift, *kept, own)
    plain, pixels = Plain(maps, scale, shift), height * width
    (exact,) = torch.autograd.grad(plain.pooled, plain.maps, halved(grad), retain_graph=True)
    share = plain.spread_out(halved(grad)).detach()
    told = share.abs()
    level, tilt = (one.mean((3, 4), keepdim=True) for one in (told, told * plain.rough))
    sums = (plain.stretch.abs() * plain.factor * (told + level + plain.rough * tilt)).detach()
    assert to_maps.dtype == torch.float16 and within(to_maps, exact, sums, pixels)
    exact = torch.stack([(share * plain.normal.detach()).sum((3, 4)), share.sum((3, 4))], 2) / GAIN
    sums = torch.stack([(told * plain.rough).sum((3, 4)), told.sum((3, 4))], 2) / GAIN
    assert within(to_both, exact, sums, pixels)
    to_scale, to_shift, again = blocks().norm_slopes(grad, scale, shift, *kept, own)
    assert torch.equal(again, to_maps)
    inputs = (plain.scale, plain.shift)
    wanted = torch.autograd.grad(plain.pooled, inputs, halved(grad) / GAIN)
    for one, other, size in zip((to_scale, to_shift), wanted, sums.sum(1).unbind(1), strict=True):
        assert within(one, other, size, pixels * images)
    assert untouched(maps, scale, shift, grad)


def weights(*inner: int, of: str) -> list[Tensor]:
    """A block's: [..., outputs, inputs, 3, 3], scale and shift."""
    *members, outputs, _ = inner
    return [
        noise(*inner, 3, 3, of=of + "weight"), noise(*members, outputs, of=of + "scale"),
        noise(*members, outputs, of=of + "shift"),
    ]  # fmt: skip


def in_a_row(block: Any, last: Any, x: Tensor, tensors: tuple[Tensor, ...], padding: int) -> Tensor:
    """Two blocks, and what they say to the outside."""
    made: Tensor = last(block(block(x, *tensors[:3], padding), *tensors[3:], 1))
    return made


def as_it_is(maps: Tensor) -> Tensor:
    return maps


SHAPES = [(1, 4, 8, 3), (3, 12, 8, 1), (8, 4, 4, 1)]  # inputs, height, width, padding


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_of_a_network_alone_are_the_plain_operations_rounded(
    shape: tuple[int, ...],
) -> None:
    inputs, height, width, padding = shape
    x = noise(2, inputs, height, width)
    tensors = (*weights(5, inputs, of="one"), *weights(9, 5, of="two"))
    moved = [one.requires_grad_() for one in (x, *tensors)]
    found = in_a_row(blocks().block, blocks().in_single, moved[0], tuple(moved[1:]), padding)
    exact = [one.detach().double().requires_grad_() for one in moved]
    wanted = in_a_row(rounded_block, as_it_is, exact[0], tuple(exact[1:]), padding)
    assert found.dtype == torch.float32 and near_on_the_whole(found, wanted, roundings=1)
    told = noise(*found.shape, of="told")
    slopes = torch.autograd.grad(found, moved, told)
    hoped = torch.autograd.grad(wanted, exact, told.double())
    for one, other in zip(slopes, hoped, strict=True):
        assert one.dtype == torch.float32 and near_on_the_whole(one, other, roundings=1)
    assert untouched(*(one.detach() for one in moved))


def test_a_block_tells_only_those_who_ask_and_nobody_twice() -> None:
    x, (weight, scale, shift) = noise(2, 3, 4, 4), weights(5, 3, of="one")
    told = guarded(noise(2, 5, 2, 2, of="told").cpu().half()).requires_grad_()
    found = blocks().block(x, weight.requires_grad_(), scale, shift, 1)
    (alone,) = torch.autograd.grad(found, weight, told, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        alone.sum().backward()
    found = blocks().block(x.requires_grad_(), weight, scale, shift, 1)
    both = torch.autograd.grad(found, (x, weight), told)
    assert both[0].shape == x.shape and torch.equal(both[1], alone)


@pytest.mark.parametrize(
    ("shape", "shared"),
    [(SHAPES[0], "nothing"), (SHAPES[1], "images"), (SHAPES[2], "weights"), (SHAPES[2], "axes")],
)
def test_blocks_of_a_stack_are_those_of_each_network(shape: tuple[int, ...], shared: str) -> None:
    inputs, height, width, padding = shape
    members, dims = 2, (0, (0,) * 6)
    x, own = noise(members, 2, inputs, height, width), (members,)
    if shared == "images":
        x, dims = noise(2, inputs, height, width), (None, (0,) * 6)
    if shared == "axes":
        x, dims = noise(2, members, inputs, height, width), (1, (0,) * 6)
    if shared == "weights":
        own, dims = (), (0, (None,) * 6)
    tensors = (*weights(*own, 5, inputs, of="one"), *weights(*own, 9, 5, of="two"))
    told = noise(members, 2, 9, (height + 2 * padding - 2) // 4, (width + 2 * padding - 2) // 4)

    def loss(inputs: Any, told: Tensor) -> tuple[Tensor, Tensor]:
        made = in_a_row(blocks().block, blocks().in_single, *inputs, padding)
        return (made * told).sum(), made

    slopes = torch.func.vmap(torch.func.grad(loss, has_aux=True), in_dims=(dims, 0))
    (of_x, of_tensors), made = slopes((x, tensors), told)
    for member in range(members):
        mine = x if dims[0] is None else x.select(dims[0], member)
        every = (mine, *(one[member] if own else one for one in tensors))
        exact = [one.double().requires_grad_() for one in every]
        wanted = in_a_row(rounded_block, as_it_is, exact[0], tuple(exact[1:]), padding)
        assert near_on_the_whole(made[member], wanted, roundings=1)
        hoped = torch.autograd.grad(wanted, exact, told[member].double())
        for one, other in zip((of_x, *of_tensors), hoped, strict=True):
            assert near_on_the_whole(one[member], other, roundings=1)
    assert untouched(x, *tensors)


def test_what_leaves_the_blocks_is_the_same_and_its_gradient_louder() -> None:
    maps = guarded(noise(3, 4).cpu().half()).requires_grad_()
    found = blocks().in_single(maps, 8.0)
    assert found.dtype == torch.float32 and torch.equal(found, maps.float())
    told = noise(3, 4, of="told")
    (slope,) = torch.autograd.grad(found, maps, told)
    assert slope.dtype == torch.float16 and torch.equal(slope, (told * 8).half())


def test_what_is_not_a_number_stays_so() -> None:
    x, tensors = noise(3, 3, 4, 4), weights(5, 3, of="one")
    x[1, 0, 2, 2] = float("nan")
    found = blocks().block(x, *tensors, 1)
    assert found.flatten(1).isnan().all(1).tolist() == [False, True, False]
    assert found.flatten(1).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("case", CONVOLUTIONS[:3], ids=str)
def test_places_in_64_bits_are_those_in_32(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    members, images, inputs, outputs, height, width, padding, tiles = case
    x, weight = noise(members, images, inputs, height, width), noise(members, outputs, inputs, 3, 3)
    grow = 2 * padding - 2
    grad = noise(members, images, outputs, height + grow, width + grow, of="told").half()

    def made() -> tuple[Tensor, ...]:
        laid, own = blocks().laid_out(weight), tiled(tiles)
        return (
            blocks().convolved(x, laid, padding, own),
            blocks().image_slopes(grad, x, laid, padding, own),
            blocks().weight_slopes(grad, x, padding, own),
            *blocks().squared_weight_slopes(grad, x, padding, own),
        )

    wanted, asked = made(), []
    monkeypatch.setattr(blocks(), "long", lambda *stacks: asked.append(stacks) or True)
    for one, other in zip(made(), wanted, strict=True):
        assert torch.equal(one, other)
    assert len(asked) == 4


FAR = 2**30  # numbers from one image to the next: the third lies where 32 bits do not reach
on_a_host = pytest.mark.skipif(
    DEVICE == "cuda", reason="needs memory with holes, which a GPU lacks"
)


@pytest.fixture
def nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies all memory back to where it came from: here to itself, holes too."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def with_holes(folder: Path, reach: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor that reaches so far, of zeros; before it lie those that a short number finds.

    It is a file with holes, of which only what is written takes room.
    """
    whole = torch.from_file(
        str(folder / "holes"), shared=True, size=2 * FAR + reach, dtype=torch.float16
    )
    return whole.as_strided(size, stride, 2 * FAR)


def far_apart(folder: Path, *shape: int) -> Tensor:
    """Maps of three images of one member, by pixel and far from each other."""
    channels, _, width = shape
    strides = (3 * FAR, FAR, 1, width * channels, channels)
    return with_holes(folder, 3 * FAR, (1, 3, *shape), strides)


@on_a_host
@pytest.mark.usefixtures("nothing_is_copied")
def test_a_convolution_reads_and_writes_images_beyond_the_reach_of_32_bits(tmp_path: Path) -> None:
    weight, maps = noise(1, 5, 4, 3, 3), noise(1, 3, 4, 4, 6)
    laid = blocks().laid_out(weight)
    far = far_apart(tmp_path, 4, 4, 6)
    far.copy_(maps)
    near_by = lying_by_pixel(maps)
    wanted = blocks().convolved(near_by, laid, 1)
    assert torch.equal(blocks().convolved(far, laid, 1), wanted)
    grad = noise(1, 3, 5, 4, 6, of="told").half()
    found = blocks().weight_slopes(grad, far, 1)
    assert torch.equal(found, blocks().weight_slopes(grad, near_by, 1))
    blocks()._launch_convolution(grad, laid, far, 1, 1.0, True, None)
    assert torch.equal(far, blocks().image_slopes(grad, near_by, laid, 1))


@on_a_host
@pytest.mark.usefixtures("nothing_is_copied")
@pytest.mark.usefixtures("device_is_chosen")
def test_gradients_of_weights_hear_pixels_beyond_the_reach_of_32_bits(tmp_path: Path) -> None:
    """Of so many channels that the third pixel lies as far as the last of very many images."""
    far = with_holes(tmp_path, 4 * FAR, (2, 2, 16), (2 * FAR, FAR, 1))
    told = noise(16, 2, 2, of="told").half()
    far.copy_(told.permute(1, 2, 0))
    x, found = noise(1, 1, 1, 2, 2), noise(16, 9)
    blocks()._weigh[(1, 1, 1)](
        x,
        far,
        found,
        found,
        1.0,
        4,
        4,
        *x.stride(),
        1,
        FAR,
        2,
        2,
        2,
        2,
        1,
        False,
        False,
        True,
        *SMALL[:3],
    )
    wanted = blocks().weight_slopes(told[None, None], x, 1, tiled(SMALL), 1, gain=1.0)
    assert torch.equal(found, wanted.view(16, 9))
