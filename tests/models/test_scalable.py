"""Networks that can be narrowed: counts of the papers, streams, the scaler, static norm layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedstill.core.errors import BadValue
from fedstill.core.seeds import generator
from fedstill.models import MLP, MODELS, Conv4, ConvNet, PreResNet18
from fedstill.models.scalable import CLASSES, IMAGE, Scalable
from fedstill.parts.submodels import SubModel, cover, extract, random_units

RATES = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
TABLE = [
    (PreResNet18((3, 32, 32), 10), [11_172_170, 2_796_714, 701_018, 176_178, 44_510]),
    (PreResNet18((3, 32, 32), 100), [11_218_340, 2_819_844, 712_628, 182_028, 47_480]),
    (PreResNet18((3, 64, 64), 200), [11_269_640, 2_845_544, 725_528, 188_528, 50_780]),
    (PreResNet18((3, 64, 64), 101), [11_218_853, 2_820_101, 712_757, 182_093, 47_513]),
    (Conv4((1, 32, 32), 10), [1_556_874, 391_370, 98_922, 25_274, 6_594]),
]
SMALL: list[Scalable] = [
    MLP((6,), 3, hidden=(8, 5)),
    ConvNet((2, 8, 8), 3, depth=2, width=6),
    ConvNet((2, 8, 8), 3, depth=2, width=6, norm="none"),
    ConvNet((2, 8, 8), 3, depth=2, width=6, norm="static"),
    ConvNet((2, 8, 8), 3, depth=2, width=6, norm="batch"),
    ConvNet((2, 8, 8), 3, depth=1, width=6, norm="layer", pooling="none"),
    Conv4((2, 8, 8), 3, widths=(4, 6, 8, 5)),
    Conv4((2, 16, 16), 3, widths=(4, 6, 8, 5), last_pool=True),
    PreResNet18((2, 8, 8), 3, widths=(4, 6, 8, 10)),
    PreResNet18((2, 8, 8), 3, widths=(4, 6, 8, 10), blocks=(1, 3, 2, 2)),
    PreResNet18((2, 9, 8), 3, widths=(4, 6, 8, 10), norm="instance"),
]


def images(model: Scalable, count: int = 5) -> Tensor:
    return torch.randn(count, *model.shape, generator=generator(3, "images"))


@pytest.mark.parametrize(("model", "floats"), TABLE, ids=repr)
def test_a_narrowed_network_has_the_floats_of_the_papers(
    model: Scalable, floats: list[int]
) -> None:
    found = [model.narrowed(rate).floats() for rate in RATES]
    assert found == [{"parameters": count, "buffers": 0} for count in floats]
    features = [model.narrowed(rate).initial()["head.weight"].shape[1] for rate in RATES]
    assert features == [512 * rate for rate in RATES]


@pytest.mark.parametrize("model", SMALL, ids=repr)
def test_every_tensor_of_a_part_has_the_shape_of_the_narrowed_network(model: Scalable) -> None:
    whole = model.init(0)
    for rate in (1, 0.5, 0.3, 0.01):
        small = model.narrowed(rate)
        part = extract(model, whole, random_units(small, generator(1)))
        shapes = {name: tuple(tensor.shape) for name, tensor in part.items()}
        assert shapes == {name: law.shape for name, law in small.initial().items()}


@pytest.mark.parametrize("model", [m for m in SMALL if getattr(m, "norm", "") != "layer"], ids=repr)
def test_a_part_says_what_the_network_says_whose_other_units_are_dead(model: Scalable) -> None:
    # Holds only if all that adds into a residual stream keeps the same units.
    small = model.narrowed(0.5)
    whole = model.init(0)
    whole = {n: w + 0.1 * torch.randn(w.shape, generator=generator(9, n)) for n, w in whole.items()}
    whole = {n: w.abs() if n.endswith("running_var") else w for n, w in whole.items()}
    units = random_units(small, generator(5))
    part = extract(model, whole, units)
    dead = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    among = cover(model, dead, [SubModel(part, units, 1.0)])
    x = images(model)
    said, expected = model(among, x), small(part, x)
    assert torch.allclose(said, expected, atol=1e-5)
    assert expected.std() > 0


@pytest.mark.parametrize("model", SMALL, ids=repr)
def test_every_layer_is_wired_and_images_and_classes_are_no_streams(model: Scalable) -> None:
    layers = {name.rpartition(".")[0] for name in model.initial()}
    assert layers <= set(model.wiring())
    named = {stream for streams in model.wiring().values() for stream in streams}
    assert named == {*model.streams(), CLASSES, IMAGE}
    assert model.wiring()["head"][0] == CLASSES


def test_blocks_that_add_to_one_path_share_a_stream() -> None:
    wiring = PreResNet18((3, 8, 8), 10).wiring()
    for group in range(4):
        added = {wiring[f"group{group}.block{block}.conv1"][0] for block in (0, 1)}
        begun = wiring["stem" if group == 0 else f"group{group}.block0.short"][0]
        assert added == {begun} == {f"group{group}"}
        inner = {wiring[f"group{group}.block{block}.conv0"][0] for block in (0, 1)}
        assert inner == {f"group{group}.block0", f"group{group}.block1"}
    assert wiring["head"] == (CLASSES, "group3")


@pytest.mark.parametrize("model", SMALL, ids=repr)
def test_the_scaler_works_in_training_alone(model: Scalable) -> None:
    plain, scaled = model.narrowed(0.5), model.narrowed(0.5, scaler=True)
    weights, x = plain.init(0), images(model)
    assert torch.equal(plain(weights, x), scaled(weights, x))
    assert torch.equal(scaled.scaled(x), x)
    assert torch.equal(scaled.train().scaled(x), x / 0.5)
    assert torch.equal(plain.train().scaled(x), x)
    whole = model.narrowed(1.0, scaler=True).train()
    assert torch.equal(whole(model.init(0), x), model.train()(model.init(0), x))


def test_the_scaler_divides_what_every_hidden_layer_makes() -> None:
    model = MLP((6,), 3, hidden=(8, 8), activation="relu").narrowed(0.25, scaler=True)
    weights = {
        name: torch.zeros_like(tensor) if name.endswith("bias") else tensor
        for name, tensor in model.init(0).items()
    }
    x = images(model)
    # Without biases ReLU layers are homogeneous: two divisions by 1/4 are a factor of 16.
    assert torch.allclose(model.train()(weights, x), 16 * model(weights, x), atol=1e-5)


def test_static_norm_goes_by_the_batch_and_keeps_nothing() -> None:
    model = ConvNet((2, 8, 8), 3, depth=1, width=4, norm="static")
    batch = ConvNet((2, 8, 8), 3, depth=1, width=4, norm="batch")
    weights, x = model.init(0), images(model)
    assert model.floats()["buffers"] == 0
    notes: dict[str, Tensor] = {}
    trained = model.train(notes)(weights, x)
    assert notes == {}
    assert torch.equal(trained, batch.train()(batch.init(0), x))
    assert torch.equal(model(weights, x), trained)


def test_static_norm_is_evaluated_with_statistics_where_weights_hold_them() -> None:
    model = ConvNet((2, 8, 8), 3, depth=1, width=4, norm="static")
    batch = ConvNet((2, 8, 8), 3, depth=1, width=4, norm="batch")
    weights, x = model.init(0), images(model, 7)
    notes: dict[str, Tensor] = {}
    model.recording(notes)(weights, x)
    seen = torch.conv2d(x, weights["conv0.weight"], weights["conv0.bias"], padding=1)
    assert torch.allclose(notes["norm0.running_mean"], seen.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(notes["norm0.running_var"], seen.var((0, 2, 3)), atol=1e-6)
    held = {**weights, **notes}
    assert torch.equal(model(held, x[:2]), batch(held, x[:2]))
    assert torch.equal(model.train()(held, x), model.train()(weights, x))


def test_a_share_of_units_is_rounded_up_but_not_by_rounding_errors() -> None:
    model = MLP((4,), 3)
    kept = {(rate, width): model.narrowed(rate).units(width) for rate in (0.1, 0.25, 1 / 3)
            for width in (3, 30)}  # fmt: skip
    assert kept == {
        (0.1, 3): 1, (0.1, 30): 3, (0.25, 3): 1, (0.25, 30): 8, (1 / 3, 3): 1, (1 / 3, 30): 10,
    }  # fmt: skip
    assert math.ceil(0.1 * 30) == 3 and math.ceil(0.7 * 10) == 7
    assert math.ceil(0.07 * 100) == 8 and model.narrowed(0.07).units(100) == 7


@pytest.mark.parametrize(
    ("model", "rate", "words"),
    [
        (MLP((4,), 3), 0, r"mlp: rate = 0: must be in \(0, 1\]"),
        (MLP((4,), 3), 1.5, r"mlp: rate = 1.5: must be in \(0, 1\]"),
        (MLP((4,), 3, hidden=(4, 0)), 0.5, "mlp: rate = 0.5 leaves layer1 without units"),
        (MLP((4,), 3), 1e-9, "mlp: rate = 1e-09 leaves layer0 without units"),
        (ConvNet((1, 8, 8), 3, width=8, norm="group"), 0.2, "four groups, and 2 of 8 channels"),
        (PreResNet18((1, 8, 8), 3, norm="group"), 0.01, "preresnet18: norm = 'group' has four"),
        (PreResNet18((1, 8, 8), 3, widths=(4, 4)), 1, r"widths = \[4, 4\]: must be four whole"),
        (PreResNet18((1, 8, 8), 3, norm="instance"), 1, "image of 8x8 leaves one pixel"),
        (Conv4((1, 15, 15), 3, norm="instance"), 1, "15x15 leaves one pixel, constant under inst"),
        (Conv4((1, 7, 8), 3), 1, "conv4: an image of 7x8 cannot be pooled three times"),
        (Conv4((1, 8, 16), 3, last_pool=True), 1, "cannot be pooled four times; use at least 16"),
        (PreResNet18((1, 8, 8), 3, blocks=(2, 3, 2)), 1, "blocks = \\[2, 3, 2\\]: must be four"),
    ],
    ids=repr,
)
def test_a_width_that_a_network_cannot_have_is_refused(
    model: Scalable, rate: float, words: str
) -> None:
    with pytest.raises(BadValue, match=words):
        model.narrowed(rate)


def test_a_rate_is_no_option_of_a_network() -> None:
    for kind in MODELS.values():
        assert not {"rate", "scaler"} & set(kind((3, 32, 32), 10).describe())


def test_the_fourth_pool_comes_before_the_mean_and_changes_nothing_else() -> None:
    plain = Conv4((1, 16, 16), 3, widths=(4, 4, 4, 4))
    more = Conv4((1, 16, 16), 3, widths=(4, 4, 4, 4), last_pool=True)
    weights, x = plain.init(0), images(plain)
    assert more.initial() == plain.initial()
    *before, last, _ = plain.stages(weights, x)
    *same, pooled, vector = more.stages(weights, x)
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))
    assert last.shape[2:] == (2, 2) and pooled.shape[2:] == (1, 1)
    assert torch.equal(pooled, last.amax((2, 3), keepdim=True))
    assert torch.equal(vector, pooled.flatten(1))


def test_a_residual_network_of_twenty_layers_has_one_block_more_in_its_second_group() -> None:
    small, large = (PreResNet18((3, 32, 32), 10, blocks=b) for b in ((2, 2, 2, 2), (2, 3, 2, 2)))
    more = large.floats()["parameters"] - small.floats()["parameters"]
    assert more == 2 * 9 * 128 * 128 + 2 * 2 * 128  # two convolutions of 3x3, two norms
    convolutions = [name for name in large.initial() if ".conv" in name or name == "stem.weight"]
    assert len(convolutions) + 1 == 20  # and the head
    x = torch.zeros(2, 3, 32, 32)
    assert [len(m.stages(m.init(0), x)) for m in (small, large)] == [5, 5]
