"""How fast fedstill is here: four pieces of work, played by its own methods and engines.

`matching` is distribution matching by the warm-up of virtual data, `local-step` and `small-step`
are FedAvg's local training, `lessons` is the round of DFRD's server. The data are noise: time does
not depend on what is in a picture. A time is that of a whole step of the method, divided by the
steps of its loop and the clients, so it holds all that a run pays: draws, batches, the loop, and
handing the result back. Of lessons it is that of the whole round.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedstill.core.data import Data, Pool, Rows
from fedstill.core.errors import BadValue, StepError, unknown
from fedstill.core.method import Method, Step
from fedstill.core.model import Model
from fedstill.core.node import SERVER, Inbox
from fedstill.core.precision import Precision
from fedstill.core.records import NodeId
from fedstill.core.seeds import generator
from fedstill.engines.engine import Engine
from fedstill.engines.execution import Execution, engine_of
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Party, Population
from fedstill.logbook.environment import environment
from fedstill.logbook.writer import write_json
from fedstill.methods.dfrd import DFRD
from fedstill.methods.fedavg import Down, FedAvg
from fedstill.methods.virtual import Virtual
from fedstill.models.conv4 import Conv4
from fedstill.models.convnet import ConvNet

SHAPE, CLASSES = (3, 32, 32), 10
FIRST_ROUND = 2  # in which DFRD's average generator teaches too


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
    at_server: bool = False  # a time is that of a server's whole round
    network: Callable[[Sizes], Model] = lambda sizes: ConvNet(SHAPE, CLASSES, width=sizes.width)

    def sizes(self, small: bool) -> Sizes:
        return self.small if small else self.full


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
    ),
    "local-step": Benchmark(
        "a local SGD step of a client",
        full=Sizes(clients=50, width=128, batch=32, steps=16),
        small=Sizes(clients=4, width=16, batch=32, steps=8),
        method=lambda sizes: FedAvg(batch_size=sizes.batch),
    ),
    "small-step": Benchmark(
        "a local SGD step of a client with a small network",
        full=Sizes(clients=200, width=32, batch=10, steps=16),
        small=Sizes(clients=20, width=8, batch=10, steps=8),
        method=lambda sizes: FedAvg(batch_size=sizes.batch),
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
        at_server=True,
        network=lambda sizes: Conv4(SHAPE, CLASSES, widths=widths(sizes.width)),
    ),
}  # fmt: skip


def widths(first: int) -> tuple[int, ...]:
    """Channels of the four layers of conv4."""
    return (first, 2 * first, 4 * first, 8 * first)


@dataclass(frozen=True)
class Case:
    """One way of doing the work."""

    engine: str
    record: bool  # replay recorded launches; on CUDA alone
    clients: int
    precision: Precision = "tf32"
    compile: bool = False  # the steps by torch's compiler

    def execution(self, device: torch.device) -> Execution:
        """This way, on a device; the number of threads stays as it is."""
        return Execution(
            engine=self.engine,
            device=str(device),
            precision=self.precision,
            threads=torch.get_num_threads(),
            record=self.record,
            compile=self.compile,
        )

    @property
    def title(self) -> str:
        words = [self.engine]
        words += ["recorded"] if self.record else []
        words += ["compiled"] if self.compile else []
        words += [self.precision] if self.precision != "tf32" else []
        return ", ".join(words)


@dataclass
class Measured:
    """The times of one case; `failed` says why there are none."""

    case: Case
    first_seconds: float | None = None  # of the repetition that is not counted
    seconds: list[float] = field(default_factory=list)  # of each repetition
    milliseconds: dict[str, float] = field(default_factory=dict)  # of one step of one client
    peak_bytes: int | None = None  # taken on the device, or held by the process on a CPU
    failed: str | None = None

    def as_dict(self) -> dict[str, Any]:
        named = {"title": self.case.title, **asdict(self.case)}
        return {**named, **{k: v for k, v in asdict(self).items() if k != "case"}}


def chosen(names: Sequence[str]) -> list[str]:
    """The names asked for, all of them when none is; a wrong one is refused."""
    wrong = [unknown("benchmark", name, BENCHMARKS) for name in names if name not in BENCHMARKS]
    if wrong:
        raise BadValue(wrong)
    return list(dict.fromkeys(names)) or list(BENCHMARKS)


def measured(
    name: str, device: torch.device, *, sizes: Sizes, repeat: int, compile: bool = False
) -> dict[str, Any]:
    """Every case of a benchmark, as it is written to a file."""
    benchmark = BENCHMARKS[name]
    facts = machine()  # before the work, so that the load is that of others
    found = [
        _timed(benchmark, case, replace(sizes, clients=case.clients), device, repeat)
        for case in cases(benchmark, sizes, device, compile)
    ]
    return {
        "benchmark": name,
        "what": benchmark.what,
        "device": str(device),
        "machine": facts,
        "settings": {
            **asdict(sizes),
            "shape": list(SHAPE),
            "classes": CLASSES,
            "network": benchmark.network(sizes).title,
            "repeat": repeat,
            "size": _size(benchmark, sizes),
        },
        "memory": "taken on the device" if device.type == "cuda" else "held by the process",
        "cases": [case.as_dict() for case in found],
    }


def _size(benchmark: Benchmark, sizes: Sizes) -> str:
    names = {benchmark.full: "full", benchmark.small: "small"}
    return names.get(sizes, "other")


def cases(
    benchmark: Benchmark, sizes: Sizes, device: torch.device, compile: bool = False
) -> list[Case]:
    """The ways to do the work: one node after another, the same recorded, all stacked."""
    if benchmark.at_server:  # one node, one loop at a time
        alone = [Case("in_process", False, sizes.clients)]
        if device.type == "cuda":
            alone.append(Case("in_process", True, sizes.clients))
        more = [replace(case, compile=True) for case in alone[-1:] if compile]
        halves = [replace(case, precision="half") for case in alone if case.record]
        return [*alone, *more, *halves]
    one_by_one = 1 if benchmark.alone else sizes.clients
    found = [Case("in_process", False, one_by_one)]
    # A single loop is not stacked: it would be the row above once more.
    stacked = Case("batched", False, sizes.clients)
    if device.type != "cuda":
        plain = [*found, stacked]
        return [*plain, *(replace(case, compile=True) for case in plain if compile)]
    fast = [
        Case("in_process", True, one_by_one),
        Case("streams", True, sizes.clients),
        replace(stacked, record=True),
    ]
    compiled = [replace(case, compile=True) for case in fast if compile]
    return [*found, stacked, *fast, *compiled, *(replace(case, precision="half") for case in fast)]


def _timed(
    benchmark: Benchmark, case: Case, sizes: Sizes, device: torch.device, repeat: int
) -> Measured:
    found = Measured(case)
    crowd = Crowd.of(sizes, device, benchmark.network(sizes))
    experiment = Experiment(benchmark.method(sizes), crowd)
    execution = case.execution(device)
    engine = engine_of(experiment, execution)
    try:
        with execution.applied(experiment.networks):
            step, inboxes = work_of(engine)
            _forget_peak(device)
            for number in range(repeat + 1):
                began = now(device)
                engine.play(step, FIRST_ROUND + number, inboxes)
                seconds = now(device) - began
                if number:
                    found.seconds.append(seconds)
                else:
                    found.first_seconds = seconds
    except StepError as error:
        found.failed = str(error).split("\n")[0]
        found.seconds.clear()
        return found
    parts = 1 if benchmark.at_server else sizes.steps * sizes.clients
    each = [1000 * seconds / parts for seconds in found.seconds]
    found.milliseconds = {
        "median": statistics.median(each),
        "lowest": min(each),
        "highest": max(each),
    }
    found.peak_bytes = _peak(device)
    return found


def work_of(engine: Engine) -> tuple[Step, Mapping[NodeId, Inbox[Any]]]:
    """The step that is timed, and what the clients have heard before it."""
    method, clients = engine.experiment.method, engine.population.clients
    if isinstance(method, Virtual):
        return method.warm_up, {name: Inbox() for name in clients}
    broadcast, update, aggregate = method.each_round()
    down = engine.play(broadcast, 0, {SERVER: Inbox()})[SERVER].message
    assert isinstance(down, Down)
    heard = {name: Inbox({SERVER: down}) for name in clients}
    if isinstance(method, FedAvg):
        return update, heard
    ups = {name: outcome.message for name, outcome in engine.play(update, 0, heard).items()}
    return aggregate, {SERVER: Inbox(ups)}


@dataclass(frozen=True, eq=False)
class Crowd(Population):
    """Clients who all see the same noise, in an order of their own."""

    examples: Data
    model: Model
    count: int
    device: torch.device

    @classmethod
    def of(cls, sizes: Sizes, device: torch.device, model: Model) -> Crowd:
        """As much noise as a repetition reads once; in matching two batches of each class."""
        count = 2 * sizes.batch * CLASSES if sizes.per_class else sizes.batch * sizes.steps
        rng = generator(0, "bench")
        noise = torch.randint(256, (count, *SHAPE), generator=rng, dtype=torch.uint8)
        labels = torch.arange(count) % CLASSES
        middle = torch.tensor([0.5, 0.5, 0.5]).reshape(-1, 1, 1)
        pool = Pool(noise, labels, middle, middle / 2).to(device)
        data = Data((Rows(pool, torch.arange(count, device=device)),))
        return cls(data, model, sizes.clients, device)

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
        return dict.fromkeys(self._named, self.model)

    def on(self, device: torch.device | str) -> Crowd:
        """It was made where it is needed."""
        return self

    def party(self, node: NodeId) -> Party:
        return Party(Data() if node == SERVER else self.examples, Data(), self.model)


def now(device: torch.device) -> float:
    """The clock when the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _forget_peak(device: torch.device) -> None:
    gc.collect()  # what the case before held
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # no such file here: the peak is then that of the whole process
        return


