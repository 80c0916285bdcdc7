"""Other systems' own code: how it is found, split, played apart, and what it is set beside."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

import own_code
import profiles
import same_weights
from fedstill.commands.bench_work import BENCHMARKS
from fedstill.models import Conv4
from systems import beside, foreign, pfllib
from work import Work, load, write_split

WORK = Work("two-conv", 3, 3, 1, batch=10, data_name="digits5")


def test_a_package_that_is_not_here_is_stood_in_for_and_others_are_not():
    assert foreign.stood_in(["json", "no_such_package.inner"]) == ["no_such_package.inner"]
    from no_such_package.inner import anything

    assert anything is not None and not isinstance(sys.modules["json"], foreign.StandIn)
    from no_such_package.inner.deeper import more

    assert more is not None
    for name in ("no_such_package", "no_such_package.inner", "no_such_package.inner.deeper"):
        del sys.modules[name]


def test_what_was_found_in_a_copy_is_forgotten_afterwards(tmp_path):
    for copy, answer in (("one", 1), ("other", 2)):
        (tmp_path / copy).mkdir()
        (tmp_path / copy / "common_name.py").write_text(f"ANSWER = {answer}")
        with foreign.searched(tmp_path / copy):
            import common_name

            assert answer == common_name.ANSWER
    assert "common_name" not in sys.modules


def test_packages_without_a_file_are_forgotten_with_the_one_they_are_in(tmp_path):
    """As in a copy in which one folder has an __init__.py and the folders in it have none."""
    (tmp_path / "outer_name" / "bare").mkdir(parents=True)
    (tmp_path / "outer_name" / "__init__.py").write_text("")
    (tmp_path / "outer_name" / "bare" / "leaf.py").write_text("ANSWER = 7")
    for _ in range(2):  # the second time failed when `bare` was still known
        with foreign.searched(tmp_path):
            from outer_name.bare import leaf

            sys.modules["outer_name.added"] = ModuleType("outer_name.added")
            assert leaf.ANSWER == 7
        assert not [name for name in sys.modules if name.startswith("outer_name")]


def test_a_missing_copy_is_named(tmp_path):
    with pytest.raises(SystemExit, match="PFLlib is not there"):
        foreign.folder(replace(WORK, code=str(tmp_path)), "PFLlib")


@pytest.mark.parametrize(("examples", "most", "used"), [(57, 0, 50), (57, 40, 40), (7, 0, 10)])
def test_clients_hold_whole_batches(examples, most, used):
    assert beside.whole_batches(examples, replace(WORK, most=most)) == used


def test_both_sides_read_one_split(tmp_path):
    sites = beside.everybody(WORK).sites
    path = own_code.exported(WORK, tmp_path / "split.npz")
    held = load(str(path)).rows
    assert [len(rows) % 10 for rows in held] == [0, 0, 0]
    assert [rows.tolist() for rows in held] == [site.rows.tolist() for site in sites]


def test_without_alpha_the_split_is_even():
    held = [len(site.rows) for site in beside.everybody(replace(WORK, alpha=0.0)).sites]
    assert held[0] % 10 == 0 and max(held) - min(held) in (0, 10)


def test_files_of_a_split_are_written_once_for_all_seeds(tmp_path):
    work = replace(WORK, data=str(own_code.exported(WORK, tmp_path / "split.npz")))
    folder = pfllib.files(work)
    first = folder / "bench" / "train" / "0.npz"
    told = np.load(first, allow_pickle=True)["data"].tolist()  # as they do, of our own file
    assert told["y"].tolist() == load(work.data).of(0)[1].tolist()
    written = first.stat().st_mtime_ns
    assert pfllib.files(replace(work, seed=1)) == folder
    assert first.stat().st_mtime_ns == written


def played(monkeypatch, run, works, limit=20):
    system = ModuleType("systems.fake")
    system.VERSIONS, system.run = ("torch",), run
    monkeypatch.setitem(sys.modules, "systems.fake", system)
    return own_code.forked(own_code.Side("a fake", "fake", {}), works, limit)


def test_runs_are_answered_from_a_process_of_their_own(monkeypatch):
    works = [replace(WORK, seed=seed) for seed in (0, 1)]
    runs, why = played(monkeypatch, lambda work: {"seconds": [work.seed + 1.0]}, works)
    assert why is None and [run["seconds"] for run in runs] == [[1.0], [2.0]]


def test_what_failed_or_took_too_long_is_said_and_what_was_done_is_kept(monkeypatch):
    def failing(work):
        if work.seed:
            raise ValueError("no more")
        return {"seconds": [1.0]}

    works = [replace(WORK, seed=seed) for seed in (0, 1, 2)]
    runs, why = played(monkeypatch, failing, works)
    assert len(runs) == 1 and why == "ValueError: no more"
    runs, why = played(monkeypatch, lambda work: time.sleep(60), works, limit=1)
    assert runs == [] and why == "took more than 1 s"


def test_a_floor_counts_every_loop_of_a_round():
    sizes, device = BENCHMARKS["average"].small, torch.device("cpu")
    twice = replace(sizes, clients=2 * sizes.clients)
    counted = profiles.operations("average", sizes, device)
    assert counted > 0 and profiles.operations("average", twice, device) == 2 * counted
    assert profiles.floor("average", sizes, device).memory is None


def test_a_floor_counts_all_examples_of_a_batch(monkeypatch):
    """Networks of a rehearsal look at one example; those that are counted must not."""
    seen, whole = [], Conv4._stages

    def noted(model, weights, x, **options):
        seen.append(len(x))
        return whole(model, weights, x, **options)

    monkeypatch.setattr(Conv4, "_stages", noted)
    sizes = BENCHMARKS["lessons"].small
    assert profiles.operations("lessons", sizes, torch.device("cpu")) > 0
    assert max(seen) >= sizes.batch > 1


def test_where_nothing_is_drawn_a_round_is_one_step_along_the_mean_gradient(tmp_path):
    """A start less the rate times the mean of the clients' gradients, each of a whole set."""
    work = Work(
        "logistic", 2, 2, 1, batch=20, lr=0.1, data_name="digits5", data=str(tmp_path / "s.npz")
    )
    found = beside.everybody(work)
    split = replace(found, sites=tuple(replace(site, rows=site.rows[:20]) for site in found.sites))
    write_split(tmp_path / "s.npz", split.sites)
    model, examples = same_weights.start(work), load(work.data or "")
    for client in range(2):
        x, y = examples.of(client)
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
    by_hand = {n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters()}
    mine = same_weights.by_us(work, split)
    assert (
        same_weights.farthest(mine, by_hand)
        < 1e-6
        < same_weights.farthest(same_weights.start(work).state_dict(), by_hand)
    )
