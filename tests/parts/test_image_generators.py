"""Generators of images: sizes of the released ones, merge operators by formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedstill.core import Weights
from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.parts import image_generators
from fedstill.parts.generators import ImageGenerator
from fedstill.parts.image_generators import Conditioned, Deconvolution, Upsampling

KINDS: list[type[ImageGenerator]] = [Deconvolution, Upsampling, Conditioned]
LABELS = torch.tensor([0, 1, 2, 0, 1])


def begun(maker: ImageGenerator) -> tuple[Weights, Tensor]:
    return maker.init(0), maker.noise(generator(0, "noise"), len(LABELS))


@pytest.mark.parametrize(
    ("maker", "floats"),
    [
        (Deconvolution((3, 32, 32), 10), 3_448_552),
        (Deconvolution((1, 32, 32), 10), 3_444_456),
        (Deconvolution((3, 32, 32), 100), 3_457_552),
        (Deconvolution((3, 64, 64), 200), 3_595_680),
        (Deconvolution((3, 64, 64), 101), 3_585_780),
        (Upsampling((3, 32, 32), 10), 2_328_899),
        (Conditioned((3, 32, 32), 10), 682_499),
        (Conditioned((3, 32, 32), 100, latent=256), 1_690_115),
    ],
)
def test_they_have_the_floats_of_the_released_ones(maker: ImageGenerator, floats: int) -> None:
    assert maker.floats()["parameters"] == floats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 5, 12), (1, 1, 1)])
def test_images_have_the_size_that_was_asked_for(
    kind: type[ImageGenerator], shape: tuple[int, ...]
) -> None:
    maker = kind(shape, 3, width=8)  # type: ignore[call-arg]
    weights, noise = begun(maker)
    for mode in (maker, maker.train({})):
        images = mode(weights, noise, LABELS)
        assert images.shape == (5, *shape)
        assert torch.isfinite(images).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_no_image(kind: type[ImageGenerator]) -> None:
    with pytest.raises(BadValue, match="a generator of images needs"):
        kind((4,), 3)


@pytest.mark.parametrize("merge", ["mul", "add", "cat", "ncat", "none"])
def test_merge_operators_are_what_they_are_called(merge: str) -> None:
    maker = Deconvolution((1, 8, 8), 3, merge=merge, latent=6, width=4)  # type: ignore[arg-type]
    weights, noise = begun(maker)
    table = weights.get("label.weight")
    hidden = maker.merged(weights, noise, LABELS)
    for z, y, h in zip(noise, LABELS.tolist(), hidden, strict=True):
        by_hand = {
            "mul": lambda z=z, y=y: z * table[y],
            "add": lambda z=z, y=y: z + table[y],
            "cat": lambda z=z, y=y: torch.cat([z, table[y]]),
            "ncat": lambda z=z, y=y: torch.cat([z, torch.eye(3)[y]]),
            "none": lambda z=z: z,
        }[merge]()
        assert torch.equal(h, by_hand)
    widths = {"mul": 6, "add": 6, "cat": 12, "ncat": 9, "none": 6}
    assert maker.input_width == hidden.shape[1] == weights["conv0.weight"].shape[0] == widths[merge]
    assert (table is not None) == (merge in ("mul", "add", "cat"))
    assert maker(weights, noise, LABELS).shape == (5, 1, 8, 8)


def test_without_a_merge_the_label_does_not_matter_and_with_one_it_does() -> None:
    others = (LABELS + 1) % 3
    for merge in ("mul", "add", "cat", "ncat", "none"):
        maker = Deconvolution((1, 8, 8), 3, merge=merge, width=8)  # type: ignore[arg-type]
        weights, noise = begun(maker)
        same = torch.equal(maker(weights, noise, LABELS), maker(weights, noise, others))
        assert same == (merge == "none")


def test_a_small_image_is_one_doubling_from_four_pixels() -> None:
    assert Deconvolution((1, 8, 8), 3).channels == [512, 1]
    assert Deconvolution((3, 28, 28), 3).channels == [512, 256, 128, 3]
    assert Deconvolution((3, 96, 96), 3).channels == [512, 256, 128, 64, 32, 3]


def test_ranges_are_those_of_the_last_layer() -> None:
    for kind, (low, high) in ((Deconvolution, (-1, 1)), (Upsampling, (0, 1))):
        maker = kind((1, 8, 8), 3, width=8)
        weights, noise = begun(maker)
        loud = {name: 50 * tensor for name, tensor in weights.items()}
        images = maker.train({})(loud, noise, LABELS)
        assert low <= images.min() and images.max() <= high
    maker = Conditioned((2, 8, 8), 3, width=8)
    weights, noise = begun(maker)
    images = maker.train({})(weights, noise, LABELS)
    assert torch.allclose(images.mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    # The norm adds 1e-5 to a variance that may be small.
    assert torch.allclose(images.var((0, 2, 3), unbiased=False), torch.ones(2), atol=0.1)


def test_weights_start_by_the_law_of_the_released_code() -> None:
    weights = Upsampling((3, 32, 32), 10).init(0)
    assert float(weights["conv1.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(weights["norm1.weight"].mean()) == pytest.approx(1.0, abs=0.01)
    assert float(weights["norm1.weight"].std()) == pytest.approx(0.02, rel=0.3)
    assert not weights["start.bias"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_in_training_the_norms_note_new_statistics(kind: type[ImageGenerator]) -> None:
    maker = kind((1, 16, 16), 3, width=8)  # type: ignore[call-arg]
    weights, noise = begun(maker)
    notes: Weights = {}
    maker.train(notes)(weights, noise, LABELS)
    assert set(notes) == {name for name in weights if "running" in name} != set()


@pytest.mark.parametrize("kind", KINDS)
def test_generators_can_be_stacked(kind: type[ImageGenerator]) -> None:
    maker = kind((1, 8, 8), 3, width=4)  # type: ignore[call-arg]
    some = [maker.init(seed) for seed in range(3)]
    noise = maker.noise(generator(0), 3, 5)
    stack = {name: torch.stack([w[name] for w in some]) for name in some[0]}
    made = torch.func.vmap(maker, in_dims=(0, 0, None))(stack, noise, LABELS)
    for place in range(3):
        assert torch.allclose(made[place], maker(some[place], noise[place], LABELS), atol=1e-6)


@pytest.mark.parametrize("side", [1, 3])
def test_transposed_convolutions_as_products_are_the_librarys_own(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = generator(0, "products")
    x = torch.randn(2, 5, side, side + 1, generator=rng, dtype=torch.float64)
    weight = torch.randn(5, 3, 4, 4, generator=rng, dtype=torch.float64)
    expected = image_generators.doubled(x, weight), image_generators.first_map(x[..., 0, 0], weight)
    monkeypatch.setattr(image_generators, "plain_on_gpu", lambda *tensors: True)
    found = image_generators.doubled(x, weight), image_generators.first_map(x[..., 0, 0], weight)
    assert found[0].shape == (2, 3, 2 * side, 2 * side + 2)
    assert found[1].shape == (2, 3, 4, 4)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
