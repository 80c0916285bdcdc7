"""The systems that are measured do the same work and come to the same accuracy."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

import side_by_side
from side_by_side import Row, Skipped, System, export, measured_row, once
from systems import dm_stacked, dm_style, ours, pfllib_style, plain
from work import Work, load, network


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return export(tmp_path_factory.mktemp("data"), "digits5", 150, None)


def test_the_exported_split_is_that_of_fedstill(digits):
    found = load(digits["data"])
    assert len(found.rows) == 150 and sum(map(len, found.rows)) == len(found.train_y)
    assert abs(float(found.train_x.mean())) < 0.05
    assert found.of(3)[0].shape == (10, 3, 16, 16)


def test_every_loop_learns_alike(digits):
    work = Work("logistic", awake=10, rounds=6, lr=0.05, epochs=4, **digits)
    found = {
        "plain": plain.run(work),
        "pfllib": pfllib_style.run(work),
        "in_process": ours.run(work),
        "batched": ours.run(replace(work, engine="batched")),
    }
    for result in found.values():
        assert len(result["seconds"]) == 6
    reached = [result["accuracy"] for result in found.values()]
    assert max(reached) - min(reached) < 0.15  # a few rounds with few images differ
    assert found["in_process"]["accuracy"] == pytest.approx(found["batched"]["accuracy"], abs=0.02)


def test_fedstills_two_convolutions_compute_what_the_module_does(digits):
    module = network(Work("two-conv", awake=1, rounds=1, **digits))
    mine = ours.TwoConv((3, 16, 16), 10)
    weights = dict(zip(mine.initial(), module.state_dict().values(), strict=True))
    x = load(digits["data"]).test_x[:5]
    assert torch.allclose(mine(weights, x), module(x), atol=1e-6)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        name: law.shape for name, law in mine.initial().items()
    }


def test_an_empty_step_is_played_by_all(digits):
    work = Work("none", 3, 3, 2, epochs=0, floats=100)
    for system in (ours, plain, pfllib_style):
        found = system.run(work)
        assert len(found["seconds"]) == 2 and found["accuracy"] is None


def test_matching_loops_make_images_to_learn_from(tmp_path):
    data = export(tmp_path, "digits5", 1, None, size=32)
    work = Work(
        "convnet", awake=1, rounds=2, batch=4, per_class=1, width=4, epochs=1, **data
    )  # fmt: skip
    for system in (ours, dm_style, dm_stacked):
        found = system.run(work)
        assert len(found["seconds"]) == 1 and 0 <= found["accuracy"] <= 1


def test_a_system_that_is_not_installed_is_named_and_left_out(monkeypatch, capsys):
    monkeypatch.setitem(side_by_side.SYSTEMS, "flower", System("F", "flower", home="nowhere"))
    options = Namespace(systems=["flower"], seeds=2, device="cpu", limit=1)
    row = measured_row(Row("work", Work("none", 1, 1, 1)), options)
    assert row["systems"][0]["skipped"] == "not installed here; make bench-env installs it"
    assert "work · F · seed 0: not installed here" in capsys.readouterr().out


def test_what_would_not_fit_into_memory_is_not_started():
    with pytest.raises(Skipped, match="GB, too much here"):
        once(side_by_side.SYSTEMS["pfllib-style"], Work("none", 1, 1, 1), 10**18, 1)
