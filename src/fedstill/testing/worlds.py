"""Tiny federations, which play a method in a moment; no randomness without a name.

from fedstill.testing import worlds

engine, log = worlds.played(FedAvg(lr=0.1), worlds.pictures(), rounds=2)
print([row.value for row in log.metrics if row.name == "accuracy"])
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from fedstill.core import Data, Method, Model, NodeId, Pool
from fedstill.core.data import Rows
from fedstill.core.loop import Loop, Several
from fedstill.core.node import SERVER
from fedstill.core.seeds import generator
from fedstill.engines.engine import autograd_gradient
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.budget import calibrated
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.federation.run import run
from fedstill.federation.topology import Complete
from fedstill.logbook.writer import MemoryLog
from fedstill.models import MLP, ConvNet

CLASSES = 3
E = TypeVar("E", bound=InProcess)


@dataclass
class World(Population):
    """A population that stands in memory."""

    parties: dict[NodeId, Party]
    server_model: Model
    public: Data = field(default_factory=Data)

    @property
    def clients(self) -> Sequence[NodeId]:
        return list(self.parties)

    @property
    def models(self) -> Mapping[NodeId, Model]:
        return {name: party.model for name, party in self.parties.items()}

    @property
    def common_test(self) -> Data | None:
        sets = {id(party.test): party.test for party in self.parties.values()}
        return next(iter(sets.values())) if len(sets) == 1 else None

    def on(self, device: torch.device | str) -> World:
        """The same federation with its data on a device."""
        if torch.device(device).type == "cpu":
            return self
        moved = {
            name: Party(party.data.to(device), party.test.to(device), party.model)
            for name, party in self.parties.items()
        }
        return World(moved, self.server_model, self.public.to(device))

    def party(self, node: NodeId) -> Party:
        return Party(Data(), Data(), self.server_model) if node == SERVER else self.parties[node]


def examples(name: str, count: int, shape: tuple[int, ...], classes: Sequence[int]) -> Data:
    """Points around one centre per class, the same centres for everybody."""
    rng = generator(0, "examples", name)
    centres = 2.0 * torch.randn(CLASSES, *shape, generator=generator(0, "centres"))
    y = torch.tensor(list(classes))[torch.randint(len(classes), (count,), generator=rng)]
    x = centres[y] + 0.7 * torch.randn(count, *shape, generator=rng)
    return Data.of(x, y)


def vectors(sizes: Sequence[int] = (20, 27, 23, 30), *, mixed: bool = False) -> World:
    """Clients of unequal size in four dimensions; the first one lacks a class."""
    models = [MLP((4,), CLASSES, hidden=(8,), activation="tanh")] * len(sizes)
    if mixed:
        models[1::2] = [MLP((4,), CLASSES, hidden=(5,), activation="tanh")] * len(models[1::2])
    parties = {}
    for i, (size, model) in enumerate(zip(sizes, models, strict=True)):
        held = [0, 1] if i == 0 else [0, 1, 2]
        name = f"c{i}"
        test = examples(f"{name} test", 40, (4,), [0, 1, 2])
        parties[name] = Party(examples(name, size, (4,), held), test, model)
    return World(parties, models[0], public=Data.unlabelled(around("public", 24, (4,))))


def pictures(sizes: Sequence[int] = (20, 27, 23), **options: object) -> World:
    """Clients with 1x8x8 images stored as bytes, a small ConvNet, one class missing somewhere.

    All training images lie in one pool, as those of a set that was partitioned do.
    """
    model = ConvNet((1, 8, 8), CLASSES, depth=2, width=4, **options)  # type: ignore[arg-type]
    data, tests = [], []
    for i, size in enumerate(sizes):
        held = [0, 1] if i == 0 else [0, 1, 2]
        data.append(as_bytes(examples(f"p{i}", size, (1, 8, 8), held)))
        tests.append(as_bytes(examples(f"p{i} test", 40, (1, 8, 8), [0, 1, 2])))
    parties = {
        f"c{i}": Party(own, test, model)
        for i, (own, test) in enumerate(zip(in_one_pool(data), tests, strict=True))
    }
    public = as_bytes(Data.of(around("public", 24, (1, 8, 8)), torch.zeros(24))).parts[0].pool
    return World(parties, model, public=Data.unlabelled(public.stored, public.mean, public.std))


def around(name: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Points around the centres of all classes, without saying which."""
    return examples(name, count, shape, range(CLASSES)).all().x


def as_bytes(data: Data) -> Data:
    """The same examples stored as bytes with a mean and a deviation."""
    x, y = data.all()
    stored = ((x / 12 + 0.5) * 255).round().clamp(0, 255).to(torch.uint8)
    return Pool(stored, y, torch.tensor(0.5), torch.tensor(1 / 4)).all()


def in_one_pool(sets: Sequence[Data]) -> list[Data]:
    """The same sets as rows of one pool, where each was a pool that is normalised alike."""
    pools = [data.parts[0].pool for data in sets]
    stored = torch.cat([pool.stored for pool in pools])
    labels = torch.cat([pool.labels for pool in pools])
    whole = Pool(stored, labels, pools[0].mean, pools[0].std)
    rows = torch.split(torch.arange(len(stored)), [len(pool.stored) for pool in pools])
    return [Data((Rows(whole, own),)) for own in rows]


def alone(data: Data) -> Data:
    """The same examples in pools that hold nobody else's."""
    own = [Pool(p.stored[rows], p.labels[rows], p.mean, p.std) for p, rows in data.parts]
    return Data(tuple(part for pool in own for part in pool.all().parts))


def experiment(method: Method, world: World, rounds: int = 4, **options: Any) -> Experiment:
    """Everybody takes part and hears everybody."""
    options.setdefault("topology", Complete())
    return Experiment(method, world, rounds=rounds, **options)


def engine_for(
    method: Method,
    world: World,
    engine: Callable[..., E] = InProcess,  # type: ignore[assignment]
    rounds: int = 4,
    **options: Any,
) -> E:
    """An engine on the host that has not played yet; options are its own or the experiment's."""
    own = {k: options.pop(k) for k in ("absences", "cache") if k in options}
    named = {f.name for f in fields(Execution)}
    switches = {k: options.pop(k) for k in list(options) if k in named}
    execution = Execution(**{"device": "cpu", **switches})
    made = calibrated(experiment(method, world, rounds, **options), execution)
    return engine(made, execution, **own)


def played(
    method: Method,
    world: World,
    rounds: int = 4,
    engine: Callable[..., E] = InProcess,  # type: ignore[assignment]
    **options: Any,
) -> tuple[E, MemoryLog]:
    """The engine and the logbook after some rounds; options are those of `engine_for`."""
    log, observers = MemoryLog(), options.pop("observers", ())
    playing = engine_for(method, world, engine, rounds, **options)
    run(playing, log, observers=observers)
    return playing, log


def finished(steps: Coroutine[Any, Any, Any]) -> Any:
    """What an awaiting function returns, each of its loops run batch by batch."""
    answer = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            return end.value
        several = isinstance(asked, Several)
        answers = [_played(loop) for loop in (asked.loops if several else (asked,))]
        answer = answers if several else answers[0]


def _played(loop: Loop[Any]) -> Any:
    carry = loop.carry
    for batch in loop.batches:
        carry, _ = loop.body(carry, loop.given, batch, autograd_gradient)
    return carry
