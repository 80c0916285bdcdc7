"""Tables checked: names looked up, values read into dataclasses, all faults at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from fedstill.channels import CHANNEL_NAMES, Channel
from fedstill.core import ranges
from fedstill.core.errors import RecipeError, unknown
from fedstill.core.method import Method
from fedstill.engines.execution import AUTO, ENGINES
from fedstill.federation.topology import TOPOLOGIES
from fedstill.methods import METHOD_NAMES
from fedstill.metrics import METRIC_NAMES
from fedstill.privacy.privacy import Privacy
from fedstill.recipe.changes import METHOD_KEYS, label_of
from fedstill.recipe.clock import read_clock
from fedstill.recipe.data import read_data
from fedstill.recipe.fields import read_table, read_values
from fedstill.recipe.networks import read_networks
from fedstill.recipe.tables import (
    FREE_TABLES,
    GRID,
    GRID_PARTS,
    QUICK,
    TRACKERS,
    DataTable,
    EngineTable,
    FederationTable,
    Recipe,
    RunTable,
    Table,
    TrackTable,
    method_name,
    values,
)
from fedstill.report.groups import BY_CLIENT

M = TypeVar("M", Method, Channel)
OLDER_ENGINE_WORDS = {"lanes": "streams"}
LONGEST_LABEL = 200  # characters; the name of a folder has no more than 255


class Named(NamedTuple):
    """A method with the name that the recipe gives it, and its label in tables."""

    method: Method
    name: str
    label: str


def checked(tables: Table) -> list[Recipe]:
    """A recipe for each method; raises with every fault of every table."""
    faults: list[str] = []
    known = {"run", "data", "models", "federation", "method", "privacy", "engine", "track",
             *FREE_TABLES, GRID, QUICK}  # fmt: skip
    faults += [_unknown_table(name, known) for name in tables if name not in known]
    run = read_table(RunTable, tables.get("run", {}), "run", faults)
    if run is not None:
        _check_name(run.name, faults)
        _check_metrics(run.metrics, faults)
    data = read_data(tables.get("data", {}), faults)
    federation = _read_federation(tables.get("federation", {}), faults)
    engine = _read_engine(tables.get("engine", {}), faults)
    track = _read_track(tables["track"], faults) if "track" in tables else None
    privacy = None
    if "privacy" in tables:  # an empty one is no budget, and asks for one all the same
        privacy = read_values(Privacy, tables["privacy"], "privacy", faults)
    models = tables.get("models", {"name": "convnet"})
    networks = read_networks(models, faults)
    for name in FREE_TABLES:
        if not isinstance(tables.get(name, {}), Mapping):
            faults.append(f"{name} must be a table, not {tables[name]!r}")
    _check_reported(tables.get("reported", {}), faults)
    if federation is not None:
        _check_federation(federation, faults)
    methods = _read_methods(tables.get("method", []), data, faults)
    if faults or not (run and data and federation and engine):
        raise RecipeError(faults)
    about, reported = (tables.get(name, {}) for name in FREE_TABLES)
    several = any(_of_a_method(name, value) for name, value in reported.items())
    return [
        Recipe(
            run,
            data,
            networks,
            federation,
            *named,
            engine,
            about,
            reported.get(named.label, {}) if several else reported,
            privacy,
            track,
        )
        for named in methods
    ]


def _unknown_table(name: str, known: Collection[str]) -> str:
    if name in GRID_PARTS:
        return f"unknown table {name!r}: it belongs to the grid; its name is {GRID}.{name}"
    return unknown("table", name, known)


def _check_name(name: str, faults: list[str]) -> None:
    """A recipe may come from someone else: its name leads to a folder under `runs`, never out."""
    path = PurePath(name)
    if not name.strip() or path.is_absolute() or ".." in path.parts:
        faults.append(
            f"run.name = {name!r}: the name of a folder under runs, without '..' and not from the "
            "root; for another place give --out"
        )


def chosen(recipes: Sequence[Recipe], labels: Sequence[str]) -> list[Recipe]:
    """The recipes of some methods, by label; all when none is named."""
    known = [recipe.label for recipe in recipes]
    strangers = [label for label in labels if label not in known]
    if strangers:
        raise RecipeError([unknown("method of this recipe", label, known) for label in strangers])
    return [recipe for recipe in recipes if not labels or recipe.label in labels]


def faults_of(tables: Table) -> list[str]:
    """What `checked` would refuse."""
    try:
        checked(tables)
    except RecipeError as error:
        return error.faults
    return []


def _of_today(engine: Any, faults: list[str]) -> Any:
    """A table of an engine with today's words for older ones, as key and as name of an engine."""
    if not isinstance(engine, Mapping):
        return engine
    faults += [
        f"engine.{old} is the older word for engine.{new}; give one of them"
        for old, new in OLDER_ENGINE_WORDS.items()
        if old in engine and new in engine
    ]
    made = {OLDER_ENGINE_WORDS.get(key, key): value for key, value in engine.items()}
    name = made.get("name")
    return {**made, "name": OLDER_ENGINE_WORDS.get(name, name)} if isinstance(name, str) else made


