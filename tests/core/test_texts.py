"""The text of a class is found where Python finds none: a change in a notebook is seen."""

from __future__ import annotations

import linecache
import subprocess
import sys
from typing import Any

import pytest

from fedstill.core.texts import text_of
from fedstill.methods.fedavg import FedAvg
from fedstill.runs.digest import code_of

NET = """
import torch.nn.functional as F
from torch import nn
class Net(nn.Module):
    width = 8
    acts = (F.relu, F.gelu)
    options = {"slopes": [0.1, {"x", "y", "z"}]}
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x, slope=0.5, *, act=F.relu, scale=2):
        return self.layer(x.relu() if x in {"a", "b"} else x)
"""
METHOD = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg
from fedstill.core import at_server
@dataclass(frozen=True)
class Mine(FedAvg):
    @at_server
    def aggregate(self, server: "Node[Global]", inbox: "Inbox[Up]") -> None:
        server.log(number=1)
"""


def made(text: str, name: str, *, kept: bool) -> Any:
    """A class as a cell of a notebook makes it (`kept`), or the prompt of Python, without text."""
    file = f"<{'cell' if kept else 'line'} {abs(hash(text))}>"
    if kept:
        linecache.cache[file] = len(text), None, text.splitlines(True), file
    space = {"__name__": "__nowhere__"}
    exec(compile(text, file, "exec"), space)
    return space[name]


@pytest.mark.parametrize("kept", [True, False], ids=["notebook", "prompt"])
@pytest.mark.parametrize(
    "change",
    [
        ("x.relu", "x.tanh"),
        ("width = 8", "width = 9"),
        ('"b"', '"c"'),
        ("F.gelu", "F.silu"),
        ("0.1", "0.2"),
        ('"z"', '"u"'),
        ("slope=0.5", "slope=0.6"),
        ("scale=2", "scale=3"),
    ],
)
def test_a_class_without_a_file_is_told_from_a_changed_one(
    change: tuple[str, str], kept: bool
) -> None:
    first, again = (text_of(made(NET, "Net", kept=kept)) for _ in range(2))
    assert first and first == again
    assert text_of(made(NET.replace(*change), "Net", kept=kept)) != first


@pytest.mark.parametrize("kept", [True, False], ids=["notebook", "prompt"])
def test_so_is_a_step_of_a_method(kept: bool) -> None:
    digests = [
        code_of(object.__new__(made(text, "Mine", kept=kept)))
        for text in (METHOD, METHOD, METHOD.replace("=1", "=2"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_it_is_the_same_in_another_process() -> None:
    program = f"""
from fedstill.core.texts import text_of
space = {{"__name__": "__nowhere__"}}
exec({NET!r}, space)
print(text_of(space["Net"]))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(said) == 1


def test_a_file_has_its_own_text() -> None:
    assert str(text_of(FedAvg)).startswith("@dataclass(frozen=True)\nclass FedAvg")
    assert text_of(3) is None