def _peak(device: torch.device) -> int | None:
    """The most memory since the last reset; None where it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else None


def machine() -> dict[str, Any]:
    """Hardware, versions, and how busy the machine is."""
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {**environment(), "cpu": _cpu(), "gpu": _gpu(), "load": load}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"name": found.name, "bytes": found.total_memory, "cudnn": cudnn}


def write(found: Mapping[str, Any], folder: Path) -> Path:
    """One file for each benchmark."""
    path = folder / f"{found['benchmark']}.json"
    write_json(path, found)
    return path


def rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cases of some benchmarks as lines of a table; a note only where something failed."""
    pairs = [(each["benchmark"], case) for each in found for case in each["cases"]]
    failures = any(case["failed"] for _, case in pairs)
    return [
        {
            "benchmark": name,
            "engine": case["title"],
            "clients": case["clients"],
            "ms": _in_words(case["milliseconds"].get("median")),
            "from": _in_words(case["milliseconds"].get("lowest")),
            "to": _in_words(case["milliseconds"].get("highest")),
            "peak MB": None if case["peak_bytes"] is None else round(case["peak_bytes"] / 1e6),
            "first s": _in_words(case["first_seconds"]),
            **({"note": case["failed"]} if failures else {}),
        }
        for name, case in pairs
    ]


def _in_words(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}" if number < 100 else f"{number:.0f}"


def explained(found: Mapping[str, Any]) -> str:
    """What the times of a benchmark are for, in a line."""
    at = found["settings"]
    synthetic = f" + {at['per_class']} synthetic a class" if at["per_class"] else ""
    return (
        f"{found['benchmark']}: {found['what']}; {'x'.join(map(str, at['shape']))}, "
        f"{at['network']} of width {at['width']}, batch {at['batch']}{synthetic}, {at['steps']} "
        f"{'turns' if BENCHMARKS[found['benchmark']].at_server else 'steps'} in a row "
        f"({at['size']} size, {found['device']})"
    )
