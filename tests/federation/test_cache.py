"""The store: what is kept is found again; what is not ours is refused and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedstill.core.errors import DataError
from fedstill.core.records import Record
from fedstill.federation import cache as module
from fedstill.federation.cache import FolderCache
from fedstill.wire import codec


class Thing(Record):
    """Something worth keeping."""

    key: str
    numbers: Tensor


class Other(Record):
    """Something else."""

    words: str


def thing(key: str = "a", *numbers: float) -> Thing:
    return Thing(key, torch.tensor(numbers or (1.5, 2.5)))


def test_what_was_kept_is_found_again_bit_for_bit_by_another_store(tmp_path: Path) -> None:
    first = FolderCache(tmp_path / "deep" / "cache")
    assert first.find("a", Thing) is None
    first.keep("a", thing("a", 0.1, -0.0))
    found = FolderCache(tmp_path / "deep" / "cache").find("a", Thing)
    assert found is not None and found.key == "a"
    assert found.numbers.numpy().tobytes() == torch.tensor([0.1, -0.0]).numpy().tobytes()


def test_a_store_counts_what_it_found_and_what_was_made(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path)
    cache.find("a", Thing)
    cache.keep("a", thing("a"))
    cache.find("a", Thing)
    cache.find("b", Thing)
    cache.keep("b", thing("b"))
    assert (cache.found, cache.made) == (1, 2)


def test_a_key_that_is_there_already_stays_as_it_is(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path)
    cache.keep("a", thing("a", 1.0))
    cache.keep("a", thing("a", 2.0))
    found = cache.find("a", Thing)
    assert found is not None and found.numbers.tolist() == [1.0]
    assert cache.made == 1


@pytest.mark.parametrize("content", [b"", b"not a file of ours", b"\x00" * 64])
def test_a_broken_file_is_refused_by_name_and_not_overwritten(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    cache = FolderCache(tmp_path)
    with pytest.raises(DataError, match=r"a\.safetensors is not a Thing .*run\.cache_dir"):
        cache.find("a", Thing)
    cache.keep("a", thing())
    assert path.read_bytes() == content
    assert (cache.found, cache.made) == (0, 0)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path)
    cache.keep("a", thing())
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="delete it"):
        cache.find("a", Thing)


def test_a_record_of_another_kind_is_refused(tmp_path: Path) -> None:
    codec.save(Other("words"), tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="is not a Thing"):
        FolderCache(tmp_path).find("a", Thing)


def test_a_file_under_another_key_is_refused_and_left_alone(tmp_path: Path) -> None:
    FolderCache(tmp_path).keep("a", thing("a"))
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    with pytest.raises(DataError, match="made from other data or settings"):
        FolderCache(tmp_path).find("b", Thing)
    assert (tmp_path / "b.safetensors").exists()


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(DataError, match="is not a Thing"):
        FolderCache(tmp_path).find("a", Thing)


def test_a_folder_that_cannot_be_made_is_refused_before_the_work_and_not_after(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(DataError, match=r"cannot keep a result in .*file.*run\.cache_dir"):
            FolderCache(folder).find("a", Thing)
        with pytest.raises(DataError, match="cannot keep"):
            FolderCache(folder).keep("a", thing())


def test_a_folder_without_permission_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="no permission to write"):
        FolderCache(tmp_path).find("a", Thing)


def test_a_full_disk_is_told_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(record: Record, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.codec, "save", full)
    cache = FolderCache(tmp_path)
    with pytest.raises(DataError, match="No space left on device"):
        cache.keep("a", thing())
    assert list(tmp_path.iterdir()) == [] and cache.made == 0
