"""The benchmark of populations runs as a reader would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "population.py"


def test_the_benchmark_prints_a_table_and_writes_every_number(tmp_path: Path) -> None:
    out = tmp_path / "population.json"
    options = "--populations 6 12 --awake 3 --rounds 3 --turns 1 --method scaffold"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split(), "--memory-limit", "0", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "| 12 / 6 |" in done.stdout
    result = json.loads(out.read_text())
    assert result["versions"].keys() >= {"fedstill", "python", "torch"}
    assert result["hardware"].keys() >= {"processor", "cores"}
    assert [run["clients"] for run in result["runs"]] == [6, 12]
    assert all(run["peak_megabytes"] > 50 for run in result["runs"])
    assert all(run["seconds_per_round"] > 0 for run in result["runs"])
