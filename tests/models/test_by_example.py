"""Gradients of single examples by products: those of torch's own rules, for every network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core import Batch, Model, Weights, gpu, precision
from fedstill.core.convolutions import by_example
from fedstill.core.mechanism import LossOn, per_example
from fedstill.core.release import (
    ClippedGradient,
    Sampled,
    as_it_lies,
    turned_back,
    weighted_sums,
)
from fedstill.core.seeds import generator
from fedstill.engines.engine import autograd_gradient
from fedstill.models import AlexNet, Conv4, ConvNet, Module, PreResNet18, ResNet18
from models.own_nets import GroupNet, Twin

EXAMPLES = 3

NETWORKS: dict[str, Model] = {
    "convnet": ConvNet((1, 8, 8), 3, depth=2, width=4),
    "convnet of 28 x 28": ConvNet((1, 28, 28), 3, depth=1, width=4),
    "convnet with group norm": ConvNet((3, 8, 8), 3, depth=2, width=4, norm="group"),
    "alexnet": AlexNet((3, 16, 16), 3, width=4),
    "conv4": Conv4((1, 16, 16), 3, widths=(4, 4, 8, 8), norm="group"),
    "preresnet18": PreResNet18((3, 16, 16), 3, widths=(4, 4, 4, 8), norm="group"),
    "resnet18": ResNet18((3, 16, 16), 3),
    "a module": Module((1, 8, 8), 3, GroupNet),
    "a module like convnet": Module((1, 8, 8), 3, Twin),
}


def examples(shape: tuple[int, ...], count: int = EXAMPLES) -> Batch:
    x = torch.randn(count, *shape, generator=generator(1))
    return Batch(x, torch.arange(count) % 3)


def classified(model: Model) -> LossOn:
    """The cross-entropy of a network, and a term that depends on the weights alone."""

    def loss_on(batch: Batch) -> Any:
        def loss(weights: Weights) -> tuple[Tensor, Weights]:
            notes: Weights = {}
            logits = model.train(notes)(weights, batch.x)
            pull = sum((tensor.square().sum() for tensor in weights.values()), torch.zeros(()))
            return F.cross_entropy(logits, batch.y) + 0.01 * pull, notes

        return loss

    return loss_on


def agree(one: Weights, other: Weights) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_give_every_networks_gradients_of_single_examples(name: str) -> None:
    model = NETWORKS[name]
    weights, batch, loss_on = model.init(0), examples(model.shape), classified(model)
    plain, losses = per_example(loss_on, weights, batch)
    with by_example():
        products, same_losses = per_example(loss_on, weights, batch)
    agree(plain, products)
    torch.testing.assert_close(same_losses, losses)


def test_one_pixel_by_hand() -> None:
    # A kernel of one tap: out = w · x, loss = out² / 2, so the gradient of each example is w · x².
    def loss_on(x: Tensor) -> Any:
        return lambda w: ((F.conv2d(x, w) ** 2).sum() / 2, {})

    x = torch.tensor([1.0, 2.0, -3.0]).view(3, 1, 1, 1)
    with by_example():
        gradients, _ = per_example(loss_on, torch.full((1, 1, 1, 1), 2.0), x)
    assert gradients.flatten().tolist() == [2 * 1, 2 * 4, 2 * 9]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Conv2d(2, 3, (3, 1), padding=(1, 0)),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 3, 3, dilation=2),
        nn.Conv2d(2, 3, 3, padding="same"),
    ],
    ids=["strides", "an oblong kernel", "groups", "gaps", "padding by a word"],
)
def test_convolutions_of_all_kinds_agree(layer: nn.Conv2d) -> None:
    def loss_on(x: Tensor) -> Any:
        return lambda w: (torch.func.functional_call(layer, w, (x,)).square().sum(), {})

    weights = {name: tensor.detach() for name, tensor in layer.named_parameters()}
    x = torch.randn(EXAMPLES, 2, 6, 6, generator=generator(2))
    plain, _ = per_example(loss_on, weights, x)
    with by_example():
        agree(plain, per_example(loss_on, weights, x)[0])


def test_examples_beside_common_images_agree() -> None:
    # Each example goes through the network together with two images that all of them share.
    common = torch.randn(2, 1, 8, 8, generator=generator(3))
    model = NETWORKS["convnet"]

    def loss_on(batch: Batch) -> Any:
        def loss(weights: Weights) -> tuple[Tensor, Weights]:
            logits = model(weights, torch.cat([batch.x, common]))
            return (logits[:1] - logits[1:]).square().sum() + model(weights, common).sum(), {}

        return loss

    weights, batch = model.init(0), examples(model.shape)
    plain, _ = per_example(loss_on, weights, batch)
    with by_example():
        agree(plain, per_example(loss_on, weights, batch)[0])


def test_stacked_clients_with_their_own_weights_agree() -> None:
    model = NETWORKS["convnet with group norm"]
    drawn = [model.init(seed) for seed in (0, 1)]
    weights = {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}
    x = torch.randn(2, EXAMPLES, *model.shape, generator=generator(4))
    y = torch.arange(2 * EXAMPLES).view(2, EXAMPLES) % 3

    def one(weights: Weights, x: Tensor, y: Tensor) -> Weights:
        found: Weights = per_example(classified(model), weights, Batch(x, y))[0]
        return found

    plain = torch.func.vmap(one)(weights, x, y)
    with by_example():
        agree(plain, torch.func.vmap(one)(weights, x, y))


def test_an_example_that_is_not_finite_leaves_the_others_alone() -> None:
    model = NETWORKS["convnet"]
    weights, batch, loss_on = model.init(0), examples(model.shape), classified(model)
    broken = Batch(batch.x.clone(), batch.y)
    broken.x[1] = float("inf")
    with by_example():
        whole, _ = per_example(loss_on, weights, batch)
        found, _ = per_example(loss_on, weights, broken)
    for name, tensor in whole.items():
        assert torch.equal(found[name][[0, 2]], tensor[[0, 2]])
    assert not torch.isfinite(found["conv0.weight"][1]).all()


def test_rows_with_the_factor_nothing_leave_no_trace() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [3.0, -1.0]])
    (found,) = weighted_sums([rows], torch.tensor([2.0, 0.0, 1.0]))
    assert found.tolist() == [2 + 3, 4 - 1]


def test_gradients_are_read_as_they_lie_and_their_sum_is_turned_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = torch.arange(48.0).view(2, 3, 2, 4)  # [example, tap, input, output] in memory
    leaf = made.permute(0, 3, 2, 1)
    monkeypatch.setattr(gpu, "plain_on_gpu", lambda *tensors: True)
    rows = as_it_lies(leaf)
    assert rows.data_ptr() == made.data_ptr() and rows.tolist() == made.flatten(1).tolist()
    assert torch.equal(turned_back(rows[0] + rows[1], leaf), leaf[0] + leaf[1])
    monkeypatch.undo()
    assert torch.equal(as_it_lies(leaf), leaf.flatten(1))


def test_half_precision_is_left_to_kernels_for_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told on a CPU by what is asked of tensors; the kernels here are torch's own operations."""
    model = ConvNet((3, 8, 8), 3, depth=2, width=4)
    calls: list[tuple[int, ...]] = []

    def block(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, padding: int) -> Tensor:
        calls.append(tuple(x.shape))
        maps = F.conv2d(x, weight, padding=padding)
        return F.avg_pool2d(F.relu(F.group_norm(maps, 4, scale, shift)), 2)

    made = SimpleNamespace(block=block, in_single=lambda maps: maps)
    here = {"kernels.half_example_blocks": made}
    weights, batch, loss_on = model.init(0), examples(model.shape), classified(model)
    plain, _ = per_example(loss_on, weights, batch)
    monkeypatch.setattr(gpu, "kernels", lambda module, *_: here.get(module))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with precision.using("half"), precision.of_examples():
        assert not precision.half_asked_for()
        agree(plain, per_example(loss_on, weights, batch)[0])
        assert calls == [(1, 3, 8, 8), (1, 4, 4, 4)]
        stacked = {name: tensor.expand(2, *tensor.shape) for name, tensor in weights.items()}
        twice = torch.func.vmap(lambda one: per_example(loss_on, one, batch)[0])
        agree(plain, {name: found[0] for name, found in twice(stacked).items()})
        own = torch.func.vmap(torch.func.grad(lambda one: loss_on(batch)(one)[0]))
        own(stacked)  # networks of their own are no examples of one
        assert len(calls) == 2
    with precision.using("tf32"), precision.of_examples():
        per_example(loss_on, weights, batch)
    with precision.using("half"):
        assert not precision.half_will_do_for_examples(batch.x)
    assert len(calls) == 2


