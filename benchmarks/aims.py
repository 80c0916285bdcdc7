"""What is aimed at on a GPU, measured in one go: python benchmarks/aims.py

Each row is a case of `fedstill bench` with the time, or the gain over one client after the other,
that it is to reach. Raw numbers of all cases that were measured lie beside the table's JSON file,
from which page.py makes the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedstill.commands import bench
from fedstill.commands.bench import Case, Wanted
from fedstill.core.errors import unknown
from fedstill.logbook.writer import write_json

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Aim:
    """A piece of work, one way of doing it, and what it is to take."""

    work: str
    benchmark: str
    case: Case
    most: float | None = None  # milliseconds
    gain: float | None = None  # or how many times as fast as clients in turn, not recorded
    steps: int | None = None  # of the loop, where they are not the benchmark's own


def network(title: str, benchmark: str, gain: float) -> Aim:
    """A local step of ten clients with another network, against these in turn."""
    work = f"a local step of ten clients, batch 64, against clients in turn: {title}"
    return Aim(work, benchmark, Case("streams", True, 10, "half"), gain=gain)


AIMS = (
    Aim("an iteration of matching, alone, in rows of 50", "matching",
        Case("in_process", True, 1, "half"), 1.3),
    Aim("the same, beside three others", "matching", Case("streams", True, 4, "half"), 1.2),
    Aim("an iteration of matching, alone, in rows of 300 as in FedDM's recipes", "matching",
        Case("in_process", True, 1, "half"), 1.3, steps=300),
    Aim("the same, beside three others", "matching", Case("streams", True, 4, "half"), 1.2,
        steps=300),
    Aim("a local step, 50 clients, width 128, batch 32", "local-step",
        Case("batched", True, 50, "half"), 0.045),
    Aim("a small step, 200 clients, width 32, batch 10", "small-step",
        Case("batched", True, 200, "half"), 0.010),
    Aim("a round of 50 clients with two convolutions, from sending to the mean", "average",
        Case("batched", True, 50, "half"), 20),
    Aim("a round of DFRD's server: ten conv4 teachers, batch 64, 10 turns of 5 + 2 steps",
        "lessons", Case("in_process", True, 10, "half"), 300),
    Aim("a round of FedDualMatch, sizes of MNIST", "sets", Case("streams", True, 10, "half"), 3000),
    network("AlexNet", "alexnet-step", 3),
    network("conv4", "conv4-step", 3),
    network("ResNet-18", "resnet18-step", 3),
    network("pre-activation ResNet-18", "preresnet18-step", 3),
    network("a module of one's own", "module-step", 2),
)  # fmt: skip


def main() -> None:
    known = list(dict.fromkeys(aim.benchmark for aim in AIMS))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions that count")
    parser.add_argument("--small", action="store_true", help="on a CPU, to see that it works")
    options = parser.parse_args()
    strange = [unknown("benchmark", name, known) for name in options.names if name not in known]
    if strange:
        raise SystemExit("\n".join(strange))
    device = torch.device("cpu" if options.small else "cuda")
    found: list[Mapping[str, Any]] = []
    raw = options.out / "aims"
    raw.mkdir(parents=True, exist_ok=True)
    for name, steps in dict.fromkeys((aim.benchmark, aim.steps) for aim in AIMS):
        if name not in options.names:
            continue
        found.append(measured(name, steps, device, options.repeat))
        write_json(raw / f"{name}{'' if steps is None else f'-{steps}'}.json", found[-1])
        table = as_table(found, options.repeat)
        write_json(options.out / "aims.json", table)  # what is measured is kept, come what may
        for row in table["rows"][-len(aims_of(name, steps)) :]:
            print(f"{row['work']}: {row['milliseconds']['median']:.3g} ms", flush=True)
    print(f"→ {options.out / 'aims.json'}")


def aims_of(benchmark: str, steps: int | None) -> list[Aim]:
    return [aim for aim in AIMS if (aim.benchmark, aim.steps) == (benchmark, steps)]


def measured(
    benchmark: str, steps: int | None, device: torch.device, repeat: int
) -> dict[str, Any]:
    """What `fedstill bench` finds of the cases that aims at so many steps need."""
    aims, small = aims_of(benchmark, steps), device.type == "cpu"
    engines = {"in_process" if small else aim.case.engine for aim in aims}
    against = any(aim.gain for aim in aims)
    wanted = Wanted(
        engines=tuple(sorted(engines | ({"in_process"} if against else set()))),
        precisions=() if small or against else ("half",),
    )
    sizes = bench.BENCHMARKS[benchmark].sizes(small)
    sizes = sizes if steps is None or small else replace(sizes, steps=steps)
    found = bench.measured(benchmark, device, sizes=sizes, repeat=repeat, wanted=wanted)
    return {**found, "steps": steps}


def as_table(found: Sequence[Mapping[str, Any]], repeat: int) -> dict[str, Any]:
    """All that page.py needs to know."""
    rows = [
        row_of(aim, each) for each in found for aim in aims_of(each["benchmark"], each["steps"])
    ]
    return {
        "when": time.strftime("%Y-%m-%d"), "machine": found[0]["machine"], "repeat": repeat,
        "rows": rows,
    }  # fmt: skip


def row_of(aim: Aim, found: Mapping[str, Any]) -> dict[str, Any]:
    """An aim beside what was measured for it."""
    cases = {case["title"]: case for case in found["cases"]}
    plain = next(iter(found["cases"]))  # clients in turn, not recorded, where these were measured
    own = cases.get(aim.case.title, plain)  # on a CPU nothing is recorded
    row: dict[str, Any] = {
        "work": aim.work, "case": own["title"], "milliseconds": own["milliseconds"],
        "failed": own["failed"], "most": aim.most, "gain": aim.gain,
    }  # fmt: skip
    if aim.gain is not None and not (own["failed"] or plain["failed"]):
        turn = replace(aim.case, engine="in_process", record=False, precision="tf32")
        if plain["title"] != turn.title:
            raise SystemExit(f"{found['benchmark']}: no case {turn.title!r} was measured")
        row["times"] = plain["milliseconds"]["median"] / own["milliseconds"]["median"]
    return row


if __name__ == "__main__":
    main()
