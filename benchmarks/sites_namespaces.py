"""Machines on a network that fails: each party in a network namespace of its own, as root on Linux.

    python benchmarks/sites_namespaces.py            # all trials
    python benchmarks/sites_namespaces.py cable      # one of them

A cable that is pulled closes no connection, as the end of a process does; a link can be slow and
lose packets. Where nobody is absent, the tables are those of an unbroken run in one process.
Whatever happens, namespaces and processes are gone at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from demo_sites import Consortium, command, run, write_data
from fedstill.deploy.site import spent
from namespaces import Network, possible
from sites_trials import Trial, absent_in, asked, check, ended, equal, tried, wait_for

PORT = 7447
STEPS = "method.epochs=30"  # some tenths of a second for a step
PREFIX = f"fedstill-{os.getpid()}"


class Machines(Consortium):
    """A consortium each of whose parties has a machine of its own."""

    def __init__(
        self, network: Network, folder: Path, method: str, rounds: int, *options: str,
        host: str = "{address}",
    ):  # fmt: skip
        self.network, self.host, self.begun = network, host, dict[str, subprocess.Popen[bytes]]()
        peers = "coordinator" not in network.names
        names = [name for name in network.names if name != "coordinator"]
        files = write_data(folder / "data", len(names), 40)
        data = dict(zip(names, files.values(), strict=True))
        self.changes = [word for word in options if "=" in word]
        super().__init__(folder, data, method, rounds=rounds, peers=peers, options=options)

    def compared(self) -> str:
        """That all tables equal those of the same run in one process."""
        alone = self.folder / "alone"
        run("run", self.recipe, *self.changes, "--out", alone, "--quiet")
        return equal(self, alone)

    def address(self, name: str) -> str:
        known = {"address": self.network.address(name), "address6": self.network.address6(name)}
        return f"{self.host.format(name=name, **known)}:{PORT}"

    def command(self, name: str, *words: object) -> list[str]:
        return self.network.command(name, command(*words))

    def begin(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        self.begun[name] = super().begin(name, *words)
        return self.begun[name]

    def all_begun(self) -> None:
        """Everybody starts."""
        for name in self.data:
            self.start(name)
        if not self.peers:
            self.coordinator()

    def all_ended(self) -> None:
        """Everybody has ended well; sites would wait for a coordinator that has not."""
        coordinator_first = dict(sorted(self.begun.items(), key=lambda one: one[0] in self.data))
        ended(coordinator_first, self)

    def killed(self) -> None:
        """Nobody is left."""
        for process in self.begun.values():
            process.kill()
            process.wait()


@contextmanager
def machines(
    folder: Path, names: Sequence[str], method: str, rounds: int, *options: str, **more: str
) -> Iterator[Machines]:
    """A network with a machine for each, and what they were sent; nothing of it stays."""
    with Network(names, PREFIX) as network:
        consortium = Machines(network, folder, method, rounds, *options, **more)
        try:
            yield consortium
        finally:
            consortium.killed()


LED = ("coordinator", "north", "south", "west")
AMONG_PEERS = ("north", "south", "west", "east")


def plain(folder: Path) -> str:
    """Nothing fails: a coordinator and sites, then peers."""
    said = []
    for names, method in ((LED, "fedavg"), (AMONG_PEERS, "desa")):
        with machines(folder / method, names, method, 3) as consortium:
            consortium.all_begun()
            consortium.all_ended()
            said.append(f"{method}: {consortium.compared()}")
    return "; ".join(said)


def addresses(folder: Path) -> str:
    """The coordinator is called by a name, at an address of IPv6, and by a name of one."""
    said = []
    for host in ("{name}.example", "[{address6}]", "{name}6.example"):
        with machines(folder / str(len(said)), LED, "fedavg", 2, host=host) as consortium:
            consortium.all_begun()
            consortium.all_ended()
            at = consortium.address("coordinator")
            said.append(f"{at}: {consortium.compared()}")
    return "; ".join(said)


def short_cut(folder: Path) -> str:
    """A site's cable, then the coordinator's, is pulled for less than `--gone`: as if unbroken."""
    said = []
    for victim in ("north", "coordinator"):
        with machines(folder / victim, LED, "fedavg", 8, STEPS, "--gone", "60") as consortium:
            consortium.all_begun()
            wait_for(consortium.log("coordinator"), "round 2/")
            consortium.network.cables[victim].both(dark=True)
            time.sleep(20)
            consortium.network.cables[victim].both(dark=False)
            consortium.all_ended()
            check(absent_in(consortium.run_folder()) == {}, "somebody is absent")
            said.append(f"{victim}: {consortium.compared()}")
    return "; ".join(said)


def private(folder: Path) -> str:
    """A private site's cable is pulled: it releases nothing twice, and stays within its budget."""
    budget = ("privacy.epsilon=8", "privacy.delta=0.001")
    constants = ("data.mean=[0.5, 0.5, 0.5]", "data.std=[0.5, 0.5, 0.5]")
    options = (*budget, *constants, "--gone", "60")
    with machines(folder, LED, "fedavg", 30, *options) as consortium:
        consortium.all_begun()
        wait_for(consortium.log("coordinator"), "round 2/")
        consortium.network.cables["north"].both(dark=True)
        time.sleep(20)
        consortium.network.cables["north"].both(dark=False)
        consortium.all_ended()
        check(absent_in(consortium.run_folder()) == {}, "somebody is absent")
        ledger = {name: str(spent(consortium.place(name))) for name in consortium.data}
        for name, said in ledger.items():
            check(float(said.split()[2]) <= 8, f"{name}: {said}")
        return f"30 rounds, nobody absent; north: {ledger['north']}"


