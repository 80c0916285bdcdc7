"""Kernels of networks without norm say what the plain operations say, there and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill.core import precision
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.alexnet import AlexNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NETWORKS = [
    AlexNet((3, 32, 32), 5, width=128), AlexNet((1, 28, 28), 5, width=8),
    AlexNet((3, 20, 24), 5, width=20),
]  # fmt: skip
ROUNDED = 2.0**-11  # a number in half precision is off by at most this share of it
STEP = 2.0**-24  # one in single precision


def noise(*shape: int, of: str = "images") -> Tensor:
    return torch.randn(*shape, generator=generator(3, of)).cuda()


def on_gpu(model: AlexNet) -> Weights:
    return {name: t.cuda().requires_grad_() for name, t in model.init(1).items()}


def halved(tensor: Tensor) -> Tensor:
    """Rounded to half precision, in double precision."""
    return tensor.detach().half().double()


def plainly(model: AlexNet, weights: Weights, x: Tensor) -> Tensor:
    """Features by the framework's operations, in the precision of what comes in."""
    with torch.backends.cudnn.flags(enabled=False):
        return model._stages(weights, x, only_last=True)[-1].flatten(1)


def twice_as_exact(weights: Weights) -> Weights:
    return {name: t.detach().double().requires_grad_() for name, t in weights.items()}


@pytest.mark.parametrize("model", NETWORKS, ids=repr)
@pytest.mark.parametrize("resting", [0, 3])
def test_features_and_gradients_are_those_of_the_plain_operations_but_for_rounding(
    model: AlexNet, resting: int
) -> None:
    weights, x = on_gpu(model), noise(13, *model.shape)
    moving = 13 - resting
    with precision.using("half"):
        found, still = model.features_beside(weights, x, resting)
    exact = twice_as_exact(weights)
    every = plainly(model, exact, x.double())
    seen = torch.cat([found, still]).detach().double()
    assert found.dtype == torch.float32 and not still.requires_grad
    # Five blocks, each of which rounds its images or maps, its weights and what it makes: fifteen
    # roundings, which of random signs come to less than four. About one is seen.
    off = float((seen - every.detach()).norm())
    assert off <= 4 * ROUNDED * float(every.detach().norm())
    told = noise(moving, model.feature_width, of="told")
    named = [name for name in weights if name.startswith("conv")]
    slopes = torch.autograd.grad(found, [weights[name] for name in named], told)
    wanted = torch.autograd.grad(every[:moving], [exact[name] for name in named], told.double())
    for name, one, other in zip(named, slopes, wanted, strict=True):
        assert one.dtype == torch.float32 and one.is_contiguous()
        # A ReLU at its kink, or the larger of two nearly alike, may fall to the other side.
        assert float((one.double() - other).norm()) <= 0.15 * float(other.norm()), name