FINE = torch.tensor(2.0**-40, dtype=torch.float64)  # a grid that rounds nothing
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_a_gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpus_clipped_gradients_are_a_processors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, clip = NETWORKS[name], ClippedGradient(1.0)
    found = []
    for device in ("cpu", "cuda"):
        weights = {key: tensor.to(device) for key, tensor in model.init(0).items()}
        batch = Batch(*(tensor.to(device) for tensor in examples(model.shape, 6)))
        noise = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
        sample = Sampled(batch, torch.full((6,), 1 / 6, device=device), noise, FINE.to(device))
        gradient, _, _ = clip.gradient(classified(model), weights, sample, autograd_gradient)
        found.append({key: tensor.cpu() for key, tensor in gradient.items()})
    for key, tensor in found[0].items():
        torch.testing.assert_close(found[1][key], tensor, rtol=5e-3, atol=2e-4, msg=key)


def in_half(model: Model, batch: Batch, name: precision.Precision = "half") -> Weights:
    weights = {key: tensor.cuda() for key, tensor in model.init(0).items()}
    with precision.using(name), precision.of_examples():
        found: Weights = per_example(classified(model), weights, batch)[0]
    return found


HALVED = [((1, 28, 28), 32), ((3, 32, 32), 128), ((3, 16, 16), 12)]


