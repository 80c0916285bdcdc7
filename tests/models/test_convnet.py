"""ConvNet against the same layers of the framework."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.convnet import ConvNet


def sequential(model: ConvNet, weights: Weights) -> nn.Sequential:
    """The network as the framework's layers, holding the given weights."""
    layers: list[nn.Module] = []
    channels = model.shape[0]
    for block in range(model.depth):
        padding = 3 if block == 0 and model.shape == (1, 28, 28) else 1
        layers += [
            nn.Conv2d(channels, model.width, 3, padding=padding),
            nn.InstanceNorm2d(model.width, affine=True)
            if model.norm == "instance"
            else nn.BatchNorm2d(model.width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
        channels = model.width
        for name, layer in ((f"conv{block}", layers[-4]), (f"norm{block}", layers[-3])):
            layer.load_state_dict(parts(weights, name), strict=False)
    head = nn.Linear(weights["head.weight"].shape[1], model.classes)
    head.load_state_dict(parts(weights, "head"))
    return nn.Sequential(*layers, nn.Flatten(), head)


def parts(weights: Weights, name: str) -> Weights:
    return {
        key.split(".")[1]: value for key, value in weights.items() if key.startswith(f"{name}.")
    }


def noise(*shape: int, name: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(1, name))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 28, 28)])
def test_the_network_is_its_layers_one_after_the_other(shape: tuple[int, int, int]) -> None:
    model = ConvNet(shape, 10, width=16)
    weights = model.init(0)
    weights |= {
        name: value + 0.1 * noise(*value.shape) for name, value in weights.items() if "norm" in name
    }
    x = noise(4, *shape)
    expected = sequential(model, weights)(x)
    torch.testing.assert_close(model.logits(weights, x), expected, atol=1e-5, rtol=1e-4)


def test_stages_are_the_maps_after_each_pooling() -> None:
    model = ConvNet((3, 32, 32), 10)
    maps = model.stages(model.init(0), noise(2, 3, 32, 32))
    assert [tuple(m.shape) for m in maps] == [(2, 128, 16, 16), (2, 128, 8, 8), (2, 128, 4, 4)]


def test_batch_norm_statistics_follow_the_frameworks_for_three_steps() -> None:
    model = ConvNet((3, 8, 8), 5, depth=2, width=8, norm="batch")
    weights = model.init(0)
    theirs = sequential(model, weights).train()
    for step in range(3):
        x = 2 + 3 * noise(6, 3, 8, 8, name=step)
        notes: Weights = {}
        ours = model.train(notes).logits(weights, x)
        torch.testing.assert_close(ours, theirs(x), atol=1e-5, rtol=1e-4)
        assert len(notes) == 4
        weights = weights | notes
    for block, place in ((0, 1), (1, 5)):
        for name in ("running_mean", "running_var"):
            expected = theirs[place].get_buffer(name)
            torch.testing.assert_close(weights[f"norm{block}.{name}"], expected)
    x = noise(3, 3, 8, 8, name=9)
    torch.testing.assert_close(model.logits(weights, x), theirs.eval()(x), atol=1e-5, rtol=1e-4)


def test_evaluation_writes_no_statistics() -> None:
    model = ConvNet((3, 8, 8), 5, depth=2, width=8, norm="batch")
    notes: Weights = {}
    model.train(notes).evaluating.logits(model.init(0), noise(2, 3, 8, 8))
    assert notes == {}


def test_a_watched_network_is_at_rest_and_notes_what_its_norms_see() -> None:
    model = ConvNet((3, 8, 8), 5, depth=2, width=8, norm="batch")
    weights, x, notes = model.init(0), noise(4, 3, 8, 8), {}
    torch.testing.assert_close(model.recording(notes).logits(weights, x), model.logits(weights, x))
    maps = torch.nn.functional.conv2d(x, weights["conv0.weight"], weights["conv0.bias"], padding=1)
    torch.testing.assert_close(notes["norm0.running_mean"], maps.mean((0, 2, 3)))
    torch.testing.assert_close(notes["norm0.running_var"], maps.var((0, 2, 3), unbiased=False))
    assert len(notes) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 28, 28), (2, 9, 13)])
