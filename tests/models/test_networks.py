"""What every network here keeps: counts of the papers, starting laws, batching, small images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedstill.core import trees
from fedstill.core.errors import BadValue
from fedstill.core.model import Model
from fedstill.core.seeds import generator
from fedstill.models import MODELS
from fedstill.models.alexnet import AlexNet
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet
from fedstill.models.mlp import MLP
from fedstill.models.preresnet import PreResNet18
from fedstill.models.resnet import ResNet18
from fedstill.parts.heads import projected

TABLE = [  # BB-1: network, features, floats
    (ConvNet((3, 32, 32), 10), 2048, 320_010),
    (ConvNet((3, 28, 28), 10), 1152, 311_050),
    (ConvNet((1, 28, 28), 10), 2048, 317_706),
    (ConvNet((3, 32, 32), 100), 2048, 504_420),
    (ConvNet((3, 96, 96), 2), 18_432, 336_386),
    (AlexNet((3, 28, 28), 10), 3072, 1_872_202),
    (AlexNet((3, 32, 32), 10), 3072, 1_872_202),
    (AlexNet((3, 16, 16), 10, width=16), 96, 30_898),
    (ResNet18((3, 32, 32), 10), 512, 11_173_962),
    (ResNet18((3, 32, 32), 100), 512, 11_220_132),
]

SMALL: list[Model] = [
    MLP((6,), 3),
    ConvNet((2, 8, 8), 3, width=4),
    ConvNet((2, 8, 8), 3, depth=1, width=8, norm="layer"),
    ConvNet((2, 8, 8), 3, depth=2, width=4, norm="batch", activation="leaky_relu"),
    ConvNet((2, 8, 8), 3, depth=2, width=8, norm="group", activation="swish", pooling="max"),
    ConvNet((2, 16, 16), 3, depth=4, width=4, norm="none", activation="sigmoid"),
    ConvNet((2, 8, 8), 3, depth=2, width=4, pooling="none"),
    ConvNet((2, 8, 8), 3, depth=2, width=4, norm="static"),
    Conv4((2, 16, 16), 3, widths=(4, 4, 6, 8)),
    PreResNet18((2, 16, 16), 3, widths=(4, 4, 6, 8)),
    PreResNet18((2, 16, 16), 3, widths=(4, 4, 6, 8), norm="layer"),
    AlexNet((2, 4, 4), 3),
    ResNet18((2, 16, 16), 3),
    ResNet18((2, 8, 8), 3, norm="batch"),
    ResNet18((2, 8, 8), 3, norm="layer"),
    ResNet18((2, 8, 8), 3, norm="group"),
    ResNet18((2, 8, 8), 3, norm="none"),
    ResNet18((2, 32, 32), 3, norm="batch", stem="imagenet"),
    ResNet18((2, 32, 32), 3, norm="batch", bridge=True),
]


def images(model: Model, count: int, *names: int) -> Tensor:
    return torch.randn(count, *model.shape, generator=generator(7, *names))


@pytest.mark.parametrize(("model", "features", "floats"), TABLE, ids=repr)
def test_a_network_has_the_floats_and_features_of_the_papers(
    model: Model, features: int, floats: int
) -> None:
    assert model.floats() == {"parameters": floats, "buffers": 0}
    assert model.initial()["head.weight"].shape == (model.classes, features)


@pytest.mark.parametrize("model", [TABLE[2][0], TABLE[5][0], TABLE[7][0]], ids=repr)
def test_features_and_logits_have_the_announced_sizes(model: Model) -> None:
    weights = model.init(0)
    features, logits = model.both(weights, images(model, 2))
    assert features.shape == (2, weights["head.weight"].shape[1])
    assert logits.shape == (2, 10)


@pytest.mark.parametrize("model", SMALL, ids=repr)
def test_a_network_stacked_over_clients_equals_the_networks_one_by_one(model: Model) -> None:
    learner = model.train()

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return learner.logits(weights, x).square().mean()

    weights = [model.init(seed) for seed in range(2)]
    x = torch.stack([images(model, 3, client) for client in range(2)])
    together = vmap(grad(loss))(trees.stack(weights), x)
    for client in range(2):
        alone = grad(loss)(weights[client], x[client])
        for name, slope in alone.items():
            close = torch.linalg.vector_norm(together[name][client] - slope)
            assert close <= 1e-3 * torch.linalg.vector_norm(slope) + 1e-6, name
        assert alone["head.weight"].abs().max() > 0


@pytest.mark.parametrize("model", SMALL, ids=repr)
def test_every_parameter_but_a_bias_before_a_norm_has_a_gradient(model: Model) -> None:
    learner = model.train()
    slopes = grad(lambda w, x: learner.logits(w, x).square().sum())(model.init(0), images(model, 4))
    for name, slope in slopes.items():
        assert slope.isfinite().all()
        dead = "running" in name or (name.startswith("conv") and name.endswith("bias"))
        assert dead or slope.abs().max() > 0, name


def test_layers_start_by_the_default_law_of_the_framework() -> None:
    weights = ConvNet((3, 32, 32), 10).init(3)
    theirs = {
        "conv1": torch.nn.Conv2d(128, 128, 3, padding=1).state_dict(),
        "head": torch.nn.Linear(2048, 10).state_dict(),
    }
    for name, layer in theirs.items():
        ours = weights[f"{name}.weight"]
        bound = 1 / math.sqrt(ours[0].numel())
        assert ours.shape == layer["weight"].shape
        for value in (*layer.values(), ours, weights[f"{name}.bias"]):
            assert value.abs().max() <= bound
        assert ours.abs().max() > 0.99 * bound
        # The variance of a uniform law, to four standard errors.
        spread = ours.square().mean() / (bound**2 / 3)
        assert abs(spread - 1) < 4 * math.sqrt(0.8 / ours.numel())
    assert (weights["norm0.weight"] == 1).all()
    assert (weights["norm0.bias"] == 0).all()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ConvNet((3, 7, 7), 10), "convnet: an image of 7x7 cannot be pooled 3 times"),
        (ConvNet((3, 32, 32), 10, depth=6), "cannot be pooled 6 times"),
        (AlexNet((3, 3, 32), 10), "alexnet: an image of 3x32 cannot be pooled three times"),
        (ResNet18((3, 7, 32), 10), "resnet18: an image of 7x32 .* cannot be halved 3 times"),
        (ResNet18((3, 8, 8), 10), "leaves one pixel, constant under instance norm"),
        (ResNet18((3, 28, 28), 10, stem="imagenet"), "use at least 32x32"),
        (ResNet18((3, 16, 16), 10, bridge=True), "leaves a 2x2 map, too small for the bridge"),
    ],
    ids=repr,
)
def test_an_image_too_small_for_a_network_is_named(model: Model, words: str) -> None:
    with pytest.raises(BadValue, match=words):
        model.initial()
    with pytest.raises(BadValue, match=words):
        model.init(0)


def test_the_smallest_images_allowed_run() -> None:
    for model in (ConvNet((1, 8, 8), 2, width=4), AlexNet((1, 4, 4), 2), ResNet18((1, 9, 8), 2)):
        logits = model.logits(model.init(0), images(model, 2))
        assert not torch.equal(logits[0], logits[1])


def test_the_table_of_names_holds_every_network() -> None:
    assert {"alexnet": AlexNet, "resnet18": ResNet18}.items() <= MODELS.items()
    for name, kind in MODELS.items():
        assert kind((3, 32, 32), 10).describe()["name"] == name


def test_networks_are_values_that_can_be_compared_and_hashed() -> None:
    assert ResNet18((3, 32, 32), 10) == ResNet18((3, 32, 32), 10, norm="instance")
    assert len({AlexNet((3, 32, 32), 10), AlexNet((3, 32, 32), 10).on("cpu")}) == 1


def test_the_names_of_norm_layers_are_those_of_their_weights_and_statistics() -> None:
    model = ConvNet((3, 32, 32), 10, depth=1, norm="batch")
    parts = ("weight", "bias", "running_mean", "running_var")
    assert model.norm_names == tuple(f"norm0.{part}" for part in parts)
    assert ConvNet((3, 32, 32), 10, norm="none").norm_names == ()
    short = [n for n in ResNet18((3, 32, 32), 10).norm_names if "short" in n]
    assert short[:2] == ["group1.block0.short.norm.weight", "group1.block0.short.norm.bias"]
    assert projected(model, 5).norm_names == model.norm_names
