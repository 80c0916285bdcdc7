"""`import fedstill` gives the names people need, and nothing is imported before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedstill
from fedstill.methods import METHODS
from fedstill.models import MODELS

STUB = Path(fedstill.__file__).with_suffix(".pyi").read_text()


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_fedstill_imports_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, fedstill\n"
        "assert len(dir(fedstill)) > 80\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert python(code) == "set()\n"


def test_type_checkers_see_the_names_that_there_are() -> None:
    seen: dict[str, set[str]] = {}
    for statement in ast.walk(ast.parse(STUB)):
        if isinstance(statement, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in statement.names}
            seen.setdefault(statement.module or "", set()).update(names)
    homes = {room: set(names.split()) for room, names in fedstill._HOMES.items()}
    assert seen == {**homes, "fedstill": set(fedstill._ROOMS)}


@pytest.mark.parametrize("name", fedstill.__all__)
def test_every_name_can_be_had_and_says_what_it_is(name: str) -> None:
    found = getattr(fedstill, name)
    assert name in dir(fedstill)
    if isinstance(found, type) or callable(found):
        assert (found.__doc__ or "").strip()


def test_every_method_network_and_partition_of_ours_is_there_by_its_class() -> None:
    for table in (METHODS, MODELS, fedstill.PARTITIONS, fedstill.TOPOLOGIES):
        for kind in table.values():
            assert getattr(fedstill, kind.__name__) is kind


def test_rooms_can_be_asked_for_and_an_unknown_name_is_told_with_the_nearest() -> None:
    assert "accuracy" in fedstill.metrics.METRICS
    assert callable(fedstill.testing.check)
    assert fedstill.__version__
    with pytest.raises(AttributeError, match="has no attribute 'FedAvgg'; did you mean 'FedAvg'"):
        fedstill.FedAvgg  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'SCAFFOLD'; did you mean 'Scaffold'"):
        fedstill.SCAFFOLD  # noqa: B018


def test_a_script_with_an_unknown_name_is_told_the_nearest_once() -> None:
    script = [sys.executable, "-c", "import fedstill; fedstill.MOON"]
    told = subprocess.run(script, capture_output=True, text=True, timeout=60).stderr
    assert told.casefold().count("did you mean") == 1
