"""Who may import whom, read from every file; and what can be imported without the extras."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fedstill"

# A room of the house, and the names under `fedstill` and outside of it that it may import.
LOWER = {
    *("channels", "core", "data", "engines", "federation", "logbook"),
    *("methods", "metrics", "models", "parts", "privacy", "report", "wire"),
}
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "core": ({"core"}, {"torch"}),
    "kernels": ({"core", "models", "parts", "kernels"}, {"torch", "triton"}),
    "parts": ({"core", "models", "parts"}, {"torch"}),
    "methods": ({"core", "parts", "methods"}, {"torch"}),
    # numpy: a module of a user may ask its generator, and is watched for it.
    "models": ({"core", "models"}, {"torch", "numpy"}),
    "data": ({"core.errors", "core.names", "core.ranges", "data"}, {"numpy"}),
    "metrics": ({"core", "metrics"}, {"torch"}),
    "wire": ({"core", "wire"}, {"torch", "safetensors"}),
    "channels": ({"core", "channels"}, {"torch"}),
    "privacy": ({"core", "privacy"}, set()),
    "logbook": ({"core", "logbook"}, {"torch", "numpy"}),
    # What an experiment is they may know, not how its rounds are played.
    "engines": (
        {
            *("channels", "core", "engines", "metrics", "privacy", "wire"),
            *("federation.experiment", "federation.population"),
        },
        {"torch"},
    ),
    "federation": (
        {
            "channels",
            "core",
            "data",
            "wire",
            "logbook",
            "engines",
            "federation",
            "metrics",
            "models",
            "privacy",
        },
        {"torch", "numpy", "networkx"},
    ),
    "report": (
        {"core.errors", "core.files", "core.records", "core.node", "logbook", "report"},
        {"numpy", "rich", "matplotlib"},
    ),
    "sites": (
        {
            *("channels", "core", "engines", "federation", "metrics", "privacy", "sites", "wire"),
        },
        {"torch", "zenoh", "cryptography", "flwr"},  # of the last three, one file each
    ),
    "recipe": (LOWER | {"recipe"}, {"torch"}),
    "runs": (
        LOWER | {"recipe", "runs"},
        {"torch", "numpy", "safetensors", "optuna", "matplotlib"},  # of the last, types alone
    ),
    "deploy": (LOWER | {"recipe", "runs", "sites", "deploy"}, {"torch"}),
    "audit": (LOWER | {"audit"}, {"torch", "numpy", "scipy"}),
    "testing": (LOWER | {"recipe", "runs", "sites", "testing"}, {"torch", "numpy"}),
    "commands": (
        LOWER | {"", "audit", "deploy", "recipe", "runs", "sites", "commands"},
        {"torch", "numpy", "rich", "typer", "scipy", "sklearn"},
    ),
}
EXTRAS = ["typer", "rich", "sklearn", "matplotlib", "pydantic", "PIL"]


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in it."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield statement.lineno, alias.name
        elif isinstance(statement, ast.ImportFrom):
            start = "." * statement.level + (statement.module or "")
            for alias in statement.names:
                yield statement.lineno, f"{start}.{alias.name}"


def allowed(name: str, room: str) -> bool:
    inside, outside = ROOMS[room]
    top, *rest = name.split(".")
    if top == "fedstill":
        inner = ".".join(rest)
        return any(inner == door or inner.startswith(f"{door}.") for door in inside)
    return top in outside or top in sys.stdlib_module_names


def offences(source: str, room: str, file: str) -> list[str]:
    return [
        f"{file}:{line} imports {name}; {room} may import {', '.join(sorted(ROOMS[room][0]))} "
        f"and {', '.join(sorted(ROOMS[room][1]))}"
        for line, name in imported(source)
        if not allowed(name, room)
    ]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    found = [
        line
        for file in sorted((ROOT / room).rglob("*.py"))
        for line in offences(file.read_text(), room, str(file.relative_to(ROOT.parent)))
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_room_is_in_the_table() -> None:
    rooms = {file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*/*.py")}
    assert rooms <= set(ROOMS), "say above what these may import"
    assert "core" in rooms


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("core", "import numpy"),
        ("core", "from fedstill.parts import balls"),
        ("core", "def late():\n    from fedstill.engines import batched"),
        ("methods", "from fedstill.federation.run import run"),
        ("methods", "from fedstill.recipe import tables"),
        ("parts", "from . import augment"),
        ("data", "from fedstill.core import algebra"),
        ("federation", "from fedstill.methods.fedavg import FedAvg"),
        ("engines", "import fedstill.commands.cli"),
        ("report", "from fedstill.core.data import Data"),
        ("models", "from fedstill.corelike import x"),
    ],
)
def test_a_wrong_import_is_found_and_named(room: str, source: str) -> None:
    (line,) = offences(source, room, "file.py")
    assert line.startswith(f"file.py:{source.count(chr(10)) + 1} imports ")


def test_right_imports_are_left_alone() -> None:
    source = "import os.path\nimport torch.nn.functional as F\nfrom fedstill.core import trees\n"
    assert offences(source, "methods", "file.py") == []
    assert offences("from fedstill.core import errors", "data", "file.py") == []


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ONE_ROUND = """
import torch
from fedstill.core import Data, Inbox
from fedstill.engines.execution import Execution
from fedstill.engines.play.batched import Batched
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.engines.play.in_process import InProcess
from fedstill.methods import METHODS
from fedstill.models import MLP
import fedstill.parts.balls, fedstill.parts.distribution_matching
model = MLP((4,), 2)
data = Data.of(torch.ones(6, 4), torch.tensor([0, 1] * 3))
class Two(Population):
    clients, models, public = ["a", "b"], {"a": model, "b": model}, Data()
    def __init__(self): pass
    def on(self, device): return self
    def party(self, node): return Party(data, data, model)
