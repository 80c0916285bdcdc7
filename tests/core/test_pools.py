"""Pools on a CPU are torch's own: values, gradients, gradients of gradients, and which kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core import pools
from fedstill.core.model import Model
from fedstill.core.seeds import generator
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.models.module import Module

SHAPES = [(3, 5, 8, 8), (2, 4, 7, 6), (2, 4, 6, 9), (1, 1, 2, 2), (2, 3, 3, 3)]
KINDS: list[tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = [
    (pools.max_pool, F.max_pool2d),
    (pools.avg_pool, F.avg_pool2d),
]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_kind = pytest.mark.parametrize(("ours", "torchs"), KINDS, ids=["max", "avg"])


def maps_of(shape: tuple[int, ...], levels: int = 0) -> Tensor:
    """Noise, or numbers of so few levels that many are equal."""
    noise = torch.randn(shape, generator=generator(3), dtype=torch.float64)
    return (noise * levels).round() if levels else noise


@by_shape
@by_kind
@pytest.mark.parametrize("levels", [0, 1])
def test_a_pool_and_its_gradient_are_torchs(
    shape: tuple[int, ...], levels: int, ours: Any, torchs: Any
) -> None:
    maps = maps_of(shape, levels)
    one, other = maps.clone().requires_grad_(), maps.clone().requires_grad_()
    made, expected = ours(one), torchs(other, 2)
    grad = torch.randn(expected.shape, generator=generator(4), dtype=torch.float64)
    assert torch.equal(made, expected) and torch.equal(ours(maps), expected)
    (found,) = torch.autograd.grad(made, one, grad)
    assert torch.equal(found, torch.autograd.grad(expected, other, grad)[0])


@by_kind
def test_gradients_of_gradients_are_torchs(ours: Any, torchs: Any) -> None:
    def twice(pool: Callable[[Tensor], Tensor]) -> Tensor:
        maps = maps_of((2, 3, 6, 6)).requires_grad_()
        (slope,) = torch.autograd.grad(pool(maps.square()).square().sum(), maps, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), maps)[0]

    torch.testing.assert_close(twice(ours), twice(lambda maps: torchs(maps, 2)))


def test_what_is_no_number_stays_where_it_was() -> None:
    maps = maps_of((1, 2, 4, 4))
    maps[0, 1, 2, 3] = torch.nan
    for ours, torchs in KINDS:
        assert torch.equal(ours(maps).isnan(), torchs(maps, 2).isnan())


ASKED: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.max_pool2d(x, kernel_size=2, stride=2),
    lambda x: torch.max_pool2d(x, 2),
    lambda x: F.avg_pool2d(x, 2),
    nn.MaxPool2d(2),
    nn.AvgPool2d((2, 2)),
    nn.MaxPool2d(2, stride=(2, 2)),
]
OTHER: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.max_pool2d(x, 3),
    lambda x: F.max_pool2d(x, 2, stride=1),
    lambda x: F.max_pool2d(x, 2, padding=1),
    lambda x: F.max_pool2d(x, 2, dilation=2),
    lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    lambda x: F.max_pool2d(x.half(), 2),
    lambda x: F.max_pool2d(x[0], 2),
    lambda x: F.max_pool2d(x.to(memory_format=torch.channels_last), 2),
    lambda x: torch.func.vmap(lambda one: F.max_pool2d(one, 2))(x[:, None]),
]


@pytest.mark.parametrize("number", range(len(ASKED) + len(OTHER)))
def test_pools_of_other_kinds_stay_torchs(number: int) -> None:
    pool = [*ASKED, *OTHER][number]
    maps = maps_of((2, 3, 7, 7))
    with pools.Quickly() as quick:
        made = pool(maps)
    torch.testing.assert_close(made, pool(maps))
    assert quick.found == (number < len(ASKED))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.first(x)), 2)
        out: Tensor = self.last(x.flatten(1))
        return out


def test_a_module_of_ones_own_pools_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    plain = pools._largest
    monkeypatch.setattr(pools, "_largest", lambda maps: (calls.append(maps), plain(maps))[1])
    model = Module((3, 8, 8), 5, Small)
    weights = {name: tensor.requires_grad_() for name, tensor in model.init(0).items()}
    x = torch.randn(6, 3, 8, 8, generator=generator(1))
    calls.clear()
    found = torch.autograd.grad(model.train({})(weights, x).square().sum(), weights.values())
    assert len(calls) == 1
    monkeypatch.setattr(pools, "_fit", lambda maps: False)
    wanted = torch.autograd.grad(model.train({})(weights, x).square().sum(), weights.values())
    assert len(calls) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "model",
    [
        ConvNet((3, 16, 16), 4, width=6),
        ConvNet((1, 12, 20), 4, depth=2, width=5, norm="batch", pooling="max"),
        Conv4((3, 16, 16), 4, (4, 6, 8, 10), last_pool=True),
        AlexNet((3, 28, 28), 4, 8),
    ],
    ids=repr,
)
def test_networks_are_as_with_torchs_own_pools_bit_for_bit(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passed() -> list[Tensor]:
        weights = model.init(1)
        moving = [t.requires_grad_() for name, t in weights.items() if "running" not in name]
        x = torch.randn(6, *model.shape, generator=generator(2)).requires_grad_()
        logits = model.train({})(weights, x)
        grads = torch.autograd.grad(logits.square().sum(), [x, *moving], materialize_grads=True)
        return [logits, *grads]

    found = passed()
    monkeypatch.setattr(pools, "_fit", lambda maps: False)
    monkeypatch.setattr("fedstill.core.gpu.plain_on_cpu", lambda *tensors: False)
    assert all(torch.equal(one, other) for one, other in zip(found, passed(), strict=True))
