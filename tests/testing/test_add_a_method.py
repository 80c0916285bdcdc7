"""The page on adding a method: its blocks are a method that keeps the contract."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from fedstill.testing import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def test_the_method_of_the_page_keeps_the_contract(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    file = tmp_path / "fedmedian.py"
    file.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert f"FedMedian: 0 of {len(CHECKS)} broken" in done.stdout


def test_the_page_lists_every_check() -> None:
    listed = re.findall(r"^\| ([a-z][a-z -]*) \|", PAGE.read_text(), re.MULTILINE)
    assert listed == ["check", *CHECKS]
