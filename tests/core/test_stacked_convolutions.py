"""Convolutions of many networks at once say what they say one by one, and so do gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core import stacked_convolutions
from fedstill.core.convolutions import Moves
from fedstill.core.seeds import generator
from fedstill.core.stacked_layers import as_one

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NETWORKS, IMAGES = 3, 2
WAYS: list[tuple[Any, Any, tuple[int, int]]] = [  # stride, padding, kernel
    (1, 0, (3, 3)),
    (1, 1, (3, 3)),
    (2, 1, (3, 3)),
    (1, 0, (1, 1)),
    (2, 0, (1, 1)),
    ((1, 2), (2, 0), (5, 3)),
]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1, "numbers", *shape), dtype=torch.float64)


def whole(*shape: int) -> Tensor:
    """Whole numbers from -4 to 4."""
    rng = generator(2, "whole numbers", *shape)
    return torch.randint(-4, 5, shape, generator=rng).double()


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def weights_of(kernel: tuple[int, int]) -> list[Tensor]:
    return [noise(NETWORKS, 4, 3, *kernel), noise(NETWORKS, 4), noise(NETWORKS, 2, 4, 3, 3)]


def gradients(
    weights: list[Tensor], images: Tensor, stride: Any, padding: Any, *, common: bool
) -> list[Tensor]:
    """Of each network's loss by its weights, and the losses, under one vmap."""

    def loss(weights: list[Tensor], images: Tensor) -> Tensor:
        maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding).relu()
        return F.max_pool2d(F.conv2d(maps, weights[2]), 2).sin().sum()

    many = torch.func.vmap(torch.func.grad_and_value(loss), in_dims=(0, None if common else 0))
    found, losses = many(weights, images)
    return [*found, losses]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks each convolution was made for."""
    counted: list[int] = []
    plain = stacked_convolutions.convolutions

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None, moves: Any) -> Tensor:
        counted.append(len(weight))
        return plain(x, weight, bias, moves)

    monkeypatch.setattr(stacked_convolutions, "convolutions", watched)
    return counted


@pytest.mark.parametrize("common", [False, True], ids=["own images", "common images"])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_all_at_once_have_the_numbers_and_gradients_of_convolutions(
    stride: Any, padding: Any, kernel: tuple[int, int], common: bool, asked: list[int]
) -> None:
    weights, images = weights_of(kernel), noise(NETWORKS, IMAGES, 3, 10, 13)
    shown = images[0] if common else images
    plain = gradients(weights, shown, stride, padding, common=common)
    assert not asked
    with as_one():
        made = gradients(weights, shown, stride, padding, common=common)
    assert asked == [NETWORKS, NETWORKS]
    for one, other in zip(plain, made, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_gradients_have_gradients(
    stride: Any, padding: Any, kernel: tuple[int, int], asked: list[int]
) -> None:
    """A penalty on the length of a gradient, which is learned from: second derivatives of all."""
    weights, images = weights_of(kernel)[:2], noise(NETWORKS, IMAGES, 3, 10, 13)

    def penalty(weights: list[Tensor], images: Tensor) -> Tensor:
        with torch.enable_grad():
            maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding)
            told = torch.autograd.grad(maps.sin().sum(), [*weights, images], create_graph=True)
        return sum((one.square().sum() for one in told), start=torch.zeros(()).double())

    many = torch.func.vmap(torch.func.grad(penalty, argnums=(0, 1)))
    plain = many(weights, images)
    with as_one():
        made = many(weights, images)
    assert len(asked) > 1  # the gradient of a gradient is a convolution too
    for one, other in zip([*plain[0], plain[1]], [*made[0], made[1]], strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)


def test_a_single_network_and_other_convolutions_stay_as_they_are(asked: list[int]) -> None:
    images, weight = noise(2, 4, 7, 7), noise(4, 4, 3, 3)
    ways: list[dict[str, Any]] = [{"groups": 4}, {"dilation": 2}, {"padding": "same"}]
    for way in ways:
        one = weight[:, :1] if "groups" in way else weight

        def loss(w: Tensor, way: dict[str, Any] = way) -> Tensor:
            return F.conv2d(images, w, **way).sin().sum()

        with as_one():
            alone = torch.func.grad(loss)(one)
            many = torch.func.vmap(torch.func.grad(loss))(torch.stack([one, one]))
        assert torch.allclose(many, alone.expand(2, *alone.shape))
    assert not asked


def test_weights_that_all_networks_share_are_convolved_at_once(asked: list[int]) -> None:
    images, weight, scales = noise(NETWORKS, 2, 3, 6, 6), noise(4, 3, 3, 3), noise(NETWORKS)

    def loss(scale: Tensor, x: Tensor) -> Tensor:
        return (F.conv2d(x, weight) * scale).sum()

    with as_one():
        found = torch.func.vmap(torch.func.grad(loss))(scales, images)
    assert torch.allclose(found, F.conv2d(images.flatten(0, 1), weight).view(NETWORKS, -1).sum(1))
    assert not asked


class Residual(nn.Module):
    """Two convolutions around which images go by one of size one, as in a residual network."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.beside = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(outputs, track_running_stats=False), nn.GroupNorm(2, outputs)]
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(inner)) + self.beside(x)).relu()


