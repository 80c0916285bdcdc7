"""Recipes: names looked up, tables read into dataclasses, all faults at once; nothing is made.

A recipe is one TOML file with tables `run`, `data`, `models`, `federation`, `method`, `engine`
and, for people, `about` and `reported`. `[[method]]` may stand several times. A table `quick` holds
changes that make a small variant of the recipe.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from fedstill import changes
from fedstill.core import ranges
from fedstill.core.errors import BadValue, RecipeError, unknown
from fedstill.core.method import Method
from fedstill.core.precision import Precision
from fedstill.core.ranges import Count, Range, Whole
from fedstill.data import DATASETS, PARTITIONS
from fedstill.engines.lanes import LANES
from fedstill.federation.post import BadMessages
from fedstill.federation.topology import TOPOLOGIES
from fedstill.methods import METHODS
from fedstill.methods.virtual import Virtual
from fedstill.models import MODELS
from fedstill.report.groups import BY_CLIENT

T = TypeVar("T")
M = TypeVar("M", bound=Method)
Table = dict[str, Any]
Chance = Annotated[float, Range(0, 1, open_low=True)]

FREE_TABLES = ("about", "reported")  # for people and reports; not checked
QUICK = "quick"  # changes for a small variant; see quickened
# Of Model and Scalable, not options of a network.
BASE_FIELDS = {"shape", "classes", "training", "device", "notes", "rate", "scaler"}


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
    cache_dir: str = "runs/cache"  # results that several runs share, such as warm-up sets


@dataclass(frozen=True)
class DataTable:
    """Which data and how they are split; `options` are those of the data set."""

    name: str
    data_dir: str | None = None
    size: Count | None = None
    channels: Count | None = None
    partition: dict[str, Any] | None = None
    virtual: dict[str, Any] | None = None  # train on sets distilled from the data instead
    public: dict[str, Any] | None = None  # what everybody holds besides; see PublicTable
    seed: Whole | None = None  # of the split; the run's seed when left out
    hold_out: Chance | None = None  # of the training examples, to score on instead of the test sets
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PublicTable:
    """Images without labels that everybody holds, in the shape of the clients' images."""

    name: str
    data_dir: str | None = None  # that of the data when left out
    count: Count | None = None  # so many, drawn by the seed of the split
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

    name: Literal["auto", "in_process", "lanes", "batched"] = "auto"
    stack_at_most: Count = 256
    lanes: Count = LANES  # loops that run beside each other on a GPU
    record: bool = True  # on a GPU, replay the steps of a loop from a recording
    compile: bool = False  # hand the steps of long loops to torch's compiler
    precision: Precision = "tf32"  # of a GPU
    memory_limit: Whole | None = None  # bytes of clients' memories at hand; the rest lie on disk


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


def read_recipe(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    quick: bool = False,
    only: Sequence[str] = (),
) -> Table:
    """The tables of a recipe file, or of its quick variant, with `key=value` overrides applied.

    They are not yet checked, but for what the quick variant changes. Where labels are named in
    `only`, overrides change those methods alone.
    """
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
    return _overridden_for(quickened(tables) if quick else tables, overrides, only)


def _overridden_for(tables: Table, overrides: Sequence[str], only: Sequence[str]) -> Table:
    """As `overridden`, the methods of other labels as they were."""
    methods = tables.get("method")
    every = methods if isinstance(methods, list) else []
    named = [isinstance(m, Mapping) and m.get("label", m.get("name")) in only for m in every]
    if not any(named):
        return overridden(tables, overrides)
    picked = [method for method, meant in zip(every, named, strict=True) if meant]
    changed = overridden({**tables, "method": picked}, overrides)
    moved = iter(changed["method"])
    changed["method"] = [next(moved) if is_meant else method
                         for method, is_meant in zip(every, named, strict=True)]  # fmt: skip
    return changed


def overridden(tables: Table, overrides: Sequence[str]) -> Table:
    """The same tables with `table.key=value` applied; values are TOML, or plain text."""
    changed: Table = copy.deepcopy(tables)
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        wrong: str | None = "write it as table.key=value, e.g. run.rounds=5"
        if equals:
            wrong = _change(changed, key.strip(), _parsed(value.strip()))
        if wrong:
            faults.append(f"override {text!r}: {wrong}")
    if faults:
        raise RecipeError(faults)
    return changed


