"""One table: every system does the same work in a process of its own, in turn, in one run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.commands.bench import machine
from fedstill.core.errors import FedstillError, unknown
from fedstill.data import load
from work import Work, write_split

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".bench"  # made by `make bench-env`
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class System:
    """Who does the work: a module of `systems`, perhaps in an environment of its own."""

    title: str
    module: str
    changes: dict[str, Any] = field(default_factory=dict)
    home: str | None = None
    copies: int = 1  # of each awake client's weights that it holds at once

    @property
    def python(self) -> Path:
        if self.home is None:
            return Path(sys.executable)
        return ENVIRONMENTS / self.home / "bin" / "python"


SYSTEMS = {
    "fedstill-in_process": System("fedstill, in_process", "ours", {"engine": "in_process"}),
    "fedstill-lanes": System("fedstill, lanes", "ours", {"engine": "streams"}),
    "fedstill-batched": System("fedstill, batched", "ours", {"engine": "batched"}),
    "plain": System("plain PyTorch loop", "plain", copies=0),
    "pfllib-style": System("PFLlib-style loop", "pfllib_style", copies=2),
    "flower": System("Flower simulation", "flower", home="flower", copies=3),
    "pfl-research": System("pfl-research", "pfl_research", home="pfl"),
    "fedstill-matching": System("fedstill", "ours", {"engine": "in_process"}),
    "fedstill-matching-half": System(
        "fedstill, half precision", "ours", {"engine": "in_process", "precision": "half"}
    ),
    "dm-style": System("DM-style loop over classes", "dm_style"),
    "dm-stacked": System("plain PyTorch, all classes in one pass", "dm_stacked"),
}


@dataclass(frozen=True)
class Row:
    """One line of a table: a piece of work, and how it is called."""

    label: str
    work: Work
    unit: str = "a round"  # that a time is for
    parts: int = 1  # units in one timed piece
    bytes: int = 0  # of the weights of all clients awake; what has no room is not started


def arguments(about: str, systems: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all tables share."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each system, seeds 0, 1, …")
    parser.add_argument("--small", action="store_true", help="a reduced size, to see that it works")
    parser.add_argument("--systems", nargs="+", default=list(systems), metavar="NAME",
                        help=", ".join(systems))  # fmt: skip
    parser.add_argument("--limit", type=int, default=3600, help="seconds that a run may take")
    return parser


def measure(
    table: str, what: str, rows: Sequence[Row], options: argparse.Namespace, *, baseline: str
) -> dict[str, Any]:
    """Run everything, say how it goes, and write `table.json`.

    `baseline` is the system to which times and accuracies are compared.
    """
    strange = [unknown("system", name, SYSTEMS) for name in options.systems if name not in SYSTEMS]
    if strange:
        raise SystemExit("\n".join(strange))
    found: dict[str, Any] = {
        "table": table,
        "what": what,
        "when": time.strftime("%Y-%m-%d"),
        "small": options.small,
        "seeds": options.seeds,
        "baseline": baseline,
        "device": options.device,
        "machine": machine(),
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{table}.json"
    for row in rows:
        found["rows"].append(measured_row(row, options))
        path.write_text(json.dumps(found) + "\n")  # what is measured is kept if a later row fails
    print(f"→ {path}")
    return found


def measured_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """All systems, seed after seed, so that a change of the machine's load meets all of them."""
    made: dict[str, dict[str, Any]] = {
        name: {"system": name, "title": SYSTEMS[name].title, "runs": [], "skipped": None}
        for name in options.systems
    }
    for seed in range(options.seeds):
        for name, entry in made.items():
            if entry["skipped"]:
                continue
            work = replace(row.work, seed=seed, device=options.device, **SYSTEMS[name].changes)
            try:
                entry["runs"].append(once(SYSTEMS[name], work, row.bytes, options.limit))
                said = f"{sum(entry['runs'][-1]['seconds']):.2f} s"
            except Skipped as reason:
                entry["skipped"] = said = str(reason)
            print(f"{row.label} · {entry['title']} · seed {seed}: {said}", flush=True)
    settings = {k: v for k, v in asdict(row.work).items() if k not in HIDDEN}
    return {
        "label": row.label, "unit": row.unit, "parts": row.parts, "work": settings,
        "systems": list(made.values()),
    }  # fmt: skip


HIDDEN = ("data", "data_dir", "launched", "seed", "engine", "precision", "device")


class Skipped(Exception):
    """Why a system was not measured."""


def once(system: System, work: Work, weights: int, limit: int) -> dict[str, Any]:
    """One run in a fresh process; `weights` are the bytes of all awake clients' weights."""
    if not system.python.exists():
        raise Skipped("not installed here; make bench-env installs it")
    if system.copies * weights > free_memory() / 2:
        raise Skipped(f"holds about {system.copies * weights / 1e9:.0f} GB, too much here")
    with tempfile.TemporaryDirectory() as place:
        settings, result = Path(place) / "work.json", Path(place) / "result.json"
        settings.write_text(json.dumps(asdict(replace(work, launched=time.time()))))
        told = [system.module, str(settings), str(result)]
        said = finished([str(system.python), "-m", "systems.worker", *told], limit)
        if not result.exists():
            raise Skipped(f"failed: {said.strip().splitlines()[-1] if said.strip() else 'silent'}")
        return {"seed": work.seed, **json.loads(result.read_text())}


def finished(command: Sequence[str], limit: int) -> str:
    """What a command wrote to its error stream; it is ended with its children at the limit."""
    path = os.pathsep.join([str(HERE), *sys.path])
    own = {**os.environ, **QUIET, "PYTHONPATH": path if command[0] == sys.executable else str(HERE)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=HERE, env=own, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Skipped(f"took more than {limit} s") from None
        errors.seek(0)
        return errors.read()


def free_memory() -> int:
    """Bytes that a process may take; without limit where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(free[0]) if free else sys.maxsize


def export(
    folder: Path, name: str, clients: int, data_dir: Path | None, size: int | None = None
) -> dict[str, Any]:
    """A data set split evenly over clients, written for the other systems; keys of a `Work`."""
    where = None if data_dir is None else str(data_dir.resolve())  # workers start elsewhere
    try:
        found = load(
            name, data_dir=where, size=size, partition={"kind": "iid", "clients": clients}, seed=0
        )
    except FedstillError as error:
        raise SystemExit(str(error)) from error
    path = folder / f"{name}-{clients}.npz"
    write_split(path, found.sites)
    return {"data": str(path), "data_name": name, "data_dir": where, "clients": clients}
