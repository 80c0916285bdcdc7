"""Models of a run as files: plain PyTorch loads them, in a process that has no fedstill."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedstill import DFRD, Execution, Experiment, FedAvg, Iid, Population, split
from fedstill import run as begin
from fedstill.core import Scored
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.seeds import generator
from fedstill.logbook import Number
from fedstill.models import MLP, MODELS, Conv4, ConvNet, Module
from fedstill.models.plain import as_module
from fedstill.runs import export
from fedstill.runs.run import read
from models.own_nets import BatchNet
from small_recipes import CLIENTS, fedstill, write_recipe

ALONE = """
import sys
sys.modules["fedstill"] = None  # not even by accident
sys.path.insert(0, {folder!r})
import torch
from safetensors.torch import load_file
from {module} import {make}
net = {make}()
net.load_state_dict(load_file({weights!r}))
x = torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8)
answer = [round(v, 4) for v in net.eval()(x).flatten().tolist()]
"""
X = torch.linspace(-1, 1, 128).reshape(2, 1, 8, 8)

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
                                  nn.Flatten(), nn.Dropout(0.2))
        self.fc = nn.Linear(108, 3)

    def forward(self, x):
        return self.fc(self.body(x))
"""


def alone(folder: Path, module: str, make: str, weights: Path) -> list[float]:
    """What a model answers where fedstill cannot be imported."""
    code = ALONE.format(folder=str(folder), module=module, make=make, weights=str(weights))
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fedstill", None)
        patch.setattr(sys, "path", [*sys.path])
        patch.delitem(sys.modules, module, raising=False)
        exec(code, found)
        patch.delitem(sys.modules, module)
    answer: list[float] = found["answer"]
    return answer


def alone_in_a_process(folder: Path, module: str, make: str, weights: Path) -> list[float]:
    """The same in a process of its own."""
    code = ALONE.format(folder=str(folder), module=module, make=make, weights=str(weights))
    code += "print(answer)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[float] = json.loads(done.stdout)
    return found


def rounded(logits: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in logits.detach().flatten().tolist()]


@pytest.mark.parametrize(
    ("models", "answers"),
    [
        ({"name": "mlp", "hidden": [6]}, alone),
        ({"name": "convnet", "depth": 2, "width": 4}, alone_in_a_process),
    ],
)
def test_our_network_is_written_with_code_that_needs_torch_alone(
    tmp_path: Path, models: dict[str, Any], answers: Any
) -> None:
    recipe = write_recipe(tmp_path, run={"rounds": 1})
    text = recipe.read_text().replace('name = "mlp"\nhidden = [6]\n', "")
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in models.items())
    recipe.write_text(text.replace("[models]", f"[models]\n{lines}"))
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    said = fedstill("export", tmp_path / "run", "--out", tmp_path / "model.safetensors")
    assert said.code == 0, said.err
    assert said.out.split() == [
        str(tmp_path / f"model.{end}") for end in ("safetensors", "json", "py")
    ]
    found = export.of_folder(tmp_path / "run")
    expected = found.network(found.weights, X)
    weights = tmp_path / "model.safetensors"
    assert answers(tmp_path, "model", "network", weights) == rounded(expected)
    told = json.loads((tmp_path / "model.json").read_text())
    assert (told["shape"], told["classes"], told["round"]) == ([1, 8, 8], 3, 1)
    assert set(told["metrics"]["accuracy"]) == set(CLIENTS)
    assert set(told["normalisation"]["by_client"]) == set(CLIENTS)