@pytest.mark.parametrize("model", NETWORKS, ids=repr)
def test_the_first_block_is_exact_but_for_the_rounding_of_its_factors_and_of_what_it_makes(
    model: AlexNet,
) -> None:
    from fedstill.kernels import rectified

    weights, x = on_gpu(model), noise(7, *model.shape)
    weight, bias = weights["conv0.weight"].detach(), weights["conv0.bias"].detach()
    images = rectified.padded(x, 4)
    assert torch.equal(images, F.pad(x, (4, 4, 4, 4)).half())
    made, corners = rectified.first_block(images, weight, bias, 5)
    maps = F.conv2d(halved(x), halved(weight), bias.double(), padding=4)
    exact, where = F.max_pool2d(F.relu(maps), 2, return_indices=True)
    sums = F.max_pool2d(F.conv2d(halved(x).abs(), halved(weight).abs(), padding=4), 2) + 1
    # Up to 80 sums in single precision, of which the hardware may keep less: four more bits.
    off = exact.abs() * ROUNDED + 80 * 16 * STEP * sums
    assert bool(((made.double() - exact).abs() <= off).all())
    # Which of four pixels it was: the index into the whole map, or none where nothing comes out.
    width = maps.shape[3]
    corner = 2 * (where // width % 2) + where % width % 2
    corner = torch.where(exact > 0, corner, 4)[:5]
    told = corners.permute(0, 3, 1, 2)
    assert float((told == corner).double().mean()) > 0.999  # but where two are nearly alike


@pytest.mark.parametrize("model", NETWORKS, ids=repr)
def test_gradients_of_the_first_block_are_sums_over_the_pixels_that_were_largest(
    model: AlexNet,
) -> None:
    from fedstill.kernels import rectified
    from fedstill.models.by_pixel import GAIN

    weights, x = on_gpu(model), noise(6, *model.shape)
    weight, bias = weights["conv0.weight"].detach(), weights["conv0.bias"].detach()
    images = rectified.padded(x, 4)
    _, corners = rectified.first_block(images, weight, bias, 6)
    told = noise(*corners.permute(0, 3, 1, 2).shape, of="told").half()
    to_weight, to_bias = rectified.first_slopes(told, images, weight, corners)
    spread = [torch.where(corners.permute(0, 3, 1, 2) == one, told.double(), 0) for one in range(4)]
    high, wide = told.shape[2:]
    whole = torch.stack(spread, -1).view(*told.shape, 2, 2).permute(0, 1, 2, 4, 3, 5)
    whole = whole.reshape(*told.shape[:2], 2 * high, 2 * wide)
    exact = torch.nn.grad.conv2d_weight(images.double(), weight.shape, whole) / GAIN
    sums = torch.nn.grad.conv2d_weight(images.double().abs(), weight.shape, whole.abs()) / GAIN
    pixels = 6 * 4 * high * wide
    # A sum of so many in single precision, in pieces of some 128 pixels and then of those.
    assert bool(((to_weight.double() - exact).abs() <= (512 + pixels / 512) * STEP * sums).all())
    exact = whole.sum((0, 2, 3)) / GAIN
    sums = whole.abs().sum((0, 2, 3)) / GAIN
    assert bool(((to_bias.double() - exact).abs() <= (512 + pixels / 512) * STEP * sums).all())


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 192), (64, 128)])
def test_a_large_convolution_and_its_way_back_are_exact_but_for_one_rounding(
    inputs: int, outputs: int
) -> None:
    from fedstill.kernels import rectified

    lying = torch.channels_last
    maps = noise(3, inputs, 9, 7).half().to(memory_format=lying)
    weight = (noise(outputs, inputs, 5, 5, of="weight") / 50).half().to(memory_format=lying)
    grad = noise(3, outputs, 9, 7, of="told").half().to(memory_format=lying)
    made = rectified.convolved(maps, weight, 2)
    back = rectified.convolved_back(grad, weight, 2)
    size = maps.shape
    with torch.backends.cudnn.flags(enabled=False):
        pairs = [
            (made, F.conv2d(maps.double(), weight.double(), padding=2),
             F.conv2d(maps.double().abs(), weight.double().abs(), padding=2)),
            (back, torch.nn.grad.conv2d_input(size, weight.double(), grad.double(), padding=2),
             torch.nn.grad.conv2d_input(
                 size, weight.double().abs(), grad.double().abs(), padding=2)),
        ]  # fmt: skip
    for found, exact, sums in pairs:
        assert found.is_contiguous(memory_format=lying)
        # 25 taps of up to 192 channels, 64 at a time: 75 sums, of which four bits may be lost.
        off = exact.abs() * ROUNDED + 75 * 16 * STEP * sums
        assert bool(((found.double() - exact).abs() <= off).all())


def test_weights_turned_round_and_back_are_the_same_but_for_rounding() -> None:
    from fedstill.kernels import rectified

    shapes = [(5, 3, 3, 3), (2, 7, 5, 5), (1, 16, 1, 1), (4, 12, 3, 3), (6, 2, 3, 3)]  # five
    tensors = [noise(*shape) for shape in shapes]
    halves = rectified.turned(tensors, torch.float16, 4.0)
    for one, other in zip(halves, tensors, strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(one, (other * 4).half())
    for one, other in zip(rectified.turned(halves, torch.float32, 0.25), tensors, strict=True):
        assert one.is_contiguous() and torch.equal(one, other.half().float())


def test_gradients_of_gradients_are_those_of_the_plain_operations() -> None:
    model = NETWORKS[1]
    weights, x = on_gpu(model), noise(4, *model.shape)

    def bent(features: Tensor, weights: Weights) -> Tensor:
        named = [name for name in weights if name.startswith("conv")]
        loss = (features.double() * 1e-2).square().sum()
        slopes = torch.autograd.grad(loss, [weights[n] for n in named], create_graph=True)
        length = torch.stack([slope.double().square().sum() for slope in slopes]).sum()
        return torch.autograd.grad(length, weights["conv2.weight"])[0].double()

    with precision.using("half"):
        found = bent(model.features(weights, x), weights)
    exact = twice_as_exact(weights)
    wanted = bent(plainly(model, exact, x.double()), exact)
    assert float((found - wanted).norm()) <= 0.15 * float(wanted.norm())


def test_who_wants_gradients_of_images_gets_them() -> None:
    model = NETWORKS[1]
    weights, x = on_gpu(model), noise(4, *model.shape).requires_grad_()
    with precision.using("half"):
        (slope,) = torch.autograd.grad(model(weights, x).sum(), x)
    assert slope.shape == x.shape and float(slope.norm()) > 0


def test_what_is_not_a_number_stays_so() -> None:
    model = NETWORKS[1]
    weights, x = on_gpu(model), noise(3, *model.shape)
    x[1, 0, 5, 5] = float("nan")
    with precision.using("half"):
        found = model.features(weights, x)
    assert found.isnan().any(1).tolist() == [False, True, False]


def test_where_all_images_rest_nobody_tells_weights_anything() -> None:
    model = NETWORKS[1]
    weights, x = on_gpu(model), noise(3, *model.shape)
    with precision.using("half"):
        found, still = model.features_beside(weights, x, resting=3)
        assert found.shape == (0, model.feature_width) and len(still) == 3
        (slope,) = torch.autograd.grad(found.sum(), weights["conv1.weight"])
    assert float(slope.abs().sum()) == 0
