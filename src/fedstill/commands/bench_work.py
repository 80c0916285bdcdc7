"""The pieces of work that `fedstill bench` measures: methods, sizes, and clients who hold noise.

`matching` is distribution matching by the warm-up of virtual data, `local-step` and its like are
FedAvg's local training, `lessons` is the round of DFRD's server; `average`, `images`, `sets` and
`peers` are whole rounds of FedAvg, FedDM, FedDualMatch and DeSA, `scores` is an evaluation. The
data are noise: time does not depend on what is in a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fedstill.core.data import Data, Pool, Rows
from fedstill.core.method import Method
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Inbox
from fedstill.core.records import NodeId
from fedstill.core.seeds import generator
from fedstill.engines.engine import Engine
from fedstill.federation.population import Party, Population
from fedstill.federation.run import going_on, rounds_of
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.desa import DeSA
from fedstill.methods.dfrd import DFRD
from fedstill.methods.fedavg import Down, FedAvg
from fedstill.methods.feddm import FedDM
from fedstill.methods.feddualmatch import FedDualMatch
from fedstill.methods.virtual import Virtual
from fedstill.models import AlexNet, Conv4, ConvNet, PreResNet18, ResNet18, as_model

T = TypeVar("T")

SHAPE, CLASSES = (3, 32, 32), 10
GREY = (1, 28, 28)
FIRST_ROUND = 2  # in which DFRD's average generator teaches too

Unit = Literal["step", "server", "round", "scores"]
"""What one time is for: a step of a client, a server's whole step, a round, an evaluation."""


@dataclass(frozen=True)
class Sizes:
    """How much work one repetition is."""

    clients: int  # that are stacked by the batched engine, or played in turn; or teach
    width: int  # of the ConvNet; of the first layer of conv4
    batch: int  # examples of a step; in matching real ones of each class
    steps: int  # of the loop in one repetition; or turns of lessons
    per_class: int = 0  # synthetic images, in matching


@dataclass(frozen=True)
class Benchmark:
    """A piece of work at its full size and at one for a CPU or a quick look."""

    what: str  # that a time is for
    full: Sizes
    small: Sizes
    method: Callable[[Sizes], Method]
    alone: bool = False  # also measured for a single client
    unit: Unit = "step"
    network: Callable[[Sizes], Model] = lambda sizes: ConvNet(SHAPE, CLASSES, width=sizes.width)
    second: Callable[[Sizes], Model] | None = None  # of every other client
    once_through: bool = False  # clients pass once through all examples, whatever else they do
    classes_held: int = CLASSES  # at most: clients hold one to so many, in turn
    usual: bool = False  # whether it is measured when none is named

    def sizes(self, small: bool) -> Sizes:
        return self.small if small else self.full

    def crowd(self, sizes: Sizes, device: torch.device) -> Crowd:
        """The clients of this piece of work."""
        models = [self.network(sizes), *([self.second(sizes)] if self.second else [])]
        return Crowd.of(
            sizes, device, *models, held=self.classes_held, tested=self.unit == "scores",
            examples=sizes.batch * sizes.steps if self.once_through else None,
        )  # fmt: skip


def local_steps(title: str, network: Callable[[Sizes], Model]) -> Benchmark:
    """Local training of ten clients with another network."""
    return Benchmark(
        f"a local SGD step of a client with {title}",
        full=Sizes(clients=10, width=64, batch=64, steps=8),
        small=Sizes(clients=2, width=4, batch=4, steps=4),
        method=lambda sizes: FedAvg(batch_size=sizes.batch),
        network=network,
    )


def own_module(sizes: Sizes) -> Model:
    """A network as users write them: two convolutions, group norms and a linear layer."""
    width = sizes.width
    return as_model(
        nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, CLASSES),
        ), SHAPE, CLASSES,
    )  # fmt: skip


def two_convolutions(sizes: Sizes) -> Model:
    """The network of the side-by-side benchmark on CIFAR-10."""
    width = sizes.width
    return as_model(
        nn.Sequential(
            nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * width * 14 * 14, 4 * width), nn.ReLU(),
            nn.Linear(4 * width, CLASSES),
        ), SHAPE, CLASSES,
    )  # fmt: skip


def peers(unit: Unit, what: str) -> Benchmark:
    """DeSA of five peers with ConvNets and AlexNets; who made the anchors does not matter."""
    return Benchmark(
        what,
        full=Sizes(clients=5, width=128, batch=32, steps=232, per_class=50),
        small=Sizes(clients=2, width=4, batch=4, steps=4, per_class=1),
        method=lambda sizes: DeSA(
            anchors="generator", generator_width=8, per_class=sizes.per_class,
            batch_size=sizes.batch,
        ),
        unit=unit,
        once_through=True,
        second=lambda sizes: AlexNet(SHAPE, CLASSES, width=sizes.width),
    )  # fmt: skip


