"""Where the time of six loops goes on a GPU: python benchmarks/profiles.py

Kernels of one step of one client, or of a whole round, by kind, beside the least that the
arithmetic and the memory of the GPU allow. The loops are those of `fedstill bench`, in half
precision; rounds are shortened, since a profile takes longer to read than to make.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedstill.commands import bench
from fedstill.commands.bench import Case
from fedstill.commands.bench_work import CLASSES, SHAPE, Sizes, repetition
from fedstill.engines.execution import Execution, engine_of
from fedstill.engines.play.rehearsal import Rehearsal
from fedstill.federation.clock import Clock
from fedstill.federation.experiment import Experiment

HERE = Path(__file__).resolve().parent
PEAK = {"arithmetic": 989e12, "memory": 4.8e12}  # of an H200: half precision, bytes a second
KINDS = (  # the first that a kernel's name has a word of
    ("augmentation", r"_change|_turn"),
    ("norm, activation, pooling", r"norm|pool|_slopes|_block|_fold|_tilt|_activate|thresh|clamp"),
    ("convolutions and matrix products",
     r"gemm|conv|cutlass|cudnn|xmma|wgrad|dgrad|fprop|_tap|_weigh|im2col|_lay_out"),
    ("copies, casts, gathers", r"copy|memcpy|memset|gather|index|cat|fill|_taken"),
    ("optimiser", r"multi_tensor"),
    ("draws", r"distribution|philox"),
    ("sums", r"reduce"),
)  # fmt: skip
CASES = {
    "matching": Case("in_process", True, 1, "half"),
    "local-step": Case("batched", True, 50, "half"),
    "small-step": Case("batched", True, 200, "half"),
    "lessons": Case("in_process", True, 10, "half"),
    "peers": Case("streams", True, 5, "half"),
    "sets": Case("streams", True, 10, "half"),
}
SHORT = {"matching": 20, "lessons": 4, "peers": 24, "sets": 10}  # steps; the others are short


@dataclass(frozen=True)
class Floor:
    """The least time of a step of a client, in microseconds."""

    arithmetic: float
    memory: float | None  # None: not counted, where maps of several networks pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("loops", nargs="*", default=list(CASES), metavar="LOOP",
                        help=", ".join(CASES))  # fmt: skip
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "profile.json"
    loops: list[dict[str, Any]] = []
    found = {
        "when": time.strftime("%Y-%m-%d"), "machine": bench.machine(), "peak": PEAK, "loops": loops,
    }  # fmt: skip
    for name in options.loops:
        loops.append(profiled(name, CASES[name], device))
        path.write_text(json.dumps(found) + "\n")  # what is measured is kept if a later one fails
    print(f"→ {path}")


def profiled(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    """The kernels of a step of a client: microseconds and launches."""
    benchmark = bench.BENCHMARKS[name]
    small = device.type == "cpu"
    sizes = benchmark.sizes(small)
    case = replace(case, clients=min(case.clients, sizes.clients), record=not small)
    steps = sizes.steps if small else SHORT.get(name, sizes.steps)
    sizes = replace(sizes, clients=case.clients, steps=steps)
    experiment = Experiment(benchmark.method(sizes), benchmark.crowd(sizes, device))
    execution = case.execution(device)
    engine = engine_of(experiment, execution)
    with execution.applied(experiment.networks):
        play = repetition(engine, benchmark.unit)
        for number in range(2):
            play(number)
        watched = ProfilerActivity.CPU if small else ProfilerActivity.CUDA
        with profile(activities=[watched]) as seen:
            began = bench.now(device)
            play(2)
            seconds = bench.now(device) - began
    units = sizes.clients * sizes.steps if benchmark.unit == "step" else 1
    kernels = [
        {
            "name": event.key,
            "us": (event.cpu_time_total if small else event.device_time_total) / units,
            "launches": event.count / units,
        }
        for event in seen.key_averages()
    ]
    kernels.sort(key=lambda kernel: -kernel["us"])
    unit = "a step of a client" if benchmark.unit == "step" else f"{steps} steps of a round"
    print(f"{name}: {1e6 * seconds / units:.1f} us for {unit}", flush=True)
    return {
        "loop": name, "title": case.title, "what": benchmark.what, "sizes": asdict(sizes),
        "unit": unit, "us": 1e6 * seconds / units, "floor": asdict(floor(name, sizes, device)),
        "kinds": by_kind(kernels), "kernels": kernels,
    }  # fmt: skip


def by_kind(kernels: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    kinds = {kind: {"us": 0.0, "launches": 0.0} for kind in (*(k for k, _ in KINDS), "the rest")}
    for kernel in kernels:
        named = (kind for kind, words in KINDS if re.search(words, kernel["name"], re.IGNORECASE))
        entry = kinds[next(named, "the rest")]
        entry["us"] += kernel["us"]
        entry["launches"] += kernel["launches"]
    return kinds


def floor(name: str, sizes: Sizes, device: torch.device) -> Floor:
    """The least time: by the shapes of a ConvNet, or of whatever loops a round has."""
    if bench.BENCHMARKS[name].unit == "step":
        return floor_of_step(name, sizes)
    return Floor(1e6 * operations(name, sizes, device) / PEAK["arithmetic"], None)


def operations(name: str, sizes: Sizes, device: torch.device) -> float:
    """Floating-point operations of a repetition's loops, counted by their shapes."""
    benchmark = bench.BENCHMARKS[name]
    crowd = benchmark.crowd(sizes, device)
    experiment = Experiment(benchmark.method(sizes), crowd, clock=Clock(speed=1.0))
    counted: list[float] = []

    class Counted(Rehearsal):
        def __init__(self, *given: Any):
            super().__init__(*given)
            self.population = crowd  # whose networks see whole batches

        def play(self, *given: Any) -> Any:
            outcomes = super().play(*given)
            counted.append(sum(got.work.operations for got in outcomes.values() if got.work))
            return outcomes

    execution = Execution("in_process", str(device))
    with execution.applied(experiment.networks):
        play = repetition(Counted(experiment, execution), benchmark.unit)
        counted.clear()
        play(1)
    return sum(counted)


def floor_of_step(name: str, sizes: Sizes) -> Floor:
    """Multiplications, and maps written and read once, at the GPU's best.

    A ConvNet's maps before pooling are written by the convolution and read by the norm; pooled
    ones are written and read. A gradient for images costs as much again, one for weights twice.
    """
    channels, side, width = SHAPE[0], SHAPE[1], sizes.width
    products = numbers = 0
    for block in range(3):
        pixels = (side >> block) ** 2
        products += 9 * (channels if block == 0 else width) * width * pixels
        numbers += width * pixels * (1 + 1 / 4)
    if name == "matching":
        images = CLASSES * (sizes.batch + 2 * sizes.per_class)
    else:
        images = 3 * sizes.batch
    return Floor(
        1e6 * 2 * products * images / PEAK["arithmetic"],
        1e6 * 2 * 2 * numbers * images / PEAK["memory"],  # two bytes, written and read
    )


if __name__ == "__main__":
    main()
