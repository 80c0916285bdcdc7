"""Memories beyond a limit lie on disk and come back as they were; results do not notice."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import worlds
from fedstill.core.errors import BadValue, RunFolderError
from fedstill.core.node import SERVER
from fedstill.core.records import State, Weights
from fedstill.engines.memories import Memories
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.sampling import Sample
from fedstill.methods import METHODS
from fedstill.testing import small

EACH = 40  # bytes of one memory


class Own(State):
    weights: Weights


def own(value: float) -> Own:
    return Own({"a": torch.full((EACH // 4,), float(value))})


def value(state: State | None) -> float:
    assert isinstance(state, Own)
    return float(state.weights["a"][0])


def filled(folder: Path, limit: int | None, clients: int = 5) -> Memories:
    made = Memories(limit)
    made.folder = folder
    for i in range(clients):
        made[f"c{i}"] = own(i)
    return made


def test_without_a_limit_memories_are_the_very_objects(tmp_path: Path) -> None:
    made, one = filled(tmp_path / "asleep", None), own(7)
    made["c1"] = one
    assert made["c1"] is one
    assert made.asleep == []
    assert not (tmp_path / "asleep").exists()


def test_those_used_longest_ago_leave_and_come_back(tmp_path: Path) -> None:
    made = filled(tmp_path, 2 * EACH)
    assert made.asleep == ["c0", "c1", "c2"]
    assert len(list(tmp_path.iterdir())) == 3
    assert value(made["c0"]) == 0
    assert made.asleep == ["c1", "c2", "c3"]
    assert list(made) == ["c0", "c1", "c2", "c3", "c4"]
    assert [value(state) for state in made.values()] == [0, 1, 2, 3, 4]


def test_what_comes_back_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    odd = Own({"a": torch.tensor([-0.0, float("nan"), float("inf"), 1e-45]), "n": torch.tensor(3)})
    made = Memories(0)
    made.folder = tmp_path
    made["c0"], made["c1"] = odd, own(1)
    assert made.asleep == ["c0"]
    back = made["c0"]
    assert isinstance(back, Own) and back is not odd
    for name, tensor in odd.weights.items():
        assert back.weights[name].dtype == tensor.dtype
        assert back.weights[name].numpy().tobytes() == tensor.numpy().tobytes()


class Holding(State):
    """Holds another memory, of a kind that its hint leaves open."""

    base: State


def test_a_memory_that_holds_another_comes_back_with_it(tmp_path: Path) -> None:
    made = Memories(limit=0)
    made.folder = tmp_path
    made["c0"], made["c1"] = Holding(own(3.0)), Holding(own(4.0))
    assert made.asleep == ["c0"]
    again = made["c0"]
    assert isinstance(again, Holding) and value(again.base) == 3.0


def test_the_server_and_the_one_used_last_stay_whatever_their_size(tmp_path: Path) -> None:
    made = Memories(0)
    made.folder = tmp_path
    for node in (SERVER, "c0", "c1"):
        made[node] = own(1)
    assert made.asleep == ["c0"]


def test_looking_at_memories_writes_nothing_again(tmp_path: Path) -> None:
    made = filled(tmp_path, 0)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 4
    for _ in range(3):
        assert [value(state) for state in made.values()] == [0, 1, 2, 3, 4]
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(after) == 5 and before.items() <= after.items()


def test_a_new_memory_takes_the_place_of_a_file(tmp_path: Path) -> None:
    made = filled(tmp_path, 0)
    made["c1"] = own(9)
    made["c2"] = None
    assert value(made["c1"]) == 9 and made["c2"] is None
    del made["c0"]
    assert list(made) == ["c1", "c2", "c3", "c4"]
    made.clear()
    assert len(made) == 0 and not list(tmp_path.iterdir())


def test_those_whose_memory_was_set_are_known(tmp_path: Path) -> None:
    made = filled(tmp_path, EACH)
    assert made.changed == {"c0", "c1", "c2", "c3", "c4"}
    made.changed.clear()
    made["c4"] = made["c4"]
    assert value(made["c0"]) == 0 and made.changed == set()
    made["c3"] = own(8)
    assert made.changed == {"c3"}


def test_a_folder_of_its_own_is_gone_with_the_memories() -> None:
    made = Memories(0)
    made["c0"], made["c1"] = own(0), own(1)
    folder = made.folder
    assert folder is not None and len(list(folder.iterdir())) == 1
    del made
    gc.collect()
    assert not folder.exists()


def test_a_given_folder_is_emptied_before_and_after(tmp_path: Path) -> None:
    folder = tmp_path / "asleep"
    folder.mkdir()
    (folder / "0.safetensors").write_bytes(b"left by a kill")
    made = Memories(0)
    with pytest.raises(KeyboardInterrupt), made.spilling_to(folder):
        assert not folder.exists()
        made["c0"], made["c1"] = own(0), own(1)
        assert value(made["c0"]) == 0
        raise KeyboardInterrupt
    assert not folder.exists()


def test_faults_name_the_client_the_place_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = filled(tmp_path, 0)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFolderError, match=r"memory of c0, put aside in .*; resume the run"):
        made["c0"]
    (tmp_path / "file").write_text("in the way")
    made = Memories(0)
    made.folder, made["c0"] = tmp_path / "file", own(0)
    with pytest.raises(RunFolderError, match=r"memory of c0 aside .*raise engine.memory_limit"):
        made["c1"] = own(1)
    with pytest.raises(BadValue, match="memory_limit = -1: must be at least 0"):
        Memories(-1)


def memories(engine: InProcess) -> dict[str, dict[str, bytes]]:
    found = {}
    for node, state in engine.states.items():
        if state is not None:
            tensors = state.tensors().items()
            found[node] = {name: tensor.numpy().tobytes() for name, tensor in tensors}
    return found


def rows(log: Any) -> list[Any]:
    return [row for row in log.metrics if row.name != "seconds"]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_ends_alike_with_memories_on_disk(name: str) -> None:
    options = {"rounds": 3, "sampling": Sample(count=2)}
    plain, log = worlds.played(small(METHODS[name]), worlds.pictures(), **options)
    tight, tight_log = worlds.played(
        small(METHODS[name]), worlds.pictures(), memory_limit=0, **options
    )
    assert memories(plain) == memories(tight)
    assert rows(log) == rows(tight_log) and log.messages == tight_log.messages
    keeping = [n for n, state in plain.states.items() if state is not None and n != SERVER]
    assert len(tight.states.asleep) == max(0, len(keeping) - 1)


@pytest.mark.parametrize("name", ["scaffold", "local"])
@pytest.mark.parametrize("limit", [0, 1000])
def test_stacked_clients_end_alike_with_memories_on_disk(name: str, limit: int) -> None:
    world = worlds.vectors([10] * 12)
    options = {"rounds": 4, "sampling": Sample(count=5), "engine": Batched}
    plain, log = worlds.played(small(METHODS[name]), world, **options)
    tight, tight_log = worlds.played(small(METHODS[name]), world, memory_limit=limit, **options)
    assert memories(plain) == memories(tight)
    assert rows(log) == rows(tight_log)
    assert tight.states.asleep and tight.states.folder is not None
    assert os.listdir(tight.states.folder)
