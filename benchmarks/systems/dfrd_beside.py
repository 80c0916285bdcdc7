"""A round of DFRD's server, `released` preset: ten conv4 teachers that were trained before."""

from __future__ import annotations

from typing import Any

from fedstill import DFRD, SERVER, Conv4, Execution, Experiment, FedAvg, Inbox, Population
from fedstill.engines.engine import Engine
from fedstill.engines.execution import engine_of
from systems.beside import everybody
from work import Rounds, Work, accuracy

VERSIONS = ("torch", "numpy")
LOCAL_STEPS = 20


def experiment(work: Work) -> Experiment:
    """Clients with conv4 as the authors have it; the server as their code's defaults are."""
    data = everybody(work)
    base = FedAvg(round_steps=LOCAL_STEPS, batch_size=64, lr=0.05)
    changes = {"base": base, "iterations": work.epochs, "generator_batch": work.batch}
    method = DFRD(**{**DFRD.presets["released"], **changes})
    model = Conv4(data.shape, data.classes, last_pool=True)
    return Experiment(method, Population(data, model), seed=work.seed)


def sent(engine: Engine) -> Inbox[Any]:
    """What the clients send after their local steps: the same whoever is the server."""
    broadcast, update, _ = engine.experiment.method.each_round()
    down = engine.play(broadcast, 1, {SERVER: Inbox()})[SERVER].message
    clients = engine.population.clients
    heard: Any = {name: Inbox({SERVER: down}) for name in clients}
    return Inbox({name: got.message for name, got in engine.play(update, 1, heard).items()})


def run(work: Work) -> dict[str, object]:
    made = experiment(work)
    execution = Execution(work.engine, work.device, work.precision)
    engine = engine_of(made, execution)
    rounds = Rounds(work)
    with execution.applied(made.networks):
        inbox, aggregate = sent(engine), made.method.each_round()[2]
        for number in range(work.rounds):
            rounds.begin()
            engine.play(aggregate, 2 + number, {SERVER: inbox})
            rounds.end()
        weights: Any = engine.states[SERVER].scored.weights
        (model,) = set(made.networks)
        return rounds.result(accuracy(lambda x: model(weights, x), work))
