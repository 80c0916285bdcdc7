"""Generators: sizes by hand, demodulation in closed form, virtual sets by seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstill.core import algebra
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.parts.generators import (
    UNTRAINED,
    ConvDecoder,
    FeatureGenerator,
    Gaussians,
    Generator,
    StyleGenerator,
    modulated,
    untrained_set,
)

KINDS: list[type[Gaussians]] = list(UNTRAINED.values())


def made(network: Generator, seed: int = 0, count: int = 6) -> Tensor:
    labels = torch.arange(count) % network.classes
    return network(network.init(seed), network.noise(generator(seed), count), labels)


# Shapes and sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 8, 8), (3, 28, 28), (3, 32, 32), (1, 5, 12)])
def test_images_have_the_size_that_was_asked_for(
    kind: type[Gaussians], shape: tuple[int, ...]
) -> None:
    images = made(kind(shape, 3, width=4))
    assert images.shape == (6, *shape)
    assert torch.isfinite(images).all()


def test_the_style_generator_has_the_floats_of_its_layers() -> None:
    # 8x8: five modulated layers, of which two make images (3 channels, 1x1).
    network = StyleGenerator((3, 8, 8), 10, width=4, latent=6)
    style = 4 * 6 + 4
    layers = 3 * (4 * 4 * 9 + 4 + style) + 2 * (3 * 4 + 3 + style)
    assert network.floats()["parameters"] == 10 * (6 + 3) + 6 * 6 + 6 + 4 * 16 + layers
    assert network.noise_width == 6 + 16 + 2 * 64


def test_the_feature_generator_has_the_floats_of_the_released_one() -> None:
    # 32 + 10 inputs, 256 hidden with batch norm, 32 out.
    sizes = FeatureGenerator((32,), 10).floats()
    assert sizes == {"parameters": 42 * 256 + 256 + 2 * 256 + 256 * 32 + 32, "buffers": 2 * 256}


def test_a_vector_is_no_image() -> None:
    with pytest.raises(BadValue, match=r"needs \[channel, height, width\], not \(4,\)"):
        StyleGenerator((4,), 3)


# Modulation


def layer(inputs: int, outputs: int, styles: int) -> dict[str, Tensor]:
    rng = generator(0, "layer")
    return {
        "l.weight": torch.randn(outputs, inputs, 3, 3, generator=rng),
        "l.style.weight": torch.randn(inputs, styles, generator=rng),
        "l.style.bias": torch.ones(inputs),
    }


def test_demodulation_gives_kernels_of_length_one() -> None:
    # So independent input of variance one has output of variance one: here without sampling.
    weights, style = layer(5, 7, 4), torch.randn(3, 4, generator=generator(1))
    unit = torch.eye(5 * 9).reshape(45, 5, 3, 3)  # each input pixel of a 3x3 image alone
    for one in style:
        out = modulated(weights, "l", unit, one.expand(45, -1))[:, :, 1, 1]  # [pixel, out]
        assert torch.allclose(out.square().sum(0), torch.ones(7), atol=1e-5)


def test_demodulated_noise_keeps_its_variance() -> None:
    weights, style = layer(8, 6, 4), torch.randn(1, 4, generator=generator(2))
    x = torch.randn(1, 8, 130, 130, generator=generator(3))
    inner = modulated(weights, "l", x, style)[..., 1:-1, 1:-1]
    assert torch.allclose(inner.var((0, 2, 3)), torch.ones(6), atol=0.1)


def test_modulation_scales_each_examples_own_kernel() -> None:
    weights, style = layer(5, 7, 4), torch.randn(3, 4, generator=generator(4))
    x = torch.randn(3, 5, 6, 6, generator=generator(5))
    found = modulated(weights, "l", x, style)
    for i in range(3):
        scale = weights["l.style.weight"] @ style[i] + 1
        kernel = weights["l.weight"] * scale.reshape(1, -1, 1, 1)
        kernel = kernel / kernel.square().sum((1, 2, 3), keepdim=True).sqrt()
        assert torch.allclose(found[i], F.conv2d(x[i : i + 1], kernel, padding=1)[0], atol=1e-5)


def test_the_cheap_decoder_is_these_layers_of_torch() -> None:
    network = ConvDecoder((2, 10, 12), 3, width=4, latent=5, within=0.25)  # 4x4, 8x8, 16x16
    weights = {  # biases begin at zero, and would hide whether they are added
        name: torch.randn(law.shape, generator=generator(0, name))
        for name, law in network.initial().items()
    }
    noise, labels = torch.randn(6, 5, generator=generator(1)), torch.tensor([0, 1, 2, 2, 1, 0])

    def conv(name: str, inputs: int, outputs: int) -> nn.Module:
        layer = nn.Conv2d(inputs, outputs, 3, padding=1)
        layer.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
        return layer

    start = nn.Linear(5, 64)
    start.load_state_dict({part: weights[f"start.{part}"] for part in ("weight", "bias")})
    larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
    plain = nn.Sequential(
        start, nn.LeakyReLU(0.2), nn.Unflatten(1, (4, 4, 4)),
        larger, conv("conv8", 4, 4), nn.LeakyReLU(0.2),
        larger, conv("conv16", 4, 4), nn.LeakyReLU(0.2), conv("image", 4, 2),
    )  # fmt: skip
    latent = weights["means"][labels] + 0.25 * noise
    middle = plain(latent)[:, :, 3:13, 2:14]
    assert torch.allclose(network(weights, noise, labels), middle, atol=1e-5)


def test_the_style_generator_is_a_mapping_and_modulated_layers_with_noise() -> None:
    network = StyleGenerator((2, 8, 8), 3, width=4, latent=5, within=0.25)
    weights = {
        name: torch.randn(law.shape, generator=generator(0, name))
        for name, law in network.initial().items()
    }
    labels, sides = torch.tensor([2, 0]), {"conv4": 4, "conv8a": 8, "conv8b": 8}
    noise = torch.randn(2, 5 + 16 + 64 + 64, generator=generator(1))
    latent, *maps = torch.split(noise, [5, 16, 64, 64], 1)
    means = weights["means"][labels]  # of the latent, then of the noise of each layer
    assert means.shape == (2, 5 + 3)

    def lit(x: Tensor) -> Tensor:  # a leaky ReLU that keeps the size of activations
        return 2**0.5 * torch.where(x > 0, x, 0.2 * x)

    latent = means[:, :5] + 0.25 * latent
    unit = latent / (latent.square().mean(1, keepdim=True) + 1e-8).sqrt()
    style = lit(unit @ weights["mapping.weight"].T + weights["mapping.bias"])
    x, image = weights["start"].expand(2, -1, -1, -1), torch.zeros(2, 2, 4, 4)
    for layer, (name, side) in enumerate(sides.items()):
        if name == "conv8a":
            x, image = (F.interpolate(maps, scale_factor=2, mode="bilinear") for maps in (x, image))
        # The deviation of a layer's noise is that of the latent over the number of layers.
        own = means[:, 5 + layer, None] + 0.25 / 3 * maps[layer]
        x = modulated(weights, name, x, style) + own.reshape(2, 1, side, side)
        x = lit(x + weights[f"{name}.bias"].reshape(-1, 1, 1))
        if name != "conv8a":  # one image for each size
            shown = modulated(weights, f"image{side}", x, style, demodulate=False)
            image = image + shown + weights[f"image{side}.bias"].reshape(-1, 1, 1)
    assert torch.allclose(network(weights, noise, labels), image, atol=1e-4, rtol=1e-4)


# As functions of weights


@pytest.mark.parametrize(
    "network",
    [StyleGenerator((1, 8, 8), 3, width=4), ConvDecoder((1, 8, 8), 3, width=4),
     FeatureGenerator((5,), 3, hidden=6)],
)  # fmt: skip
def test_generators_can_be_stacked_and_have_slopes(network: Generator) -> None:
    pool = [network.init(seed) for seed in range(3)]
    stacked = {name: torch.stack([weights[name] for weights in pool]) for name in pool[0]}
    noise, labels = network.noise(generator(0), 4), torch.tensor([0, 1, 2, 0])
    together = torch.func.vmap(network, in_dims=(0, None, None))(stacked, noise, labels)
    for weights, found in zip(pool, together, strict=True):
        assert torch.allclose(network(weights, noise, labels), found, atol=1e-5)
    first = pool[0]
    grad = torch.func.grad(lambda w: network({**first, **w}, noise, labels).square().sum())(
        algebra.parameters(first)
    )
    moved = {name for name, tensor in grad.items() if tensor.abs().sum() > 0}
    assert {name for name in grad if name.endswith("weight")} <= moved


def test_training_a_feature_generator_notes_new_statistics() -> None:
    network, notes = FeatureGenerator((5,), 3, hidden=6), {}
    made(network.train(notes))
    assert notes.keys() == {"norm.running_mean", "norm.running_var"}


def test_noise_of_features_is_uniform() -> None:
    noise = FeatureGenerator((5,), 3).noise(generator(0), 100)
    assert 0 <= float(noise.min()) < 0.01 and 0.99 < float(noise.max()) < 1


# Virtual sets


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_one_set_and_another_seed_another(kind: type[Gaussians]) -> None:
    network = kind((1, 8, 8), 3, width=4)
    one = untrained_set(network, 5, 4)
    other = untrained_set(network, 6, 4)
    again = untrained_set(kind((1, 8, 8), 3, width=4), 5, 4)
    assert torch.equal(one.images, again.images)
    assert not torch.allclose(one.images, other.images, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_images_of_a_class_are_nearer_to_each_other_than_to_others(
    kind: type[Gaussians], seed: int
) -> None:
    images = untrained_set(kind((3, 16, 16), 10, width=16), seed, 8).images.flatten(2)
    apart = torch.cdist(images.flatten(0, 1), images.flatten(0, 1)).reshape(10, 8, 10, 8)
    within = torch.stack([apart[c, :, c].sum() / (8 * 7) for c in range(10)])
    between = torch.stack([apart[c].sum() - apart[c, :, c].sum() for c in range(10)]) / (8 * 72)
    assert (within < between).all()
    assert within.mean() < 0.6 * between.mean()


def test_a_virtual_set_is_labelled_shared_out_and_standardised() -> None:
    made = untrained_set(ConvDecoder((3, 8, 8), 4, width=4), 0, 5)
    images, labels = made.flat()
    assert images.shape == (20, 3, 8, 8)
    assert labels.tolist() == [c for c in range(4) for _ in range(5)]
    assert torch.allclose(made.share.sum(1), torch.ones(4))
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std((0, 2, 3), unbiased=False), torch.ones(3), atol=1e-5)
    assert not images.requires_grad