def test_kernels_give_what_the_operations_give(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = ConvNet(shape, 10, depth=3, width=8)
    weights = {name: tensor.cuda().requires_grad_() for name, tensor in model.init(1).items()}
    x = torch.randn(5, *shape, generator=generator(0)).cuda().requires_grad_()

    def outputs() -> list[Tensor]:
        logits = model(weights, x)
        grads = torch.autograd.grad(
            logits.square().sum(), [x, *weights.values()], create_graph=True, materialize_grads=True
        )
        (second,) = torch.autograd.grad(grads[0].square().sum(), [x])
        with torch.no_grad():
            still = model(weights, x)
        plain = torch.autograd.grad(model(weights, x).square().sum(), [x])
        return [logits, still, *grads, *plain, second]

    fused = outputs()
    monkeypatch.setattr("fedstill.core.gpu.kernels", lambda *_: None)
    for one, other in zip(fused, outputs(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.detach().abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 16, 16), (3, 28, 28)])
def test_a_coarse_pass_is_the_pass_rounded_to_half_precision(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ConvNet(shape, 10, depth=2, width=12)
    weights = {name: tensor.cuda() for name, tensor in model.init(1).items()}
    x = torch.randn(5, *shape, generator=generator(0)).cuda()
    monkeypatch.setattr("fedstill.core.precision._now", "half")
    found = model.coarse_stages(weights, x)
    with torch.no_grad():
        exact = model.stages(weights, x)
    for one, other in zip(found, exact, strict=True):
        assert not torch.equal(one, other) and torch.allclose(one, other, atol=0.01)
    moving = [x.requires_grad_(), *(tensor.requires_grad_() for tensor in weights.values())]
    rough = torch.autograd.grad(model(weights, x).square().sum(), moving, materialize_grads=True)
    monkeypatch.setattr("fedstill.core.precision._now", "single")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    grads = torch.autograd.grad(model(weights, x).square().sum(), moving, materialize_grads=True)
    for one, other in zip(rough, grads, strict=True):
        assert float((one - other).norm()) <= 0.1 * float(other.norm()) + 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("shape", "width"), [((3, 32, 32), 128), ((1, 28, 28), 12), ((1, 16, 16), 8), ((3, 28, 28), 40)]
)
def test_the_first_block_as_one_kernel_is_its_operations_rounded(
    shape: tuple[int, int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    kernels = pytest.importorskip("fedstill.kernels.first_blocks")
    padding = 3 if shape == (1, 28, 28) else 1
    x = (2 + torch.randn(5, *shape, generator=generator(0))).cuda().requires_grad_()
    weight = 0.2 * noise(width, shape[0], 3, 3).cuda()
    scale, shift = 1 + 0.1 * noise(width).cuda(), 0.1 * noise(width, name=1).cuda()
    assert kernels.takes(x, padding)
    found = kernels.block(x, weight, scale, shift, padding)
    with torch.no_grad():
        assert torch.equal(found, kernels.block(x, weight, scale, shift, padding))
    maps = torch.nn.functional.conv2d(x, weight, padding=padding)
    maps = torch.nn.functional.group_norm(maps, width, scale, shift)
    exact = torch.nn.functional.avg_pool2d(maps.relu(), 2)
    assert torch.allclose(found.float(), exact, atol=0.01)
    told = torch.randn(exact.shape, generator=generator(2)).cuda()
    rough = torch.autograd.grad(found, x, told.half())[0]
    grads = torch.autograd.grad(exact, x, told)[0]
    assert float((rough - grads).norm()) <= 0.05 * float(grads.norm())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spread", [0.0, 1e-3])
@pytest.mark.parametrize("level", [0.0, 0.7])
def test_the_first_block_as_one_kernel_takes_images_of_hardly_more_than_one_colour(
    level: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    kernels = pytest.importorskip("fedstill.kernels.first_blocks")
    x = (level + spread * noise(3, 3, 32, 32)).cuda().requires_grad_()
    weight = 0.2 * noise(40, 3, 3, 3, name=1).cuda()
    scale, shift = 1 + 0.1 * noise(40).cuda(), 0.1 * noise(40, name=2).cuda()
    found = kernels.block(x, weight, scale, shift, 1)
    maps = torch.nn.functional.conv2d(x, weight, padding=1)
    maps = torch.nn.functional.group_norm(maps, 40, scale, shift)
    exact = torch.nn.functional.avg_pool2d(maps.relu(), 2)
    assert torch.allclose(found.float(), exact, atol=0.01)
    told = noise(*exact.shape, name=3).cuda()
    rough = torch.autograd.grad(found, x, told.half())[0]
    grads = torch.autograd.grad(exact, x, told)[0]
    assert float((rough - grads).norm()) <= 0.05 * float(grads.norm())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 64, 64)])
