"""How memory and the time of a round grow with the population, the same clients awake.

    python benchmarks/population.py
    python benchmarks/population.py --method desa --topology ring --populations 10 100 1000

Runs one method on made-up images that are split over more and more clients, ten examples each, of
whom fifty are awake in a round; with a topology all of them are. Every run is complete, with its
folder, rows and checkpoints, and has a process of its own. Populations take turns, so that a busy
machine is busy for all of them. Prints a table, and writes every number with versions and hardware
to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = 10  # of each client
CLASSES = 10
TESTS = 500  # examples of the one test set
PEERS = {  # DeSA's anchors, small
    "per_class": 1, "steps": 2, "real_batch": 4, "synthesis_width": 4, "combination": "neighbour",
}  # fmt: skip
RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Measure every population in turns, print a table and write the JSON file."""
    options = arguments()
    if options.measure:
        print(json.dumps(measured(json.loads(options.measure))))
        return
    begun = os.getloadavg()[0]
    runs = [
        {"turn": turn, **in_a_process(clients, options)}
        for turn in range(options.turns)
        for clients in options.populations
    ]
    result = {
        "what": f"{options.method}, {options.topology or options.awake} clients awake in each of "
        f"{options.rounds} rounds, {EXAMPLES} examples each, one test set of {TESTS}; "
        f"MLP with {options.hidden} hidden units",
        "memory_limit": options.memory_limit,
        "hardware": hardware(),
        "versions": runs[0].pop("versions"),
        "load_at_begin_and_end": [begun, os.getloadavg()[0]],
        "by_population": {clients: together(runs, clients) for clients in options.populations},
        "ratios": ratios(runs, options.populations),
        "runs": [{k: v for k, v in run.items() if k != "versions"} for run in runs],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    print(f"every number is in {options.out}")


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--populations", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--awake", type=int, default=50, help="clients a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="runs of each population")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--hidden", type=int, default=32, help="units of the network")
    parser.add_argument("--topology", help="of peers, who are all awake, e.g. ring")
    parser.add_argument("--memory-limit", type=int, help="engine.memory_limit, in bytes")
    parser.add_argument("--out", type=Path, default=RESULTS / "population.json")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a fresh interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images.npz", clients)
        asked = {
            "clients": clients, "awake": options.awake, "rounds": options.rounds,
            "method": options.method, "hidden": options.hidden,
            "memory_limit": options.memory_limit, "folder": folder, "topology": options.topology,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, __file__, "--measure", json.dumps(asked)],
            stdout=subprocess.PIPE,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return dict(json.loads(done.stdout))


def write_images(path: Path, clients: int) -> None:
    """Images of 8x8 pixels, a bright row for each class but two, in noise."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", EXAMPLES * clients), ("test", TESTS)):
        labels = np.arange(count) % CLASSES
        images = rng.integers(0, 100, (count, 8, 8), dtype=np.uint8)
        images[np.arange(count), labels % 8] += 100
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    np.savez(path, **arrays)


def measured(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a recipe in this process; peak memory, and the times from round to round."""
    from fedstill import recipe as config
    from fedstill.logbook.environment import environment
    from fedstill.runs import recipes as runs

    folder = Path(asked["folder"])
    engine = {} if asked["memory_limit"] is None else {"memory_limit": asked["memory_limit"]}
    joined = (
        {"sample": asked["awake"]} if asked["topology"] is None else {"topology": asked["topology"]}
    )
    method = {"name": asked["method"], "lr": 0.05, "batch_size": EXAMPLES}
    if asked["topology"] is not None:
        method |= PEERS
    (recipe,) = config.checked(
        {
            "run": {
                "rounds": asked["rounds"], "device": "cpu", "threads": 1, "pictures": False,
                "cache_dir": str(folder / "cache"),
            },
            "data": {
                "name": "own",
                "options": {"clients": {"all": str(folder / "images.npz")}},
                "partition": {"kind": "iid", "clients": asked["clients"]},
            },
            "models": {"name": "mlp", "hidden": [asked["hidden"]]},
            "federation": joined,
            "method": method,
            "engine": engine,
        }
    )  # fmt: skip
    imported = peak_megabytes()
    stamps: list[tuple[float, float]] = []
    begun = time.perf_counter()
    runs.begin(
        recipe,
        folder / "run",
        lambda progress: stamps.append((time.perf_counter(), time.process_time())),
    )
    ended = time.perf_counter()
    # The first round also pays for what torch sets up once.
    wall, cpu = (np.diff(times)[1:].tolist() for times in zip(*stamps, strict=True))
    return {
        "clients": asked["clients"],
        "peak_megabytes": peak_megabytes(),
        "megabytes_after_imports": imported,
        "seconds_per_round": statistics.median(wall),
        "cpu_seconds_per_round": statistics.median(cpu),
        "seconds_before_first_round": stamps[0][0] - begun,
        "seconds_in_all": ended - begun,
        "versions": {k: v for k, v in environment().items() if k not in ("device", "cpus")},
    }


def peak_megabytes() -> float:
    """The most memory this process has had resident."""
    try:
        status = Path("/proc/self/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    except (OSError, ValueError):  # not Linux
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1024**2 if sys.platform == "darwin" else 1024)


NUMBERS = ("peak_megabytes", "seconds_per_round", "cpu_seconds_per_round")


def together(runs: list[dict[str, Any]], clients: int) -> dict[str, float]:
    """The medians over all runs of one population."""
    mine = [run for run in runs if run["clients"] == clients]
    names = (*NUMBERS, "megabytes_after_imports", "seconds_before_first_round")
    return {name: statistics.median(run[name] for run in mine) for name in names}


def ratios(runs: list[dict[str, Any]], populations: list[int]) -> dict[str, dict[str, float]]:
    """Each population over the one before, within a turn: the median over turns."""
    found = {}
    for small, large in pairwise(populations):
        turns = {run["turn"] for run in runs}
        by_turn = {(run["turn"], run["clients"]): run for run in runs}
        found[f"{large} / {small}"] = {
            name: statistics.median(
                by_turn[turn, large][name] / by_turn[turn, small][name] for turn in turns
            )
            for name in NUMBERS
        }
    return found


def hardware() -> dict[str, Any]:
    """What this ran on."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {"processor": model, "cores": os.cpu_count(), "device": "cpu", "threads": 1}


def table(result: Mapping[str, Any]) -> str:
    """The numbers as Markdown."""
    lines = [
        "| clients | peak memory (MB) | above the imports (MB) | ms a round | CPU ms a round |",
        "|---|---|---|---|---|",
    ]
    for clients, row in result["by_population"].items():
        above = row["peak_megabytes"] - row["megabytes_after_imports"]
        wall, cpu = 1000 * row["seconds_per_round"], 1000 * row["cpu_seconds_per_round"]
        peak = row["peak_megabytes"]
        lines.append(f"| {clients} | {peak:.0f} | {above:.0f} | {wall:.0f} | {cpu:.0f} |")
    for pair, row in result["ratios"].items():
        peak, wall, cpu = (row[name] for name in NUMBERS)
        lines.append(f"| {pair} | {peak:.2f} | | {wall:.2f} | {cpu:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