for engine in (InProcess, Batched):
    method = METHODS["fedavg"](batch_size=2)
    played = engine(Experiment(method, Two()), Execution(device="cpu"))
    broadcast, update, aggregate = method.each_round()
    down = played.play(broadcast, 1, {"server": Inbox()})["server"].message
    ups = played.play(update, 1, {c: Inbox({"server": down}) for c in "ab"})
    played.play(aggregate, 1, {"server": Inbox({c: up.message for c, up in ups.items()})})
    print(played.name, "ran")
"""


def test_methods_and_engines_run_with_torch_and_safetensors_alone() -> None:
    said = python(f"import sys\nfor name in {EXTRAS}: sys.modules[name] = None\n{ONE_ROUND}")
    assert said.splitlines() == ["in_process ran", "batched ran"]


def test_a_blocked_package_really_is_blocked() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "try: import fedstill.commands.cli\n"
        "except ImportError: print('blocked')"
    )
    assert python(code) == "blocked\n"


BRINGS = """
import json, sys, numpy, torch
seen = set(sys.modules)
def told(what):
    print(json.dumps([what, sorted(name for name in sys.modules if name not in seen)]))
import fedstill
told("the library")
from fedstill.data.embedded import handwriting
assert len(handwriting().labels) == 1797
told("the embedded digits")
import fedstill.report.plots, fedstill.report.tables
told("reports")
from fedstill.core import torch_internals as looking
assert looking.operations(lambda: torch.ones(2, 3) @ torch.ones(3, 2)) == 24
with looking.looking_at_results(lambda made: None):
    torch.ones(2) + 1
told("looking at operations")
import fedstill.testing
told("the contract")
"""


@cache
def brought() -> dict[str, set[str]]:
    """What stands imported beside torch and numpy, one thing after the other in one process."""
    lines = (json.loads(line) for line in python(BRINGS).splitlines())
    return {what: set(names) for what, names in lines}


def test_importing_fedstill_brings_nothing_but_torch_and_numpy() -> None:
    new = {name.split(".")[0] for name in brought()["the library"]}
    assert new - sys.stdlib_module_names <= {"fedstill", "torch", "numpy"}


@pytest.mark.parametrize(
    ("what", "absent"),
    [
        ("the embedded digits", {"sklearn"}),
        ("reports", {"matplotlib", "rich"}),
        ("looking at operations", {"torch._dynamo"}),
        ("the contract", {"pytest"}),
    ],
)
def test_nothing_is_imported_before_it_is_needed(what: str, absent: set[str]) -> None:
    assert not absent & brought()[what]


USED_AS = {  # packages that are imported under another name than they are installed by
    "Pillow": "PIL",
    "dp-accounting": "dp_accounting",
    "eclipse-zenoh": "zenoh",
    "mkdocs-material": "mkdocs",
    "tensorboard": "torch.utils.tensorboard",
}


def test_every_package_of_an_extra_is_used() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
    own = (
        path.read_text()
        for folder in (ROOT, ROOT.parents[1] / "docs")
        for path in folder.rglob("*.py")
    )
    text = "\n".join(own)
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    packages = {re.split(r"[<>=\[]", one)[0] for each in extras.values() for one in each}
    unused = [p for p in packages - {"fedstill"} if USED_AS.get(p, p) not in text]
    assert len(packages) > 8 and not unused
