"""The first part of docs/sites.md, followed line by line: every command as it stands there.

    python benchmarks/follow_sites_docs.py --fedstill /path/to/venv/bin/fedstill

A coordinator and three sites have a folder and a HOME each, and nothing else in common. What people
do by hand (send an invitation, send a request, send a certificate back) is done by copying those
files. Written otherwise than on the page: the address is one of this machine, data are small
pictures made here, the run is short, and the number is the one that was printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from demo_sites import free_port, rows

PAGE = Path(__file__).parent.parent / "docs" / "sites.md"
COORDINATOR, SITES = "coordinator", ("north", "south", "west")
SECONDS = 1200.0
SHORTER = {"rounds = 20": "rounds = 2", 'name = "feddm"': 'name = "feddm"\npreset = "small"'}


@dataclass
class Machine:
    """A party: a folder, a HOME, and what runs there."""

    name: str
    folder: Path
    fedstill: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "home").mkdir(parents=True)

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "TMPDIR")}
        return {**kept, "HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}

    def words(self, command: str) -> list[str]:
        return [*shlex.split(self.fedstill), *shlex.split(command)[1:]]

    def run(self, command: str) -> str:
        """What a command prints; one that fails ends everything."""
        done = subprocess.run(
            self.words(command), cwd=self.folder, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, check=False,
        )  # fmt: skip
        print(f"{self.name}$ {command}\n{done.stdout}", flush=True)
        if done.returncode:
            raise SystemExit(f"{self.name}: {command} ended with {done.returncode}")
        return done.stdout

    def begin(self, command: str) -> None:
        """Leave a command running."""
        print(f"{self.name}$ {command} &", flush=True)
        words, home = self.words(command), self.environment()
        with (self.folder / "log").open("ab") as log:
            begun = subprocess.Popen(words, cwd=self.folder, env=home, stdout=log, stderr=log)
        self.running.append(begun)


def blocks(text: str, heading: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a section, each with its language."""
    section = re.split(r"^## ", text, flags=re.M)
    (found,) = [part for part in section if part.startswith(heading)]
    yield from re.findall(r"^```(\w*)\n(.*?)^```", found, flags=re.M | re.S)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Who types what, in the order of the page."""
    for _, block in blocks(text, "A coordinator and sites, line by line"):
        for line in block.splitlines():
            typed = re.match(r"(coordinator|site)\$ (fedstill [^#]*)", line)
            if typed:
                yield typed[1], typed[2].strip()


def pictures(folder: Path, seed: int) -> None:
    """Folders of pictures, dark and bright ones, of one site."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(("healthy", "ill")):
        (folder / name).mkdir(parents=True)
        for number in range(20 + 5 * seed):
            pixels = rng.integers(0, 120, (32, 32, 3)) + 100 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


class Followed:
    """The page with real machines in place of its names."""

    def __init__(self, folder: Path, fedstill: str):
        self.text = PAGE.read_text(encoding="utf-8")
        self.machines = {
            name: Machine(name, folder / name, fedstill) for name in (COORDINATOR, *SITES)
        }
        self.address, self.number = f"127.0.0.1:{free_port()}", ""
        for seed, name in enumerate(SITES):
            pictures(self.machines[name].folder / "images", seed)

    def recipe(self) -> None:
        """Write the recipe of the page where the coordinator is."""
        ((_, text),) = blocks(self.text, "The recipe")
        for there, here in SHORTER.items():
            assert there in text, f"the page has no {there!r}"
            text = text.replace(there, here)
        folder = self.machines[COORDINATOR].folder
        (folder / "recipe.toml").write_text(text, encoding="utf-8")
        for name in SITES:  # the trial in one place
            shutil.copytree(self.machines[name].folder / "images", folder / "trial" / name)

    def typed(self, who: str, command: str) -> None:
        """One line of the page, at the party or parties that it is for."""
        parties = SITES if who == "site" else [COORDINATOR]
        for name in parties:
            machine = self.machines[name]
            own = command.replace("fl.example.org:7447", self.address)
            own = own.replace("/data/images", str(machine.folder / "images"))
            if "--agree" in own:
                own = f"{own.split('--agree')[0]}--agree {self.number}"
            if " start " in own or "--watch" in own:
                machine.begin(own)
            elif " sign " in own:
                self._signed(own)
            else:
                self._read(machine.run(own), own)

    def _read(self, said: str, command: str) -> None:
        if " make " in command:
            found = re.search(r"number (\S+)", said)
            assert found, said
            self.number = found[1]
            made = self.machines[COORDINATOR].folder / "consortium" / "invitations"
            for name in SITES:
                shutil.copytree(made / name, self.machines[name].folder / "invitation")
        elif " join " in command:
            assert self.number in said or "--agree" in command, said

    def _signed(self, command: str) -> None:
        """Every site's request to the coordinator, and what it signed back."""
        coordinator = self.machines[COORDINATOR]
        for name in SITES:
            place = self.machines[name].folder / "invitation"
            shutil.copy(place / f"{name}.csr", coordinator.folder)
            coordinator.run(command.replace("north", name))
            signed = coordinator.folder / "consortium" / "coordinator" / "signed" / f"{name}.pem"
            shutil.copy(signed, place)

    def ended(self) -> None:
        """Wait until the run is over everywhere."""
        until = time.monotonic() + SECONDS
        for machine in self.machines.values():
            for process in machine.running:
                if process.wait(max(1.0, until - time.monotonic())):
                    raise SystemExit(f"{machine.name}:\n{(machine.folder / 'log').read_text()}")

    def close(self) -> None:
        for machine in self.machines.values():
            for process in machine.running:
                process.kill()
                process.wait()


def followed(folder: Path, fedstill: str) -> None:
    """Everything that the page says, then the same run in one process beside it."""
    page = Followed(folder, fedstill)
    try:
        page.recipe()
        for who, command in commands(page.text):
            page.typed(who, command)
        page.ended()
    finally:
        page.close()
    coordinator = page.machines[COORDINATOR]
    coordinator.run(
        "fedstill run recipe.toml run.scores=own engine.name=in_process --out alone --quiet"
    )
    for name in SITES:
        page.machines[name].run("fedstill site status invitation")
    apart = coordinator.folder / "consortium" / "coordinator" / "run"
    for table in ("metrics.csv", "messages.csv"):
        found, alone = rows(apart, table), rows(coordinator.folder / "alone", table)
        if found != alone:
            raise SystemExit(f"{table} differs from that of one process: {folder}")
        print(f"{table}: {len(found)} rows equal those of one process")


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--fedstill", default=f"{sys.executable} -m fedstill")
    asked.add_argument("--folder", type=Path)
    given = asked.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fedstill-docs-"))
    followed(folder, given.fedstill)
    print(f"followed to the end in {folder}")


if __name__ == "__main__":
    main()
