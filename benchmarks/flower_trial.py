"""A deployment over Flower, as processes of this machine: SuperLink, filter, SuperNodes, sites.

Needs `fedstill[flower]` and nginx. `python benchmarks/flower_trial.py` plays fedavg and feddm
behind the filter, with TLS and registered keys, and compares the tables with one process. The
parts are used by tests/deploy/test_flower.py and by flower_overhead.py as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from demo_sites import Consortium, command, compared, free_port, write_data, write_recipe
from fedstill.deploy import flower as flowers
from fedstill.deploy import folder as folders
from fedstill.deploy import site as sites
from fedstill.deploy.flower_app import HOME, PACKAGE, PROJECT
from fedstill.recipe import checked, read_recipe
from fedstill.runs import recipes as runs
from fedstill.sites.away import Patience
from fedstill.sites.site import Policy

METHODS = ("fedavg", "feddm")
STARTING = 600.0  # seconds for a process to be there, on a machine with much to do
NOBODY = 65534  # a user, and a group, without rights

STRANGER_SERVER = """\
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    asked = [
        Message(RecordDict({"s": ConfigRecord({"path": DATA})}), dst_node_id=node.node_id,
                message_type="query.look", ttl=100)
        for node in grid.get_nodes()
    ]
    for reply in grid.send_and_receive(asked, timeout=100):
        text = str(reply.error) if reply.has_error() else reply.content["s"]["seen"]
        with Path(FOUND).open("a") as file:
            file.write(text + "\\n")
"""

STRANGER_CLIENT = """\
import os
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("look")
def look(message, context):
    try:
        seen = f"{len(Path(message.content['s']['path']).read_bytes())} bytes of data"
    except OSError as error:
        seen = type(error).__name__
    text = f"code of a stranger ran as user {os.getuid()}: {seen}"
    return Message(RecordDict({"s": ConfigRecord({"seen": text})}), reply_to=message)
"""


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(there: Callable[[], bool], what: str, seconds: float = STARTING) -> None:
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)


def descendants(pid: int) -> list[int]:
    """All that a process has started, directly or not; Flower's have sessions of their own."""
    table = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    parents = dict(zip(map(int, table[::2]), map(int, table[1::2]), strict=True))
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


class Processes:
    """Processes of this machine, each in a group of its own, with a log and a home for Flower."""

    def __init__(self, folder: Path):
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()

    def environment(self, home: Path) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(home)}

    def begin(self, name: str, words: Sequence[object], home: Path | None = None) -> None:
        home = home or self.folder / f"home-{name}"
        home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as file:
            self.running[name] = subprocess.Popen(
                [*map(str, words)], stdout=file, stderr=file, env=self.environment(home),
                start_new_session=True,
            )  # fmt: skip

    def flwr(self, words: Sequence[object], home: Path) -> subprocess.CompletedProcess[str]:
        """What one of Flower's short commands says."""
        return subprocess.run(
            [*map(str, words)], env=self.environment(home), capture_output=True, text=True,
            check=False, timeout=STARTING,
        )  # fmt: skip

    def end(self, name: str) -> None:
        """End a process at once, with all that it has started."""
        process = self.running.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)

    def end_all(self) -> None:
        for name in [*self.running]:
            self.end(name)


