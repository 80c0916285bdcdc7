"""Names of a recipe: ours, plug-ins of installed packages, references to code of one's own."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from fedstill.core import names
from fedstill.core.errors import BadValue
from fedstill.core.names import Names, absolute, is_reference, referred, short, subclass_fault


class Animal:
    """What the names of these tests stand for."""


class Dog(Animal):
    """The one that stands in the table."""


ANIMALS: Names[type[Animal]] = Names("animal", {"dog": Dog}, "zoo.animals", subclass_fault(Animal))

CAT = """
import core.test_names as known
from helper_of_{stem} import SOUND

class Cat(known.Animal):
    "A cat."
    sound = SOUND

class Inside:
    class Cat(known.Animal): pass

cats = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pets.py"
    path.write_text(CAT.format(stem="pets").replace("core.test_names", __name__))
    (tmp_path / "helper_of_pets.py").write_text("SOUND = 'miau'\n")
    return path


@pytest.fixture(autouse=True)
def _clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)
    sys.modules.pop("helper_of_pets", None)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, points: str) -> None:
    """A package with entry points, as pip leaves it."""
    (folder / "zoo_pack.py").write_text(
        f"import {__name__} as known\nclass Wolf(known.Animal):\n    'A wolf.'\n"
    )
    info = folder / "zoo_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[zoo.animals]\n{points}\n")
    if str(folder) not in sys.path:
        monkeypatch.syspath_prepend(folder)


def test_a_name_of_the_table_is_found_and_found_again() -> None:
    assert ANIMALS["dog"] is Dog and ANIMALS.name_of(Dog) == "dog"
    with pytest.raises(BadValue, match="unknown animal 'dgo'; did you mean 'dog'"):
        ANIMALS["dgo"]


def test_a_class_of_a_file_is_loaded_once_and_may_import_its_neighbours(file: Path) -> None:
    reference = f"{file}:Cat"
    cat = ANIMALS[reference]
    assert cat.sound == "miau"  # type: ignore[attr-defined]
    assert ANIMALS[f"{file.parent}/../{file.parent.name}/pets.py:Cat"] is cat, "one file, one type"
    assert ANIMALS.name_of(cat) == reference
    assert sys.modules[cat.__module__].__file__ == str(file)
    assert referred(f"{file}:Inside.Cat").__qualname__ == "Inside.Cat"


def test_a_class_of_a_package_is_found_by_its_module() -> None:
    assert ANIMALS[f"{__name__}:Dog"] is Dog


LOOSE = """from dataclasses import dataclass

@dataclass(frozen=True)
class Frozen:
    pass

@dataclass
class Cat(Frozen):
    pass
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{folder}/none.py:Cat", "no file .*none.py; a reference is path/file.py:Class"),
        ("{folder}/pets.py:Cats", "pets.py: unknown name 'Cats'; did you mean 'Cat'"),
        ("{folder}/pets.py:cats", "pets.py:cats is a int, not a subclass of .*Animal"),
        ("{folder}/pets.py:Inside", "is the class Inside, not a subclass of .*Animal"),
        ("{folder}/broken.py:Cat", "run: ZeroDivisionError: division by zero in line 2$"),
        ("{folder}/loose.py:Cat", r"frozen one in line 7; write @dataclass\(frozen=True\) there"),
        (
            "{folder}/pets.py",
            "pets.py is a file; say which animal in it is meant, as .*pets.py:NAME",
        ),
        ("{folder}/wrong.py:Cat", "wrong.py cannot be run: SyntaxError"),
        ("no_such_package.zoo:Cat", "no_such_package.zoo cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_with_a_reference_is_said_in_one_line(
    file: Path, name: str, sentence: str
) -> None:
    (file.parent / "broken.py").write_text("\n1 / 0\n")
    (file.parent / "loose.py").write_text(LOOSE)
    (file.parent / "wrong.py").write_text("class\n")
    name = name.format(folder=file.parent)
    with pytest.raises(BadValue, match=sentence) as caught:
        ANIMALS[name]
    assert "\n" not in str(caught.value) and ANIMALS.wrong(name) == str(caught.value)


def test_a_file_that_could_not_be_run_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text("1 / 0\n")
    with pytest.raises(BadValue, match="cannot be run"):
        referred(f"{path}:x")
    path.write_text("x = 5\n")
    assert referred(f"{path}:x") == 5


def test_references_to_files_are_made_to_mean_the_same_from_anywhere() -> None:
    here = Path("/some/where")
    assert absolute("nets.py:Net", here) == "/some/where/nets.py:Net"
    assert absolute("../nets.py:Net", here) == "/some/nets.py:Net"
    assert absolute("/else/nets.py:Net", here) == "/else/nets.py:Net"
    for other in ("fedavg", "package.module:Net", "a text: with a colon", "cuda:0"):
        assert absolute(other, here) == other
    assert short("/a/nets.py:Net") == "Net" and short("fedavg") == "fedavg"
    assert is_reference("a.b:C") and not is_reference("a.b") and not is_reference("cuda:0")


def test_packages_are_looked_into_once_until_one_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    looked: list[str] = []

    def counted(*, group: str) -> Any:
        looked.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(names, "entry_points", counted)
    os.utime(tmp_path, ns=(1, 1))
    assert ANIMALS.known() == ANIMALS.known() == ["dog"] and looked == ["zoo.animals"]
    installed(tmp_path, monkeypatch, "wolf = zoo_pack:Wolf")
    assert ANIMALS.known() == ["dog", "wolf"] and len(looked) == 2


def test_a_plug_in_is_listed_by_its_package_and_loaded_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "wolf = zoo_pack:Wolf")
    assert "zoo_pack" not in sys.modules and ANIMALS.known() == ["dog", "wolf"]
    assert "zoo_pack" not in sys.modules, "names alone load nothing"
    wolf = ANIMALS["wolf"]
    assert issubclass(wolf, Animal) and ANIMALS.name_of(wolf) == "wolf"
    listed = {line.name: (line.source, line.value) for line in ANIMALS.listed()}
    assert listed == {"dog": ("fedstill", Dog), "wolf": ("zoo-pack", wolf)}
    sys.modules.pop("zoo_pack")


def test_a_broken_plug_in_is_named_and_breaks_no_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = "bear = zoo_pack:Bear\ncart = os:sep\ndog = zoo_pack:Wolf\nghost = no_such:Thing"
    installed(tmp_path, monkeypatch, points)
    faults = {line.name: line.fault for line in ANIMALS.listed() if line.fault}
    assert set(faults) == {"bear", "cart", "dog", "ghost"}
    assert "plug-in 'bear' of zoo-pack cannot be loaded: AttributeError" in str(faults["bear"])
    assert "ghost' of zoo-pack cannot be loaded: ModuleNotFoundError" in str(faults["ghost"])
    assert "is a str, not a subclass" in str(faults["cart"])
    assert "the name is fedstill's own" in str(faults["dog"]) and ANIMALS["dog"] is Dog
    with pytest.raises(BadValue, match="cannot be loaded"):
        ANIMALS["ghost"]
    sys.modules.pop("zoo_pack", None)
