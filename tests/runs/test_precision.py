"""Half precision where it cannot be had: the run goes on, and its notes say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedstill.core import gpu
from fedstill.engines.execution import Execution
from fedstill.models import MLP, AlexNet, ConvNet
from fedstill.recipe.check import checked
from fedstill.runs import recipes as runs
from small_recipes import tables


def test_what_is_not_in_half_precision_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    convnet = ConvNet((3, 8, 8), 2, norm="group")
    half = Execution(device="cuda", precision="half")
    assert half.notes([convnet, MLP((4,), 2), AlexNet((3, 8, 8), 2)]) == [
        "convnet: not in half precision here, but as with tf32",
        "mlp: not in half precision here, but as with tf32",
    ]
    assert (
        "on a CPU all is single precision" in Execution(device="cpu", precision="half").notes([])[0]
    )
    assert Execution(device="cpu").notes([convnet]) == []


def test_a_gpu_that_is_too_old_for_kernels_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(gpu, "capability", lambda device: (7, 5))
    convnet = ConvNet((3, 8, 8), 2)
    note = (
        "Tesla T4 has compute capability 7.5, and kernels of fedstill are for 8.0 and later; "
        "torch's own operations are used, which are slower"
    )
    assert Execution(device="cuda").notes([convnet]) == [note]
    assert Execution(device="cuda:0", precision="half").notes([convnet, AlexNet((3, 8, 8), 2)]) == [
        note,
        "convnet: not in half precision here, but as with tf32",
    ]
    assert Execution(device="cpu").notes([convnet]) == []


def test_a_run_on_a_cpu_notes_that_it_is_in_single_precision(tmp_path: Path) -> None:
    (recipe,) = checked(tables(tmp_path, engine={"precision": "half"}))
    runs.begin(recipe, tmp_path / "run")
    assert "half precision is for a GPU" in (tmp_path / "run" / "notes.csv").read_text()
