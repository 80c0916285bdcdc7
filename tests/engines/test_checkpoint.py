"""A run can be stopped at any instruction and goes on from the last complete checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import files
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.records import State, Weights
from fedstill.engines import checkpoint
from fedstill.engines.checkpoint import DamagedCheckpoint, latest, read, read_latest, write


class Memory(State):
    weights: Weights
    rounds: int


class Other(State):
    number: float


KINDS: dict[str, type[State]] = {"Memory": Memory, "Other": Other}


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


def memory(round: int) -> Memory:
    return Memory({"a.weight": torch.full((2,), float(round))}, round)


def write_round(folder: Path, round: int, **options: Any) -> Path:
    states = {"server": memory(round), "c1": Other(round / 3), "c2": None}
    return write(folder, round, states, digest="d", **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(saved: checkpoint.Saved | None, round: int) -> None:
    assert saved is not None
    assert saved.round == round
    server, client = saved.states["server"], saved.states["c1"]
    assert isinstance(server, Memory)
    assert isinstance(client, Other)
    assert (server.rounds, server.weights["a.weight"].tolist()) == (round, [round, round])
    assert client.number == round / 3
    assert saved.states["c2"] is None


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write_round(tmp_path / "run" / "checkpoints", 12, extra={"best": [0.5, None]})
    assert path.name == "round-00012"
    assert names(path) == ["c1.safetensors", "checkpoint.json", "server.safetensors"]
    assert latest(path.parent) == path
    saved = read(path, KINDS, digest="d")
    assert_holds(saved, 12)
    assert saved.extra == {"best": [0.5, None]}
    assert saved.notes == []
    assert list(saved.states) == ["server", "c1", "c2"]


def test_memories_can_be_named_by_node(tmp_path: Path) -> None:
    path = write_round(tmp_path, 1)
    assert_holds(read(path, lambda node: Memory if node == "server" else Other, digest=None), 1)
    with pytest.raises(RunFolderError, match=r"'server' remembers Memory, .* expects Other"):
        read(path, lambda node: Other, digest="d")
    with pytest.raises(RunFolderError, match="expects nothing of that name; resume with"):
        read(path, {"Memory": Memory}, digest="d")


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for round in range(1, 6):
        write_round(tmp_path, round, keep=2)
    assert names(tmp_path) == ["round-00004", "round-00005"]
    write_round(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["round-00006"]


def test_later_checkpoints_outlive_an_earlier_round_written_again(tmp_path: Path) -> None:
    for round in (3, 4):
        write_round(tmp_path, round)
    write_round(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["round-00002", "round-00003", "round-00004"]


def test_rounds_are_ordered_by_number(tmp_path: Path) -> None:
    for round in (99_999, 100_000):
        write_round(tmp_path, round)
    assert latest(tmp_path) == tmp_path / "round-100000"


def test_drafts_left_behind_are_ignored_and_removed(tmp_path: Path) -> None:
    write_round(tmp_path, 1)
    shutil.copytree(tmp_path / "round-00001", tmp_path / "round-00007.partial")
    (tmp_path / "round-00002.partial").mkdir()
    assert latest(tmp_path) == tmp_path / "round-00001"
    write_round(tmp_path, 2)
    assert names(tmp_path) == ["round-00001", "round-00002"]


def test_a_round_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 1, {"server": Other(0.0)}, digest="old")
    write_round(tmp_path, 1)
    assert names(tmp_path) == ["round-00001"]
    assert_holds(read_latest(tmp_path, KINDS, digest="d"), 1)


# Killed at any instruction


Situation = Callable[[Path], int]


def one_before(folder: Path) -> int:
    write_round(folder, 2, keep=1)
    return 2


def two_before_and_a_draft(folder: Path) -> int:
    write_round(folder, 1)
    write_round(folder, 2)
    shutil.copytree(folder / "round-00002", folder / "round-00003.partial")
    return 2


def the_same_round_before(folder: Path) -> int:
    write_round(folder, 3, keep=1)
    return 3


def the_same_round_set_aside(folder: Path) -> int:
    write_round(folder, 3, keep=1)
    os.rename(folder / "round-00003", folder / "round-00003.replaced")
    return 3


SITUATIONS = [
    one_before, two_before_and_a_draft, the_same_round_before, the_same_round_set_aside,
]  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "rmdir", "mkdir"])
def test_a_kill_at_any_system_call_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Situation, call: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    real = getattr(os, call)
    for number in count():
        folder = tmp_path / str(number)
        before = situation(folder)
        left = number

        def dying(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, dying)
            finished = plays(partial(write_round, folder, 3, keep=1))
        assert_usable(folder, before)
        if finished:
            assert number > 0 or call in ("unlink", "rmdir")
            return


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_kill_at_any_line_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Situation
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    template, folder = tmp_path / "template", tmp_path / "run"
    before = situation(template)
    shutil.copytree(template, folder)
    changing = lines_that_change(folder)
    assert_usable(folder, before)
    assert len(changing) > 10
    for number in changing:
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        child = os.fork()
        if child == 0:
            write_and_die(folder, number)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == DIED
        assert_usable(folder, before)


DIED = 9


def lines_that_change(folder: Path) -> list[int]:
    """After how many lines of writing round 3 the folder is another than a line before.

    A kill at any other line leaves on the disk what a kill at one of these leaves.
    """
    changing, held = [], None

    def look(number: int) -> None:
        nonlocal held
        found = on_disk(folder)
        if found != held:
            held = found
            changing.append(number)

    with line_by_line(look):
        write_round(folder, 3, keep=1)
    return changing


def on_disk(folder: Path) -> list[tuple[str, int, int]]:
    """Every file and folder with its size and the time it was changed."""
    states = [(str(path), path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(name, state.st_size, state.st_mtime_ns) for name, state in states]


def write_and_die(folder: Path, lines: int) -> None:
    """Write round 3, but end this process without any tidying after so many lines."""

    def die(number: int) -> None:
        if number == lines:
            os._exit(DIED)

    try:
        with line_by_line(die):
            write_round(folder, 3, keep=1)
        os._exit(0)
    finally:
        os._exit(1)


@contextmanager
def line_by_line(act: Callable[[int], None]) -> Iterator[None]:
    """Act before every line of what writes checkpoints, told how many there were."""
    sources = {checkpoint.__file__, files.__file__, shutil.__file__}
    number = count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in sources:
            return None
        if event == "line":
            act(next(number))
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


def plays(act: Callable[[], Any]) -> bool:
    try:
        act()
    except Killed:
        return False
    return True


def assert_usable(folder: Path, before: int) -> None:
    """The old checkpoint or the new one is there, and whatever bears such a name is whole."""
    for path in folder.glob("round-*"):
        if not path.name.endswith(".partial"):
            read(path, KINDS, digest="d")
    saved = read_latest(folder, KINDS, digest="d")
    assert saved is not None
    assert saved.round in (before, 3)
    assert_holds(saved, saved.round)
    assert saved.notes == []


def test_a_run_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_round(tmp_path, 1)

    def dying(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        assert not plays(lambda: write_round(tmp_path, 2))
    assert names(tmp_path) == ["round-00001", "round-00002.partial"]
    write_round(tmp_path, 2)
    assert names(tmp_path) == ["round-00001", "round-00002"]
    assert_holds(read_latest(tmp_path, KINDS, digest="d"), 2)


# What cannot be read


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm, reason",
    [
        (lambda path: flip(path / "server.safetensors"), "server.safetensors is not what was"),
        (lambda path: (path / "c1.safetensors").unlink(), "c1.safetensors is missing"),
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json is missing"),
        (lambda path: (path / "checkpoint.json").write_text("{"), "is damaged: checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text("[]"), "is damaged: checkpoint.json"),
        (
            lambda path: (path / "checkpoint.json").write_text('{"format": 1, "round": 2}'),
            "lacks what a checkpoint lists",
        ),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    write_round(tmp_path, 1)
    harm(write_round(tmp_path, 2))
    with pytest.raises(DamagedCheckpoint, match=reason):
        read(tmp_path / "round-00002", KINDS, digest="d")
    saved = read_latest(tmp_path, KINDS, digest="d")
    assert_holds(saved, 1)
    assert saved is not None
    [note] = saved.notes
    assert "round-00002" in note
    assert reason in note


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    for round in (1, 2):
        flip(write_round(tmp_path, round) / "c1.safetensors")
    with pytest.raises(RunFolderError, match=r"every .* new folder\n(.*round-00002.*)\n(.*1)"):
        read_latest(tmp_path, KINDS, digest="d")


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    assert read_latest(tmp_path, KINDS, digest="d") is None


def test_another_experiment_is_refused(tmp_path: Path) -> None:
    path = write_round(tmp_path, 1)
    with pytest.raises(RunFolderError, match=r"belongs to another experiment .*digest d, .* has e"):
        read(path, KINDS, digest="e")
    with pytest.raises(RunFolderError, match="give this run a new folder"):
        read_latest(tmp_path, KINDS, digest="e")
    assert_holds(read(path, KINDS, digest=None), 1)


def test_another_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = write_round(tmp_path, 1)
    index = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**index, "format": 9}))
    with pytest.raises(RunFolderError, match="format 9, this fedstill reads format 1; resume with"):
        read_latest(tmp_path, KINDS, digest="d")


def test_a_memory_with_other_fields_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1, {"server": Other(1.0)}, digest="d")
    changed = type("Other", (State,), {"__annotations__": {"count": int}})
    with pytest.raises(RunFolderError, match="intact, but was written by other code: Other"):
        read(path, {"Other": changed}, digest="d")


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match=r"round 1 to .*file.round-00001: .*; check that"):
        write_round(tmp_path / "file", 1)


def test_a_full_disk_is_an_error_about_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_round(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFolderError, match="No space left on device; check"):
            write_round(tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "round-00001"


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="extra must be what JSON can hold"):
        write_round(tmp_path / "run", 1, extra={"thing": object()})
    with pytest.raises(BadValue, match="keep = 0 must be at least 1"):
        write_round(tmp_path / "run", 1, keep=0)
    assert not (tmp_path / "run").exists()


# Names of nodes


ODD = [
    "a/b", "../up", ".", "", "a b", "A", "a", "%41", "é", "日本", "a\nb", "nul\0",
    "x" * 300, "🙂" * 90,
]  # fmt: skip


def test_nodes_may_have_any_name(tmp_path: Path) -> None:
    states = {name: Other(float(i)) for i, name in enumerate(ODD)}
    path = write(tmp_path / "run", 1, states, digest="d")
    assert names(tmp_path) == ["run"]
    assert len(names(path)) == len(ODD) + 1
    saved = read(path, KINDS, digest="d")
    assert {name: vars(state)["number"] for name, state in saved.states.items()} == {
        name: float(i) for i, name in enumerate(ODD)
    }


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.text(max_size=16))
def test_a_file_name_gives_the_node_back(node: str) -> None:
    name = checkpoint.file_name(node)
    assert unquote(name.removesuffix(".safetensors")) == node
    assert name == name.lower()
    assert not set(name) & set("/\\:\0 ")


# What is still the same is not written again


def grown(folder: Path, rounds: int, **options: Any) -> Path:
    """Checkpoints of a run in which the server and one of three clients change in each round."""
    base, states = None, {f"c{i}": Other(float(i)) for i in range(3)}
    changed = {"server", *states}
    for round in range(1, rounds + 1):
        states |= {"server": Other(10.0 * round), f"c{round % 3}": Other(float(round))}  # type: ignore[dict-item]
        changed |= {"server", f"c{round % 3}"}
        base = write(folder, round, states, digest="d", base=base, changed=changed, **options)
        changed = set()
    assert base is not None
    return base


def numbers(path: Path) -> dict[str, float]:
    saved = read(path, KINDS, digest="d")
    return {node: state.number for node, state in saved.states.items() if isinstance(state, Other)}


def test_unchanged_memories_share_the_file_of_the_checkpoint_before(tmp_path: Path) -> None:
    path = grown(tmp_path, 5, keep=2)
    assert numbers(path) == {"c0": 3.0, "c1": 4.0, "c2": 5.0, "server": 50.0}
    before = path.with_name("round-00004")
    shared = {file.name for file in path.glob("*.safetensors") if file.samefile(before / file.name)}
    assert shared == {"c0.safetensors", "c1.safetensors"}
    shutil.rmtree(before)
    assert numbers(path)["c0"] == 3.0


def test_where_files_cannot_be_shared_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refusing)
        path = grown(tmp_path / "apart", 5)
    assert numbers(path) == numbers(grown(tmp_path / "shared", 5))


@pytest.mark.parametrize("harm", ["c1.safetensors", "checkpoint.json"])
def test_what_the_checkpoint_before_lacks_is_written(tmp_path: Path, harm: str) -> None:
    base = grown(tmp_path, 2)
    (base / harm).unlink()
    states = {"server": Other(1.0), "c1": Other(2.0), "c3": Other(4.0)}
    path = write(tmp_path, 3, states, digest="d", base=base, changed={"server"})
    assert numbers(path) == {"server": 1.0, "c1": 2.0, "c3": 4.0}
    path = write(tmp_path, 4, states, digest="d", base=tmp_path / "nowhere")
    assert numbers(path) == {"server": 1.0, "c1": 2.0, "c3": 4.0}


@pytest.mark.parametrize("call", ["link", "fsync", "replace", "unlink"])
def test_a_kill_while_files_are_shared_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    real = getattr(os, call)
    for number in count():
        folder, left = tmp_path / str(number), number
        base = grown(folder, 2, keep=1)

        def dying(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **options)

        states = {**{f"c{i}": Other(float(i)) for i in range(3)}, "server": Other(0.5)}
        with monkeypatch.context() as patch:
            patch.setattr(os, call, dying)
            finished = plays(
                partial(write, folder, 3, states, digest="d", keep=1, base=base, changed={"server"})
            )
        saved = read_latest(folder, KINDS, digest="d")
        assert saved is not None and saved.notes == [] and saved.round in (2, 3)
        if finished:
            assert saved.round == 3 and number > 0
            return


def test_nodes_without_memory_are_listed_and_older_lists_are_read(tmp_path: Path) -> None:
    path = write_round(tmp_path, 1)
    index = json.loads((path / "checkpoint.json").read_text())
    assert index["blank"] == ["c2"] and "c2" not in index["nodes"]
    del index["blank"]
    index["nodes"]["c2"] = {"file": None, "sha256": None, "state": None}
    (path / "checkpoint.json").write_text(json.dumps(index))
    assert_holds(read(path, KINDS, digest="d"), 1)
    (path / "checkpoint.json").write_text(json.dumps({**index, "blank": [3]}))
    with pytest.raises(DamagedCheckpoint, match="lacks what a checkpoint lists"):
        read(path, KINDS, digest="d")


def test_memories_are_read_into_a_given_place(tmp_path: Path) -> None:
    write_round(tmp_path, 1)
    flip(write_round(tmp_path, 2) / "c1.safetensors")
    place: dict[str, State | None] = {"stranger": None}
    saved = read_latest(tmp_path, KINDS, digest="d", into=place)
    assert saved is not None and saved.states is place
    assert saved.path == tmp_path / "round-00001"
    assert_holds(saved, 1)
    assert "stranger" not in place