@needs_a_gpu
@pytest.mark.parametrize(("shape", "width"), HALVED)
def test_on_a_gpu_gradients_in_half_precision_are_those_of_single_rounded(
    shape: tuple[int, ...], width: int
) -> None:
    model = ConvNet(shape, 3, width=width)
    batch = Batch(*(tensor.cuda() for tensor in examples(shape, 20)))
    rough, exact = in_half(model, batch), in_half(model, batch, "single")
    assert not torch.equal(rough["conv1.weight"], exact["conv1.weight"])
    for name, tensor in exact.items():
        found = rough[name]
        assert found.shape == tensor.shape and found.dtype == torch.float32
        assert float((found - tensor).norm()) <= 0.15 * float(tensor.norm()) + 1e-6, name


@needs_a_gpu
def test_on_a_gpu_common_images_go_through_half_precision_too() -> None:
    model = ConvNet((3, 16, 16), 3, width=16)
    weights = {key: tensor.cuda() for key, tensor in model.init(0).items()}
    batch = Batch(*(tensor.cuda() for tensor in examples(model.shape, 20)))
    common = torch.randn(4, *model.shape, generator=generator(3)).cuda()

    def loss_on(batch: Batch) -> Any:
        def loss(weights: Weights) -> tuple[Tensor, Weights]:
            own = F.cross_entropy(model(weights, batch.x), batch.y)
            return own + model(weights, common).square().mean(), {}

        return loss

    found = []
    for name in ("half", "single"):
        with precision.using(name), precision.of_examples():
            found.append(per_example(loss_on, weights, batch)[0])
    for key, tensor in found[1].items():
        assert float((found[0][key] - tensor).norm()) <= 0.15 * float(tensor.norm()) + 1e-6, key


@needs_a_gpu
@pytest.mark.parametrize("wild", [1e3, 1e5, 1e30, float("inf"), float("nan")])
def test_on_a_gpu_one_wild_record_in_half_precision_moves_the_sum_by_the_clip(wild: float) -> None:
    # Images beyond 65504, the largest number of half precision, have no finite gradient: no trace.
    model, clip = ConvNet((1, 28, 28), 3, width=32), 0.5
    weights = {key: tensor.cuda() for key, tensor in model.init(0).items()}
    noise = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
    x, y = (tensor.cuda() for tensor in examples(model.shape, 20))
    x[7] = wild * x[7].abs()
    found = []
    for there in (True, False):
        share = torch.ones(20, device="cuda")
        share[7] = float(there)
        sample = Sampled(Batch(x, y), share, noise, FINE.cuda())
        with precision.using("half"):
            made = ClippedGradient(clip).gradient(
                classified(model), weights, sample, autograd_gradient
            )
        found.append(torch.cat([tensor.flatten() for tensor in made[0].values()]).double())
    assert torch.isfinite(found[0]).all() and float(found[1].norm()) > clip
    assert float((found[0] - found[1]).norm()) <= clip * (1 + 1e-4)
    if wild > 65504 * 10 or wild != wild:
        assert torch.equal(found[0], found[1])
