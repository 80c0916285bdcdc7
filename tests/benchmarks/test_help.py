"""Scripts that are asked for help print it and do nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["flops", "page", "sites_namespaces", "sites_trials"])
def test_a_script_that_is_asked_for_help_prints_it_alone(name: str) -> None:
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}.py [-h]")
