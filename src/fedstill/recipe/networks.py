"""The networks of a recipe: `[models]` read once into objects that build them for given data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from fedstill.core import ranges
from fedstill.core.errors import BadValue, RecipeError, unknown
from fedstill.core.model import Model, option_names
from fedstill.core.records import NodeId
from fedstill.models import MODEL_NAMES, Module
from fedstill.models.skeleton import Origin
from fedstill.recipe.fields import as_hinted, read_table

Table = dict[str, Any]
DEFAULT = "convnet"
PLACES = ("cycle", "clients")  # of other networks than the common one
PLACEHOLDERS = {
    "{classes}": "the number of classes",
    "{channels}": "the first side of an example",
    "{height}": "the second side",
    "{width}": "the third side",
    "{features}": "the numbers of an example",
    "{shape}": "all sides as a list",
}
"""Values of a module's arguments that stand for what the data say."""


@dataclass(frozen=True)
class ModuleTable:
    """What a recipe says of a torch module besides its arguments; see `models.Module`."""

    head_layer: str | None = None
    stage_layers: tuple[str, ...] | None = None
    start: Literal["fresh", "given"] = "fresh"
    fresh_head: bool = False


@dataclass(frozen=True)
class NetworkTable:
    """One network: its name, the options it is chosen by, and what is said of a module."""

    name: str | None = None  # None: that of the table before it
    options: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)

    def over(self, before: NetworkTable) -> NetworkTable:
        """What this table makes of the one before; another name leaves its options out."""
        if self.name not in (None, before.name):
            return self
        return NetworkTable(
            before.name, {**before.options, **self.options}, {**before.module, **self.module}
        )

    def model(self, shape: Sequence[int], classes: int) -> Model:
        """The network for examples of a shape and a number of classes."""
        name = self.name or DEFAULT
        kind = MODEL_NAMES[name]
        made: Model
        try:
            if _is_model(kind):
                strange = sorted(set(self.options) - set(option_names(kind)))
                if strange:  # a client's table without a name, behind one of another name
                    raise BadValue([f"a {name} has no key {key!r}" for key in strange])
                made = kind(tuple(shape), classes, **self.options)
            else:
                built = partial(kind, **filled(dict(self.options), shape, classes))
                origin = Origin.of(built, name if ":" in name else "")
                made = Module(tuple(shape), classes, origin, **_module_values(self.module))
            made.fitting()
        except BadValue as error:
            raise RecipeError([f"models: {line}" for line in error.faults]) from error
        return made


@dataclass(frozen=True)
class NetworkTables:
    """Everybody's network: by client name, else in turn from `cycle`, else the common one."""

    common: NetworkTable
    cycle: tuple[NetworkTable, ...]
    clients: Mapping[NodeId, NetworkTable]
    written: Table  # as the recipe has them

    def models(
        self, names: Sequence[NodeId], shape: Sequence[int], classes: int
    ) -> dict[NodeId, Model]:
        """The network of each client; who has equal tables has the very same one."""
        strangers = [name for name in self.clients if name not in names]
        if strangers:
            raise RecipeError(["models.clients: " + unknown("client", n, names) for n in strangers])
        made: dict[str, Model] = {}
        models = {}
        for i, name in enumerate(names):
            table = self.common
            if self.cycle:
                table = self.cycle[i % len(self.cycle)].over(table)
            if name in self.clients:
                table = self.clients[name].over(table)
            key = repr(table)
            if key not in made:
                made[key] = table.model(shape, classes)
            models[name] = made[key]
        return models


def read_networks(models: Any, faults: list[str]) -> NetworkTables:
    """The networks of a recipe's table; what is wrong with them is added to `faults`."""
    if not isinstance(models, Mapping):
        faults.append(f"models must be a table, not {models!r}")
        return NetworkTables(NetworkTable(), (), {}, {})
    cycle, clients = models.get("cycle", []), models.get("clients", {})
    if not isinstance(cycle, list):
        faults.append("models.cycle must be a list of tables")
        cycle = []
    if not isinstance(clients, Mapping):
        faults.append("models.clients must be a table of client names")
        clients = {}
    plain = {key: value for key, value in models.items() if key not in PLACES}
    common = _read({"name": DEFAULT, **plain}, DEFAULT, "models", faults)
    name = common.name or DEFAULT
    return NetworkTables(
        common,
        tuple(_read(t, name, f"models.cycle[{i}]", faults) for i, t in enumerate(cycle)),
        {c: _read(t, name, f"models.clients.{c}", faults) for c, t in clients.items()},
        dict(models),
    )


def _read(table: Any, before: str, where: str, faults: list[str]) -> NetworkTable:
    """One network's table; without a name it is of the kind of the common one."""
    if not isinstance(table, Mapping):
        faults.append(f"{where} must be a table with a name, not {table!r}")
        return NetworkTable()
    name = table.get("name", before)
    wrong = MODEL_NAMES.wrong(name)
    if wrong is not None:
        faults.append(f"{where}.name: {wrong}")
        return NetworkTable()
    kind = MODEL_NAMES[name]
    given = {key: value for key, value in table.items() if key != "name"}
    told: Mapping[str, Any] = {}
    if _is_model(kind):
        options = _options(kind, given, where, faults)
    else:
        told = given.pop("module", {})
        read_table(ModuleTable, told, f"{where}.module", faults)
        complete = name != before or where == "models"
        faults += _argument_faults(kind, given, where, complete)
        options = given
    return NetworkTable(table.get("name"), options, told if isinstance(told, Mapping) else {})


def _options(kind: type[Model], given: Table, where: str, faults: list[str]) -> Table:
    """The options of one of our networks, in the form that its hints ask for."""
    known, hints = option_names(kind), ranges.hints(kind)
    options: Table = {}
    for key, value in given.items():
        if key not in known:
            faults.append(f"{where}.{key}: " + unknown("key", key, {*known, "name"}))
            continue
        options[key] = as_hinted(value, hints[key])
        wrong = ranges.fault(f"{where}.{key}", options[key], hints[key])
        if wrong:
            faults.append(wrong)
    return options


def _argument_faults(kind: Any, given: Table, where: str, complete: bool) -> list[str]:
    """Arguments that a module's constructor does not take, or cannot do without."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []  # it says so itself when it is built
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = {p.name for p in named}
    lines = []
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        lines = [
            f"{where}.{key}: " + unknown("argument", key, known | {"module"})
            for key in given
            if key not in known
        ]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing and complete:
        may = ", ".join(PLACEHOLDERS)
        lines += [f"{where}.{n} is missing; give a value, or one of {may}" for n in missing]
    return lines


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Model)


def _module_values(table: Mapping[str, Any]) -> Table:
    hints = ranges.hints(ModuleTable)
    return {key: as_hinted(value, hints[key]) for key, value in table.items()}


def filled(value: Any, shape: Sequence[int], classes: int) -> Any:
    """Arguments with what the data say in the place of placeholders."""
    if isinstance(value, Mapping):
        return {key: filled(inner, shape, classes) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, shape, classes) for inner in value]
    if value not in PLACEHOLDERS:
        return value
    sides = dict(zip(("{channels}", "{height}", "{width}"), shape, strict=False))
    product = 1
    for side in shape:
        product *= side
    known = {**sides, "{classes}": classes, "{features}": product, "{shape}": list(shape)}
    if value not in known:
        given = "x".join(map(str, shape))
        raise BadValue(f"{value} stands for {PLACEHOLDERS[value]}, but examples are {given}")
    return known[value]
