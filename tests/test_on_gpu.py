"""make test-gpu: what it runs, and its one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import on_gpu

ROOT = Path(__file__).resolve().parent.parent


def test_the_one_line_has_counts_commit_and_device() -> None:
    lines = ["....", "FAILED tests/a.py::b", "= 1 failed, 3 passed, 2 skipped in 9.1s ="]
    assert on_gpu.any_failed(lines)
    assert on_gpu.summary(lines, "abc", "a card") == (
        "GPU tests at abc on a card: 1 failed, 3 passed, 2 skipped in 9.1s"
    )
    assert on_gpu.summary([], "abc", "a card").endswith("nothing was counted")


def test_what_is_left_out_exists() -> None:
    assert all((ROOT / "tests" / name).exists() for name in on_gpu.LEFT_OUT)
    words = on_gpu.command(["tests/core"], workers=3)
    assert "no:benchmark" in words
    assert words[-1] == "tests/core" and "--ignore=tests/sites" in words and "3" in words


def test_it_ends_with_its_line_and_with_the_code_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_kept(): pass\ndef test_broken(): assert 1 == 2\n")
    words = ["on_gpu.py", "--workers", "1", "--without-gpu", str(tests)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        on_gpu.main()
    failed, line = capsys.readouterr().out.strip().splitlines()
    assert end.value.code == 1 and "test_two.py::test_broken" in failed
    assert line.startswith("GPU tests at ") and "1 failed, 1 passed in " in line


def test_at_its_limit_it_tells_what_was_counted_by_then() -> None:
    """Here a program that ends as pytest does when it is interrupted."""
    program = "\n".join([
        "import time",
        "try: time.sleep(60)",
        "except KeyboardInterrupt: print('1 passed in 3s'); exit(2)",
    ])  # fmt: skip
    lines, code, stopped = on_gpu.played([sys.executable, "-c", program], limit=3)
    assert (lines, code, stopped) == (["1 passed in 3s"], 2, True)
    assert on_gpu.played([sys.executable, "-c", "print(1)"], limit=60) == (["1"], 0, False)
