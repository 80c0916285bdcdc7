"""Real processes on this machine: a coordinator with three sites, then five peers.

Each party has a folder, a key and data of its own, and runs the commands that an administrator
would type. The tables must equal those of one process, number by number. `make demo-sites` runs
all of it; `--only fedavg` one method.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fedstill.commands.cli import app
from fedstill.data import load
from fedstill.recipe.toml import toml_text

LED = ("fedavg", "feddm", "fedlgd", "scaffold")
AMONG_PEERS = ("desa",)


def write_data(folder: Path, clients: int, examples: int = 60) -> dict[str, Path]:
    """Some images of each domain of digits5, a file for each site."""
    collection, found = load("digits5", size=16), {}
    folder.mkdir(parents=True, exist_ok=True)
    for site in collection.sites[:clients]:
        train, test = site.pool.take(site.rows[:examples]), site.test
        found[site.name] = folder / f"{site.name}.npz"
        np.savez(
            found[site.name],
            train_images=train.inputs.transpose(0, 2, 3, 1),
            train_labels=train.labels,
            test_images=test.inputs[:examples].transpose(0, 2, 3, 1),
            test_labels=test.labels[:examples],
        )
    return found


def write_recipe(path: Path, data: Mapping[str, Path], method: str, rounds: int) -> Path:
    """A recipe whose clients are these files; it is run in one process and between sites."""
    names = {name: str(file) for name, file in data.items()}
    options = {"clients": names, "class_names": [str(digit) for digit in range(10)]}
    tables = {
        "run": {
            "name": method, "rounds": rounds, "threads": 1, "scores": "own", "device": "cpu",
            "pictures": False,
        },
        "data": {"name": "own", "size": 16, "channels": 3, "options": options},
        "models": {"name": "convnet", "depth": 2, "width": 8},
        "engine": {"name": "in_process"},
        "method": {"name": method, "preset": "small"},
    }  # fmt: skip
    if method == "feddm":  # sites allow no images that begin as examples unless they are asked to
        tables["method"]["start"] = "noise"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(toml_text(tables), encoding="utf-8")
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedstill", *map(str, words)]


def run(*words: object) -> str:
    """What a command prints; one that fails ends the demonstration with what it said.

    It is played in this process, since a new one would load torch again for each.
    """
    done = CliRunner().invoke(app, list(map(str, words)))
    if done.exit_code:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.output}{done.exception or ''}")
    return done.output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Consortium:
    """Folders as they would lie on several machines, and the processes in them."""

    def __init__(
        self,
        folder: Path,
        data: Mapping[str, Path],
        method: str,
        *,
        rounds: int = 2,
        peers: bool = False,
        options: Sequence[str] = (),
    ):
        self.folder, self.data, self.peers = folder, data, peers
        self.recipe = write_recipe(folder / "recipe.toml", data, method, rounds)
        self.out = folder / "consortium"
        if peers:
            listening = (f"{name}={self.address(name)}" for name in data)
            where = [word for pair in listening for word in ("--peer", pair)]
        else:
            where = ["--address", self.address("coordinator")]
        made = run("deploy", "make", self.recipe, *where, "--out", self.out, *options)
        number = re.search(r"number (\S+)", made)
        assert number is not None
        for name, file in data.items():
            place = self.place(name)
            run("site", "join", place, "--data", file, "--agree", number[1], "--device", "cpu")
            run("deploy", "sign", self.out, place / f"{name}.csr")
            signed = self.out / "coordinator" / "signed" / f"{name}.pem"
            (place / signed.name).write_bytes(signed.read_bytes())

    def address(self, name: str) -> str:
        """Where a party listens."""
        return f"127.0.0.1:{free_port()}"

    def place(self, name: str) -> Path:
        return self.out / "invitations" / name

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """A site's or a peer's process."""
        return self.begin(name, "peer" if self.peers else "site", "start", self.place(name))

    def coordinator(self) -> subprocess.Popen[bytes]:
        return self.begin("coordinator", "deploy", "start", self.out)

    def begin(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        """A party's command, which goes on beside this one; what it says goes to its log."""
        with self.log(name).open("ab") as file:
            return subprocess.Popen(
                self.command(name, *words), stdout=file, stderr=file, env=self.environment(name)
            )

    def command(self, name: str, *words: object) -> list[str]:
        """How a party's machine runs a command."""
        return command(*words)

    def environment(self, name: str) -> dict[str, str]:
        """What a party's processes find set."""
        return dict(os.environ)

    def run_folder(self, name: str = "") -> Path:
        return (self.place(name) if name else self.out / "coordinator") / "run"

    def played(self, seconds: float = 1800) -> None:
        """All processes from the beginning to the end."""
        everybody = {name: self.start(name) for name in self.data}
        if not self.peers:
            everybody["coordinator"] = self.coordinator()
        until = time.monotonic() + seconds
        try:
            for name, process in everybody.items():
                if process.wait(max(1.0, until - time.monotonic())):
                    raise SystemExit(f"{name} failed:\n{self.log(name).read_text()}")
        finally:
            for process in everybody.values():
                process.kill()
                process.wait()


def rows(folder: Path, table: str, nodes: Sequence[str] | None = None) -> list[dict[str, str]]:
    """A table of a run folder without its times; of some nodes, their own numbers."""
    with (folder / table).open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row.get("name") != "seconds"]
    return [row for row in found if nodes is None or row["node"] in nodes]


def compared(consortium: Consortium, alone: Path) -> str:
    """Whether all tables equal those of one process, in words."""
    if consortium.peers:
        pairs = [
            (rows(consortium.run_folder(n), "metrics.csv"), rows(alone, "metrics.csv", [n]))
            for n in consortium.data
        ] + [
            (rows(consortium.run_folder(n), "messages.csv"), rows(alone, "messages.csv"))
            for n in consortium.data
        ]
    else:
        pairs = [
            (rows(consortium.run_folder(), table), rows(alone, table))
            for table in ("metrics.csv", "messages.csv")
        ]
    wrong = sum(here != there for here, there in pairs)
    count = sum(len(there) for _, there in pairs)
    return f"{count} rows equal" if not wrong else f"{wrong} of {len(pairs)} tables DIFFER"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only", choices=LED + AMONG_PEERS, action="append")
    asked.add_argument("--rounds", type=int, default=2)
    asked.add_argument("--folder", type=Path)
    given = asked.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fedstill-sites-"))
    different = 0
    for method in given.only or LED + AMONG_PEERS:
        peers = method in AMONG_PEERS
        place, began = folder / method, time.perf_counter()
        data = write_data(place / "data", 5 if peers else 3)
        consortium = Consortium(place, data, method, rounds=given.rounds, peers=peers)
        run("run", consortium.recipe, "--out", place / "alone", "--quiet")
        consortium.played()
        said = compared(consortium, place / "alone")
        different += "DIFFER" in said
        who = "five peers" if peers else "a coordinator and three sites"
        seconds = time.perf_counter() - began
        print(f"{method}: {who}: {said} to one process ({seconds:.0f} s)", flush=True)
    print(f"all folders: {folder}")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
