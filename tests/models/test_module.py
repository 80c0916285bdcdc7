"""A user's torch module as a network: its weights, its start, its features, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedstill.core.errors import BadValue
from fedstill.core.loop import Seeded as SeededBatch
from fedstill.core.model import option_names
from fedstill.core.records import is_buffer
from fedstill.core.seeds import generator
from fedstill.models import MODELS, ConvNet, Module, as_model
from fedstill.models.random_calls import Seeded, uniform
from fedstill.parts.heads import projected
from models.own_nets import BatchNet, GroupNet, VectorNet

IMAGE = (1, 8, 8)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, *IMAGE, generator=generator(0, "images"))


def own(net: nn.Module, shape: tuple[int, ...] = IMAGE, **options: Any) -> Module:
    return Module(shape, 3, net, **options)


def loaded(model: Module, weights: dict[str, Tensor], net: nn.Module) -> nn.Module:
    """The user's own module with these weights, by its own means."""
    net.load_state_dict(model.state_dict(weights))
    return net


# Weights and start.


@pytest.mark.parametrize("kind", [GroupNet, BatchNet])
def test_weights_have_the_names_of_the_state_dict_and_give_the_modules_own_logits(
    kind: type[nn.Module],
) -> None:
    model = Module(IMAGE, 3, kind)
    weights = model.init(7)
    net = loaded(model, weights, kind()).eval()
    assert torch.equal(model(weights, images()), net(images()))
    extra = {name for name in net.state_dict() if name.endswith("num_batches_tracked")}
    assert weights.keys() == net.state_dict().keys() - extra


def test_fresh_weights_are_what_the_constructor_draws_and_no_generator_moves() -> None:
    before = torch.get_rng_state()
    weights = Module(IMAGE, 3, GroupNet).init(11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    expected = GroupNet().state_dict()
    torch.set_rng_state(before)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_start_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadValue, match=r"start = 'pretrained': .* known: fresh, given"):
        own(nn.Linear(64, 3), start="pretrained")


def test_an_instance_starts_afresh_unless_its_values_are_asked_for() -> None:
    net = BatchNet()
    with torch.no_grad():
        net.out.weight.fill_(5.0)
        net.body[1].running_mean.fill_(3.0)
    fresh, given = own(net).init(1), own(net, start="given").init(1)
    assert not (fresh["out.weight"] == 5).any() and (given["out.weight"] == 5).all()
    assert (fresh["body.1.running_mean"] == 0).all() and (given["body.1.running_mean"] == 3).all()
    assert torch.equal(own(net).init(1)["out.weight"], fresh["out.weight"])
    assert not torch.equal(own(net).init(2)["out.weight"], fresh["out.weight"])


def test_an_instance_is_copied_and_stays_as_it_is() -> None:
    net = GroupNet()
    model = own(net, start="given")
    before = model.init(0)["fc.weight"].clone()
    with torch.no_grad():
        net.fc.weight.zero_()
    assert torch.equal(model.init(0)["fc.weight"], before)
    assert net.act.inplace and net.fc.weight.device.type == "cpu"


def test_a_weight_that_nobody_can_draw_anew_is_named() -> None:
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))
            self.fc = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.flatten(1) * self.scale)  # type: ignore[no-any-return]

    with pytest.raises(BadValue, match=r"how its weight scale is drawn anew.*start = \"given\""):
        own(Free()).init(0)
    assert Module(IMAGE, 3, Free).init(0)["scale"].sum() == 64
    assert own(Free(), start="given").init(0)["scale"].sum() == 64


def test_random_networks_differ_and_depend_on_the_generator_alone() -> None:
    model = Module(IMAGE, 3, GroupNet)
    first, second = model.samples(generator(3), 2)
    again = model.samples(generator(3), 2)[1]
    assert not torch.equal(first["fc.weight"], second["fc.weight"])
    assert torch.equal(second["fc.weight"], again["fc.weight"])


def test_modules_are_equal_when_equal_arguments_made_them() -> None:
    wide = Module(IMAGE, 3, partial(GroupNet, width=8))
    assert wide == Module(IMAGE, 3, partial(GroupNet, width=8))
    assert hash(wide) == hash(Module(IMAGE, 3, partial(GroupNet, width=8)))
    assert wide != Module(IMAGE, 3, GroupNet)
    assert Module(IMAGE, 3, partial(GroupNet, 8)) != Module(IMAGE, 3, partial(GroupNet, 8.0))  # type: ignore[arg-type]
    net = GroupNet()
    assert own(net) == own(net) and own(net) != own(GroupNet())
    before = own(net)
    with torch.no_grad():
        net.fc.weight.add_(1)
    assert own(net) != before, "it is another network to start from"


