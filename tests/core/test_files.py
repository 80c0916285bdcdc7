"""A file is there whole or as it was, whatever fails in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedstill.core import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "a.txt", "größer")
    files.write_whole(tmp_path / "b.bin", b"\x00\xff")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "größer"
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["a.txt", "b.bin"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_draft(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_whole(tmp_path / "a", "old")

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", broken)
        with pytest.raises(OSError, match="disk full"):
            files.write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_secret_is_for_its_owner_alone_and_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="disk full"):
            files.write_secret(tmp_path / "key", b"one")
    assert names(tmp_path) == []
    files.write_secret(tmp_path / "key", b"two")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        files.write_secret(tmp_path / "key", b"three")
    assert (tmp_path / "key").read_bytes() == b"two" and names(tmp_path) == ["key"]


def test_whoever_fails_while_writing_changes_nothing(tmp_path: Path) -> None:
    files.write_whole(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "a") as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_until_it_is_complete_the_old_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_whole(path, "old")
    with files.replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
        draft = next(name for name in names(tmp_path) if name != "a")
    assert path.read_text() == "new"
    assert files.is_draft(draft)


def test_what_a_kill_left_is_replaced_by_the_next_writer(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a") as file:
        file.write(b"ne")
        file.flush()
        (draft,) = names(tmp_path)
    (tmp_path / draft).write_bytes(b"left by a kill")
    files.write_whole(tmp_path / "a", "new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "new"


def test_several_processes_do_not_write_into_one_draft(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a", by_several=True):
        (draft,) = names(tmp_path)
    assert files.is_draft(draft) and str(os.getpid()) in draft


def test_only_drafts_are_taken_for_drafts() -> None:
    assert files.is_draft(".recipe.toml.123.draft") and files.is_draft(".recipe.toml.draft")
    assert not any(map(files.is_draft, ["recipe.toml", "recipe.toml.draft", ".hidden"]))


def test_what_is_written_through_and_its_folder_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(handle) or fsync(handle))
    files.write_through(tmp_path / "a", b"data")
    files.sync_folder(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"data"
    assert len(synced) == 2