def _read_methods(tables: Any, data: DataTable | None, faults: list[str]) -> list[Named]:
    """The methods of a recipe, each under a label of its own, and what they need of the data."""
    tables = tables if isinstance(tables, list) else [tables]
    if not tables:
        faults.append(f"method.name is missing; known: {', '.join(sorted(METHOD_NAMES.known()))}")
    virtual = data.written.get("virtual") if data and data.virtual else None
    places = ["method"] if len(tables) == 1 else [f"method[{i}]" for i in range(len(tables))]
    read = (_read_method(one, at, virtual, faults) for one, at in zip(tables, places, strict=True))
    made = [named for named in read if named]
    if data is not None and data.public is None:
        faults += [
            f"data.public is missing: {named.name} needs images without labels that everybody "
            'holds; name a set, e.g. data.public.name = "fashion-mnist"'
            for named in made
            if named.method.needs_public
        ]
    labels = [named.label for named in made]
    faults += [
        f"method.label = {label!r}: it stands in tables and names a folder; write a word of at "
        f"most {LONGEST_LABEL} characters on one line, not of dots alone"
        for label in labels
        if not label.strip(" .") or not label.isprintable() or len(label) > LONGEST_LABEL
    ]
    faults += [
        f"method.label {label!r} stands twice; give each method its own label"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    return made


def _read_method(table: Any, where: str, virtual: Table | None, faults: list[str]) -> Named | None:
    if not isinstance(table, Mapping) or "name" not in table:
        faults.append(f"{where}.name is missing; known: {', '.join(sorted(METHOD_NAMES.known()))}")
        return None
    name, label = table["name"], label_of(table)
    wrong = METHOD_NAMES.wrong(name)
    if wrong is not None:
        faults.append(f"{where}.name: {wrong}")
        return None
    kind = METHOD_NAMES[name]
    given = {k: v for k, v in table.items() if k not in METHOD_KEYS}
    standing: Mapping[str, Any] = {}
    if "preset" in table:
        if not _among(table["preset"], kind.presets):
            strange = unknown("preset", str(table["preset"]), kind.presets)
            faults.append(f"{where}.preset: {strange}")
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
    if len(faults) > before:
        return None
    method = read_values(kind, given, where, faults, METHOD_KEYS)
    return Named(method, name, str(label)) if method is not None else None


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
    return made.method if made else value


def _read_engine(table: Any, faults: list[str]) -> EngineTable | None:
    engine = read_table(EngineTable, _of_today(table, faults), "engine", faults)
    if engine is not None and engine.name not in (AUTO, *ENGINES):
        faults.append("engine.name: " + unknown("engine", engine.name, (AUTO, *ENGINES)))
    return engine


def _read_track(table: Any, faults: list[str]) -> TrackTable | None:
    track = read_table(TrackTable, table, "track", faults)
    if track is not None:
        strange = [name for name in track.to if name not in TRACKERS]
        faults += ["track.to: " + unknown("tracker", name, TRACKERS) for name in strange]
    return track


def _read_federation(table: Any, faults: list[str]) -> FederationTable | None:
    """The table with its channels and its clock as objects."""
    if not isinstance(table, Mapping):
        return read_table(FederationTable, table, "federation", faults)
    made: Table = {}
    if "channel" in table:
        made["channel"] = _read_channels(table["channel"], faults)
    if "clock" in table:
        made["clock"] = read_clock(table["clock"], faults)
    others = {key: value for key, value in table.items() if key not in made}
    federation = read_table(FederationTable, others, "federation", faults)
    return federation and replace(federation, **made)


def _read_channels(given: Any, faults: list[str]) -> tuple[Channel, ...] | None:
    if not isinstance(given, list):
        faults.append(
            f"federation.channel must be a list of tables, each headed [[federation.channel]], "
            f"not {given!r}"
        )
        return None
    read = [_read_channel(item, f"federation.channel[{i}]", faults) for i, item in enumerate(given)]
    return tuple(channel for channel in read if channel is not None) or None


def _read_channel(table: Any, where: str, faults: list[str]) -> Channel | None:
    if not isinstance(table, Mapping) or "name" not in table:
        faults.append(f"{where}.name is missing; known: {', '.join(sorted(CHANNEL_NAMES.known()))}")
        return None
    name = table["name"]
    if wrong := CHANNEL_NAMES.wrong(name):
        faults.append(f"{where}.name: {wrong}")
        return None
    options = {key: value for key, value in table.items() if key != "name"}
    return read_values(CHANNEL_NAMES[name], options, where, faults)


def _among(name: Any, known: Mapping[str, Any]) -> bool:
    """Whether a value from a recipe, of whatever type, is a name in a table."""
    return isinstance(name, str) and name in known


def _check_metrics(metrics: Sequence[Any], faults: list[str]) -> None:
    if not metrics:
        faults.append('run.metrics is empty; name at least one, e.g. run.metrics = ["accuracy"]')
    faults += [f"run.metrics: {wrong}" for wrong in map(METRIC_NAMES.wrong, metrics) if wrong]


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