def test_a_description_says_what_made_it() -> None:
    told = Module(IMAGE, 3, partial(GroupNet, width=8)).describe()
    assert told["name"] == "models.own_nets:GroupNet" and told["width"] == 8
    assert told["code"] != Module(IMAGE, 3, GroupNet).describe()["code"]


class Mirroring(GroupNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(3))


def test_a_description_knows_the_classes_that_a_network_is_derived_from() -> None:
    def derived(base: type[GroupNet]) -> Any:
        class Net(base):  # type: ignore[misc, valid-type]
            pass

        return Module(IMAGE, 3, Net).describe()["code"]

    assert derived(GroupNet) == derived(GroupNet) != derived(Mirroring)


# Features and head.


def test_features_are_what_enters_the_last_linear_layer() -> None:
    model = Module(IMAGE, 3, GroupNet)
    weights, seen = model.init(0), []
    net = loaded(model, weights, GroupNet())
    net.fc.register_forward_pre_hook(lambda _, into: seen.append(into[0]))  # type: ignore[union-attr, operator]
    net(images())
    assert torch.equal(model.features(weights, images()), seen[0])
    assert model.head_names == ("fc.weight", "fc.bias") and model.feature_width == 64
    assert Module(IMAGE, 3, BatchNet).head_names == ("out.weight", None)


def test_norm_layers_are_known_by_their_kind_whatever_they_are_called() -> None:
    assert Module(IMAGE, 3, GroupNet).norm_names == ("norm.weight", "norm.bias")
    affine, statistics = ("weight", "bias"), ("running_mean", "running_var")
    batch = tuple(f"body.1.{name}" for name in (*affine, *statistics))
    assert Module(IMAGE, 3, BatchNet).norm_names == batch
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    assert Module(IMAGE, 3, plain).norm_names == ("2.weight", "2.bias")
    assert Module(IMAGE, 3, nn.Sequential(nn.Flatten(), nn.Linear(64, 3))).norm_names == ()


def test_a_projection_stands_before_the_head_and_starts_the_rest_as_without_it() -> None:
    model = Module(IMAGE, 3, GroupNet)
    wider = projected(model, 6)
    weights = wider.init(4)
    assert weights["fc.weight"].shape == (3, 6) and weights["projection0.weight"].shape == (6, 64)
    assert torch.equal(weights["conv.weight"], model.init(4)["conv.weight"])
    assert wider(weights, images()).shape == (5, 3)
    (sample,) = wider.samples(generator(1), 1)
    assert sample.keys() == weights.keys()


