"""The page on channels: its example runs, and its tables name what there is."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import worlds
from fedstill.channels import CHANNELS, Edge, TensorChannel, received, sent
from fedstill.core import seeds
from fedstill.methods.fedavg import FedAvg, Up

PAGE = (Path(__file__).parents[2] / "docs" / "channels.md").read_text(encoding="utf-8")


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The channel of the page's example."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # a dataclass looks up its module
    exec(compile(block, "docs/channels.md", "exec"), module.__dict__)
    return module.__dict__["Signs"]


def test_the_example_codes_an_entry_in_a_bit(signs: Any) -> None:
    tensor = torch.tensor([1.0, -3.0] * 9).reshape(3, 6)
    edge = Edge("up", lambda purpose: seeds.generator(0, purpose))
    travelling, _ = sent([signs()], Up({"w": tensor}, 1), edge, {})
    assert travelling is not None
    assert travelling.bytes()["weights"] == 3 + 4  # 18 bits, and the mean size
    found: Any = received([signs()], travelling, "up", None)
    assert found.weights["w"].tolist() == [[2.0, -2.0] * 3] * 3


def test_the_example_trains(signs: Any) -> None:
    method, world = FedAvg(lr=0.1, batch_size=8), worlds.vectors()
    _, plain = worlds.played(method, world, 10)
    _, coded = worlds.played(method, world, 10, channels=[signs()])

    def accuracy(log: Any) -> float:
        last = [n.value for n in log.metrics if n.name == "accuracy" and n.round == 10]
        return sum(last) / len(last)

    assert accuracy(coded) > accuracy(plain) - 0.1
    assert sum(m.bytes for m in coded.messages) < 0.8 * sum(m.bytes for m in plain.messages)


def test_the_tables_name_every_channel_and_every_common_option() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.M)
    assert set(CHANNELS) <= set(rows)
    assert {field.name for field in fields(TensorChannel)} <= set(rows)
    for kind in CHANNELS.values():
        own = {field.name for field in fields(kind)} - {f.name for f in fields(TensorChannel)}
        assert all(f"`{name}` =" in PAGE for name in own)
