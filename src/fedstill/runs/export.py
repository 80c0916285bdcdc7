"""Models of a run as files that plain PyTorch loads: weights, a description, and code.

fedstill export runs/demo/feddm --out model.safetensors

from safetensors.torch import load_file
net = MyNet(...)
net.load_state_dict(load_file("model.safetensors"))
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fedstill.core.errors import BadValue, RunFolderError, unknown
from fedstill.core.files import for_json, write_whole
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, State, Weights
from fedstill.engines import checkpoint
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.experiment import Experiment
from fedstill.logbook import read_run
from fedstill.logbook.events import Number
from fedstill.logbook.reader import check_single
from fedstill.models import MODELS, Module, standalone
from fedstill.models.plain import fits, standalone_options
from fedstill.recipe.build import experiment_of
from fedstill.recipe.tables import Recipe
from fedstill.runs.digest import normalisation, plain
from fedstill.runs.recipes import recipe_of

SUFFIX = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")  # as torch.save's files are called
CODE = '''"""A network of fedstill in plain PyTorch: `load_state_dict` takes the weights."""

{body}


def network() -> nn.Module:
    """The network whose weights lie beside this file."""
    return {built}
'''


VARIANT = "the method trains its own variant of this network"
WEIGHTS_ALONE = (
    "the run was begun from Python with a module of your own: these are its trained weights and "
    "statistics by the names of its state dict; counters of batch norm and frozen weights are not "
    "among them, so load with strict=False, or export in Python: run.export(...)"
)
NO_CODE = (
    "weights and description; there is plain code for ConvNet and MLP only, so build the network "
    "with fedstill, or write a module with these names"
)

EACH_ITS_OWN = (
    "every site normalises its inputs by the mean and standard deviation of its own training "
    "examples, which only it knows"
)


@dataclass(frozen=True, eq=False)
class Export:
    """A model to be written: whose, its weights by name, and what there is to say of it."""

    node: NodeId
    weights: Weights
    network: Model | None  # None where nothing but its description is known
    description: Mapping[str, Any]
    code: str | None = None  # of the network in plain PyTorch, where there is some

    def with_scores(self, rows: Iterable[Number]) -> Export:
        """With what the run measured of the model in that round, where it was scored."""
        scores: dict[str, dict[str, float]] = {}
        for row in rows:
            if (row.step, row.node, row.round) == (
                "evaluate", self.node, self.description["round"],
            ):  # fmt: skip
                scores.setdefault(row.name, {})[row.target] = row.value
        if not scores:
            return self
        return replace(self, description={**self.description, "metrics": scores})


def of_folder(
    folder: Path,
    node: NodeId | None = None,
    round: int | None = None,
    *,
    apart: Mapping[NodeId, Model] | None = None,
) -> Export:
    """The model of a run folder: the server's, a client's by name, of any round that was kept.

    Of a run whose parties keep their data `apart` are their networks.
    """
    path = _checkpoint(folder, round)
    rows = read_run(folder).metrics
    if apart is not None:
        return of_parties(recipe_of(folder), path, apart, node).with_scores(rows)
    if not (folder / "recipe.toml").exists() and (folder / "experiment.json").exists():
        return of_objects(folder, path, node).with_scores(rows)
    experiment = experiment_of(recipe_of(folder))
    engine = InProcess(experiment, Execution(device="cpu", engine="in_process"))
    held = experiment.method.holds
    if round is None:
        saved = checkpoint.read_latest(path.parent, engine.kind_of, digest=None, held=held)
        assert saved is not None  # `path` is one
    else:
        saved = checkpoint.read(path, engine.kind_of, digest=None, held=held)
    return of_states(experiment, saved.states, node, round=saved.round).with_scores(rows)


def of_objects(folder: Path, path: Path, node: NodeId | None = None) -> Export:
    """The model in a checkpoint of a run that was begun from Python: as far as its folder says.

    Networks of fedstill are built again by their description. Of others there are the weights.
    """
    tables = json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    round, who = checkpoint.listed(path)
    chosen = _chosen(node, who, who)
    weights = _weights_in(checkpoint.tensors(path, chosen))
    if not weights:
        raise RunFolderError(f"{chosen} keeps no model after this run")
    models = tables["models"]
    described = models.get("clients", {}).get(chosen, models["server"])
    model = _rebuilt(described)
    code = _code(model) if model is not None and fits(model, weights) else None
    apart = tables.get("normalisation", {})
    description = {
        "node": chosen,
        "round": round,
        "method": tables["method"]["class"].rpartition(".")[2],
        "network": described,
        "shape": described["shape"],
        "classes": described["classes"],
        "normalisation": apart.get("by_client", {}).get(chosen, apart),
        **_noted(WEIGHTS_ALONE if model is None else _note(model, weights)),
    }
    return Export(chosen, weights, model, description, code)


def of_parties(
    recipe: Recipe, path: Path, networks: Mapping[NodeId, Model], node: NodeId | None = None
) -> Export:
    """The model in a checkpoint of a run between parties that keep their data, without these."""
    round, who = checkpoint.listed(path)
    holders = [name for name in who if _weights_in(checkpoint.tensors(path, name))]
    if not holders:
        raise RunFolderError("no model is in this folder; clients keep theirs at their sites")
    if node in networks and node not in (SERVER, *holders):
        raise RunFolderError(
            f"no model of {node} is in this folder; what {node} keeps is at its site. Here are "
            f"those of {', '.join(holders)}"
        )
    chosen = _chosen(node, list(networks), holders)
    weights, model = _weights_in(checkpoint.tensors(path, chosen)), networks[chosen]
    own = fits(model, weights)
    given = {
        key: recipe.data.options.get(key, getattr(recipe.data, key)) for key in ("mean", "std")
    }
    known = None not in given.values()
    notes = [_note(model, weights), None if known else EACH_ITS_OWN]
    description = {
        "node": chosen,
        "round": round,
        "method": type(recipe.method).__name__,
        "network": plain(model.describe()),
        "shape": list(model.shape),
        "classes": model.classes,
        "normalisation": given if known else {},
        **_noted("; ".join(note for note in notes if note) or None),
    }
    saved = model.state_dict(weights) if own else weights
    return Export(chosen, saved, model, description, _code(model) if own else None)


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
    chosen = _chosen(node, (SERVER, *experiment.population.clients), holders)
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
        "normalisation": normalisation(experiment.population, chosen),
        **_noted(_note(model, weights)),
    }
    return Export(chosen, saved, model, description, _code(model) if own else None)


def write(export: Export, out: Path) -> list[Path]:
    """The weights, beside them a description in JSON and, for ConvNet and MLP, plain code."""
    if out.suffix in PICKLES:
        raise BadValue(
            f"{out.name}: weights are written as safetensors, which run no code when they are "
            f"read; name the file {out.with_suffix(SUFFIX).name}"
        )
    out = out if out.suffix == SUFFIX else out.with_name(out.name + SUFFIX)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(for_json(export.description), indent=2, ensure_ascii=False) + "\n"
    files = {out: save(_apart(export.weights)), out.with_suffix(".json"): text.encode()}
    if export.code is not None:
        files[out.with_suffix(".py")] = export.code.encode()
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def _checkpoint(folder: Path, round: int | None) -> Path:
    """The newest checkpoint of a run, or that of a round."""
    checkpoints = folder / "checkpoints"
    if round is None:
        found = checkpoint.latest(checkpoints)
        if found is None:
            if not folder.exists():
                raise RunFolderError(f"there is no run folder {folder}")
            check_single(folder)
            raise RunFolderError(f"{folder} holds no checkpoint, so there is no model in it")
        return found
    kept = sorted(int(path.name[6:]) for path in checkpoints.glob("round-?????"))
    if round not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise RunFolderError(
            f"round {round} was not kept in {folder}; kept: {there}; more are kept with "
            "run.keep_checkpoints"
        )
    return checkpoints / f"round-{round:05d}"


def _rebuilt(described: Mapping[str, Any]) -> Model | None:
    """A network of fedstill by its description; None where it is another, or of another version."""
    kind = MODELS.get(described["name"])
    if kind is None:
        return None
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in described.items()
        if key != "name"
    }
    try:
        return kind(**options)
    except (BadValue, TypeError):
        return None


def _weights_in(tensors: Weights) -> Weights:
    """Of what a node remembers the model: what was taught, its own, or that of a base method."""
    for prefix in ("shown.", "weights.", "base.weights."):
        found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        if found:
            return found
    return {}


def _note(model: Model, weights: Weights) -> str | None:
    """What must be known of weights before they are loaded, or None."""
    if not fits(model, weights):
        return VARIANT
    return None if isinstance(model, Module) or standalone_options(model) is not None else NO_CODE


def _noted(note: str | None) -> dict[str, str]:
    return {} if note is None else {"note": note}


def _chosen(node: NodeId | None, known: Sequence[NodeId], holders: Sequence[NodeId]) -> NodeId:
    if node is None and SERVER in holders:
        return SERVER
    some = ", ".join(holders[:5]) + (", …" if len(holders) > 5 else "")
    if node is None:
        raise RunFolderError(f"clients keep models of their own here; name one with --node: {some}")
    if node not in known:
        raise RunFolderError(unknown("party", node, known))
    if node not in holders:
        raise RunFolderError(f"{node} keeps no model after this run; these do: {some}")
    return node


def _weights(state: State | None) -> Weights | None:
    found = getattr(state, "weights", None)
    if isinstance(found, dict) and found and all(isinstance(t, Tensor) for t in found.values()):
        return found
    return None


def _apart(weights: Weights) -> Weights:
    """Tensors that share no memory, as the format wants them."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}


def _code(model: Model) -> str | None:
    """A file in plain PyTorch that builds the network, or None."""
    options = standalone_options(model)
    if isinstance(model, Module) or options is None:
        return None
    text = inspect.getsource(standalone).partition("from __future__")
    values = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return CODE.format(body="".join(text[1:]).rstrip(), built=f"{type(model).__name__}({values})")