def quickened(tables: Table) -> Table:
    """The small variant of a recipe: its `[quick]` table applied; what that breaks is refused.

    It has a name of its own, and no reported numbers: they belong to the recipe as it stands.
    """
    quick = tables.get(QUICK)
    if not isinstance(quick, Mapping):
        raise RecipeError(
            "the recipe has no table [quick], so it has no small variant; "
            'add one with dotted keys, e.g. "run.rounds" = 1'
        )
    plain = {name: table for name, table in tables.items() if name != QUICK}
    changed: Table = copy.deepcopy(plain)
    faults = []
    for key, value in changes.dotted(quick):
        wrong = _change(changed, key, value, quick=True)
        if wrong:
            faults.append(f"quick: {key}: {wrong}")
    before = _faults(plain)
    faults += [f"quick: {line}" for line in _faults(changed) if line not in before]
    if faults:
        raise RecipeError([*before, *faults])
    changed.pop("reported", None)
    run = changed.setdefault("run", {})
    if isinstance(run, dict) and run.get("name") == plain.get("run", {}).get("name"):
        run["name"] = f"{run.get('name', RunTable.name)}-quick"
    return changed


def _change(tables: Table, key: str, value: Any, *, quick: bool = False) -> str | None:
    """Set the value at a dotted key; what is wrong with the key, or None."""
    name, *keys = key.split(".")
    if not name or not all(keys):
        return "write it as table.key=value, e.g. run.rounds=5"
    if name == QUICK:
        return "what stands in [quick] is not changed from outside; change the key it names"
    if not keys:
        return f"say which table, e.g. {_guessed_table(name)}"
    return changes.change(tables, name, keys, value, quick=quick)


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
    known = {"run", "data", "models", "federation", "method", "engine", *FREE_TABLES, QUICK}
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
    _check_reported(tables.get("reported", {}), faults)
    virtual = None
    if data is not None:
        _check_data(data, faults)
        virtual = _checked_virtual(data, faults)
    if federation is not None:
        _check_federation(federation, faults)
    methods = tables.get("method", [])
    methods = methods if isinstance(methods, list) else [methods]
    public = data is None or data.public is not None
    if not methods:
        faults.append(f"method.name is missing; known: {', '.join(sorted(METHODS))}")
    places = ["method"] if len(methods) == 1 else [f"method[{i}]" for i in range(len(methods))]
    made = [
        _read_method(table, where, virtual, faults)
        for table, where in zip(methods, places, strict=True)
    ]
    faults += [
        f"data.public is missing: {item[1]} needs images without labels that everybody holds; "
        'name a set, e.g. data.public.name = "fashion-mnist"'
        for item in made
        if item and item[0].needs_public and not public
    ]
    labels = [item[2] for item in made if item]
    faults += [
        f"method.label {label!r} stands twice; give each method its own label"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    if faults or not (run and data and federation and engine):
        raise RecipeError(faults)
    about, reported = (tables.get(name, {}) for name in FREE_TABLES)
    several = any(_of_a_method(name, value) for name, value in reported.items())
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


def chosen(recipes: Sequence[Recipe], labels: Sequence[str]) -> list[Recipe]:
    """The recipes of some methods, by label; all when none is named."""
    known = [recipe.label for recipe in recipes]
    strangers = [label for label in labels if label not in known]
    if strangers:
        raise RecipeError([unknown("method of this recipe", label, known) for label in strangers])
    return [recipe for recipe in recipes if not labels or recipe.label in labels]


def _faults(tables: Table) -> list[str]:
    """What `checked` would refuse."""
    try:
        checked(tables)
    except RecipeError as error:
        return error.faults
    return []


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
    table: Any, where: str, virtual: Table | None, faults: list[str]
) -> tuple[Method, str, str] | None:
    if not isinstance(table, Mapping) or "name" not in table:
        faults.append(f"{where}.name is missing; known: {', '.join(sorted(METHODS))}")
        return None
    name, label = table["name"], table.get("label", table["name"])
    if not _among(name, METHODS):
        faults.append(f"{where}.name: " + unknown("method", str(name), METHODS))
        return None
    kind = METHODS[name]
    given = {k: v for k, v in table.items() if k not in ("name", "label", "preset")}
    standing: Mapping[str, Any] = {}
    if "preset" in table:
        if not _among(table["preset"], kind.presets):
            wrong = unknown("preset", str(table["preset"]), kind.presets)
            faults.append(f"{where}.preset: {wrong}")
            return None
        standing = kind.presets[table["preset"]]
        given = {**standing, **given}
    if kind.distils:  # it makes its virtual sets itself, by the same values as the others'
        given = {**(virtual or {}), **given}
    before = len(faults)
    for field_of in (f for f in fields(kind) if ranges.hints(kind)[f.name] is Method):
        if field_of.name in given:
            there = standing.get(field_of.name, field_of.default)
            inner = f"{where}.{field_of.name}"
            given[field_of.name] = _read_inner(given[field_of.name], there, inner, faults)
    method = _read_values(kind, given, where, faults) if len(faults) == before else None
    return (method, name, str(label)) if method is not None else None