class FlowerConsortium(Consortium):
    """A consortium whose bytes Flower carries."""

    def __init__(
        self, folder: Path, data: Mapping[str, Path], method: str, *, rounds: int = 2,
        gone: float = 90.0,
    ):  # fmt: skip
        self.folder, self.data, self.peers = folder, data, False
        self.recipe = write_recipe(folder / "recipe.toml", data, method, rounds)
        self.out, self.inner = folder / "consortium", free_port()
        self._make(gone)
        flowers.write(self.out, self.inner)
        self.flower, self.home = self.out / "flower", self.out / "flower" / "home"
        self.nodes = Path(tempfile.mkdtemp(prefix="node-"))  # paths of sockets must be short
        self.nodes.chmod(0o755)
        self.processes = Processes(folder)

    def _make(self, gone: float) -> None:
        """As `Consortium` does by commands, within this process: a deployment that all joined."""
        (recipe,) = checked(read_recipe(self.recipe))
        patience = Patience(gone=gone)
        folders.make(recipe, self.out, address=f"127.0.0.1:{free_port()}", patience=patience)
        for name, file in self.data.items():
            place = self.place(name)
            invited, policy = sites.opened(place), Policy()
            number = invited.deployment.number
            asked = sites.join(invited, file, number, policy, data_dir=None, device="cpu")
            signed = folders.sign(self.out, asked)
            (place / signed.name).write_bytes(signed.read_bytes())

    @property
    def as_nobody(self) -> bool:
        """Whether SuperNodes run as a user without rights, who must be able to run Python."""
        places = [*Path(sys.executable).resolve().parents, *Path(sys.executable).parents]
        return os.geteuid() == 0 and all(place.stat().st_mode & 0o001 for place in places)

    def alive(self, name: str) -> bool:
        process = self.processes.running.get(name)
        return process is not None and process.poll() is None

    @property
    def outer(self) -> int:
        """The port of the filter."""
        listen = (self.flower / "nginx.conf").read_text().split(" listen ")[1]
        return int(listen.split()[0].rsplit(":", 1)[1])

    def start_link(self) -> None:
        self.processes.begin("superlink", [self.flower / "superlink.sh"], self.home)
        wait(lambda: listening(self.inner), "the SuperLink")

    def start_filter(self) -> None:
        settings = self.flower / "nginx.conf"
        self.processes.begin(
            "nginx", ["nginx", "-e", "stderr", "-g", "daemon off;", "-c", settings]
        )
        wait(lambda: listening(self.outer), "nginx")

    def make_node(self, name: str) -> None:
        """The folder of a SuperNode; what is made in it is for the group of its user."""
        node = self.nodes / name
        node.mkdir(exist_ok=True)
        if self.as_nobody:
            shutil.chown(node, group=NOBODY)
            node.chmod(0o2750)

    def start_site(self, name: str) -> None:
        self.make_node(name)
        self.processes.begin(
            name, command("site", "start", self.place(name), "--flower", self.nodes / name)
        )

    def start_node(self, name: str) -> None:
        """The SuperNode of a site; where this process may choose, as a user without rights."""
        wait((self.nodes / name / "door").exists, f"the door of {name}")
        home = self.nodes / f"home-{name}"
        home.mkdir(exist_ok=True)
        user: list[object] = []
        if self.as_nobody:
            shutil.chown(home, NOBODY, NOBODY)
            user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        words = [self.nodes / name / "supernode.sh", "--port", free_port()]
        self.processes.begin(f"node-{name}", [*user, *words], home)

    def said(self, *words: object, home: Path | None = None) -> str:
        """What a short command says; an error where it fails."""
        done = self.processes.flwr(words, home or self.home)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def started(self) -> None:
        """Everything but the run itself."""
        for name in self.data:
            self.start_site(name)
        self.start_link()
        self.start_filter()
        self.said(self.flower / "register.sh")
        for name in self.data:
            self.start_node(name)

    def submit(self) -> None:
        self.said(self.flower / "run.sh")

    def stranger(self, port: int) -> tuple[subprocess.CompletedProcess[str], Path]:
        """Somebody with nothing but an address and the public certificate runs code at all sites.

        Returns what `flwr run` said, and the file in which the code would write what it saw.
        """
        place = self.folder / f"stranger-{port}"
        app, found, data = place / "app", place / "found", next(iter(self.data.values()))
        (app / PACKAGE).mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT.format(deployment='""'))
        (app / "LICENSE").write_text("none\n")
        constants = f"DATA, FOUND = {str(data)!r}, {str(found)!r}\n"
        (app / PACKAGE / "__init__.py").write_text('"""An app."""\n')
        (app / PACKAGE / "server.py").write_text(STRANGER_SERVER + constants)
        (app / PACKAGE / "client.py").write_text(STRANGER_CLIENT)
        shutil.copyfile(self.flower / "ca.crt", place / "ca.crt")
        home = place / "home"
        home.mkdir()
        authority = json.dumps(str(place / "ca.crt"))
        (home / "config.toml").write_text(HOME.format(inner=port, authority=authority))
        return self.processes.flwr(["flwr", "run", app, "consortium"], home), found

    def alone(self, folder: Path) -> None:
        """The same run in this process."""
        (recipe,) = checked(read_recipe(self.recipe))
        runs.begin(recipe, folder)

    def finished(self, seconds: float = 900) -> None:
        wait((self.run_folder() / "summary.json").exists, f"the end of {self.folder}", seconds)

    def close(self) -> None:
        self.processes.end_all()
        shutil.rmtree(self.nodes, ignore_errors=True)


def private_data(folder: Path) -> dict[str, Path]:
    """Data of three sites that their owner alone can read."""
    found = write_data(folder, 3)
    for path in found.values():
        path.chmod(0o600)
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only", choices=METHODS, action="append")
    asked.add_argument("--rounds", type=int, default=2)
    given = asked.parse_args()
    folder, different = Path(tempfile.mkdtemp(prefix="fedstill-flower-")), 0
    for method in given.only or METHODS:
        place, began = folder / method, time.perf_counter()
        data = private_data(place / "data")
        consortium = FlowerConsortium(place, data, method, rounds=given.rounds)
        try:
            consortium.alone(place / "alone")
            consortium.started()
            consortium.submit()
            consortium.finished()
            said = compared(consortium, place / "alone")
        finally:
            consortium.close()
        different += "DIFFER" in said
        seconds = time.perf_counter() - began
        print(f"{method}: three SuperNodes behind the filter: {said} ({seconds:.0f} s)", flush=True)
    print(f"all folders: {folder}")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
