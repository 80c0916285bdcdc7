"""docs/architecture.md is true to the tree: rooms, files, and every name it speaks of."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from test_imports import ROOMS

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "fedstill"
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
TODAY, _, MOVED = PAGE.partition("## What moved where")
FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|css|js|csv|json)")
PLAIN = {"True", "await", "import", "best_"}  # of the language, and the beginning of names


def marked(text: str) -> list[str]:
    """What stands between backticks in a text, blocks of code left out."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def rows(title: str) -> list[list[str]]:
    """The cells of the table whose head begins with these words."""
    _, _, rest = PAGE.partition(f"| {title} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def whole_code() -> str:
    """The two rounds that the page follows from call to call."""
    _, _, followed = TODAY.partition("## Two rounds, followed")
    return followed.partition("```")[2].partition("```")[0]


@cache
def source() -> tuple[frozenset[str], dict[str, set[str]]]:
    """Every word of the code, and the members of each class with those of its bases."""
    words: set[str] = set()
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        words |= {*file.relative_to(SOURCE).parts[:-1], file.stem}
        for found in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match found:
                case ast.ClassDef():
                    words.add(found.name)
                    bases[found.name] |= {ast.unparse(base).split("[")[0] for base in found.bases}
                    members[found.name] |= own_members(found)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    words.add(found.name)
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                    words.add(word)
                case ast.Constant(value=str(text)) if len(text) < 60:
                    words |= set(re.findall(r"\w+", text))
    for name in list(members):
        above = list(bases[name])
        while above:
            base = above.pop()
            members[name] |= members.get(base, set())
            above += bases.get(base, ())
    return frozenset(words), members


def own_members(kind: ast.ClassDef) -> set[str]:
    found = set()
    for inner in ast.walk(kind):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                found.add(name)
    return found


def unknown(told: str) -> list[str]:
    """The names of a piece of code that the source does not have."""
    words, members = source()
    wrong = []
    for name in re.findall(r"[A-Za-z_][\w.]*", told):
        parts = [part for part in name.split(".") if part and part not in PLAIN]
        missing = [part for part in parts if part not in words]
        if len(parts) == 2 and parts[0] in members and parts[1] not in members[parts[0]]:
            missing.append(name)
        wrong += missing
    return wrong


@cache
def tree() -> tuple[str, ...]:
    """Paths of all files and folders, from the repository's."""
    places = ("src", "docs", "tests", "recipes", "benchmarks", "examples")
    found = [path for place in places for path in (REPOSITORY / place).rglob("*")]
    return tuple(f"/{path.relative_to(REPOSITORY)}" for path in found)


def exists(path: str) -> bool:
    """Whether a file or folder is there, by the end of its path."""
    return any(found.endswith(f"/{path.rstrip('/')}") for found in tree())


def test_every_room_of_the_tree_has_its_place_on_the_page():
    rooms = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    _, _, told = TODAY.partition("## The rooms")
    named = set(marked(told.partition("\n## ")[0]))
    assert "core" in rooms and rooms - named == set()


@pytest.mark.parametrize("row", rows("room"), ids=lambda row: row[0].strip("`"))
def test_a_room_may_import_what_the_page_says(row):
    room, said = row[0].strip("`"), row[2]
    told = set(marked(said))
    if "all above" in said:
        order = [other[0].strip("`") for other in rows("room")]
        told = set(order[: order.index(room)]) - told
    assert told == ROOMS[room][0] - {room}


def test_every_file_of_runs_is_told_and_there():
    told = {row[0].strip("`") for row in rows("file of `runs`")}
    assert told == {file.name for file in (SOURCE / "runs").glob("[!_]*.py")}


def test_files_and_folders_that_the_page_names_are_there():
    words, _ = source()
    told = [name for name in marked(TODAY) if FILE.fullmatch(name) or name.endswith("/")]
    missing = [name for name in told if not exists(name)]
    written = [name for name in missing if set(re.findall(r"\w+", name)) <= words]  # by a run
    assert len(told) > 40 and sorted(set(missing) - set(written)) == []


@pytest.mark.parametrize("gone", ["engines/lanes.py", "parts/synthesis.py", "no_such_room/"])
def test_a_file_that_is_not_there_is_noticed(gone):
    assert not exists(gone)


def test_names_that_the_page_speaks_of_are_in_the_code():
    told = [name for name in marked(TODAY) if not FILE.fullmatch(name) and "/" not in name]
    assert len(told) > 300 and [name for name in told if unknown(name)] == []


def test_functions_of_the_rounds_followed_are_in_the_code():
    told = re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", whole_code())
    called = {name for name in told if "." in name or "_" in name}
    assert len(called) > 25 and [name for name in sorted(called) if unknown(name)] == []


@pytest.mark.parametrize("wrong", ["FedDM.no_such_step", "no_such_function", "Method.no_such_part"])
def test_a_name_that_is_not_there_is_noticed(wrong):
    assert unknown(wrong)


def test_what_moved_has_left_its_place_and_is_where_the_page_says():
    moved = rows("before")
    assert len(moved) > 30
    for before, now in moved:
        renamed = re.findall(r"`([^`]+)` is `", now)
        for name in marked(now):
            if FILE.fullmatch(name) or name.endswith("/"):
                assert exists(name) or name in renamed, name
            else:
                assert not unknown(name), name
        left = marked(before)
        if " in " not in before and all(FILE.fullmatch(name) for name in left):  # whole files
            assert [name for name in left if "/" in name and (SOURCE / name).exists()] == []
