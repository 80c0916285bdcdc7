"""B4: other systems' own code beside ours; python benchmarks/own_code.py --code DIR --data-dir DIR

Their repositories are no part of this one. DIR has a copy of each, by these names:

    git clone https://github.com/TsingZ0/PFLlib                    # FedAvg, SCAFFOLD
    git clone https://github.com/TsingZ0/HtFLlib                   # FedProto, FedGen
    git clone https://github.com/VICO-UoE/DatasetCondensation      # distribution matching
    git clone https://github.com/clearsky0601/FL                   # DFRD/LightFed, DFRD's authors
    pip install --no-deps --target pfl-research pfl==0.6.0         # pfl-research

MNIST from --data-dir (CIFAR-10 in the row of its name), without it the embedded digits; both sides
read one split of the same arrays.
Every system is played in a process of its own, which is forked when torch and fedstill are loaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.commands.bench import machine
from fedstill.core.errors import unknown
from systems import beside, foreign
from work import Work, write_split

HERE = Path(__file__).resolve().parent
HALF = {"precision": "half"}


@dataclass(frozen=True)
class Side:
    """Who does the work of a row: a module of `systems`, and how it is told."""

    title: str
    module: str
    changes: dict[str, Any]


def ours(title: str, module: str = "beside", **changes: Any) -> Side:
    return Side(f"fedstill, {title}", module, changes)


STACKED = (ours("batched", engine="batched"), ours("batched, half", engine="batched", **HALF))
ALONE = (ours("tf32", "ours"), ours("half", "ours", **HALF))
ROWS = {
    "cifar10": (
        Side("plain PyTorch loop", "plain", {}),
        Side("pfl-research", "pfl_copy", {}),
        ours("streams", engine="streams"),
        *STACKED,
    ),
    "fedavg": (Side("PFLlib FedAvg", "pfllib", {}), *STACKED),
    "scaffold": (Side("PFLlib SCAFFOLD", "pfllib", {}), STACKED[0]),
    "fedproto": (Side("HtFLlib FedProto", "htfllib", {}), STACKED[0]),
    "fedgen": (
        Side("HtFLlib FedGen, its generator kept", "htfllib", {"mended": True}),
        Side("HtFLlib FedGen as it is", "htfllib", {}),
        STACKED[0],
    ),
    "matching": (Side("main_DM.py of its authors", "dm_authors", {}), *ALONE),
    "lessons": (
        Side("DFRD server of its authors", "dfrd_authors", {}),
        ours("tf32", "dfrd_beside", engine="in_process"),
        ours("half", "dfrd_beside", engine="in_process", **HALF),
    ),
}

LABELS = {
    "cifar10": "FedAvg on CIFAR-10, two convolutions, 50 of 1000 clients, 25 rounds",
    "fedavg": "FedAvg, two convolutions, 20 of 100 clients",
    "scaffold": "SCAFFOLD, two convolutions, 20 of 100 clients",
    "fedproto": "FedProto, two convolutions, ten clients of at most 600 images",
    "fedgen": "FedGen, a linear network, ten clients of at most 600 images",
    "matching": "Distribution matching, 256 real and 50 synthetic images a class, width 128",
    "lessons": "DFRD's server, ten conv4 teachers, ten turns of 5 + 1 steps, batch 64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--code", type=Path, required=True, help="folder with the repositories")
    parser.add_argument("--data-dir", type=Path, help="folder with mnist.npz")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each side, seeds 0, 1, …")
    parser.add_argument("--small", action="store_true", help="a reduced size, to see that it works")
    parser.add_argument("--limit", type=int, default=600, help="seconds that a side may take")
    options = parser.parse_args()
    strange = [unknown("row", name, ROWS) for name in options.rows if name not in ROWS]
    if strange:
        raise SystemExit("\n".join(strange))
    for name in {side.module for row in options.rows for side in ROWS[row]}:
        importlib.import_module(f"systems.{name}")
    foreign.importable("torchvision")  # what takes long to load is loaded once
    found: dict[str, Any] = {
        "table": "own_code", "baseline": "", "when": time.strftime("%Y-%m-%d"),
        "small": options.small, "seeds": options.seeds, "device": options.device,
        "machine": looked_at(), "rows": [],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"own_code-{'-'.join(options.rows)}.json"
    with tempfile.TemporaryDirectory() as place:
        for name in options.rows:
            work = workload(name, options, Path(place))
            found["rows"].append(described(name, work))
            for system in measured(name, work, options):  # what is measured is kept, come what may
                found["rows"][-1]["systems"].append(system)
                path.write_text(json.dumps(found) + "\n")
    print(f"→ {path}")


def workload(name: str, options: argparse.Namespace, place: Path) -> Work:
    """The settings of a row, with its examples written for everybody to read."""
    if options.data_dir is None:
        data: dict[str, Any] = {"data_name": "digits5", "data_dir": None}
    else:
        held = "cifar10" if name == "cifar10" else "mnist"
        data = {"data_name": held, "data_dir": str(options.data_dir.resolve())}
    shared = {"device": options.device, "code": str(options.code.resolve()), "method": name, **data}
    small = options.small
    if name == "matching":
        sizes = (8, 1, 4, 16, 2) if small else (256, 50, 100, 128, 150)
        batch, per_class, iterations, width, epochs = sizes
        work = Work(
            "convnet", 1, 1, iterations, batch=batch, per_class=per_class, width=width,
            epochs=epochs, size=32, **shared,
        )  # fmt: skip
    elif name == "lessons":
        clients, rounds, batch, turns = (3, 2, 8, 1) if small else (10, 3, 64, 10)
        work = Work("conv4", clients, clients, rounds, batch=batch, epochs=turns, size=32, **shared)
    elif name == "cifar10":
        clients, awake, rounds = (6, 3, 2) if small else (1000, 50, 25)
        work = Work("two-conv", clients, awake, rounds, alpha=0.0, **{**shared, "method": "fedavg"})
    elif name in ("fedavg", "scaffold"):
        clients, awake, rounds = (6, 3, 2) if small else (100, 20, 12)
        work = Work(
            "two-conv", clients, awake, rounds, batch=10 if small else 50, lr=0.05, **shared
        )
    else:
        clients, rounds, most = (3, 2, 40) if small else (10, 8, 600)
        kind = "logistic" if name == "fedgen" else "two-conv"
        batch = 10 if small else 20
        work = Work(kind, clients, clients, rounds, batch=batch, lr=0.02, most=most, **shared)
    return replace(work, data=str(exported(work, place / f"{name}.npz")))


def exported(work: Work, path: Path) -> Path:
    """The split's arrays in a file, as all systems read them."""
    write_split(path, beside.everybody(work).sites)
    return path


