"""Several federations beside each other: each is what it would be alone."""

from __future__ import annotations

import pytest

import worlds
from fedstill.engines.execution import Execution
from fedstill.engines.play.together import Together
from fedstill.federation.experiment import Experiment
from fedstill.federation.run import rounds_of, run_together
from fedstill.federation.sampling import Sample
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import METHODS

SIZES = ((20, 27, 23), (12, 30, 9), (25, 8, 16))


def experiments(name: str, rounds: int = 2, **options: object) -> list[Experiment]:
    """The same method on other data, with other seeds."""
    kind = METHODS[name]
    method = kind(**kind.presets["small"])
    return [
        worlds.experiment(method, worlds.pictures(sizes), rounds, seed=seed, **options)
        for seed, sizes in enumerate(SIZES)
    ]


def together(made: list[Experiment], engine: str) -> list[MemoryLog]:
    playing = Together(made, Execution(device="cpu", engine=engine))
    logs = [MemoryLog() for _ in made]
    run_together(playing, [rounds_of(*pair) for pair in zip(playing.engines, logs, strict=True)])
    return logs


def numbers(log: MemoryLog) -> dict[tuple[object, ...], float]:
    return {
        (row.round, row.step, row.node, row.name, row.target): row.value
        for row in log.metrics
        if row.name != "seconds"
    }


@pytest.mark.parametrize("name", ["fedavg", "desa", "feddm"])
def test_federations_together_are_bit_for_bit_what_they_are_alone(name: str) -> None:
    rounds = 2 if name == "fedavg" else 1
    made = experiments(name, rounds)
    for experiment, log in zip(made, together(made, "in_process"), strict=True):
        world, seed = experiment.population, experiment.seed
        _, plain = worlds.played(experiment.method, world, rounds, seed=seed)
        assert numbers(log) == numbers(plain)


def test_stacks_over_federations_agree_with_single_ones() -> None:
    made = experiments("fedavg")
    for experiment, log in zip(made, together(made, "batched"), strict=True):
        _, plain = worlds.played(experiment.method, experiment.population, 2, seed=experiment.seed)
        assert numbers(log) == pytest.approx(numbers(plain), abs=1e-4)


def test_federations_whose_clients_sleep_otherwise_keep_their_own_steps() -> None:
    made = experiments("fedavg", 3, sampling=Sample(count=1))
    awake = [[experiment.awake(round) for round in (1, 2, 3)] for experiment in made]
    assert awake[0] != awake[1]
    for experiment, log in zip(made, together(made, "in_process"), strict=True):
        _, plain = worlds.played(
            experiment.method, experiment.population, 3, seed=experiment.seed,
            sampling=Sample(count=1),
        )  # fmt: skip
        assert numbers(log) == numbers(plain)


def test_without_scores_nothing_is_evaluated() -> None:
    made = experiments("fedavg", 1)
    playing = Together(made, Execution(device="cpu"))
    logs = [MemoryLog() for _ in made]
    pairs = zip(playing.engines, logs, strict=True)
    run_together(playing, [rounds_of(engine, log, scored=False) for engine, log in pairs])
    assert not [row for log in logs for row in log.metrics if row.name == "accuracy"]
    assert all(engine.memory("server") is not None for engine in playing.engines)