class Excited(nn.Module):
    """Channels weighed by what a mean over the image says of them, as in a mobile network."""

    def __init__(self, channels: int):
        super().__init__()
        self.less = nn.Conv2d(channels, 4, 1)
        self.more = nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = F.adaptive_avg_pool2d(x, 1)
        return F.hardsigmoid(self.more(F.hardswish(self.less(means)))) * x


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(4, 4, 1), Residual(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, 3),
    )  # fmt: skip


def mobile_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6, track_running_stats=False),
        nn.Hardswish(), nn.Conv2d(6, 6, 3, 1, 1, groups=6), Excited(6), nn.Conv2d(6, 8, 1),
        nn.Conv2d(8, 8, 3, 1, 2, dilation=2), nn.AdaptiveMaxPool2d(2), nn.Flatten(),
        nn.Linear(32, 3),
    )  # fmt: skip


def pooled_net() -> nn.Module:
    """Pools of every kind, and layers that make images larger or move their pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 8, 3, padding=(0, 1)),
        nn.PixelShuffle(2), nn.Upsample(scale_factor=2), nn.Conv2d(2, 4, 3, (2, 1), bias=False),
        nn.InstanceNorm2d(4), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


@pytest.mark.parametrize("build", [residual_net, mobile_net, pooled_net])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_a_gpu)])
def test_networks_with_all_kinds_of_layers_behind_them_learn_as_before(
    build: Any, device: str
) -> None:
    """Maps that lay in memory by pixel made torch warn or refuse in the layers behind."""
    torch.manual_seed(0)
    net = build().to(device)
    kind = torch.float64 if device == "cpu" else torch.float32
    weights = {
        name: torch.stack([one.detach().to(kind) * scale for scale in (1.0, 0.7)])
        for name, one in net.named_parameters()
    }
    images, labels = noise(2, 4, 3, 32, 32).to(device, kind), torch.tensor([[0, 1, 2, 0]] * 2)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y)

    many = torch.func.vmap(torch.func.grad(loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = many(weights, images, labels.to(device))
        with as_one():
            made = many(weights, images, labels.to(device))
    apart = torch.cat([(made[name] - one).flatten() for name, one in plain.items()]).norm()
    length = torch.cat([one.flatten() for one in plain.values()]).norm()
    assert apart <= (1e-10 if device == "cpu" else 5e-2) * length


def test_results_lie_in_memory_as_the_frameworks_do() -> None:
    moves = Moves((1, 1), (1, 1))
    x, weight = noise(NETWORKS, IMAGES, 3, 6, 7), noise(NETWORKS, 4, 3, 3, 3)
    made = stacked_convolutions.convolutions(x, weight, None, moves)
    told = stacked_convolutions.image_gradients(made, weight, tuple(x.shape[1:]), moves)
    to_weight, to_bias = stacked_convolutions.weight_gradients(made, x, (3, 3), moves)
    assert all(tensor[0].is_contiguous() for tensor in (made, told, to_weight, to_bias))


@needs_a_gpu
@pytest.mark.parametrize("images", [1, 40])  # the latter's weights are sums of several parts
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 4), (3, 70), (20, 200), (40, 16)])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_kernels_on_a_gpu_sum_whole_numbers_exactly(
    stride: Any, padding: Any, kernel: tuple[int, int], inputs: int, outputs: int, images: int
) -> None:
    """Factors from -4 to 4 lose no bits, and no sum of 16 · 200 · 15 or 16 · 40 · 180 is 2 ** 24.

    180 are the most pixels of an image here.
    """
    moves = Moves(pair(stride), pair(padding))
    x, weight = whole(NETWORKS, images, inputs, 10, 13), whole(NETWORKS, outputs, inputs, *kernel)
    bias, shape = whole(NETWORKS, outputs), tuple(x.shape[1:])
    made = stacked_convolutions.convolutions(x, weight, bias, moves)
    grad = whole(*made.shape)
    wanted = [
        made,
        *stacked_convolutions.weight_gradients(grad, x, kernel, moves),
        stacked_convolutions.image_gradients(grad, weight, shape, moves),
    ]
    x, weight, bias, grad = (tensor.float().cuda() for tensor in (x, weight, bias, grad))
    found = [
        stacked_convolutions.convolutions(x, weight, bias, moves),
        *stacked_convolutions.weight_gradients(grad, x, kernel, moves),
        stacked_convolutions.image_gradients(grad, weight, shape, moves),
    ]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(other.double().cpu(), one)
        assert other[0].is_contiguous()


@needs_a_gpu
@pytest.mark.parametrize("channels", [3, 20])
def test_kernels_on_a_gpu_take_tensors_however_they_lie(channels: int) -> None:
    """Images that all networks share, maps by pixel, and gradients that are one number."""
    moves = Moves((1, 1), (1, 1))
    common, weight = whole(IMAGES, channels, 6, 7), whole(NETWORKS, 5, channels, 3, 3)
    x = common.expand(NETWORKS, *common.shape)
    grad = torch.ones(()).double().expand(NETWORKS, IMAGES, 5, 6, 7)
    wanted = [
        stacked_convolutions.convolutions(x, weight, None, moves),
        *stacked_convolutions.weight_gradients(grad, x, (3, 3), moves),
        stacked_convolutions.image_gradients(grad, weight, tuple(x.shape[1:]), moves),
    ]
    on = common.float().cuda().contiguous(memory_format=torch.channels_last)
    x, weight = on.expand(NETWORKS, *on.shape), weight.float().cuda()
    weight = weight.flip(0).transpose(3, 4).contiguous().transpose(3, 4).flip(0)
    grad = torch.ones((), device="cuda").expand(NETWORKS, IMAGES, 5, 6, 7)
    found = [
        stacked_convolutions.convolutions(x, weight, None, moves),
        *stacked_convolutions.weight_gradients(grad, x, (3, 3), moves),
        stacked_convolutions.image_gradients(grad, weight, tuple(x.shape[1:]), moves),
    ]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(other.double().cpu(), one)


@needs_a_gpu
def test_kernels_on_a_gpu_take_more_images_than_a_grid_has_places_along_its_last_axis() -> None:
    x, weight = torch.ones(2, 2**15, 16, 1, 1, device="cuda"), torch.ones(2, 1, 16, 1, 1).cuda()
    made = stacked_convolutions.convolutions(x, weight, None, Moves((1, 1), (0, 0)))
    assert torch.equal(made, torch.full_like(made, 16))


@needs_a_gpu
@pytest.mark.parametrize("outputs", [4, 70])
@pytest.mark.parametrize(("stride", "padding", "kernel"), WAYS)
def test_kernels_on_a_gpu_give_what_products_give_on_the_host(
    stride: Any, padding: Any, kernel: tuple[int, int], outputs: int
) -> None:
    """Of four products on the way each has two factors, each right to 2 ** -11 of itself.

    No kink lies in between: where a map is close to zero, rounding would turn a ReLU on or off.
    """
    weights = [noise(NETWORKS, outputs, 3, *kernel), noise(NETWORKS, outputs)]
    weights.append(noise(NETWORKS, 2, outputs, 3, 3) / outputs)
    images = noise(NETWORKS, IMAGES, 3, 10, 13)

    def loss(weights: list[Tensor], images: Tensor) -> Tensor:
        maps = F.conv2d(images, weights[0], weights[1], stride=stride, padding=padding)
        return F.conv2d(F.softplus(maps), weights[2]).square().mean()

    many = torch.func.vmap(torch.func.grad_and_value(loss, argnums=(0, 1)))
    (found, to_images), losses = many(weights, images)
    there = [tensor.float().cuda() for tensor in weights]
    with as_one():
        (made, made_images), made_losses = many(there, images.float().cuda())
        again, _ = many(there, images.float().cuda())
    for one, other in zip(
        [*found, to_images, losses], [*made, made_images, made_losses], strict=True
    ):
        apart = (other.double().cpu() - one).abs().max()
        assert apart < 4 * 2 * 2**-11 * one.abs().max()
    assert all(
        torch.equal(a, b) for a, b in zip([*again[0], again[1]], [*made, made_images], strict=True)
    )


@needs_a_gpu
@pytest.mark.parametrize("channels", [3, 20])
def test_kernels_on_a_gpu_round_both_ways(channels: int) -> None:
    """Factors that were cut off, not rounded, would make sums 0.07 % smaller in the mean."""
    moves = Moves((1, 1), (0, 0))
    x, weight = noise(NETWORKS, 8, channels, 10, 13).abs(), noise(NETWORKS, 70, channels, 3, 3)
    weight = weight.abs()
    made = stacked_convolutions.convolutions(x, weight, None, moves)
    grad = noise(*made.shape).abs()
    told, _ = stacked_convolutions.weight_gradients(grad, x, (3, 3), moves)
    x, weight, grad = (tensor.float().cuda() for tensor in (x, weight, grad))
    found = stacked_convolutions.convolutions(x, weight, None, moves)
    assert abs(float((found.double().cpu() / made).mean()) - 1) < 1e-4
    found, _ = stacked_convolutions.weight_gradients(grad, x, (3, 3), moves)
    assert abs(float((found.double().cpu() / told).mean()) - 1) < 1e-4


@needs_a_gpu
@pytest.mark.parametrize("channels", [3, 20])
def test_what_is_not_a_number_is_none_after_kernels_on_a_gpu(channels: int) -> None:
    moves = Moves((1, 1), (0, 0))
    x, weight = torch.ones(2, 1, channels, 4, 4).cuda(), torch.ones(2, 5, channels, 3, 3).cuda()
    x[1, 0, 0, 0, 0] = x.new_zeros(()) / 0  # as a GPU writes it: all bits set but the sign
    x[1, 0, 0, 3, 3] = float("inf")
    made = stacked_convolutions.convolutions(x, weight, None, moves)[1, 0, 0]
    assert made.isnan().tolist() == [[True, False], [False, False]]
    assert made[1, 1] == float("inf")
    assert made[0, 1] == 9 * channels


@needs_a_gpu
def test_where_a_gpu_is_not_to_round_convolutions_stay_the_frameworks(asked: list[int]) -> None:
    weights = [tensor.float().cuda() for tensor in weights_of((3, 3))]
    images = noise(NETWORKS, IMAGES, 3, 10, 13).float().cuda()
    before = torch.backends.cudnn.allow_tf32
    try:
        for rounds, wanted in ((False, []), (True, [NETWORKS, NETWORKS])):
            torch.backends.cudnn.allow_tf32 = rounds
            with as_one():
                gradients(weights, images, 1, 0, common=False)
            assert asked == wanted
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Told:
    """Stands for the kernels, and notes what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def convolved(self, x: Tensor, *_: Any) -> Tensor:
        self.asked.append("convolved")
        return x

    def to_images(self, grad: Tensor, *_: Any) -> Tensor:
        self.asked.append("to_images")
        return grad


