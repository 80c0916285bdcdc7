"""What one engine has kept, another that rounds otherwise makes anew: runs do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import worlds
from fedstill.core import Inbox
from fedstill.engines.cached import rounding
from fedstill.engines.execution import Execution, threads
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.cache import FolderCache
from fedstill.methods import METHODS
from fedstill.testing import small
from fedstill.testing.closely import written

ON_HOST = Execution(device="cpu")


def warmed(
    name: str, kind: Any, cache: FolderCache | None, *clients: str, sizes: Any = (20, 27, 23)
) -> list[torch.Tensor]:
    """What c1, c2 and so on remember after the warm-up of some clients, or of all."""
    method, world = small(METHODS[name]), worlds.pictures(sizes)
    engine = worlds.engine_for(method, world, kind, cache=cache)
    engine.play(method.before()[0], 0, {c: Inbox() for c in clients or world.clients})
    return [item for state in engine.states.values() for item in state.tensors().values()]


@pytest.mark.parametrize("name", ["desa", "fedlgd"])
@pytest.mark.parametrize(("first", "second"), [(InProcess, Batched), (Batched, InProcess)])
def test_an_engine_does_not_find_what_another_made(
    name: str, first: Any, second: Any, tmp_path: Path
) -> None:
    warmed(name, first, FolderCache(tmp_path))
    again = FolderCache(tmp_path)
    found = warmed(name, second, again)
    assert all(map(torch.equal, found, warmed(name, second, None)))
    assert (again.made, again.found) == (3, 0)


@pytest.mark.parametrize("kind", [InProcess, Batched])
def test_the_same_engine_finds_what_it_made(kind: Any, tmp_path: Path) -> None:
    made = warmed("desa", kind, FolderCache(tmp_path))
    again = FolderCache(tmp_path)
    assert all(map(torch.equal, warmed("desa", kind, again), made))
    assert (again.made, again.found) == (0, 3)


@pytest.mark.parametrize("name", ["desa", "fedlgd"])
@pytest.mark.parametrize("kind", [InProcess, Batched])
def test_a_run_that_finds_its_sets_has_the_rows_of_one_that_makes_them(
    name: str, kind: Any, tmp_path: Path
) -> None:
    method, world = small(METHODS[name]), worlds.pictures()
    logs = [
        worlds.played(method, world, 1, kind, cache=cache)[1]
        for cache in (None, FolderCache(tmp_path), FolderCache(tmp_path))
    ]
    alone, made, found = (written(log) for log in logs)
    assert alone == made == found
    assert [row for row in found[1] if row.name == "loss" and row.round == 0]


def test_what_a_stack_made_is_not_what_a_client_makes_alone(tmp_path: Path) -> None:
    warmed("desa", Batched, FolderCache(tmp_path))
    alone = warmed("desa", Batched, FolderCache(tmp_path), "c1")
    assert all(map(torch.equal, alone, warmed("desa", Batched, None, "c1")))


@pytest.mark.parametrize("name", ["desa", "fedlgd"])
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_a_cache_that_holds_a_part_of_a_stack_changes_no_digit(
    name: str, missing: tuple[int, ...], tmp_path: Path
) -> None:
    """As a kill leaves it, or a run that plays beside this one."""
    made = warmed(name, Batched, FolderCache(tmp_path))
    files = sorted(tmp_path.iterdir())
    for number in missing:
        files[number].unlink()
    again = FolderCache(tmp_path)
    assert all(map(torch.equal, warmed(name, Batched, again), made))
    assert again.made == len(missing) and sorted(tmp_path.iterdir()) == files


def test_a_client_without_examples_does_not_keep_a_stack_from_finding_its_sets(
    tmp_path: Path,
) -> None:
    made = warmed("desa", Batched, FolderCache(tmp_path), sizes=(20, 0, 23))
    again = FolderCache(tmp_path)
    assert all(map(torch.equal, warmed("desa", Batched, again, sizes=(20, 0, 23)), made))
    assert (again.made, again.found) == (0, 2)


def test_for_the_keys_of_a_stack_everybody_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of clients each would look at thousands."""
    method, world = small(METHODS["desa"]), worlds.pictures()
    engine: Any = worlds.engine_for(method, world, Batched, cache=FolderCache(tmp_path))
    step, inboxes = method.before()[0], {client: Inbox() for client in world.clients}
    engine.begun(step, 0, inboxes)
    asked, party = [], engine.population.party

    def looked_at(name: str) -> Any:
        asked.append(name)
        return party(name)

    with monkeypatch.context() as patched:
        patched.setattr(engine.population, "party", looked_at)
        first = {engine.cache.key("set") for _ in range(9)}
    assert len(asked) <= len(world.clients) and len(first) == 1
    engine.begun(step, 0, {"c1": Inbox()})
    assert engine.cache.key("set") not in first  # others play now


def test_one_by_one_a_client_finds_its_set_whoever_else_takes_part(tmp_path: Path) -> None:
    warmed("desa", InProcess, FolderCache(tmp_path))
    again = FolderCache(tmp_path)
    warmed("desa", InProcess, again, "c1")
    assert (again.made, again.found) == (0, 1)


def test_threads_and_a_compiler_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {rounding(ON_HOST), rounding(replace(ON_HOST, compile=True))}
    with threads(torch.get_num_threads() + 1):
        told.add(rounding(ON_HOST))
    monkeypatch.setattr(torch, "__version__", "9.9")
    told.add(rounding(ON_HOST))
    assert len(told) == 4
    # On a CPU there is nothing to record, and one precision.
    assert rounding(replace(ON_HOST, record=False, precision="half")) == rounding(ON_HOST)
