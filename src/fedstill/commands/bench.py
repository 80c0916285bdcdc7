"""How fast fedstill is here: pieces of work (`bench_work`), played by its own engines.

A time is that of a whole step of the method, divided by the steps of its loop and the clients, so
it holds all that a run pays: draws, batches, the loop, and handing the result back. Of lessons,
rounds and evaluations it is that of the whole.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.commands.bench_work import BENCHMARKS, Benchmark, Sizes, repetition
from fedstill.core.errors import BadValue, StepError, unknown
from fedstill.core.precision import Precision
from fedstill.engines.execution import Execution, engine_of
from fedstill.federation.experiment import Experiment
from fedstill.logbook.environment import environment
from fedstill.logbook.writer import write_json

ALL = "all"


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
    """The names asked for, the usual ones when none is; a wrong one is refused."""
    known = (*BENCHMARKS, ALL)
    wrong = [unknown("benchmark", name, known) for name in names if name not in known]
    if wrong:
        raise BadValue(wrong)
    if ALL in names:
        return list(BENCHMARKS)
    return list(dict.fromkeys(names)) or [name for name in BENCHMARKS if BENCHMARKS[name].usual]


@dataclass(frozen=True)
class Wanted:
    """Which cases to measure; what is left empty restricts nothing."""

    engines: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    compile: bool = False  # also those by torch's compiler

    def cases(self, name: str, sizes: Sizes, device: torch.device) -> list[Case]:
        """Those of a benchmark; refused where none is left."""
        offered = cases(BENCHMARKS[name], sizes, device, self.compile)
        left = [case for case in offered if self._has(case)]
        if left:
            return left
        asked = " and ".join(
            f"{what} {' or '.join(map(repr, given))}"
            for what, given in (("engine", self.engines), ("precision", self.precisions))
            if given
        )
        had = "; ".join(f"{case.title} ({case.precision})" for case in offered)
        raise BadValue([f"benchmark {name!r} has no case with {asked} on {device}; it has: {had}"])

    def _has(self, case: Case) -> bool:
        return (not self.engines or case.engine in self.engines) and (
            not self.precisions or case.precision in self.precisions
        )


EVERY_CASE = Wanted()


def measured(
    name: str, device: torch.device, *, sizes: Sizes, repeat: int, wanted: Wanted = EVERY_CASE
) -> dict[str, Any]:
    """The cases of a benchmark, as they are written to a file."""
    return list(as_measured(name, device, sizes=sizes, repeat=repeat, wanted=wanted))[-1]


def as_measured(
    name: str, device: torch.device, *, sizes: Sizes, repeat: int, wanted: Wanted = EVERY_CASE
) -> Iterator[dict[str, Any]]:
    """The same after each case, with those so far: nothing is lost when the work is stopped."""
    benchmark = BENCHMARKS[name]
    facts = machine()  # before the work, so that the load is that of others
    found: list[Measured] = []
    for case in wanted.cases(name, sizes, device):
        own = replace(sizes, clients=case.clients)
        found.append(_timed(benchmark, case, own, device, repeat))
        yield _described(name, device, sizes, repeat, facts, found)


def _described(
    name: str,
    device: torch.device,
    sizes: Sizes,
    repeat: int,
    facts: Mapping[str, Any],
    found: Sequence[Measured],
) -> dict[str, Any]:
    benchmark = BENCHMARKS[name]
    network = benchmark.network(sizes)
    return {
        "benchmark": name,
        "what": benchmark.what,
        "device": str(device),
        "machine": dict(facts),
        "settings": {
            **asdict(sizes),
            "shape": list(network.shape),
            "classes": network.classes,
            "network": network.title,
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
    if benchmark.unit == "server":  # one node, one loop at a time
        alone = [Case("in_process", False, sizes.clients)]
        if device.type == "cuda":
            alone.append(Case("in_process", True, sizes.clients))
        more = [replace(case, compile=True) for case in alone[-1:] if compile]
        halves = [replace(case, precision="half") for case in alone if case.record]
        return [*alone, *more, *halves]
    if benchmark.unit in ("round", "scores"):
        found = _of_rounds(sizes.clients, device, compile)
        if benchmark.unit == "scores" and device.type == "cuda":
            found.append(Case("streams", True, sizes.clients, "half_throughout"))
        return found
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


def _of_rounds(clients: int, device: torch.device, compile: bool) -> list[Case]:
    """Whole rounds: as `auto` plays them on a GPU, and stacked; elsewhere in turn, and stacked."""
    if device.type != "cuda":
        found = [Case(engine, False, clients) for engine in ("in_process", "batched")]
    else:
        found = [Case(engine, True, clients) for engine in ("in_process", "streams", "batched")]
    more = [replace(case, compile=True) for case in found if compile]
    return [*found, *more, *(replace(case, precision="half") for case in found if case.record)]


def _timed(
    benchmark: Benchmark, case: Case, sizes: Sizes, device: torch.device, repeat: int
) -> Measured:
    found = Measured(case)
    crowd = benchmark.crowd(sizes, device)
    experiment = Experiment(benchmark.method(sizes), crowd, rounds=repeat + 2)
    execution = case.execution(device)
    engine = engine_of(experiment, execution)
    try:
        with execution.applied(experiment.networks):
            play = repetition(engine, benchmark.unit)
            _forget_peak(device)
            for number in range(repeat + 1):
                began = now(device)
                play(number)
                seconds = now(device) - began
                if number:
                    found.seconds.append(seconds)
                else:
                    found.first_seconds = seconds
    except StepError as error:
        found.failed = str(error).split("\n")[0]
        found.seconds.clear()
        return found
    parts = sizes.steps * sizes.clients if benchmark.unit == "step" else 1
    each = [1000 * seconds / parts for seconds in found.seconds]
    found.milliseconds = {
        "median": statistics.median(each),
        "lowest": min(each),
        "highest": max(each),
    }
    found.peak_bytes = _peak(device)
    return found


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
        f"{'turns' if BENCHMARKS[found['benchmark']].unit == 'server' else 'steps'} in a row "
        f"({at['size']} size, {found['device']})"
    )