def _read_inner(value: Any, there: Method, where: str, faults: list[str]) -> Any:
    """A method inside a method's table: a name, or a table of its own values.

    A table without a name changes values of the method that stands there otherwise.
    """
    if isinstance(value, Method):
        return value
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        faults.append(f"{where} must be the name of a method or its table, not {value!r}")
        return value
    if "label" in table:
        faults.append(f"{where}.label: " + unknown("key", "label", {"name", "preset"}))
    standing = {} if "name" in table else {"name": method_name(there), **values(there)}
    made = _read_method({**standing, **table}, where, None, faults)
    return made[0] if made else value


def method_name(method: Any) -> str:
    """The name of a method in the table of methods."""
    return next(name for name, kind in METHODS.items() if kind is type(method))


def _read_values(kind: type[M], given: Any, where: str, faults: list[str]) -> M | None:
    """A method from its values; also what is wrong with them together is added to `faults`."""
    try:
        return read_table(kind, given, where, faults)
    except BadValue as error:
        faults += [f"{where}: {line.split(': ', 1)[-1]}" for line in error.faults]
        return None


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
    _check_set("data", data.name, data.options, faults)
    if data.partition is not None:
        _check_partition(data.partition, faults)
    if data.public is not None:
        public = read_table(PublicTable, data.public, "data.public", faults)
        if public is not None:
            _check_set("data.public", public.name, public.options, faults)


def _check_set(where: str, name: str, options: Table, faults: list[str]) -> None:
    if name not in DATASETS:
        faults.append(f"{where}.name: " + unknown("data set", name, DATASETS))
        return
    known = DATASETS[name].options
    faults += [
        f"{where}.options: " + unknown(f"option of {name}", option, known)
        for option in options
        if option not in known
    ]


def _checked_virtual(data: DataTable, faults: list[str]) -> Table | None:
    """The values of `data.virtual` where there is nothing wrong with them."""
    if data.virtual is None:
        return None
    made = _read_values(Virtual, data.virtual, "data.virtual", faults)
    return data.virtual if made is not None else None


def _check_partition(partition: Table, faults: list[str]) -> None:
    kind = partition.get("kind")
    if kind is None:
        faults.append(f"data.partition.kind is missing; known: {', '.join(sorted(PARTITIONS))}")
    elif not _among(kind, PARTITIONS):
        faults.append("data.partition.kind: " + unknown("kind", str(kind), PARTITIONS))
    else:
        table = {k: v for k, v in partition.items() if k != "kind"}
        read_table(PARTITIONS[kind], table, "data.partition", faults)


def _of_a_method(name: str, value: Any) -> bool:
    """Whether an entry of `[reported]` is the table of one method, not a score by client."""
    return isinstance(value, Mapping) and name not in BY_CLIENT.values()


def _check_reported(reported: Any, faults: list[str]) -> None:
    """Of `[reported]` only the names of tables are checked: a mistyped one would be lost."""
    if not isinstance(reported, Mapping):
        return
    for label, table in reported.items():
        for key, value in table.items() if _of_a_method(label, table) else ():
            if _of_a_method(key, value):
                wrong = unknown("score by client", key, BY_CLIENT.values())
                faults.append(f"reported.{label}.{key}: {wrong}")


def _check_federation(federation: FederationTable, faults: list[str]) -> None:
    if federation.topology not in ("auto", *TOPOLOGIES):
        faults.append(
            "federation.topology: "
            + unknown("topology", federation.topology, ("auto", *TOPOLOGIES))
        )
    if federation.sample is not None and federation.share is not None:
        faults.append("federation.sample and federation.share: give one of them")


def values(instance: Any) -> Table:
    """The fields of a dataclass that TOML can hold: no None, tuples as lists, methods as tables."""
    found = {f.name: getattr(instance, f.name) for f in fields(instance) if f.init}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    for key, value in plain.items():
        if isinstance(value, Method):
            plain[key] = {"name": method_name(value), **values(value)}
    return {k: v for k, v in plain.items() if v is not None and v != {}}