class Temperature(GroupNet):
    """Its logits are not the output of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_logits_that_are_not_the_heads_are_refused_or_taken_for_features() -> None:
    with pytest.raises(BadValue, match=r"logits are not what its last linear layer gives"):
        Module(IMAGE, 3, Temperature).initial()
    model = Module(IMAGE, 3, Temperature, head_layer="none")
    weights = model.init(0)
    expected = loaded(model, weights, Temperature())(images())
    assert torch.equal(model(weights, images()), expected)
    assert torch.equal(model.features(weights, images()), expected) and model.feature_width == 3
    assert projected(model, 5).init(0)["head.weight"].shape == (3, 5)


def test_a_head_for_more_classes_takes_the_place_of_the_old_one() -> None:
    model = Module(IMAGE, 3, GroupNet)
    double = model.with_classes(6)
    weights = double.init(5)
    assert double(weights, images()).shape == (5, 6)
    assert torch.equal(weights["conv.weight"], model.init(5)["conv.weight"])
    with pytest.raises(BadValue, match="no linear head"):
        Module(IMAGE, 3, Temperature, head_layer="none").with_classes(6)


def test_stages_are_named_layers_or_the_parts_of_a_sequence_and_then_the_features() -> None:
    named = Module(IMAGE, 3, GroupNet, stage_layers=("norm",))
    shapes = [tuple(map_.shape) for map_ in named.stages(named.init(0), images())]
    assert shapes == [(5, 4, 8, 8), (5, 64)]

    def chain() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6),
            nn.ReLU(), nn.Flatten(), nn.Linear(96, 3),
        )  # fmt: skip

    model = Module(IMAGE, 3, chain)
    shapes = [tuple(map_.shape) for map_ in model.stages(model.init(0), images())]
    assert shapes == [(5, 2, 4, 4), (5, 96)], "what enters each layer that mixes, after the first"
    assert len(Module(IMAGE, 3, GroupNet).stages(named.init(0), images())) == 1


# Norm layers.


def test_batch_norm_notes_the_statistics_that_torch_would_keep() -> None:
    model = Module(IMAGE, 3, partial(BatchNet, drop=0.0))
    weights, notes = model.init(0), {}  # type: ignore[var-annotated]
    held = {name: tensor.clone() for name, tensor in weights.items()}
    net = loaded(model, weights, BatchNet(0.0)).train()
    logits = model.train(notes)(weights, images())
    assert torch.allclose(logits, net(images()), atol=1e-6)
    for name, tensor in notes.items():
        assert torch.allclose(tensor, net.state_dict()[name], atol=1e-6)
    assert set(notes) == {"body.1.running_mean", "body.1.running_var"}
    assert all(torch.equal(held[name], weights[name]) for name in held), "nothing is written"


class NormAndMore(nn.BatchNorm2d):
    """A batch norm that drops and activates, as some libraries have it."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[no-any-return]


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def normed(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), kind(4), nn.Flatten(), nn.Linear(4 * 36, 3))


def test_what_a_batch_norm_does_behind_its_norm_is_done_too() -> None:
    model = Module(IMAGE, 3, partial(normed, NormAndMore))
    weights, notes = model.init(0), {}  # type: ignore[var-annotated]
    net = loaded(model, weights, normed(NormAndMore))
    assert torch.allclose(model(weights, images()), net.eval()(images()), atol=1e-6)
    logits = model.train(notes)(weights, images())
    assert torch.allclose(logits, net.train()(images()), atol=1e-6)
    for name, tensor in notes.items():
        assert torch.allclose(tensor, net.state_dict()[name], atol=1e-6)


def test_batch_norm_without_momentum_keeps_plain_means() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))

    model, theirs = Module((4,), 3, net), net()
    weights = model.init(0)
    for step in range(3):
        notes: dict[str, Tensor] = {}
        x = torch.randn(6, 4, generator=generator(step))
        model.train(notes)(weights, x)
        weights = {**weights, **notes}
        theirs(x)
    assert int(weights["0.num_batches_tracked"]) == 3
    assert torch.allclose(weights["0.running_mean"], theirs[0].running_mean, atol=1e-6)  # type: ignore[index]


def test_recording_notes_the_statistics_of_a_batch_and_lets_gradients_through() -> None:
    model = Module(IMAGE, 3, BatchNet)
    weights, notes = model.init(0), {}  # type: ignore[var-annotated]
    x = images().requires_grad_()
    answers = model.recording(notes)(weights, x)
    assert torch.equal(answers, model(weights, x)), "it answers as in evaluation"
    conv = F.conv2d(x, weights["body.0.weight"], padding=1)
    assert torch.allclose(notes["body.1.running_mean"], conv.mean((0, 2, 3)), atol=1e-6)
    notes["body.1.running_var"].sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_one_example_alone_is_trained_by_the_running_statistics() -> None:
    model = Module((4,), 3, VectorNet)
    weights, notes = model.init(0), {}  # type: ignore[var-annotated]
    x = torch.ones(1, 4)
    assert torch.equal(model.train(notes)(weights, x), model(weights, x)) and not notes