def test_features_alone_are_the_last_of_all_stages_in_half_precision(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.core.precision._now", "half")
    model = ConvNet(shape, 10, width=24)
    weights = {name: tensor.cuda() for name, tensor in model.init(1).items()}
    x = noise(5, *shape).cuda().requires_grad_()
    found = model.features(weights, x)
    expected = model.stages(weights, x)[-1].flatten(1)
    assert torch.equal(found, expected) and found.dtype == torch.float32
    one, other = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected))
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    with torch.no_grad():
        assert torch.equal(model.coarse_features(weights, x), found)


def test_a_gradient_of_a_gradient_is_refused_where_gains_would_spoil_it() -> None:
    kernels = pytest.importorskip("fedstill.kernels.half_blocks")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    maps = noise(2, 8, 4, 4).cuda().half().requires_grad_()
    ones = torch.ones(8, device="cuda")
    out = kernels.norm_relu_pool(maps, ones, ones, last=True).square().sum()
    (grad,) = torch.autograd.grad(out, maps, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        torch.autograd.grad(grad.sum(), maps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_that_is_trained_alone_is_a_stack_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.core.precision._now", "half")
    model = ConvNet((3, 32, 32), 10, width=32)
    weights = {name: tensor.cuda() for name, tensor in model.init(1).items()}
    x, told = noise(6, 3, 32, 32).cuda(), noise(6, 10, name=1).cuda()

    def loss(weights: Weights, x: Tensor) -> Tensor:
        return (model(weights, x) * told).sum()

    moving = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    alone = torch.autograd.grad(loss(moving, x), list(moving.values()), materialize_grads=True)
    stack = {name: tensor.unsqueeze(0) for name, tensor in weights.items()}
    among = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(stack, x)
    for name, one in zip(weights, alone, strict=True):
        assert torch.allclose(one, among[name][0], rtol=1e-3, atol=1e-3 * float(one.abs().max()))
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(loss(moving, x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        torch.autograd.grad(grad.sum(), x)


def test_features_are_the_flattened_last_stage() -> None:
    model = ConvNet((3, 8, 8), 4, depth=2, width=4)
    weights, x = model.init(1), noise(5, 3, 8, 8)
    last = model.stages(weights, x)[-1].flatten(1)
    assert torch.equal(model.features(weights, x), last)
    assert torch.equal(model.coarse_features(weights, x), last)


def test_a_coarse_pass_is_an_ordinary_one_unless_half_precision_is_asked_for() -> None:
    model = ConvNet((3, 8, 8), 4, depth=2, width=4)
    weights, x = model.init(1), noise(5, 3, 8, 8)
    for one, other in zip(model.coarse_stages(weights, x), model.stages(weights, x), strict=True):
        assert torch.equal(one, other)


def test_the_constant_before_an_instance_norm_counts_for_nothing() -> None:
    model = ConvNet((3, 8, 8), 4, depth=2, width=4)
    weights = model.init(1)
    moved = {n: t + 7 if n == "conv0.bias" else t for n, t in weights.items()}
    x = torch.randn(5, 3, 8, 8, generator=generator(0))
    assert torch.equal(model(weights, x), model(moved, x))
