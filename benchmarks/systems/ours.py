"""fedstill, through its recipes and its one round loop, run folder and logbook included."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstill import recipe as config
from fedstill.core import Data, Inbox, Model, Node, Weights, at_clients
from fedstill.core.model import Initial, Initials, conv_initial, linear_initial
from fedstill.data import load
from fedstill.engines.execution import Execution, engine_of
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.federation.run import Progress
from fedstill.federation.run import run as play
from fedstill.logbook.writer import FolderLog
from fedstill.methods.fedavg import Down, FedAvg, Up
from fedstill.methods.virtual import Virtual
from fedstill.models import MODELS, ConvNet
from fedstill.runs import recipes as runs
from work import PIECES, Rounds, Work, trained_accuracy

VERSIONS = ("torch", "numpy")


def run(work: Work) -> dict[str, object]:
    if work.network == "none":
        return overhead(work)
    return matching(work) if work.per_class else averaging(work)


@dataclass(frozen=True)
class TwoConv(Model):
    """Two convolutions, pooling, a hidden layer; a network from outside of fedstill."""

    def initial(self) -> Initials:
        side = (self.shape[1] - 4) // 2
        return {
            **conv_initial("conv0", self.shape[0], 32, 3),
            **conv_initial("conv1", 32, 64, 3),
            **linear_initial("hidden", 64 * side * side, 128),
            **linear_initial("head", 128, self.classes),
        }

    def stages(self, weights: Weights, x: Tensor) -> list[Tensor]:
        first = F.relu(F.conv2d(x, weights["conv0.weight"], weights["conv0.bias"]))
        second = F.relu(F.conv2d(first, weights["conv1.weight"], weights["conv1.bias"]))
        pooled = F.max_pool2d(second, 2).flatten(1)
        last = F.relu(F.linear(pooled, weights["hidden.weight"], weights["hidden.bias"]))
        return [first, second, last]


def averaging(work: Work) -> dict[str, object]:
    """A whole run as `fedstill run` does it; evaluated and saved at the end, as the others."""
    models: dict[str, object] = {"name": "mlp", "hidden": []}
    if work.network == "two-conv":
        MODELS["two-conv"] = TwoConv
        models = {"name": "two-conv"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tables = {
            "run": {
                "name": "bench", "rounds": work.rounds, "seed": work.seed, "device": work.device,
                "evaluate_every": work.rounds, "checkpoint_every": work.rounds, "pictures": False,
                "cache_dir": str(folder / "cache"),
            },
            "data": {
                "name": work.data_name, "data_dir": work.data_dir, "seed": 0,
                "partition": {"kind": "iid", "clients": work.clients},
            },
            "models": models,
            "federation": {"sample": work.awake},
            "method": {
                "name": "fedavg", "lr": work.lr, "batch_size": work.batch, "epochs": work.epochs,
            },
            "engine": {"name": work.engine, "precision": work.precision},
        }  # fmt: skip
        if work.data_dir is None:
            del tables["data"]["data_dir"]
        (recipe,) = config.checked(tables)
        clock, reached = Rounds(work), [0.0]

        def watch(progress: Progress) -> None:
            if progress.round:
                clock.end()
                reached[0] = progress.score or 0.0
            if progress.round < work.rounds:
                clock.begin()

        runs.begin(recipe, folder / "run", watch)
    return clock.result(reached[0])


@dataclass(frozen=True)
class Travelling(Model):
    """Weights without a purpose."""

    floats_each: int = 1

    def initial(self) -> Initials:
        return {f"piece{i}": Initial((self.floats_each,), "zeros") for i in range(PIECES)}


@dataclass(frozen=True)
class Echo(FedAvg):
    """Averaging of weights that nobody trained."""

    @at_clients
    def update(self, client: Node[None], inbox: Inbox[Down]) -> Up:
        """Send back a copy of the weights."""
        return Up({name: piece.clone() for name, piece in inbox.only().weights.items()}, 1)


class Crowd(Population):
    """Clients without examples."""

    def __init__(self, clients: list[str], model: Model):
        self._names, self.model = clients, model
        self._own = dict.fromkeys(clients, model)

    @property
    def clients(self) -> list[str]:
        return self._names

    @property
    def models(self) -> dict[str, Model]:
        return self._own

    def on(self, device: object) -> Population:
        return self

    def party(self, node: str) -> Party:
        return Party(Data(), Data(), self.model)


def overhead(work: Work) -> dict[str, object]:
    """Rounds in which nothing is learned: delivery, counting, logbook and the mean are left."""
    model = Travelling((1,), 1, work.floats // PIECES)
    population = Crowd([f"client-{i:04d}" for i in range(work.clients)], model)
    experiment = Experiment(Echo(), population, rounds=work.rounds, seed=work.seed)
    execution = Execution(work.engine, work.device, threads=torch.get_num_threads())
    clock = Rounds(work)

    def watch(progress: Progress) -> None:
        if progress.round:
            clock.end()
        if progress.round < work.rounds:
            clock.begin()

    with tempfile.TemporaryDirectory() as folder, FolderLog(Path(folder)) as log:
        log.rewind(-1)
        with execution.applied(experiment.networks):
            play(engine_of(experiment, execution), log, watch=watch)
    return clock.result(None)


def matching(work: Work) -> dict[str, object]:
    """One client's warm-up of virtual data; `rounds` are iterations, timed together."""
    alone = {"kind": "iid", "clients": 1}
    everybody = load(work.data_name, data_dir=work.data_dir, size=32, partition=alone, seed=0)
    model = ConvNet(everybody.shape, everybody.classes, width=work.width)
    (name,) = (site.name for site in everybody.sites)
    population = Population(everybody, model)
    execution = Execution(work.engine, work.device, work.precision, threads=torch.get_num_threads())

    def made(steps: int) -> tuple[Tensor, Tensor]:
        method = Virtual(
            work.per_class, steps, start="noise", pixel_lr=work.pixel_lr,
            pixel_momentum=work.pixel_momentum, real_batch=work.batch,
        )  # fmt: skip
        engine = engine_of(Experiment(method, population, seed=work.seed), execution)
        engine.play(method.warm_up, 1, {name: Inbox()})
        return engine.states[name].as_set().flat()

    with execution.applied([model]):
        made(10)  # what is prepared once
        clock = Rounds(work)
        clock.begin()
        images, labels = made(work.rounds)
        clock.end()
    return clock.result(trained_accuracy(images, labels, work, work.epochs))