BENCHMARKS: dict[str, Benchmark] = {
    "matching": Benchmark(
        "an iteration of distribution matching of a client, 10 classes, augmented, "
        "under a fresh random network",
        full=Sizes(clients=4, width=128, batch=256, steps=50, per_class=50),
        small=Sizes(clients=2, width=16, batch=16, steps=8, per_class=5),
        method=lambda sizes: Virtual(
            sizes.per_class, sizes.steps, start="noise", real_batch=sizes.batch
        ),
        alone=True,
        usual=True,
    ),
    "local-step": Benchmark(
        "a local SGD step of a client",
        full=Sizes(clients=50, width=128, batch=32, steps=16),
        small=Sizes(clients=4, width=16, batch=32, steps=8),
        method=lambda sizes: FedAvg(batch_size=sizes.batch),
        usual=True,
    ),
    "small-step": Benchmark(
        "a local SGD step of a client with a small network",
        full=Sizes(clients=200, width=32, batch=10, steps=16),
        small=Sizes(clients=20, width=8, batch=10, steps=8),
        method=lambda sizes: FedAvg(batch_size=sizes.batch),
        usual=True,
    ),
    "lessons": Benchmark(
        "a round of DFRD's server: in each turn five steps of the generator and two of the "
        "student, with an average generator",
        full=Sizes(clients=10, width=64, batch=64, steps=10),
        small=Sizes(clients=3, width=4, batch=8, steps=2),
        method=lambda sizes: DFRD(
            base=FedAvg(round_steps=1, batch_size=sizes.batch), iterations=sizes.steps,
            generator_batch=sizes.batch, generator_width=8 * sizes.width,
        ),
        unit="server",
        network=lambda sizes: Conv4(SHAPE, CLASSES, widths=widths(sizes.width)),
        usual=True,
    ),
    "resnet18-step": local_steps(
        "a ResNet-18", lambda sizes: ResNet18(SHAPE, CLASSES)
    ),
    "preresnet18-step": local_steps(
        "a pre-activation ResNet-18",
        lambda sizes: PreResNet18(SHAPE, CLASSES, widths=widths(sizes.width)),
    ),
    "alexnet-step": local_steps(
        "an AlexNet", lambda sizes: AlexNet(SHAPE, CLASSES, width=2 * sizes.width)
    ),
    "conv4-step": local_steps(
        "conv4", lambda sizes: Conv4(SHAPE, CLASSES, widths=widths(sizes.width))
    ),
    "module-step": local_steps("a torch module of one's own", own_module),
    "average": Benchmark(
        "a round of FedAvg: fifty clients with two convolutions, from sending to the mean",
        full=Sizes(clients=50, width=32, batch=10, steps=5),
        small=Sizes(clients=4, width=4, batch=4, steps=4),
        method=lambda sizes: FedAvg(lr=0.1, batch_size=sizes.batch),
        unit="round",
        network=two_convolutions,
    ),
    "images": Benchmark(
        "a round of FedDM: ten clients match their images, the server trains on them",
        full=Sizes(clients=10, width=128, batch=256, steps=1000, per_class=10),
        small=Sizes(clients=2, width=4, batch=4, steps=4, per_class=1),
        method=lambda sizes: FedDM(
            per_class=sizes.per_class, steps=sizes.steps, real_batch=sizes.batch,
            server_epochs=-(-sizes.steps // 2),
        ),
        unit="round",
    ),
    "sets": Benchmark(
        "a round of FedDualMatch on grey images of 28x28: ten clients with one to three classes "
        "match their images, the server matches gradients and fine-tunes",
        full=Sizes(clients=10, width=128, batch=256, steps=200, per_class=10),
        small=Sizes(clients=3, width=4, batch=4, steps=4, per_class=1),
        method=lambda sizes: FedDualMatch(
            per_class=sizes.per_class, steps=sizes.steps, real_batch=sizes.batch,
            samplings=max(1, sizes.steps // 20), tune_epochs=5 * sizes.steps // 2,
        ),
        unit="round",
        network=lambda sizes: ConvNet(GREY, CLASSES, width=sizes.width),
        classes_held=3,
    ),
    "peers": peers("round", "a round of DeSA: five peers speak and learn, every other an AlexNet"),
    "scores": peers("scores", "an evaluation of five own models, each on five test sets"),
}  # fmt: skip


def widths(first: int) -> tuple[int, ...]:
    """Channels of the four layers of conv4, or of the four groups of a ResNet."""
    return (first, 2 * first, 4 * first, 8 * first)


Repetition = Callable[[int], object]


def repetition(engine: Engine, unit: Unit) -> Repetition:
    """What is timed, as a function of the repetition's number; all that comes before is done."""
    if unit in ("round", "scores"):
        round = rounds(engine)
        round(0)
        return round if unit == "round" else lambda number: list(engine.score(1))
    method, clients = engine.experiment.method, engine.population.clients
    if isinstance(method, Virtual):
        step, inboxes = method.warm_up, {name: Inbox[Any]() for name in clients}
        return lambda number: engine.play(step, FIRST_ROUND + number, inboxes)
    broadcast, update, aggregate = method.each_round()
    down = engine.play(broadcast, 0, {SERVER: Inbox()})[SERVER].message
    assert isinstance(down, Down)
    heard: Mapping[NodeId, Inbox[Any]] = {name: Inbox({SERVER: down}) for name in clients}
    if unit == "step":
        return lambda number: engine.play(update, FIRST_ROUND + number, heard)
    ups = {name: outcome.message for name, outcome in engine.play(update, 0, heard).items()}
    inbox = {SERVER: Inbox[Any](ups)}
    return lambda number: engine.play(aggregate, FIRST_ROUND + number, inbox)


def rounds(engine: Engine) -> Repetition:
    """A function that plays the next round each time; what comes before the first is done."""
    playing = rounds_of(engine, MemoryLog(), scored=False)
    waiting = [going_on(playing)]

    def play(number: int) -> None:
        act = waiting[0]
        assert act is not None
        round = act.round if act.round else 1
        while act is not None and act.round <= round:
            act = going_on(playing, engine.play(*act))
        waiting[0] = act

    return play


@dataclass(frozen=True, eq=False)
class Crowd(Population):
    """Clients who see the same noise, in an order of their own; of all classes or of a few."""

    examples: Sequence[Data]  # of the clients in turn
    kinds: Sequence[Model]  # of the clients in turn
    count: int
    device: torch.device

    tests: Sequence[Data] = ()  # of the clients in turn; none: nobody has any

    @classmethod
    def of(
        cls, sizes: Sizes, device: torch.device, *models: Model, examples: int | None = None,
        held: int = CLASSES, tested: bool = False,
    ) -> Crowd:  # fmt: skip
        """As much noise as a repetition reads once; in matching two batches of each class."""
        count = 2 * sizes.batch * CLASSES if sizes.per_class else sizes.batch * sizes.steps
        count = examples or count
        rng, shape = generator(0, "bench"), models[0].shape
        noise = torch.randint(256, (count, *shape), generator=rng, dtype=torch.uint8)
        labels = torch.arange(count) % CLASSES
        middle = torch.full((shape[0], 1, 1), 0.5)
        pool = Pool(noise, labels, middle, middle / 2).to(device)
        own = [
            Rows(pool, torch.nonzero((labels - first) % CLASSES < classes).flatten().to(device))
            for first, classes in holdings(held)
        ]
        tests = [Data((own[0],)) for _ in range(sizes.clients)] if tested else ()
        return cls([Data((rows,)) for rows in own], models, sizes.clients, device, tests)

    @property
    def clients(self) -> Sequence[NodeId]:
        return self._named

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return self._networks

    @cached_property
    def _named(self) -> Sequence[NodeId]:
        return [f"client-{number:03d}" for number in range(self.count)]

    @cached_property
    def _networks(self) -> Mapping[NodeId, Model]:
        return {name: _in_turn(self.kinds, at) for at, name in enumerate(self._named)}

    @cached_property
    def _held(self) -> Mapping[NodeId, Party]:
        return {
            name: Party(
                _in_turn(self.examples, at),
                _in_turn(self.tests, at) if self.tests else Data(),
                self._networks[name],
            )
            for at, name in enumerate(self._named)
        }

    def on(self, device: torch.device | str) -> Crowd:
        """It was made where it is needed."""
        return self

    def party(self, node: NodeId) -> Party:
        return Party(Data(), Data(), self.kinds[0]) if node == SERVER else self._held[node]


def holdings(most: int) -> list[tuple[int, int]]:
    """Of clients in turn the first class and how many: all classes, or one to so many."""
    if most >= CLASSES:
        return [(0, CLASSES)]
    return [(first, 1 + first % most) for first in range(CLASSES)]


def _in_turn(items: Sequence[T], place: int) -> T:
    return items[place % len(items)]
