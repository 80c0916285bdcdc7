"""A user's module with every method: it trains alike in two engines, or is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import worlds
from fedstill.core.errors import BadValue
from fedstill.core.method import Method
from fedstill.engines.loops import compiled
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.streams import Streams
from fedstill.federation.population import Party
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS
from fedstill.models import ConvNet, Module
from fedstill.testing import small
from models.own_nets import Attentive, BatchNet, GroupNet, Twin, VectorNet

NETS: dict[str, Callable[[], nn.Module]] = {"group": GroupNet, "batch": BatchNet}
NARROWED = {"heterofl", "feddropout", "fedrolex"}  # they cut networks, whose widths they must know


def with_network(world: worlds.World, model: Any) -> worlds.World:
    world.parties = {
        name: Party(party.data, party.test, model) for name, party in world.parties.items()
    }
    world.server_model = model
    return world


def pictures(net: Callable[[], nn.Module]) -> worlds.World:
    return with_network(worlds.pictures(), Module((1, 8, 8), worlds.CLASSES, net))


def losses(log: MemoryLog) -> dict[Any, float]:
    rows = [row for row in log.metrics if row.step == "evaluate" and row.name == "loss"]
    return {(row.round, row.node, row.target): row.value for row in rows}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", sorted(set(METHODS) - NARROWED))
def test_a_module_trains_alike_in_two_engines(name: str, net: str) -> None:
    method = small(METHODS[name])
    _, plain = worlds.played(method, pictures(NETS[net]), rounds=1)
    _, stacked = worlds.played(method, pictures(NETS[net]), rounds=1, engine=Batched)
    found, expected = losses(stacked), losses(plain)
    assert found.keys() == expected.keys() and expected
    for key, loss in expected.items():
        assert found[key] == pytest.approx(loss, abs=2e-3)


@pytest.mark.parametrize("name", ["fedavg", "desa"])
def test_attention_is_stacked_without_a_warning_and_trains_alike(name: str) -> None:
    method = small(METHODS[name])
    _, plain = worlds.played(method, pictures(Attentive), rounds=1)
    with warnings.catch_warnings(action="error"):
        _, stacked = worlds.played(method, pictures(Attentive), rounds=1, engine=Batched)
    assert losses(stacked) == pytest.approx(losses(plain), abs=2e-3)


@pytest.mark.parametrize("name", sorted(NARROWED))
def test_methods_that_cut_networks_refuse_a_module_before_the_run(name: str) -> None:
    with pytest.raises(BadValue, match="GroupNet cannot be narrowed; use one of conv4, convnet"):
        worlds.played(small(METHODS[name]), pictures(GroupNet), rounds=1)


def test_vhl_refuses_a_module_without_a_head_before_the_run_and_not_in_a_step() -> None:
    model = Module((1, 8, 8), worlds.CLASSES, GroupNet, head_layer="none")
    world = with_network(worlds.pictures(), model)
    with pytest.raises(BadValue, match=r"VHL.*twice the outputs, but .* has no linear head"):
        worlds.experiment(small(METHODS["vhl"]), world)
    with pytest.raises(BadValue, match=r"FedGen.*no linear head.*bottleneck"):
        worlds.experiment(small(METHODS["fedgen"]), world)
    worlds.played(small(METHODS["moon"]), world, rounds=1)
    worlds.played(METHODS["vhl"](labels="same", per_class=3), world, rounds=1)


VECTOR_METHODS = ["fedavg", "fedprox", "scaffold", "fednova", "local", "moon", "fedproto", "fedhe"]


@pytest.mark.parametrize("name", [*VECTOR_METHODS, "fedgen", "feddf", "fccl", "centralised"])
def test_a_module_on_vectors_trains_alike_in_two_engines(name: str) -> None:
    world = with_network(worlds.vectors(), Module((4,), worlds.CLASSES, VectorNet))
    method = small(METHODS[name])
    _, plain = worlds.played(method, world, rounds=1)
    _, stacked = worlds.played(method, world, rounds=1, engine=Batched)
    for key, loss in losses(plain).items():
        assert losses(stacked)[key] == pytest.approx(loss, abs=2e-3)


def weights_of(engine: Any, node: str = "server") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.states[node].weights
    return found


def test_dropout_of_a_resumed_run_is_that_of_a_straight_one_bit_for_bit() -> None:
    method, world = small(METHODS["fedavg"]), pictures(BatchNet)
    straight, _ = worlds.played(method, world, rounds=4)
    with TemporaryDirectory() as folder:
        first, _ = worlds.played(method, world, rounds=2)
        first.save(Path(folder), 2, digest="d")
        second = worlds.engine_for(method, world, rounds=4)
        assert second.load(Path(folder), digest="d") is not None
    run(second, MemoryLog(), done=2)
    for name, tensor in weights_of(straight).items():
        assert torch.equal(tensor, weights_of(second)[name]), name


def test_dropout_differs_by_client_and_round_and_not_by_the_global_generator() -> None:
    method, world = small(METHODS["local"]), pictures(BatchNet)
    same = {
        name: Party(world.parties["c0"].data, p.test, p.model) for name, p in world.parties.items()
    }
    world.parties = same
    torch.manual_seed(1)
    one, _ = worlds.played(method, world, rounds=1)
    torch.manual_seed(2)
    two, _ = worlds.played(method, world, rounds=1)
    key = "out.weight"
    assert torch.equal(weights_of(one, "c0")[key], weights_of(two, "c0")[key])
    assert not torch.equal(weights_of(one, "c0")[key], weights_of(one, "c1")[key])


@pytest.mark.parametrize(
    "options", [{"engine": Streams}, {"compile": True}], ids=["streams", "compiled"]
)
@pytest.mark.parametrize("net", NETS)
def test_a_module_trains_alike_on_streams_and_compiled(
    net: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "WORTHWHILE", 1)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    method = small(METHODS["fedavg"])
    plain, _ = worlds.played(method, pictures(NETS[net]), rounds=2)
    other, _ = worlds.played(method, pictures(NETS[net]), rounds=2, **options)
    assert not other.notes
    for name, tensor in weights_of(plain).items():
        assert torch.allclose(tensor, weights_of(other)[name], atol=1e-5), name


class SameStart(ConvNet):
    """The built-in network with the twin's fresh weights."""

    def init(self, seed: int) -> dict[str, torch.Tensor]:
        return Module(self.shape, self.classes, Twin).init(seed)


