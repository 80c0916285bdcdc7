"""Networks of torchvision as they come; skipped where torchvision cannot be imported."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import worlds
from fedstill.core import Data
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Party
from fedstill.methods import METHODS
from fedstill.models import Module
from fedstill.testing import small

try:
    from torchvision import models as zoo
except Exception as error:  # a broken build raises RuntimeError or OSError
    pytest.skip(f"torchvision cannot be imported here: {error}", allow_module_level=True)

SHAPE, CLASSES = (3, 32, 32), 3
NETS: dict[str, Any] = {
    "resnet18": zoo.resnet18,
    "mobilenet_v2": zoo.mobilenet_v2,
    "mobilenet_v3_small": zoo.mobilenet_v3_small,
}
HEADS = {"resnet18": "fc", "mobilenet_v2": "classifier.1", "mobilenet_v3_small": "classifier.3"}
NARROWED = {"heterofl", "feddropout", "fedrolex"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(name: str) -> Module:
    return Module(SHAPE, CLASSES, partial(NETS[name], num_classes=CLASSES))


def federation(name: str) -> worlds.World:
    """Two clients with a few images each."""
    parties = {}
    for i, size in enumerate((12, 9)):
        data = worlds.examples(f"tv{i}", size, SHAPE, range(CLASSES))
        test = worlds.examples(f"tv{i} test", 8, SHAPE, range(CLASSES))
        parties[f"c{i}"] = Party(data, test, network(name))
    public = Data.unlabelled(worlds.around("tv public", 8, SHAPE))
    world = worlds.World(parties, network(name), public=public)
    return world.on(DEVICE) if DEVICE != "cpu" else world


@pytest.mark.parametrize("name", NETS)
def test_its_weights_are_torchvisions_and_so_are_its_answers(name: str) -> None:
    model = network(name)
    weights = model.init(3)
    theirs = NETS[name](num_classes=CLASSES)
    theirs.load_state_dict(model.state_dict(weights))
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(weights, x), theirs.eval()(x), atol=1e-5)
    assert model.head_names == (f"{HEADS[name]}.weight", f"{HEADS[name]}.bias")
    assert model.by_example


def test_a_pretrained_instance_gets_a_head_for_the_classes() -> None:
    net = zoo.resnet18()  # 1000 classes, as pretrained weights have
    model = Module(SHAPE, CLASSES, net, start="given", fresh_head=True)
    weights = model.init(0)
    assert weights["fc.weight"].shape == (CLASSES, 512)
    assert torch.equal(weights["conv1.weight"], net.conv1.weight)


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("method", sorted(set(METHODS) - NARROWED))
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_it_trains_with_every_method_that_can_take_it(name: str, method: str, engine: Any) -> None:
    _, log = worlds.played(
        small(METHODS[method]), federation(name), rounds=1, engine=engine, device=DEVICE
    )
    assert any(row.name == "accuracy" for row in log.metrics)
