"""Pulse: what is told inside a round, and that nothing is counted where nobody listens."""

from __future__ import annotations

import numpy as np
import pytest

from fedstill.core import pulse
from fedstill.core.pulse import Part, Pulse
from fedstill.data import Iid, split
from fedstill.engines.execution import Execution, engine_of
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.federation.run import run
from fedstill.logbook import MemoryLog
from fedstill.methods.fedavg import FedAvg
from fedstill.models import MLP


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(pulse, "APART", 0.0)


def test_items_stay_what_they_are_where_nobody_listens():
    items = [1, 2]
    assert pulse.counted(items) is items


def test_a_listener_hears_step_node_and_iteration():
    heard: list[Pulse] = []
    with pulse.heard_by(heard.append), pulse.working_on("match", 3):
        for _ in pulse.counted("ab"):
            list(pulse.counted(range(2), "iteration"))
    assert [beat.parts for beat in heard[:3]] == [
        (Part("", 1, 2),),
        (Part("", 1, 2), Part("iteration", 1, 2)),
        (Part("", 1, 2), Part("iteration", 2, 2)),
    ]
    assert {(beat.round, beat.step) for beat in heard} == {(3, "match")}
    assert str(heard[-1]) == "match 2/2, iteration 2/2"


def test_what_there_is_one_of_is_not_counted_in_words():
    assert str(Pulse(1, "train", (Part("", 1, 1), Part("iteration", 40, 500)))) == (
        "train iteration 40/500"
    )
    assert str(Pulse(1, "evaluate", ())) == "evaluate"


@pytest.mark.parametrize("engine", ["in_process", "batched"])
def test_a_round_tells_of_every_step_and_its_iterations(engine):
    data = split(np.eye(30, 4), np.arange(30) % 2, partition=Iid(3))
    experiment = Experiment(FedAvg(batch_size=4), Population(data, MLP), rounds=1)
    heard: list[Pulse] = []
    with pulse.heard_by(heard.append):
        run(engine_of(experiment, Execution(engine=engine, device="cpu")), MemoryLog())
    assert {"update", "evaluate"} <= {beat.step for beat in heard}
    assert any(part.name == "iteration" for beat in heard for part in beat.parts)