def long_cut(folder: Path) -> str:
    """A site cut off in one direction or both is absent after `--gone`, and comes back."""
    said = []
    for way in ("up", "down", "both"):
        options = (STEPS, "--gone", "10")
        with machines(folder / way, LED, "fedavg", 60, *options) as consortium:
            consortium.all_begun()
            wait_for(consortium.log("coordinator"), "round 2/")
            cable = consortium.network.cables["north"]
            for one in (cable.up, cable.down) if way == "both" else (getattr(cable, way),):
                one.dark = True
            began, notes = time.monotonic(), consortium.run_folder() / "notes.csv"
            wait_for(notes, ",absent,north,")
            seconds = time.monotonic() - began
            check(seconds < 35, f"north was noticed to be away after {seconds:.0f} s")
            cable.both(dark=False)
            consortium.all_ended()
            rounds = absent_in(consortium.run_folder())["north"]
            check(60 not in rounds, "north did not come back")
            said.append(f"{way}: absent after {seconds:.0f} s, in {len(rounds)} rounds")
    return "; ".join(said)


def cut_peer(folder: Path) -> str:
    """A peer that is cut off is absent for the others, and takes part again when it is back."""
    options = ("--gone", "10")
    with machines(folder, AMONG_PEERS, "desa", 150, *options) as consortium:
        consortium.all_begun()
        wait_for(consortium.log("north"), "round 2/")
        consortium.network.cables["west"].both(dark=True)
        wait_for(consortium.run_folder("north") / "notes.csv", ",absent,west,")
        consortium.network.cables["west"].both(dark=False)
        consortium.all_ended()
        absent = {name: absent_in(consortium.run_folder(name)) for name in AMONG_PEERS[:2]}
        for name, found in absent.items():
            check({*found} == {"west"} and 150 not in found["west"], f"{name}: {found}")
        rounds = len(absent["north"]["west"])
        return f"for north absent in {rounds} of 150 rounds, and there again"


def slow(folder: Path) -> str:
    """A site behind 200 ms, 3 % loss and 1 Mbit/s gets and sends megabytes: as if all were near."""
    options = ("models.width=128", "models.depth=3")
    with machines(folder, LED, "fedavg", 1, *options) as consortium:
        consortium.network.cables["north"].both(delay=0.2, loss=0.03, rate=125_000)
        consortium.all_begun()
        consortium.all_ended()
        check(absent_in(consortium.run_folder()) == {}, "somebody is absent")
        cable = consortium.network.cables["north"]
        carried = (cable.up.carried + cable.down.carried) / 1e6
        said = consortium.compared()
        return f"{said}, {carried:.1f} MB over the slow cable, {cable.up.dropped} packets lost up"


def moved(folder: Path) -> str:
    """A site's machine gets another address: as if unbroken."""
    with machines(folder, LED, "fedavg", 20, STEPS, "--gone", "60") as consortium:
        consortium.all_begun()
        wait_for(consortium.log("coordinator"), "round 2/")
        network = consortium.network
        network.ip("north", "addr", "del", f"{network.address('north')}/24", "dev", "eth0")
        network.ip("north", "addr", "add", "10.77.0.99/24", "dev", "eth0")
        consortium.all_ended()
        check(absent_in(consortium.run_folder()) == {}, "somebody is absent")
        return consortium.compared()


def rebooted(folder: Path) -> str:
    """The coordinator's machine vanishes without a word and is back later: as if unbroken."""
    with machines(folder, LED, "scaffold", 8, "--gone", "60") as consortium:
        consortium.all_begun()
        wait_for(consortium.log("coordinator"), "round 2/")
        consortium.network.ip("coordinator", "link", "set", "eth0", "down")
        consortium.begun["coordinator"].kill()
        consortium.begun["coordinator"].wait()
        time.sleep(15)
        consortium.network.ip("coordinator", "link", "set", "eth0", "up")
        consortium.coordinator()
        consortium.all_ended()
        return consortium.compared()


TRIALS: dict[str, Trial] = {
    "plain": plain,
    "addresses": addresses,
    "cable": short_cut,
    "private": private,
    "away": long_cut,
    "peer": cut_peer,
    "slow": slow,
    "moved": moved,
    "rebooted": rebooted,
}


def main() -> None:
    names = asked(TRIALS, __doc__)
    if why := possible():
        raise SystemExit(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    os.environ["OMP_NUM_THREADS"] = "1"
    tried(TRIALS, names, "fedstill-namespaces-")


if __name__ == "__main__":
    main()
