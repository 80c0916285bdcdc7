"""Recipe files, their quick variants and overrides, as tables that are not yet checked."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedstill.core.errors import RecipeError
from fedstill.core.names import absolute
from fedstill.methods import METHODS
from fedstill.recipe import changes
from fedstill.recipe.check import faults_of
from fedstill.recipe.tables import (
    FREE_TABLES,
    QUICK,
    DataTable,
    EngineTable,
    FederationTable,
    RunTable,
    Table,
    TrackTable,
)

# The tables of a recipe; those of networks and methods have the keys of whatever they name.
TABLES: dict[str, type[Any] | None] = {
    "run": RunTable,
    "data": DataTable,
    "federation": FederationTable,
    "engine": EngineTable,
    "track": TrackTable,
    "models": None,
    "method": None,
}


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
    except IsADirectoryError:
        raise RecipeError(
            f"{path} is a folder; give the path of a .toml file, or go on with the runs in it by "
            f"`fedstill resume {path}`"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text in UTF-8: {error}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not a TOML file: {error}") from error
    tables = _settled(tables, path.resolve().parent)
    changed = _overridden_for(quickened(tables) if quick else tables, overrides, only)
    return _settled(changed, Path.cwd())  # what was said on the command line


def _settled(tables: Table, folder: Path) -> Table:
    """The same tables with references to files (`mine.py:Net`) that mean the same from anywhere."""

    def settled(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: settled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [settled(inner) for inner in value]
        return absolute(value, folder) if isinstance(value, str) else value

    return {
        name: table if name in FREE_TABLES else settled(table) for name, table in tables.items()
    }


def _overridden_for(tables: Table, overrides: Sequence[str], only: Sequence[str]) -> Table:
    """As `overridden`, the methods of other labels as they were."""
    methods = tables.get("method")
    every = methods if isinstance(methods, list) else []
    named = [isinstance(m, Mapping) and changes.label_of(m) in only for m in every]
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


def with_value(tables: Table, key: str, value: Any) -> Table:
    """The same tables with the value at a dotted key."""
    changed: Table = copy.deepcopy(tables)
    wrong = _change(changed, key, value)
    if wrong:
        raise RecipeError(f"{key}: {wrong}")
    return _settled(changed, Path.cwd())


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
    before = faults_of(plain)
    faults += [f"quick: {line}" for line in faults_of(changed) if line not in before]
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
    if not keys and name in TABLES:
        kind = TABLES[name]
        first = fields(kind)[0].name if kind else "name"
        return f"{name} is a table of the recipe; change one of its keys, e.g. {name}.{first}=…"
    if not keys:
        return f"say which table, e.g. {table_of(name) or 'method'}.{name}=…"
    return changes.change(tables, name, keys, value, quick=quick)


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def table_of(key: str) -> str | None:
    """The table of a recipe that has a key; None where none has it."""
    for name, kind in TABLES.items():
        if kind and key in {f.name for f in fields(kind)}:
            return name
    known = {f.name for kind in METHODS.values() for f in fields(kind)}
    return "method" if key in known else None