def looked_at() -> dict[str, Any]:
    """The machine, seen by a process of its own: whoever looks at a GPU can fork no more."""
    with multiprocessing.get_context("fork").Pool(1) as apart:
        return apart.apply(machine)


def described(name: str, work: Work) -> dict[str, Any]:
    """A row as page.py reads it, before anybody has played."""
    hidden = ("data", "data_dir", "code", "launched", "seed", "engine", "precision", "device")
    return {
        "label": LABELS[name], "unit": "an iteration" if work.per_class else "a round",
        "parts": work.rounds if work.per_class else 1, "baseline": ROWS[name][0].title,
        "work": {key: value for key, value in vars(work).items() if key not in hidden},
        "systems": [],
    }  # fmt: skip


def measured(name: str, work: Work, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everybody's runs of one row, one after the other."""
    for side in ROWS[name]:
        told = replace(work, **side.changes)
        runs, why = forked(
            side, [replace(told, seed=at) for at in range(options.seeds)], options.limit
        )
        parts = work.rounds if work.per_class else 1
        said = [f"{median_ms(run) / parts:.2f} ms, {100 * run['accuracy']:.2f} %" for run in runs]
        print(f"{name} · {side.title}: {'; '.join([*said, why or ''])}", flush=True)
        yield {"system": side.title, "title": side.title, "runs": runs, "skipped": why}


def median_ms(run: dict[str, Any]) -> float:
    """Milliseconds of a timed piece, without the first of several."""
    seconds = run["seconds"]
    return 1000 * float(np.median(seconds[1:] or seconds))


def forked(
    side: Side, works: Sequence[Work], limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """What came of runs in a process of their own, one after the other; and why not of all."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=played, args=(side.module, works, theirs), daemon=True)
    process.start()
    theirs.close()
    runs: list[dict[str, Any]] = []
    end = time.monotonic() + limit
    why = None
    while len(runs) < len(works) and why is None:
        if not mine.poll(max(0.0, end - time.monotonic())):
            why = f"took more than {limit} s"
            process.kill()
            break
        try:
            found = json.loads(mine.recv_bytes())
        except EOFError:
            found = {"failed": "its process ended"}
        why = found.get("failed")
        runs += [] if why else [found]
    process.join(30)
    return runs, why


def played(module: str, works: Sequence[Work], answers: Connection) -> None:
    """In the process: run after run, each answered as JSON."""
    system = importlib.import_module(f"systems.{module}")
    versions = {package: version(package) for package in system.VERSIONS}
    for work in works:
        try:
            with redirect_stdout(StringIO()):  # others say much
                found = system.run(replace(work, launched=time.time()))
            found |= {"seed": work.seed, "versions": versions}
        except (Exception, SystemExit) as error:
            traceback.print_exc(limit=-4)
            found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answers.send_bytes(json.dumps(found).encode())


if __name__ == "__main__":
    main()
