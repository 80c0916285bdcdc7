"""Where the time of the three loops goes on a GPU: python benchmarks/profiles.py

Kernels of one step of one client, by kind, beside the least that the arithmetic and the memory
of the GPU allow. The loops are those of `fedstill bench`, in half precision.
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
from fedstill.engines.execution import engine_of
from fedstill.federation.experiment import Experiment

HERE = Path(__file__).resolve().parent
PEAK = {"arithmetic": 989e12, "memory": 4.8e12}  # of an H200: half precision, bytes a second
KINDS = (
    ("convolutions and matrix products", r"gemm|conv|cutlass|cudnn|xmma|wgrad|dgrad|fprop|_tap"),
    ("norm, activation, pooling", r"norm_relu_pool|_slopes|_block|_folded"),
    ("copies, casts, gathers", r"copy|memcpy|memset|gather|index|cat|fill"),
    ("optimiser", r"multi_tensor"),
    ("draws", r"distribution|philox"),
    ("sums", r"reduce"),
)
CASES = {
    "matching": Case("in_process", True, 1, "half"),
    "local-step": Case("batched", True, 50, "half"),
    "small-step": Case("batched", True, 200, "half"),
}


@dataclass(frozen=True)
class Floor:
    """The least time of a step of a client, in microseconds."""

    arithmetic: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that it works")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    loops = [profiled(name, case, device) for name, case in CASES.items()]
    found = {
        "when": time.strftime("%Y-%m-%d"), "machine": bench.machine(), "peak": PEAK, "loops": loops,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "profile.json"
    path.write_text(json.dumps(found) + "\n")
    print(f"→ {path}")


def profiled(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    """The kernels of a step of a client: microseconds and launches."""
    benchmark = bench.BENCHMARKS[name]
    small = device.type == "cpu"
    sizes = benchmark.sizes(small)
    case = replace(case, clients=min(case.clients, sizes.clients), record=not small)
    sizes = replace(sizes, clients=case.clients)
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
    steps = sizes.clients * sizes.steps
    kernels = [
        {
            "name": event.key,
            "us": (event.cpu_time_total if small else event.device_time_total) / steps,
            "launches": event.count / steps,
        }
        for event in seen.key_averages()
    ]
    kernels.sort(key=lambda kernel: -kernel["us"])
    print(f"{name}: {1e6 * seconds / steps:.1f} us a step of a client", flush=True)
    return {
        "loop": name, "title": case.title, "what": benchmark.what, "sizes": asdict(sizes),
        "us": 1e6 * seconds / steps, "floor": asdict(floor(name, sizes)),
        "kinds": by_kind(kernels), "kernels": kernels[:40],
    }  # fmt: skip


def by_kind(kernels: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    kinds = {kind: {"us": 0.0, "launches": 0.0} for kind in (*(k for k, _ in KINDS), "the rest")}
    for kernel in kernels:
        named = (kind for kind, words in KINDS if re.search(words, kernel["name"], re.IGNORECASE))
        entry = kinds[next(named, "the rest")]
        entry["us"] += kernel["us"]
        entry["launches"] += kernel["launches"]
    return kinds


def floor(name: str, sizes: Sizes) -> Floor:
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
