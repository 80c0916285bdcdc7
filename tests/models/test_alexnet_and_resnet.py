"""The maps of AlexNet and ResNet18, and their arithmetic against the framework's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedstill.core import trees
from fedstill.core.records import Weights
from fedstill.core.seeds import generator
from fedstill.models.alexnet import AlexNet
from fedstill.models.resnet import ResNet18


def noise(*shape: int, name: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(2, name))


def shapes(maps: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(m.shape[1:]) for m in maps]


def test_alexnet_is_its_layers_one_after_the_other() -> None:
    model = AlexNet((3, 28, 28), 10)
    weights = model.init(0)
    pool = nn.MaxPool2d(2)
    layers = [
        nn.Conv2d(3, 128, 5, padding=4), nn.ReLU(), pool,
        nn.Conv2d(128, 192, 5, padding=2), nn.ReLU(), pool,
        nn.Conv2d(192, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 192, 3, padding=1), nn.ReLU(),
        nn.Conv2d(192, 192, 3, padding=1), nn.ReLU(), pool,
        nn.Flatten(), nn.Linear(3072, 10),
    ]  # fmt: skip
    theirs = nn.Sequential(*layers)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), weights.values(), strict=True)))
    x = noise(2, 3, 28, 28)
    torch.testing.assert_close(model.logits(weights, x), theirs(x), atol=1e-5, rtol=1e-4)


def test_alexnet_has_a_last_map_of_four_by_four_for_28_and_for_32() -> None:
    for side in (28, 32):
        model = AlexNet((1, side, side), 10)
        maps = model.stages(model.init(0), noise(1, 1, side, side))
        assert len(maps) == 5
        assert shapes(maps)[-1] == (192, 4, 4)


def test_resnet_stages_are_four_groups_and_the_pooled_vector() -> None:
    model = ResNet18((3, 32, 32), 10)
    maps = model.stages(model.init(0), noise(1, 3, 32, 32))
    assert shapes(maps) == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4), (512,)]
    torch.testing.assert_close(maps[4], nn.functional.avg_pool2d(maps[3], 4).flatten(1))


def test_the_large_stem_divides_by_four_and_the_bridge_reads_4608_numbers() -> None:
    for stem, last in (("small", 12), ("imagenet", 3)):
        model = ResNet18((3, 96, 96), 2, stem=stem, bridge=True)  # type: ignore[arg-type]
        assert model.initial()["bridge.weight"].shape == (512, 4608)
        assert model.initial()["head.weight"].shape == (2, 512)
        with torch.no_grad():
            maps = model.stages(model.init(0), noise(1, 3, 96, 96))
        assert shapes(maps)[3:] == [(512, last, last), (512,)]


def test_the_bridge_and_the_stem_change_only_their_own_tensors() -> None:
    plain = ResNet18((3, 32, 32), 10).initial()
    bridged = ResNet18((3, 32, 32), 10, bridge=True).initial()
    large = ResNet18((3, 64, 64), 10, stem="imagenet").initial()
    assert bridged.keys() - plain.keys() == {"bridge.weight", "bridge.bias"}
    assert {name for name in plain if plain[name] != large[name]} == {"stem.conv.weight"}


class Basic(nn.Module):
    """A residual block of the framework's layers."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv0 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm0 = nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.short = None
        if stride != 1:
            self.short = nn.ModuleDict(
                {"conv": nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                 "norm": nn.BatchNorm2d(outputs)}
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu()))
        kept = self.short["norm"](self.short["conv"](x)) if self.short else x
        summed: Tensor = out + kept
        return summed.relu()


class Reference(nn.Module):
    """ResNet18 with batch norm and the small stem, of the framework's layers."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem = nn.ModuleDict(
            {"conv": nn.Conv2d(3, 64, 3, 1, 1, bias=False), "norm": nn.BatchNorm2d(64)}
        )
        inputs = 64
        for group, outputs in enumerate((64, 128, 256, 512)):
            first = Basic(inputs, outputs, 1 if group == 0 else 2)
            blocks = {"block0": first, "block1": Basic(outputs, outputs, 1)}
            self.add_module(f"group{group}", nn.ModuleDict(blocks))
            inputs = outputs
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem["norm"](self.stem["conv"](x)).relu()
        for group in range(4):
            for block in self.get_submodule(f"group{group}").values():  # type: ignore[operator]
                x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def test_resnet_with_batch_norm_follows_the_framework_for_three_steps() -> None:
    model = ResNet18((3, 16, 16), 4, norm="batch")
    weights = model.init(0)
    theirs = Reference(4).train()
    missing = theirs.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    with torch.no_grad():
        for step in range(3):
            x = 1 + 2 * noise(4, 3, 16, 16, name=step)
            notes: Weights = {}
            ours = model.train(notes).logits(weights, x)
            torch.testing.assert_close(ours, theirs(x), atol=1e-4, rtol=1e-3)
            weights = weights | notes
        for name, value in theirs.state_dict().items():
            if "running" in name:
                torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)
        x = noise(2, 3, 16, 16, name=9)
        ours, expected = model.logits(weights, x), theirs.eval()(x)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3)


def test_batch_norm_statistics_of_stacked_clients_are_each_clients_own() -> None:
    model = ResNet18((3, 8, 8), 4, norm="batch")

    def seen(weights: Weights, x: Tensor) -> Weights:
        notes: Weights = {}
        model.train(notes).logits(weights, x)
        return notes

    weights = [model.init(seed) for seed in range(2)]
    x = noise(2, 4, 3, 8, 8)
    with torch.no_grad():
        together = vmap(seen)(trees.stack(weights), x)
        for client in range(2):
            alone = seen(weights[client], x[client])
            assert len(alone) == 40
            for name, value in alone.items():
                torch.testing.assert_close(together[name][client], value, atol=1e-5, rtol=1e-4)