class Freezing(BatchNet):
    """Leaves its norm as it was pretrained."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.body[1].eval()
        return self


def test_a_norm_that_the_module_freezes_goes_by_its_running_statistics() -> None:
    model, x = own(Freezing(drop=0.0)), 3 + 2 * images()
    weights, notes = model.init(0), dict[str, Tensor]()
    net = loaded(model, weights, Freezing(drop=0.0)).train()
    assert torch.equal(model.train(notes)(weights, x), net(x))
    assert not notes


def test_answers_that_depend_on_the_batch_are_found_out() -> None:
    def by_batch() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))

    assert not Module((4,), 3, by_batch).by_example
    assert Module(IMAGE, 3, BatchNet).by_example


# Dropout.


def test_numbers_of_a_seed_are_uniform_and_calls_and_seeds_stand_apart() -> None:
    seed = torch.tensor([123, 456])
    numbers = uniform(seed, 1, (100_000,))
    assert abs(float(numbers.mean()) - 0.5) < 0.005 and numbers.min() >= 0 and numbers.max() < 1
    assert abs(float(numbers.var()) - 1 / 12) < 0.002
    counts = torch.histc(numbers, 16, 0, 1)
    assert float(((counts - 6250) ** 2 / 6250).sum()) < 40, "chi-squared, 15 degrees of freedom"
    for other in (uniform(seed, 2, (100_000,)), uniform(seed + 1, 1, (100_000,))):
        both = torch.corrcoef(torch.stack([numbers, other]))[0, 1]
        assert abs(float(both)) < 0.015
    steps = torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]
    assert abs(float(steps)) < 0.015


def test_dropout_keeps_the_mean_and_draws_from_the_seed_alone() -> None:
    model = Module(IMAGE, 3, BatchNet)
    weights, before = model.init(0), torch.get_rng_state()
    training = model.train().drawing(torch.tensor([1, 2]))
    features = training.features(weights, images(400))
    plain = model.train().features(weights, images(400))
    alive = plain > 0
    assert abs(float((features[alive] == 0).float().mean()) - 0.3) < 0.01
    kept = alive & (features != 0)
    assert torch.allclose(features[kept], plain[kept] / 0.7)
    assert torch.equal(features, training.features(weights, images(400)))
    other = model.train().drawing(torch.tensor([1, 3])).features(weights, images(400))
    assert not torch.equal(features, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.draws and not Module(IMAGE, 3, GroupNet).draws


def test_masks_under_vmap_are_those_of_each_seed_alone() -> None:
    model = Module((4,), 3, VectorNet)
    weights, x = model.init(0), torch.randn(6, 4, generator=generator(0))
    seeds = torch.tensor([[1, 2], [3, 4]])
    together = torch.func.vmap(lambda seed: model.train().drawing(seed)(weights, x))(seeds)
    for row, seed in zip(together, seeds, strict=True):
        assert torch.allclose(row, model.train().drawing(seed)(weights, x), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "per_channel"),
    [(nn.Dropout2d(0.5), True), (nn.AlphaDropout(0.5), False), (nn.FeatureAlphaDropout(0.5), True)],
)
def test_other_kinds_of_dropout_draw_from_the_seed_too(layer: nn.Module, per_channel: bool) -> None:
    x = torch.randn(64, 16, 4, 4, generator=generator(0))
    before = torch.get_rng_state()
    with Seeded(torch.tensor([5, 6])):
        out = layer.train()(x)
    assert torch.equal(torch.get_rng_state(), before)
    changed = (out != x / 0.5).flatten(2) if isinstance(layer, nn.Dropout2d) else None
    if changed is not None:
        assert (changed.all(2) | ~changed.any(2)).all(), "whole channels"
        assert abs(float(changed.any(2).float().mean()) - 0.5) < 0.05
    elif not per_channel:
        assert abs(float(out.mean())) < 0.05 and abs(float(out.var()) - 1) < 0.1


def test_attention_drops_its_weights_by_the_seed() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)

    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fc = layer, nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.layer(x).mean(1))  # type: ignore[no-any-return]

    model = Module((5, 8), 3, Sentence)
    weights, x = model.init(0), torch.randn(2, 5, 8, generator=generator(0))
    one = model.train().drawing(torch.tensor([1, 1]))(weights, x)
    assert not torch.allclose(one, model.train().drawing(torch.tensor([1, 2]))(weights, x))
    assert torch.allclose(one, model.train().drawing(torch.tensor([1, 1]))(weights, x))


def test_the_seed_of_a_step_is_part_of_its_batch() -> None:
    assert SeededBatch._fields == ("batch", "seed")


# Other tensors.


class Odd(nn.Module):
    """A constant buffer, a frozen weight, weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x * self.scale * self.passing)))  # type: ignore[operator]
        return self.fc(self.frozen(x))  # type: ignore[no-any-return]