@pytest.mark.parametrize(("images", "asked"), [(668, ["convolved", "to_images"]), (669, [])])
def test_what_kernels_cannot_count_is_left_to_products(
    images: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 maps of 224x224 are more than 2**31 numbers from 669 images on."""
    told = Told()
    monkeypatch.setattr(stacked_convolutions.gpu, "plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr(stacked_convolutions.gpu, "kernels", lambda *_: told)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen, maps = (torch.empty(2, images, count, 224, 224, device="meta") for count in (3, 64))
    weight, moves = torch.empty(2, 64, 3, 3, 3, device="meta"), Moves((1, 1), (1, 1))
    stacked_convolutions.convolutions(seen, weight, None, moves)
    narrow = weight.transpose(1, 2)  # from three maps to 64: what is made counts, too
    stacked_convolutions.image_gradients(seen, narrow, tuple(maps.shape[1:]), moves)
    assert told.asked == asked


@pytest.mark.parametrize(("networks", "asked"), [(3, ["convolved"]), (4, [])])
def test_numbers_of_others_between_a_networks_own_are_counted(
    networks: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 images of 3x224x224 of four networks in turn are more than 2**31 numbers."""
    told = Told()
    monkeypatch.setattr(stacked_convolutions.gpu, "plain_on_gpu", lambda *tensors: True)
    monkeypatch.setattr(stacked_convolutions.gpu, "kernels", lambda *_: told)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen = torch.empty(4000, networks, 3, 224, 224, device="meta").transpose(0, 1)
    weight = torch.empty(networks, 1, 3, 1, 1, device="meta")
    stacked_convolutions.convolutions(seen, weight, None, Moves((1, 1), (0, 0)))
    assert told.asked == asked
