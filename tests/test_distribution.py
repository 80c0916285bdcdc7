"""The source distribution: what `make test` and `make demo` need is in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "constraints", "docker", "docs", "examples", "recipes", "src", "tests")
ELSEWHERE = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")


def test_the_source_distribution_holds_what_its_makefile_needs(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds the package")
    tree = tmp_path / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=ELSEWHERE)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    expected = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path / "built"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "built").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert expected - names == set()