def test_constants_frozen_weights_and_ties_are_neither_trained_nor_sent_twice() -> None:
    model = Module((4,), 3, Odd)
    weights = model.init(0)
    assert set(weights) == {"first.weight", "fc.weight", "fc.bias"}
    assert not any(map(is_buffer, weights))
    state = model.state_dict(weights)
    assert state.keys() == Odd().state_dict().keys()
    net, x = Odd(), torch.randn(5, 4, generator=generator(0))
    net.load_state_dict(state)
    assert torch.equal(net(x), model(weights, x))
    grads = torch.func.grad(lambda w: model(w, x).square().sum())(weights)
    net(x).square().sum().backward()
    assert torch.allclose(grads["first.weight"], net.first.weight.grad, atol=1e-4)  # type: ignore[arg-type]


def test_lazy_layers_take_the_shape_of_the_data() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3))

    model = Module(IMAGE, 3, lazy)
    assert model.init(0)["1.weight"].shape == (5, 64)


class Sparing(GroupNet):
    """Computes its norm again when gradients are taken, which takes less memory."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        seen = checkpoint(self.norm, maps, use_reentrant=self.reentrant)
        return self.fc(F.avg_pool2d(self.act(seen), 2).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
def test_parts_that_are_computed_again_have_the_gradients_of_others(reentrant: bool) -> None:
    model, plain = own(Sparing(reentrant)), own(GroupNet())
    weights, x = plain.init(0), images()
    found = []
    for one in (model, plain):
        moving = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        one.train({})(moving, x).square().sum().backward()
        found.append([tensor.grad for tensor in moving.values()])
    assert all(map(torch.equal, *found))
    assert model.smooth and model.twice and model.stackable

    net = model.module(weights)
    assert torch.equal(net(x), model(weights, x))


class Placing(nn.Module):
    """Makes a table of places when it is first asked, and again for another number of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.fc = nn.Linear(8, 8), nn.Linear(8, 3)
        self.places: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.seen(x.squeeze(1))
        if self.places is None or self.places.shape != rows.shape:
            self.places = torch.linspace(0, 1, 8, device=x.device).expand(rows.shape)
        return self.fc((rows + self.places).tanh().mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("count", [1, 4])
def test_what_a_module_keeps_of_a_pass_stays_on_its_device(device: str, count: int) -> None:
    model = Module(IMAGE, 3, Placing)
    weights, x = model.init(0), images(count)
    there = {name: tensor.to(device) for name, tensor in weights.items()}
    assert model(there, x.to(device)).device.type == device
    assert torch.equal(model(weights, x), model.module(weights)(x))


def test_threads_that_share_a_network_start_and_see_what_each_would_alone() -> None:
    model = Module(IMAGE, 3, BatchNet)

    def played(seed: int) -> list[Tensor]:
        weights, notes = model.init(seed), {}
        logits = [model.train(notes)(weights, images()) for _ in range(20)]
        return [*weights.values(), *logits, *notes.values()]

    alone = [played(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(played, range(8)))
    for one, other in zip(alone, beside, strict=True):
        assert all(map(torch.equal, one, other)) and len(one) == len(other)


def test_a_linear_layer_is_a_network() -> None:
    model = Module((4,), 3, partial(nn.Linear, 4, 3))
    assert model.head_names == ("weight", "bias")
    x = torch.ones(2, 4)
    assert torch.equal(model.features(model.init(0), x), x)
    assert model.with_classes(6)(model.with_classes(6).init(0), x).shape == (2, 6)


def test_a_module_gives_itself_back_with_weights() -> None:
    model = Module(IMAGE, 3, BatchNet)
    weights = model.init(3)
    net = model.module(weights)
    assert isinstance(net, BatchNet) and not net.training
    assert torch.equal(net(images()), model(weights, images()))


def test_a_constructor_may_ask_any_global_generator_and_leaves_it_as_it_was() -> None:
    class OwnStart(GroupNet):
        def __init__(self) -> None:
            super().__init__()
            drawn = np.random.normal(size=tuple(self.fc.weight.shape))
            self.fc.weight.data = torch.as_tensor(drawn * random.random(), dtype=torch.float32)

    before = np.random.get_state()[1].tolist(), random.getstate()
    model = Module(IMAGE, 3, OwnStart)
    one, same, other = (model.init(seed)["fc.weight"] for seed in (0, 0, 2**40))
    after = np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert before == after


# What is refused.


class Drawing(GroupNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(1) if self.training else x)


class AlwaysDropping(GroupNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5))  # not only in training


class NumpyDrawing(GroupNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(np.random.rand()))


class PythonDrawing(GroupNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(3) if self.training and random.random() < 0.5 else x)


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


class Clamping(GroupNet):
    """Writes into its inputs, but changes none of those that are asked about."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp_(-100, 100))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.1)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.fc(self.lstm(x.squeeze(1))[0][:, -1])
        return answer


class Counting(GroupNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1  # type: ignore[has-type, operator, misc]
        return super().forward(x)


class Remembering(GroupNet):
    """Keeps what it made in its first pass of training in a buffer, which until then is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.first is None:
            self.first = torch.ones(8)
        return super().forward(x)


class Sparse(GroupNet):
    """Keeps neighbours in a graph as torch does it where there are few."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(8).to_sparse())


class Scheduled(GroupNet):
    """Grows with the number of passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x * self.passes)


