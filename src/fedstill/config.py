"""Recipe to experiment: names looked up, tables read into dataclasses, all faults at once.

A recipe is one TOML file with tables `run`, `data`, `models`, `federation`, `method`, `engine`
and, for people, `about` and `reported`. `[[method]]` may stand several times.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from fedstill.core import ranges
from fedstill.core.errors import BadValue, DataError, RecipeError, unknown
from fedstill.core.method import Method, Place
from fedstill.core.model import Model
from fedstill.core.ranges import Count, Range, Whole
from fedstill.core.records import NodeId
from fedstill.data import DATASETS, PARTITIONS, Collection, load
from fedstill.engines.batched import Batched
from fedstill.engines.engine import Engine
from fedstill.engines.in_process import InProcess
from fedstill.federation.experiment import Experiment, Sampler, speaks_to_peers
from fedstill.federation.population import Population
from fedstill.federation.post import BadMessages
from fedstill.federation.sampling import Everyone, Sample
from fedstill.federation.topology import TOPOLOGIES, Graph, Topology
from fedstill.methods import METHODS
from fedstill.models import MODELS

T = TypeVar("T")
Table = dict[str, Any]
Chance = Annotated[float, Range(0, 1, open_low=True)]

FREE_TABLES = ("about", "reported")  # for people and reports; not checked
BASE_FIELDS = {"shape", "classes", "training", "device", "notes"}  # of Model, not options


@dataclass(frozen=True)
class RunTable:
    """How long, with which seed, and what is kept."""

    name: str = "run"
    rounds: Count = 10
    seed: Whole = 0
    device: str = "auto"  # auto, cpu, cuda, cuda:0, …
    threads: Count | None = None
    evaluate_every: Count = 1
    scores: Literal["auto", "cross", "own"] = "auto"
    checkpoint_every: Count = 1
    keep_checkpoints: Count = 2
    pictures: bool = True


@dataclass(frozen=True)
class DataTable:
    """Which data and how they are split; `options` are those of the data set."""

    name: str
    data_dir: str | None = None
    size: Count | None = None
    channels: Count | None = None
    partition: dict[str, Any] | None = None
    seed: Whole | None = None  # of the split; the run's seed when left out
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FederationTable:
    """Who hears whom, who takes part, what becomes of a broken message."""

    topology: str = "auto"
    neighbours: Count | None = None
    degree: Count | None = None
    probability: Chance | None = None
    sample: Count | None = None  # clients a round
    share: Chance | None = None  # of the clients a round
    bad_messages: BadMessages = "stop"


@dataclass(frozen=True)
class EngineTable:
    """Which engine; `auto` chooses by device."""

    name: Literal["auto", "in_process", "batched"] = "auto"
    stack_at_most: Count = 256


@dataclass(frozen=True)
class Recipe:
    """A checked recipe for one method."""

    run: RunTable
    data: DataTable
    models: Table
    federation: FederationTable
    method: Method
    method_name: str
    label: str
    engine: EngineTable
    about: Table = field(default_factory=dict)
    reported: Table = field(default_factory=dict)

    def as_tables(self) -> Table:
        """Every value that makes the numbers, as tables."""
        method = {"name": self.method_name, "label": self.label, **values(self.method)}
        tables = {
            "run": values(self.run),
            "data": values(self.data),
            "models": self.models,
            "federation": values(self.federation),
            "method": method,
            "engine": values(self.engine),
            "about": self.about,
            "reported": self.reported,
        }
        return {name: table for name, table in tables.items() if table}


class Built:
    """Everything a run needs, made from a recipe."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.device = chosen_device(recipe.run.device)
        torch.backends.cudnn.deterministic = True  # two runs with one seed are equal on a GPU too
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        self.collection = load_data(recipe)
        self.models, self.server_model = made_models(recipe, self.collection)
        population = Population(self.collection, self.models, self.server_model, device=self.device)
        names = list(population.clients)
        self.graph = made_graph(recipe, names)
        sampler = made_sampler(recipe.federation, len(names))
        self.experiment = Experiment(
            recipe.method,
            population,
            self.graph,
            sampler,
            rounds=recipe.run.rounds,
            seed=recipe.run.seed,
            evaluate_every=recipe.run.evaluate_every,
            scores=chosen_scores(recipe, len(names)),
            bad_messages=recipe.federation.bad_messages,
        )
        self.engine, self.engine_note = made_engine(recipe, population, self.device)

    def digest(self) -> str:
        """What a checkpoint must share with a run that goes on from it."""
        tables = {**decisive(self.recipe), "content": self.collection.digest()}
        text = json.dumps(tables, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def decisive(recipe: Recipe) -> Table:
    """The values that decide the numbers of every round.

    A run that goes on may get more rounds, another name or device; these it must keep.
    """
    tables = recipe.as_tables()
    kept: Table = {k: tables[k] for k in ("data", "models", "federation", "method") if k in tables}
    kept["data"] = {k: v for k, v in kept["data"].items() if k != "data_dir"}
    kept["method"] = {k: v for k, v in kept["method"].items() if k != "label"}
    kept["run"] = {"seed": recipe.run.seed}
    return kept


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """A line for every value that two tables do not share."""
    lines: list[str] = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{where}{key}.")
        elif old != new:
            words = ["unset" if value is None else repr(value) for value in (old, new)]
            lines.append(f"{where}{key} was {words[0]}, not {words[1]}")
    return lines


def read_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Table:
    """The tables of a recipe file with `key=value` overrides applied; not yet checked."""
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}; give the path of a .toml file") from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text in UTF-8: {error}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not a TOML file: {error}") from error
    return overridden(tables, overrides)


