"""Models of a run as files that plain PyTorch loads: weights, a description, and code.

fedstill export runs/demo/feddm --out model.safetensors

from safetensors.torch import load_file
net = MyNet(...)
net.load_state_dict(load_file("model.safetensors"))
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedstill.core.errors import RunFolderError, unknown
from fedstill.core.files import write_whole
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, State, Weights
from fedstill.engines import checkpoint
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.experiment import Experiment
from fedstill.logbook import read_run
from fedstill.models import Module, standalone
from fedstill.models.plain import fits, standalone_options
from fedstill.recipe.build import experiment_of
from fedstill.runs.digest import plain
from fedstill.runs.recipes import recipe_of

SUFFIX = ".safetensors"
CODE = '''"""A network of fedstill in plain PyTorch: `load_state_dict` takes the weights."""

{body}


def network() -> nn.Module:
    """The network whose weights lie beside this file."""
    return {built}
'''


@dataclass(frozen=True, eq=False)
class Export:
    """A model to be written: whose, its weights by name, and what there is to say of it."""

    node: NodeId
    weights: Weights
    network: Model
    description: Mapping[str, Any]
    code: str | None = None  # of the network in plain PyTorch, where there is some


def of_folder(folder: Path, node: NodeId | None = None, round: int | None = None) -> Export:
    """The model of a run folder: the server's, a client's by name, of any round that was kept."""
    experiment = experiment_of(recipe_of(folder))
    engine = InProcess(experiment, Execution(device="cpu", engine="in_process"))
    checkpoints = folder / "checkpoints"
    if round is None:
        saved = engine.load(checkpoints, digest=None)
        if saved is None:
            raise RunFolderError(f"{folder} holds no checkpoint, so there is no model in it")
    else:
        kept = sorted(int(path.name[6:]) for path in checkpoints.glob("round-?????"))
        if round not in kept:
            there = ", ".join(map(str, kept)) or "none"
            raise RunFolderError(
                f"round {round} was not kept in {folder}; kept: {there}; more are kept with "
                "run.keep_checkpoints"
            )
        saved = checkpoint.read(
            checkpoints / f"round-{round:05d}", engine.kind_of, digest=None,
            held=experiment.method.holds,
        )  # fmt: skip
    described = of_states(experiment, saved.states, node, round=saved.round)
    return _with_scores(described, folder, saved.round)


def of_states(
    experiment: Experiment,
    states: Mapping[NodeId, State | None],
    node: NodeId | None = None,
    *,
    round: int | None = None,
) -> Export:
    """The model in what the parties of an experiment remember; the server's unless one is named."""
    holders = [name for name, state in states.items() if _weights(state) is not None]
    if not holders:
        raise RunFolderError("nobody remembers one set of weights after this run")
    chosen = _chosen(node, experiment, holders)
    weights = _weights(states[chosen])
    assert weights is not None
    model = experiment.population.party(chosen).model
    own = fits(model, weights)
    saved = model.state_dict(weights) if own else dict(weights)
    description = {
        "node": chosen,
        "round": experiment.rounds if round is None else round,
        "method": type(experiment.method).__name__,
        "network": plain(model.describe()),
        "shape": list(model.shape),
        "classes": model.classes,
        "normalisation": _normalisation(experiment, chosen),
        **({} if own else {"note": "the method trains its own variant of this network"}),
    }
    return Export(chosen, saved, model, description, _code(model) if own else None)


def write(export: Export, out: Path) -> list[Path]:
    """The weights, beside them a description in JSON and, for ConvNet and MLP, plain code."""
    out = out if out.suffix == SUFFIX else out.with_name(out.name + SUFFIX)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(export.description, indent=2, ensure_ascii=False) + "\n"
    files = {out: save(_apart(export.weights)), out.with_suffix(".json"): text.encode()}
    if export.code is not None:
        files[out.with_suffix(".py")] = export.code.encode()
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def _chosen(node: NodeId | None, experiment: Experiment, holders: list[NodeId]) -> NodeId:
    if node is None and SERVER in holders:
        return SERVER
    some = ", ".join(holders[:5]) + (", …" if len(holders) > 5 else "")
    if node is None:
        raise RunFolderError(f"clients keep models of their own here; name one with --node: {some}")
    known = (SERVER, *experiment.population.clients)
    if node not in known:
        raise RunFolderError(unknown("party", node, known))
    if node not in holders:
        raise RunFolderError(f"{node} remembers no model after this run; who does: {some}")
    return node


def _weights(state: State | None) -> Weights | None:
    found = getattr(state, "weights", None)
    if isinstance(found, dict) and found and all(isinstance(t, Tensor) for t in found.values()):
        return found
    return None


def _apart(weights: Weights) -> Weights:
    """Tensors that share no memory, as the format wants them."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}


def _normalisation(experiment: Experiment, node: NodeId) -> dict[str, Any]:
    """How inputs are made for the model: (x - mean) / std, bytes divided by 255 before."""
    data = experiment.population.data
    if data is None:
        return {}
    sites = [site for site in data.sites if node in (SERVER, site.name)]
    each = {site.name: {"mean": _list(site.mean), "std": _list(site.std)} for site in sites}
    values = list(each.values())
    if values and all(value == values[0] for value in values):
        return values[0]
    return {"by_client": each}


def _list(values: Any) -> Any:
    return None if values is None else [float(value) for value in values]


def _code(model: Model) -> str | None:
    """A file in plain PyTorch that builds the network, or None."""
    options = standalone_options(model)
    if isinstance(model, Module) or options is None:
        return None
    text = inspect.getsource(standalone).partition("from __future__")
    values = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return CODE.format(body="".join(text[1:]).rstrip(), built=f"{type(model).__name__}({values})")


def _with_scores(export: Export, folder: Path, round: int) -> Export:
    """What the run measured of the model in that round, where it was scored."""
    rows = [
        row for row in read_run(folder).metrics
        if row.step == "evaluate" and row.node == export.node and row.round == round
    ]  # fmt: skip
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        scores.setdefault(row.name, {})[row.target] = row.value
    described = {**export.description, **({"metrics": scores} if scores else {})}
    return Export(export.node, export.weights, export.network, described, export.code)