class OwnDrawing(GroupNet):
    def __init__(self, rng: Callable[[int], Any]) -> None:
        super().__init__()
        self.rng = rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.rng.random() if self.training else x)


class OwnTorchDrawing(GroupNet):
    def __init__(self) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(1, generator=self.rng) if self.training else x)


class OwnMean(GroupNet):
    """Keeps a mean in a plain attribute, which it takes away in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return super().forward(x)
        return super().forward(x - self.mean)


class Logarithm(GroupNet):
    """Has no answer for numbers below 0, as are some of a pass that only looks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log()


class Two(GroupNet):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Computed(nn.Linear):
    """Keeps a tensor that was computed, as older kinds of weight norm do; torch copies none."""

    def __init__(self) -> None:
        super().__init__(64, 3)
        self.norm = self.weight.norm()


@pytest.mark.parametrize(
    ("net", "options", "sentence"),
    [
        (Drawing, {}, "draws random numbers in training otherwise than by dropout"),
        (AlwaysDropping, {}, "draws random numbers in evaluation too.*self.training"),
        (NumpyDrawing, {}, "draws random numbers from numpy's global generator in forward"),
        (PythonDrawing, {}, "draws random numbers from Python's global generator in forward"),
        (Recurrent, {}, "otherwise than by dropout.*the dropout of 'lstm'.*nn.Dropout between"),
        (Counting, {}, "changes its buffer 'seen' in training"),
        (Remembering, {}, "changes its buffer 'first' in training"),
        (Scheduled, {}, "answers otherwise when it is asked again.*draw by dropout"),
        (partial(OwnDrawing, np.random.default_rng), {}, "answers otherwise when it is asked"),
        (partial(OwnDrawing, random.Random), {}, "answers otherwise when it is asked again"),
        (OwnTorchDrawing, {}, "answers otherwise when it is asked again"),
        (OwnMean, {}, "answers otherwise when it is asked again.*means in batch norm layers"),
        (Two, {}, "must return logits as one tensor, not tuple"),
        (partial(normed, Doubled), {}, "its layer '1', Doubled, is a batch norm with a forward of"),
        (partial(GroupNet, classes=7), {}, "gives 7 logits for 3 classes.*fresh_head"),
        (partial(GroupNet, width=5), {}, "cannot be built: ValueError"),
        (lambda: nn.Linear(5, 3), {}, "cannot take examples of 1x8x8"),
        (lambda: nn.Flatten(0), {}, r"must return logits \[example, class\]"),
        (lambda: 3, {}, "gives int, not a torch.nn.Module"),
        (Shifting, {}, r"writes into its inputs.*write x = x \+ 1"),
        (Clamping, {}, r"writes into its inputs.*x\.clamp in place of x\.clamp_"),
        (GroupNet, {"head_layer": "last"}, "has no linear layer 'last'; it has: fc"),
        (GroupNet, {"stage_layers": ("block",)}, "has no layer 'block' for a stage"),
        (lambda: GroupNet().half(), {}, r"conv.weight is of torch.float16.*net.float\(\)"),
        (Sparse, {}, "keeps 'graph' as a sparse tensor.*to_dense"),
        (lambda: nn.DataParallel(GroupNet()), {}, r"give the module inside, net\.module"),
        (Computed, {}, "cannot be copied: RuntimeError"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    net: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadValue, match=sentence):
        Module(IMAGE, 3, net, **options).initial()


def test_an_answer_that_is_no_number_is_the_same_when_it_is_asked_again() -> None:
    assert Module(IMAGE, 3, Logarithm, head_layer="none").initial()


def test_a_constant_may_be_anything_that_a_tensor_holds() -> None:
    net = GroupNet()
    kinds = torch.tensor([True, False]), torch.ones((), dtype=torch.bfloat16), torch.zeros(0)
    for place, value in enumerate([torch.tensor([torch.nan, 1.0]), *kinds]):
        net.register_buffer(f"constant{place}", value)
    model = own(net)
    assert len(model.skeleton.constants) == 4 and model.describe()["code"]
    assert model(model.init(0), images()).shape == (5, 3)


def test_a_first_layer_in_place_is_no_write_into_the_inputs() -> None:
    parts = nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    model, x = Module(IMAGE, 3, nn.Sequential(*parts)), images()
    before = x.clone()
    model(model.init(0), x)
    assert torch.equal(x, before)
    assert parts[0].inplace, "nor is anybody's layer changed"


def test_a_network_that_is_first_asked_in_inference_mode_can_be_trained() -> None:
    model = Module(IMAGE, 3, partial(BatchNet, drop=0.25))
    with torch.inference_mode():
        logits = model(model.init(0), images())
    assert logits.shape == (5, 3) and model.twice
    assert not any(tensor.is_inference() for tensor in model.skeleton.constants.values())


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(BadValue, match=r"a network is a torch\.nn\.Module.*fedstill\.ConvNet"):
        Module(IMAGE, 3, "convnet")
    with pytest.raises(BadValue, match="plain value, not set"):
        Module(IMAGE, 3, partial(GroupNet, width={1}))
    with pytest.raises(BadValue, match="not OrderedDict") as told:
        as_model(VectorNet().state_dict(), IMAGE, 3)
    assert len(str(told.value)) < 200  # not every weight of it


# The door for objects.


@pytest.mark.parametrize("name", ["convnet", "conv4", "alexnet", "resnet18", "preresnet18"])
@pytest.mark.parametrize(("shape", "spoken"), [((64,), "64"), ((3, 32), "3x32")])
def test_a_network_of_images_refuses_vectors_in_one_sentence(
    name: str, shape: tuple[int, ...], spoken: str
) -> None:
    with pytest.raises(BadValue, match=rf"^{name}: cannot take examples of {spoken}, but images"):
        as_model(MODELS[name], shape, 3)
    assert as_model(MODELS["mlp"], shape, 3).shape == shape


def test_what_users_hand_in_becomes_a_network() -> None:
    assert as_model(ConvNet, IMAGE, 3) == ConvNet(IMAGE, 3)
    assert as_model(partial(ConvNet, width=8, depth=2), IMAGE, 3).options()["width"] == 8
    assert isinstance(as_model(GroupNet(), IMAGE, 3), Module)
    assert as_model(GroupNet, IMAGE, 3) == Module(IMAGE, 3, GroupNet)
    built = ConvNet(IMAGE, 3, depth=2)
    assert as_model(built, IMAGE, 3) is built
    with pytest.raises(BadValue, match=r"convnet is for classes 3, but the data have 4"):
        as_model(built, IMAGE, 4)


def test_a_function_that_takes_shape_and_classes_is_given_them() -> None:
    def ours(shape: tuple[int, ...], classes: int) -> ConvNet:
        return ConvNet(shape, classes, depth=2)

    def theirs(shape: tuple[int, ...], classes: int, width: int = 4) -> nn.Module:
        return GroupNet(width, classes)

    assert as_model(ours, IMAGE, 3) == ConvNet(IMAGE, 3, depth=2)
    assert as_model(theirs, IMAGE, 3).initial()["fc.weight"].shape == (3, 64)
    wide = as_model(partial(theirs, width=6), IMAGE, 3)
    assert wide.initial()["fc.weight"].shape == (3, 96)
    assert as_model(lambda: GroupNet(), IMAGE, 3).initial()["fc.weight"].shape == (3, 64)


def test_options_are_those_one_chooses_by() -> None:
    assert option_names(ConvNet) == ["depth", "width", "norm", "activation", "pooling"]
    assert option_names(MODELS["mlp"]) == ["hidden", "activation"]
    assert replace(ConvNet(IMAGE, 3), rate=0.5).options() == ConvNet(IMAGE, 3).options()