def test_a_users_own_class_loads_what_was_trained(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    recipe = write_recipe(tmp_path)
    text = recipe.read_text().replace('name = "mlp"\nhidden = [6]\n', 'name = "nets.py:Net"\n')
    recipe.write_text(text)
    said = fedstill("run", recipe, "--out", tmp_path / "run")
    assert said.code == 0, said.err
    said = fedstill("export", tmp_path / "run")
    weights = tmp_path / "run" / "export" / "server.safetensors"
    assert said.code == 0 and said.out.split() == [str(weights), str(weights.with_suffix(".json"))]
    found = export.of_folder(tmp_path / "run")
    assert "body.1.num_batches_tracked" in load_file(weights)
    assert alone(tmp_path, "nets", "Net", weights) == rounded(found.network(found.weights, X))


def test_a_clients_own_model_and_an_earlier_round_can_be_asked_for(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, method={"name": "local"})
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    with pytest.raises(RunFolderError, match=r"keep models of their own.*--node: east, nor"):
        export.of_folder(tmp_path / "run")
    with pytest.raises(RunFolderError, match="unknown party 'eats'; did you mean 'east'"):
        export.of_folder(tmp_path / "run", "eats")
    with pytest.raises(RunFolderError, match="server keeps no model after this run"):
        export.of_folder(tmp_path / "run", "server")
    last, earlier = export.of_folder(tmp_path / "run", "east"), export.of_folder(
        tmp_path / "run", "east", 2)  # fmt: skip
    assert (last.description["round"], earlier.description["round"]) == (3, 2)
    assert not torch.equal(last.weights["head.weight"], earlier.weights["head.weight"])
    assert "mean" in last.description["normalisation"]
    with pytest.raises(BadValue, match=r"east\.pt: .*safetensors.*name the file east\.safetensors"):
        export.write(last, tmp_path / "east.pt")
    assert export.write(last, tmp_path / "east.v2")[0].name == "east.v2.safetensors"
    with pytest.raises(RunFolderError, match=r"round 1 was not kept.*kept: 2, 3"):
        export.of_folder(tmp_path / "run", "east", 1)


def test_a_folder_of_several_runs_names_one_and_a_folder_that_is_not_there_is_said_so(
    tmp_path: Path,
) -> None:
    out = tmp_path / "two"
    ran = fedstill("run", write_recipe(tmp_path), "run.rounds=1", "--seeds", 0, 1, "--out", out)
    assert ran.code == 0, ran.err
    said = fedstill("export", out)
    assert said.code == 2
    assert f"{out} holds 2 runs below it; name one, such as {out / 'seed-1'}" in said.err
    assert "holds 2 runs below it" in fedstill("privacy", out).err
    assert "there is no run folder" in fedstill("export", tmp_path / "none").err


def test_a_method_that_trains_a_variant_says_so(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, method={"name": "moon"}, run={"rounds": 1})
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    found = export.of_folder(tmp_path / "run")
    assert "variant" in found.description["note"] and found.code is None
    assert "projection0.weight" in found.weights


def test_a_run_gives_its_model_as_a_module_of_the_users_own_class(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    recipe = write_recipe(tmp_path, run={"rounds": 1})
    text = recipe.read_text().replace('name = "mlp"\nhidden = [6]\n', 'name = "nets.py:Net"\n')
    recipe.write_text(text)
    assert fedstill("run", recipe, "--out", tmp_path / "run").code == 0
    trained = read(tmp_path / "run").model()
    net = trained.module()
    assert type(net).__name__ == "Net" and not net.training
    assert torch.equal(net(X), trained(X))
    assert fedstill("run", recipe, "method.name=moon", "--out", tmp_path / "moon").code == 0
    with pytest.raises(RunFolderError, match="its own variant of Net"):
        read(tmp_path / "moon").model().module()


def objects(net: Any, method: Any = None, rounds: int = 1) -> Experiment:
    """An experiment made in Python: images of 8x8 pixels in three classes, two clients."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (24, 1, 8, 8)).astype(np.uint8)
    data = split(images, np.arange(24) % 3, partition=Iid(2))
    method = method or FedAvg(lr=0.1, batch_size=8)
    return Experiment(method, Population(data, net), rounds=rounds)


def test_a_run_begun_from_python_is_exported_with_code_too(tmp_path: Path) -> None:
    planned = objects(partial(MLP, hidden=(6,)))
    run = begin(planned, execution=Execution(device="cpu"), folder=tmp_path / "run", pictures=False)
    said = fedstill("export", tmp_path / "run", "--out", tmp_path / "model.safetensors")
    assert said.code == 0, said.err
    weights = tmp_path / "model.safetensors"
    expected = rounded(run.model()(X))
    assert alone(tmp_path, "model", "network", weights) == expected
    told = json.loads((tmp_path / "model.json").read_text())
    assert (told["node"], told["round"], told["method"]) == ("server", 1, "FedAvg")
    assert told["network"]["hidden"] == [6] and len(told["normalisation"]["mean"]) == 1
    assert "note" not in told and set(told["metrics"]["accuracy"]) == {"client-00", "client-01"}
    run.export(tmp_path / "again")
    for end in ("safetensors", "json", "py"):
        assert (tmp_path / f"again.{end}").read_bytes() == (tmp_path / f"model.{end}").read_bytes()


def test_a_score_that_is_not_defined_is_null_which_every_reader_of_json_takes(
    tmp_path: Path,
) -> None:
    planned = objects(partial(MLP, hidden=(6,)))
    begin(planned, execution=Execution(device="cpu"), folder=tmp_path / "run", pictures=False)
    undefined = Number(1, "evaluate", "server", "auroc", "client-00", float("nan"))
    found = export.of_folder(tmp_path / "run").with_scores([undefined])
    export.write(found, tmp_path / "model")
    text = (tmp_path / "model.json").read_text()
    assert json.loads(text)["metrics"] == {"auroc": {"client-00": None}} and "NaN" not in text


def test_of_a_module_begun_from_python_the_folder_has_the_weights_and_the_run_all(
    tmp_path: Path,
) -> None:
    planned, here = objects(BatchNet), Execution(device="cpu")
    begin(planned, execution=here, folder=tmp_path / "run", pictures=False)
    found = export.of_folder(tmp_path / "run")
    assert found.network is None and found.code is None
    assert "strict=False" in found.description["note"]
    assert found.description["network"]["name"] == "models.own_nets:BatchNet"
    net = BatchNet()
    missing, besides = net.load_state_dict(found.weights, strict=False)
    assert not besides and all(name.endswith("num_batches_tracked") for name in missing)
    in_memory = begin(planned, execution=here)
    written = in_memory.export(tmp_path / "whole")
    assert [path.name for path in written] == ["whole.safetensors", "whole.json"]
    net.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    assert torch.equal(net.eval()(X), in_memory.model()(X))


def test_what_a_fine_tuner_taught_is_exported_and_other_networks_come_without_code(
    tmp_path: Path,
) -> None:
    tuned = DFRD(**{**DFRD.presets["small"], "feedback": False})
    run = begin(objects(MLP, tuned), execution=Execution(device="cpu"), folder=tmp_path / "run",
                pictures=False)  # fmt: skip
    shown = run.model().state.weights  # type: ignore[union-attr]
    taught = export.of_folder(tmp_path / "run").weights
    assert not torch.equal(taught["head.weight"], shown["head.weight"])
    x = torch.randn(2, 1, 8, 8, generator=generator(1))
    assert torch.equal(MLP((1, 8, 8), 3)(taught, x), run.model()(x))
    described = export.of_states(
        objects(Conv4), {"server": Scored(Conv4((1, 8, 8), 3).init(0))}
    ).description
    assert "plain code for ConvNet and MLP only" in described["note"]


def networks() -> list[Any]:
    small = [kind((3, 32, 32), 4) for name, kind in MODELS.items() if "resnet" not in name]
    norms = [ConvNet((3, 32, 32), 4, norm=norm) for norm in ("batch", "layer", "group", "none")]  # type: ignore[arg-type]
    grey = [ConvNet((1, 28, 28), 4, pooling="max", activation="swish"), MLP((1, 28, 28), 4, ())]
    return [*small, *norms, *grey, Module((1, 8, 8), 3, BatchNet)]


@pytest.mark.parametrize("model", networks(), ids=lambda model: repr(model)[:60])
def test_every_network_is_a_module_with_its_weights(model: Any) -> None:
    weights = model.init(0)
    net = as_module(model, weights)
    x = torch.randn(3, *model.shape, generator=generator(0))
    assert isinstance(net, torch.nn.Module) and not net.training
    assert torch.allclose(net(x), model(weights, x), atol=1e-5)
    assert set(weights) <= set(net.state_dict())