@pytest.mark.parametrize(("name", "tolerance"), [("fedavg", 1e-5), ("feddm", 1e-3)])
def test_a_module_learns_as_the_built_in_network_of_the_same_layers(
    name: str, tolerance: float
) -> None:
    method: Method = small(METHODS[name])
    built_in = SameStart((1, 8, 8), worlds.CLASSES, depth=2, width=4)
    ours, our_log = worlds.played(method, with_network(worlds.pictures(), built_in), rounds=3)
    theirs, their_log = worlds.played(method, pictures(Twin), rounds=3)
    for key, loss in losses(our_log).items():
        assert losses(their_log)[key] == pytest.approx(loss, abs=tolerance)
    for key in ("conv0.weight", "head.weight"):
        assert torch.allclose(weights_of(ours)[key], weights_of(theirs)[key], atol=tolerance)


class OnceOnly(nn.Module):
    """A layer whose gradient torch cannot differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(64, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hard = torch.nn.functional.hardsigmoid(self.first(x.flatten(1)))
        return self.fc(hard)  # type: ignore[no-any-return]


class HardSigmoid(OnceOnly):
    """The same layer as a module, which is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.first(x.flatten(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fedlgd", "feddualmatch", "dynafed"])
def test_methods_that_match_gradients_refuse_layers_without_a_second_derivative(name: str) -> None:
    with pytest.raises(BadValue, match="no second derivative of a layer of OnceOnly"):
        worlds.experiment(small(METHODS[name]), pictures(OnceOnly))
    worlds.experiment(small(METHODS[name]), pictures(HardSigmoid))


@pytest.mark.parametrize("name", ["fedlgd", "feddualmatch", "dynafed"])
def test_methods_that_match_gradients_take_a_linear_network(name: str) -> None:
    def linear() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    _, log = worlds.played(small(METHODS[name]), pictures(linear), rounds=1)
    assert log.metrics


def test_a_hard_sigmoid_layer_can_be_differentiated_twice() -> None:
    model = Module((1, 8, 8), 3, HardSigmoid)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    weights = model.init(0)
    net = model.module(weights)
    assert torch.allclose(model(weights, x), net(x), atol=1e-6)
    worlds.played(small(METHODS["feddualmatch"]), pictures(HardSigmoid), rounds=1)
