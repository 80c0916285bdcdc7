"""The Python blocks of the README run one after the other, as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def test_the_blocks_run_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README, block {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "fedavg" in said and "feddm" in said
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()
    assert names["logits"].shape[1] == 10
    fedavg, feddm = names["runs"]
    assert min(run.summary["average_accuracy"] for run in (fedavg, feddm)) > 0.3  # chance is 0.1


def test_fifteen_lines_are_enough_for_the_first_block() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 15