def overridden(tables: Table, overrides: Sequence[str]) -> Table:
    """The same tables with `table.key=value` applied; values are TOML, or plain text."""
    changed: Table = copy.deepcopy(tables)
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        where = key.strip().split(".")
        if not equals or not all(where):
            faults.append(f"override {text!r}: write it as table.key=value, e.g. run.rounds=5")
            continue
        if len(where) == 1:
            faults.append(f"override {text!r}: say which table, e.g. {_guessed_table(where[0])}")
            continue
        for target in _targets(changed, where[0]):
            try:
                _set(target, where[1:], _parsed(value.strip()))
            except TypeError:
                faults.append(f"override {text!r}: {key} is not a table")
    if faults:
        raise RecipeError(faults)
    return changed


def _targets(tables: Table, name: str) -> list[Any]:
    """The table of a name, or each of several `[[method]]` tables."""
    found = tables.setdefault(name, {})
    return list(found) if isinstance(found, list) else [found]


def _set(table: Any, keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise TypeError(key)
    table[keys[-1]] = value


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _guessed_table(key: str) -> str:
    for name, kind in (("run", RunTable), ("data", DataTable), ("federation", FederationTable)):
        if key in {f.name for f in fields(kind)}:
            return f"{name}.{key}=…"
    return f"method.{key}=…"


def checked(tables: Table) -> list[Recipe]:
    """A recipe for each method; raises with every fault of every table."""
    faults: list[str] = []
    known = {"run", "data", "models", "federation", "method", "engine", *FREE_TABLES}
    faults += [unknown("table", name, known) for name in tables if name not in known]
    run = read_table(RunTable, tables.get("run", {}), "run", faults)
    data = read_table(DataTable, tables.get("data", {}), "data", faults)
    federation = read_table(FederationTable, tables.get("federation", {}), "federation", faults)
    engine = read_table(EngineTable, tables.get("engine", {}), "engine", faults)
    models = tables.get("models", {"name": "convnet"})
    _check_models(models, faults)
    for name in FREE_TABLES:
        if not isinstance(tables.get(name, {}), Mapping):
            faults.append(f"{name} must be a table, not {tables[name]!r}")
    if data is not None:
        _check_data(data, faults)
    if federation is not None:
        _check_federation(federation, faults)
    methods = tables.get("method", [])
    methods = methods if isinstance(methods, list) else [methods]
    if not methods:
        faults.append(f"method.name is missing; known: {', '.join(sorted(METHODS))}")
    made = [_read_method(table, i, len(methods), faults) for i, table in enumerate(methods)]
    labels = [item[2] for item in made if item]
    faults += [
        f"method.label {label!r} stands twice; give each method its own label"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    if faults or not (run and data and federation and engine):
        raise RecipeError(faults)
    about, reported = (tables.get(name, {}) for name in FREE_TABLES)
    several = any(isinstance(table, Mapping) for table in reported.values())
    return [
        Recipe(
            run,
            data,
            models,
            federation,
            method,
            name,
            label,
            engine,
            about,
            reported.get(label, {}) if several else reported,
        )
        for method, name, label in (item for item in made if item)
    ]


def read_table(kind: type[T], table: Any, where: str, faults: list[str]) -> T | None:
    """A dataclass from a table; what is wrong is added to `faults`."""
    if not isinstance(table, Mapping):
        faults.append(f"{where} must be a table, not {table!r}")
        return None
    named = ranges.hints(kind)
    own = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    before = len(faults)
    faults += [f"{where}.{key}: " + unknown("key", key, own) for key in table if key not in own]
    given = {key: as_hinted(value, named[key]) for key, value in table.items() if key in own}
    for key, value in given.items():
        wrong = ranges.fault(f"{where}.{key}", value, named[key])
        if wrong:
            faults.append(wrong)
    for key, item in own.items():
        required = item.default is MISSING and item.default_factory is MISSING
        if required and key not in given:
            faults.append(f"{where}.{key} is missing")
    return kind(**given) if len(faults) == before else None


def as_hinted(value: Any, hint: Any) -> Any:
    """A TOML value in the form a hint asks for: lists as tuples, whole numbers as floats."""
    if get_origin(hint) is Annotated:
        return as_hinted(value, get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return as_hinted(value, options[0]) if len(options) == 1 else value
    if isinstance(value, list) and (get_origin(hint) or hint) is tuple:
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _read_method(
    table: Any, place: int, count: int, faults: list[str]
) -> tuple[Method, str, str] | None:
    where = "method" if count == 1 else f"method[{place}]"
    if not isinstance(table, Mapping) or "name" not in table:
        faults.append(f"{where}.name is missing; known: {', '.join(sorted(METHODS))}")
        return None
    name, label = table["name"], table.get("label", table["name"])
    if not _among(name, METHODS):
        faults.append(f"{where}.name: " + unknown("method", str(name), METHODS))
        return None
    kind = METHODS[name]
    given = {k: v for k, v in table.items() if k not in ("name", "label", "preset")}
    if "preset" in table:
        if not _among(table["preset"], kind.presets):
            wrong = unknown("preset", str(table["preset"]), kind.presets)
            faults.append(f"{where}.preset: {wrong}")
            return None
        given = {**kind.presets[table["preset"]], **given}
    try:
        method = read_table(kind, given, where, faults)
    except BadValue as error:
        faults += [f"{where}: {line.split(': ', 1)[-1]}" for line in error.faults]
        return None
    return (method, name, str(label)) if method is not None else None


def _among(name: Any, known: Mapping[str, Any]) -> bool:
    """Whether a value from a recipe, of whatever type, is a name in a table."""
    return isinstance(name, str) and name in known


def _check_models(models: Any, faults: list[str]) -> None:
    if not isinstance(models, Mapping):
        faults.append(f"models must be a table, not {models!r}")
        return
    for where, table in _model_tables(models, faults):
        if not isinstance(table, Mapping):
            faults.append(f"{where} must be a table with a name, not {table!r}")
            continue
        name = table.get("name", models.get("name", "convnet"))
        if not _among(name, MODELS):
            faults.append(f"{where}.name: " + unknown("model", str(name), MODELS))
            continue
        kind = MODELS[name]
        options = {f.name for f in fields(kind) if f.init} - BASE_FIELDS
        named = ranges.hints(kind)
        for key, value in table.items():
            if key == "name":
                continue
            if key not in options:
                faults.append(f"{where}.{key}: " + unknown("key", key, options | {"name"}))
                continue
            wrong = ranges.fault(f"{where}.{key}", as_hinted(value, named[key]), named[key])
            if wrong:
                faults.append(wrong)


def _model_tables(models: Mapping[str, Any], faults: list[str]) -> list[tuple[str, Any]]:
    """Each table that describes a network, with its place: the common one, a cycle, by client."""
    cycle, clients = models.get("cycle", []), models.get("clients", {})
    common = {key: value for key, value in models.items() if key not in ("cycle", "clients")}
    found: list[tuple[str, Any]] = [("models", common)]
    if not isinstance(cycle, list):
        faults.append("models.cycle must be a list of tables")
        cycle = []
    if not isinstance(clients, Mapping):
        faults.append("models.clients must be a table of client names")
        clients = {}
    found += [(f"models.cycle[{i}]", table) for i, table in enumerate(cycle)]
    found += [(f"models.clients.{name}", table) for name, table in clients.items()]
    return found


def _check_data(data: DataTable, faults: list[str]) -> None:
    if data.name not in DATASETS:
        faults.append("data.name: " + unknown("data set", data.name, DATASETS))
    if data.partition is not None:
        _check_partition(data.partition, faults)


def _check_partition(partition: Table, faults: list[str]) -> None:
    kind = partition.get("kind")
    if kind is None:
        faults.append(f"data.partition.kind is missing; known: {', '.join(sorted(PARTITIONS))}")
    elif not _among(kind, PARTITIONS):
        faults.append("data.partition.kind: " + unknown("kind", str(kind), PARTITIONS))
    else:
        table = {k: v for k, v in partition.items() if k != "kind"}
        read_table(PARTITIONS[kind], table, "data.partition", faults)


def _check_federation(federation: FederationTable, faults: list[str]) -> None:
    if federation.topology not in ("auto", *TOPOLOGIES):
        faults.append(
            "federation.topology: "
            + unknown("topology", federation.topology, ("auto", *TOPOLOGIES))
        )
    if federation.sample is not None and federation.share is not None:
        faults.append("federation.sample and federation.share: give one of them")


def load_data(recipe: Recipe) -> Collection:
    """The recipe's data; a fault names the table."""
    data = recipe.data
    try:
        return load(
            data.name,
            data_dir=data.data_dir,
            size=data.size,
            channels=data.channels,
            partition=data.partition,
            seed=recipe.run.seed if data.seed is None else data.seed,
            **data.options,
        )
    except DataError as error:
        raise DataError(f"data: {error}") from error


def made_models(recipe: Recipe, collection: Collection) -> tuple[dict[NodeId, Model], Model]:
    """Everybody's network: by client name, else in turn from `cycle`, else the common one."""
    tables, shape = recipe.models, tuple(collection.shape)
    common = {k: v for k, v in tables.items() if k not in ("cycle", "clients")}
    cycle, by_name = tables.get("cycle", []), tables.get("clients", {})
    names = [site.name for site in collection.sites]
    strangers = [name for name in by_name if name not in names]
    if strangers:
        raise RecipeError(["models.clients: " + unknown("client", n, names) for n in strangers])
    models = {}
    for i, name in enumerate(names):
        turn = cycle[i % len(cycle)] if cycle else {}
        table = joined_tables(common, turn, by_name.get(name, {}))
        models[name] = network(table, shape, collection.classes)
    server = network(common, shape, collection.classes)
    if recipe.method.scored is Place.SERVER and any(m != server for m in models.values()):
        raise RecipeError(
            f"models: {recipe.method_name} averages one network, but the clients' networks differ; "
            "leave out models.cycle and models.clients, or use a method for mixed networks"
        )
    return models, server


def joined_tables(*tables: Table) -> Table:
    """Tables of networks, later ones first; options of a network of another name are left out."""
    made: Table = {}
    for table in tables:
        other = table.get("name", made.get("name")) != made.get("name")
        made = {**({} if other else made), **table}
    return made


def network(table: Table, shape: tuple[int, ...], classes: int) -> Model:
    """One network for images of a shape and a number of classes."""
    name = table.get("name", "convnet")
    kind = MODELS[name]
    named = ranges.hints(kind)
    strange = sorted(set(table) - {"name"} - set(named))
    if strange:
        raise RecipeError([f"models: a {name} has no key {key!r}" for key in strange])
    options = {k: as_hinted(v, named[k]) for k, v in table.items() if k != "name"}
    model = kind(shape, classes, **options)
    model.laws()  # refuses images it cannot take
    return model


def made_topology(recipe: Recipe) -> Topology:
    """Who hears whom; `auto` is a star, or everybody for a method of peers."""
    table, peers = recipe.federation, speaks_to_peers(recipe.method)
    name = table.topology
    if name == "auto":
        name = "complete" if peers else "star"
    if name == "star" and peers:
        raise RecipeError(
            f'federation.topology = "star": {recipe.method_name} speaks from client to client; '
            f"use one of {', '.join(sorted(set(TOPOLOGIES) - {'star'}))}"
        )
    kind = TOPOLOGIES[name]
    known = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    options = {
        key: getattr(table, key)
        for key in ("neighbours", "degree", "probability")
        if getattr(table, key) is not None
    }
    extra = sorted(set(options) - known)
    if extra:
        raise RecipeError([f"federation.{key}: a {name} topology has no such key" for key in extra])
    return kind(**options)


def made_graph(recipe: Recipe, names: Sequence[NodeId]) -> Graph:
    """Who hears whom among these clients; a fault names the table."""
    try:
        return made_topology(recipe).graph(names, recipe.run.seed)
    except RecipeError:
        raise
    except BadValue as error:
        raise RecipeError([f"federation: {line}" for line in error.faults]) from error


def made_sampler(table: FederationTable, clients: int) -> Sampler:
    """Who takes part; refuses to ask for more clients than there are."""
    if table.sample is None and table.share is None:
        return Everyone()
    if table.sample is not None and table.sample > clients:
        raise RecipeError(
            f"federation.sample = {table.sample}, but there are {clients} clients; "
            f"ask for at most {clients}"
        )
    return Sample(count=table.sample, share=table.share)


def chosen_scores(recipe: Recipe, clients: int) -> Literal["cross", "own"]:
    """Every model on every test set up to thirty clients; beyond that each on its own."""
    if recipe.run.scores != "auto":
        return recipe.run.scores
    return "cross" if clients <= 30 else "own"


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"run.device = {name!r}: use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"run.device = {name!r}, but no CUDA device is here; use auto or cpu")
    return device


def made_engine(recipe: Recipe, population: Population, device: torch.device) -> tuple[Engine, str]:
    """The engine and a sentence on why it was chosen."""
    name, why = recipe.engine.name, "as the recipe says"
    if name == "auto":
        name = "batched" if device.type == "cuda" else "in_process"
        why = f"chosen for device {device.type}"
    seed = recipe.run.seed
    if name == "batched":
        engine: Engine = Batched(
            recipe.method, population, seed=seed, device=device,
            stack_at_most=recipe.engine.stack_at_most,
        )  # fmt: skip
    else:
        engine = InProcess(recipe.method, population, seed=seed, device=device)
    return engine, f"{name}, {why}"


def values(instance: Any) -> Table:
    """The fields of a dataclass that TOML can hold: no None, tuples as lists."""
    found = {f.name: getattr(instance, f.name) for f in fields(instance) if f.init}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    return {k: v for k, v in plain.items() if v is not None and v != {}}


def toml_text(tables: Mapping[str, Any]) -> str:
    """Tables as TOML, nested ones after the plain values."""
    return "\n".join(_toml_lines(tables, ())) + "\n"


def _toml_lines(table: Mapping[str, Any], where: tuple[str, ...]) -> list[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lines = [f"[{'.'.join(map(_toml_key, where))}]"] if where and (plain or not nested) else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    for key, inner in nested.items():
        lines += (
            ["", *_toml_lines(inner, (*where, key))] if lines else _toml_lines(inner, (*where, key))
        )
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return _toml_text(str(value))


def _toml_text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
