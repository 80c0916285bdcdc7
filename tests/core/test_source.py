"""The digest of the code: what counts, what does not, and that a wheel has that of its source."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import fedstill
from fedstill.core import source
from fedstill.runs.session import standing

REPOSITORY = Path(__file__).parents[2]
FILES = {"__init__.py": "a = 1\n", "room/__init__.py": "", "room/work.py": "b = 2\nc = 3\n"}


def package(folder: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def test_equal_source_has_an_equal_digest_wherever_it_lies_and_in_whatever_order(
    tmp_path: Path,
) -> None:
    backwards = dict(reversed(FILES.items()))
    one, other = package(tmp_path / "a"), package(tmp_path / "far" / "b", backwards)
    assert source.digest_of(one) == source.digest_of(other)


@pytest.mark.parametrize(
    "beside",
    [
        {"__pycache__/work.cpython-311.pyc": "x", "room/__pycache__/work.cpython-311.pyc": "x"},
        {"recipes/mine.toml": "[run]\n", "py.typed": "", "room/page.html": "<p>"},
        {".scratch.py": "x", ".ipynb_checkpoints/work-checkpoint.py": "x"},
        {"room/work.py": "b = 2\r\nc = 3\r\n"},
    ],
)
def test_what_is_no_source_does_not_count(tmp_path: Path, beside: dict[str, str]) -> None:
    plain, other = package(tmp_path / "a"), package(tmp_path / "b", {**FILES, **beside})
    assert source.digest_of(plain) == source.digest_of(other)


@pytest.mark.parametrize(
    "altered",
    [
        {**FILES, "room/work.py": "b = 2\nc = 4\n"},
        {**FILES, "room/more.py": ""},
        {"__init__.py": "a = 1\n", "room/__init__.py": ""},
        {"__init__.py": "a = 1\n", "room/__init__.py": "", "room/other.py": "b = 2\nc = 3\n"},
        {"__init__.py": "a = 1\n", "room/__init__.py": "b = 2\nc = 3\n", "room/work.py": ""},
    ],
)
def test_another_content_or_name_or_file_is_another_digest(
    tmp_path: Path, altered: dict[str, str]
) -> None:
    plain, other = package(tmp_path / "a"), package(tmp_path / "b", altered)
    assert source.digest_of(plain) != source.digest_of(other)


def test_a_built_package_has_the_digest_of_its_source(tmp_path: Path) -> None:
    """What a wheel holds is what `build_py` makes; recipes are copied into it there."""
    pytest.importorskip("setuptools", reason="builds the package")
    tree = tmp_path / "tree"
    for name in ("src", "recipes"):
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, tree / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, tree)
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path / "built"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "built" / "fedstill"
    assert [*(built / "recipes").rglob("*.toml")] and (built / "__init__.py").exists()
    own = REPOSITORY / "src" / "fedstill"
    assert Path(fedstill.__file__).parent == own
    assert source.digest_of(built) == source.digest_of(own) == source.own_digest()


def test_a_plug_in_is_told_by_the_package_that_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "kept_pack")
    package(tmp_path / "shared_name" / "inner_pack")  # a folder that several packages share
    (tmp_path / "one_file.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)

    def told(module: str) -> str:
        return source.version_of(EntryPoint("x", f"{module}:X", "fedstill.methods"))

    whole = source.digest_of(tmp_path / "kept_pack")[: source.SHORT]
    assert told("kept_pack.room.work") == f"a plug-in (code {whole})"
    assert told("shared_name.inner_pack.room") == f"a plug-in (code {whole})"
    before = told("one_file")
    (tmp_path / "one_file.py").write_text("a = 2\n")
    assert told("one_file") != before


def test_ranks_compare_the_code_beside_the_version() -> None:
    assert standing("the data").versions.startswith(f"{source.own_version()}, torch ")
    assert source.own_digest()[: source.SHORT] in source.own_version()
