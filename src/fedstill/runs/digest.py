"""What a run is, as plain tables: what is written beside it, and what must not change."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstill.core.method import Method
from fedstill.core.model import Model
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.core.texts import text_of
from fedstill.data import Collection
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.federation.sampling import Sampler
from fedstill.methods import METHODS
from fedstill.recipe.tables import Recipe, Table
from fedstill.recipe.toml import toml_text


@dataclass(frozen=True)
class Description:
    """What is written beside a run: a recipe, or a table of the objects that it was made of.

    A run that goes on may get more rounds, another name or device; what is `decisive` it must keep.
    """

    file: str
    text: str
    decisive: Mapping[str, Any]
    method: str
    label: str
    data: str


def of_recipe(recipe: Recipe) -> Description:
    """A recipe as what is written beside its run."""
    return Description(
        "recipe.toml",
        toml_text(recipe.as_tables()),
        decisive(recipe),
        recipe.method_name,
        recipe.label,
        recipe.data.name,
    )


def of_experiment(experiment: Experiment, label: str | None = None) -> Description:
    """An experiment made of objects as what is written beside its run."""
    method, population = experiment.method, experiment.population
    names = {kind: name for name, kind in METHODS.items()}
    name = names.get(type(method), type(method).__name__.lower())
    data = type(population).__name__ if population.data is None else population.data.name
    values = {key: value for key, value in plain(method).items() if key != "name"}
    tables: Table = {
        "method": {"name": name, "label": label or name, "class": _name(type(method)), **values},
        "models": _networks(population),
        "federation": {
            "topology": plain(experiment.topology),
            "sampling": _sampling(experiment.sampling),
            "channels": plain(experiment.channels),
            "bad_messages": experiment.bad_messages,
        },
        "data": {"name": data, "clients": len(population.clients)},
        "run": {
            key: plain(getattr(experiment, key))
            for key in ("rounds", "seed", "evaluate_every", "scores", "metrics")
        },
        "content": contents(population),
        "normalisation": normalisation(population),
    }
    if experiment.clock is not None:
        tables["federation"]["clock"] = plain(experiment.clock.table())
    if experiment.privacy is not None:
        tables["privacy"] = plain(experiment.privacy.table())
    text = json.dumps(tables, indent=2, ensure_ascii=False) + "\n"
    return Description(
        "experiment.json", text, decisive_of(json.loads(text)), name, label or name, data
    )


def decisive_of(tables: Mapping[str, Any]) -> Table:
    """Of the tables in an experiment.json, the values that decide the numbers of every round."""
    kept = {key: tables.get(key) for key in ("models", "federation", "data", "content")}
    if "privacy" in tables:
        kept["privacy"] = _with_rounds(tables)
    method = {k: v for k, v in tables.get("method", {}).items() if k != "label"}
    return {**kept, "method": method, "run": {"seed": tables.get("run", {}).get("seed")}}


def decisive(recipe: Recipe) -> Table:
    """The values of a recipe that decide the numbers of every round."""
    return decisive_in(recipe.as_tables())


def decisive_in(tables: Table) -> Table:
    """The same of a recipe's tables as they are written in a folder.

    A folder of an earlier fedstill does not list keys that are new since.
    """
    kept: Table = {k: tables[k] for k in ("data", "models", "federation", "method") if k in tables}
    kept["data"] = {k: v for k, v in kept["data"].items() if k != "data_dir"}
    if "public" in kept["data"]:
        public = {k: v for k, v in kept["data"]["public"].items() if k != "data_dir"}
        kept["data"]["public"] = public
    kept["method"] = {k: v for k, v in kept["method"].items() if k != "label"}
    kept["run"] = {"seed": tables["run"]["seed"]}
    if "privacy" in tables:
        kept["privacy"] = _with_rounds(tables)
    return kept


def _with_rounds(tables: Mapping[str, Any]) -> Table:
    """What was asked of privacy, and for how many rounds: the noise was found for so many."""
    return {**tables["privacy"], "rounds": tables.get("run", {}).get("rounds")}


def code_of(method: Method) -> str | None:
    """The digest of the files in which a method's classes stand; None where all are ours.

    Of a class without a file, as of a notebook, its own text.
    """
    files: dict[str, bytes] = {}
    values = (getattr(method, field.name) for field in fields(method))
    methods = [method, *(value for value in values if isinstance(value, Method))]
    for kind in (kind for each in methods for kind in type(each).__mro__):
        if kind.__module__.partition(".")[0] in ("builtins", "fedstill"):
            continue
        try:
            path = inspect.getsourcefile(kind)
            files[str(path)] = Path(str(path)).read_bytes()
        except (TypeError, OSError):
            files[kind.__qualname__] = (text_of(kind) or "").encode()
    texts = [files[name] for name in sorted(files)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else None


# Values that tell a person nothing but that they differ.
_DIGESTED = {
    "content": "the examples, or who holds them, are others",
    "public content": "the public examples are others",
    "code": "the network's code, layers or fixed values are others",
}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """A line for every value that two tables do not share."""
    lines: list[str] = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{where}{key}.")
        elif old != new and key in _DIGESTED:
            lines.append(f"{where}{key}: {_DIGESTED[key]}")
        elif old != new:
            words = ["unset" if value is None else repr(value) for value in (old, new)]
            lines.append(f"{where}{key} was {words[0]}, not {words[1]}")
    return lines


def digest(kept: Mapping[str, Any], population: Population) -> str:
    """What a checkpoint must share with a run that goes on from it."""
    text = json.dumps({**kept, **contents(population)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def contents(population: Population) -> dict[str, str]:
    """What the data are, by their digests."""
    if population.data is None:
        every = [(c, population.party(c)) for c in population.clients]
        lines = [f"{c} {party.data.digest()} {party.test.digest()}" for c, party in every]
        found = {"content": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
        return found | ({"public content": population.public.digest()} if population.public else {})
    found = {"content": population.data.digest()}
    if population.unlabelled is not None:
        found["public content"] = population.unlabelled.digest()
    return found


def normalisation(population: Population, node: NodeId = SERVER) -> dict[str, Any]:
    """How inputs are made for a party's model: (x - mean) / std, bytes divided by 255 before.

    For the server's where clients differ, client by client.
    """
    data = population.data
    if data is None:
        return {}
    sites = [site for site in data.sites if node in (SERVER, site.name)]
    each = {site.name: {"mean": _floats(site.mean), "std": _floats(site.std)} for site in sites}
    values = list(each.values())
    if values and all(value == values[0] for value in values):
        return values[0]
    return {"by_client": each}


def content_digest(collection: Collection) -> str:
    """What the data are, however they are split; what is held out lies in the pools already."""
    seen = {id(site.pool): site.pool for site in collection.sites}
    if not collection.held_out:
        seen |= {id(site.test): site.test for site in collection.sites}
    digests = sorted(examples.digest() for examples in seen.values())
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def named_networks(models: Mapping[NodeId, Model]) -> dict[NodeId, str]:
    """Each client's network by name, with the options in which networks of that name differ."""
    distinct: list[Model] = []
    distinct += (model for model in models.values() if model not in distinct)
    words: dict[Model, str] = {}
    for model in distinct:
        alike = [other.options() for other in distinct if other.title == model.title]
        differ = [
            f"{option} {_in_words(value)}"
            for option, value in model.options().items()
            if any(other.get(option) != value for other in alike)
        ]
        words[model] = ", ".join([model.title, *differ])
    return {node: words[model] for node, model in models.items()}


def plain(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        content = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        return {"shape": list(value.shape), "type": str(value.dtype), "content": content}
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"name": _name(type(value)), **held}
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _sampling(sampler: Sampler) -> Any:
    """A sampler, which may be of any class, by what it holds; what begins with _ is its own."""
    held = {name: item for name, item in getattr(sampler, "__dict__", {}).items() if name[0] != "_"}
    if is_dataclass(sampler) or not held:
        return plain(sampler)
    return {"name": _name(type(sampler)), **plain(held)}


def _networks(population: Population) -> dict[str, Any]:
    """The server's network, and the clients' where they differ from it."""
    server = population.party(SERVER).model
    others = {c: plain(m.describe()) for c, m in population.models.items() if m != server}
    return {"server": plain(server.describe()), **({"clients": others} if others else {})}


def _floats(values: Any) -> list[float] | None:
    return None if values is None else [float(value) for value in values]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _in_words(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
