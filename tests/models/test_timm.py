"""Networks of timm as they come; skipped where timm cannot be imported."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import worlds
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.population import Party
from fedstill.methods import METHODS
from fedstill.models import Module
from fedstill.testing import small

try:
    import timm
except Exception as error:  # it needs torchvision, a broken build of which raises RuntimeError
    pytest.skip(f"timm cannot be imported here: {error}", allow_module_level=True)

SHAPE, CLASSES = (3, 32, 32), 3
HEADS = {"resnet10t": "fc", "mobilenetv3_small_050": "classifier", "vit_tiny_patch16_224": "head"}
VALUES: dict[str, Any] = {"vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 24, "depth": 2}}


def made(name: str) -> Any:
    return timm.create_model(name, num_classes=CLASSES, **VALUES.get(name, {}))


def network(name: str) -> Module:
    return Module(SHAPE, CLASSES, partial(made, name))


def federation(name: str) -> worlds.World:
    """Two clients with a few images each."""
    parties = {}
    for i, size in enumerate((10, 8)):
        data = worlds.examples(f"timm{i}", size, SHAPE, range(CLASSES))
        test = worlds.examples(f"timm{i} test", 6, SHAPE, range(CLASSES))
        parties[f"c{i}"] = Party(data, test, network(name))
    return worlds.World(parties, network(name))


@pytest.mark.parametrize("name", HEADS)
def test_its_weights_are_timms_and_so_are_its_answers(name: str) -> None:
    model = network(name)
    weights = model.init(3)
    theirs = made(name)
    theirs.load_state_dict(model.state_dict(weights))
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model(weights, x), theirs.eval()(x), atol=1e-5)
    assert model.head_names == (f"{HEADS[name]}.weight", f"{HEADS[name]}.bias")


@pytest.mark.parametrize("engine", [InProcess, Batched])
@pytest.mark.parametrize("method", ["fedavg", "feddm", "desa"])
@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_it_trains(name: str, method: str, engine: Any) -> None:
    _, log = worlds.played(small(METHODS[method]), federation(name), rounds=1, engine=engine)
    assert any(row.name == "accuracy" for row in log.metrics)
