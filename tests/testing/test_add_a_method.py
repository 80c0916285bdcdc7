"""The page on adding a method: its blocks are a method that keeps the contract."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from fedstill.testing import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


def test_the_method_of_the_page_keeps_the_contract(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    file = tmp_path / "fedmedian.py"
    file.write_text("\n".join(blocks))
    runpy.run_path(str(file), run_name="__main__")
    assert f"FedMedian: 0 of {len(CHECKS)} broken" in capsys.readouterr().out


def test_the_page_lists_every_check() -> None:
    listed = re.findall(r"^\| ([a-z][a-z -]*) \|", PAGE.read_text(), re.MULTILINE)
    assert listed == ["check", *CHECKS]
