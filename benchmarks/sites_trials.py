"""Deaths and returns, with real processes: who is killed goes on, and the tables stay the same.

    python benchmarks/sites_trials.py             # all trials
    python benchmarks/sites_trials.py site        # one of them

Each trial plays an unbroken run in one process first and compares; times are those of this machine.
"""

from __future__ import annotations

import argparse
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from demo_sites import Consortium, compared, rows, run, write_data

SECONDS = 1800.0
ROUNDS = 60  # among peers: enough for those who return to come in time
Process = subprocess.Popen[bytes]


def wait_for(path: Path, text: str, times: int = 1) -> None:
    """Until a log says something so often."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if path.exists() and path.read_text(errors="replace").count(text) >= times:
            return
        time.sleep(0.02)
    raise SystemExit(f"{path} never said {text!r}:\n{path.read_text() if path.exists() else ''}")


def ended(processes: dict[str, Process], consortium: Consortium) -> None:
    """All have ended well."""
    for name, process in processes.items():
        if process.wait(SECONDS):
            raise SystemExit(f"{name} failed:\n{consortium.log(name).read_text()}")


def led(folder: Path, method: str, rounds: int, *options: str) -> tuple[Consortium, Path]:
    """A coordinator and three sites that have joined, and the same run in one process."""
    data = write_data(folder / "data", 3, 40)
    consortium = Consortium(folder, data, method, rounds=rounds, options=options)
    run("run", consortium.recipe, "--out", folder / "alone", "--quiet")
    return consortium, folder / "alone"


def killed_site(folder: Path) -> str:
    """A site killed after each of its first acts, each time back: as if unbroken.

    FedLGD has a client's steps before the first round and in rounds, so one is killed in each.
    """
    consortium, alone = led(folder, "fedlgd", 2, "--gone", "1500")
    everybody = {name: consortium.start(name) for name in consortium.data}
    everybody["coordinator"] = consortium.coordinator()
    victim = next(iter(consortium.data))
    kills = 0
    for times in range(1, 4):
        wait_for(consortium.log(victim), "bytes in", 2 * times)  # hello, then acts
        if everybody[victim].poll() is None:
            everybody[victim].kill()
            everybody[victim].wait()
            everybody[victim] = consortium.start(victim)
            kills += 1
    ended(everybody, consortium)
    return f"{kills} times killed and back: {equal(consortium, alone)}"


def equal(consortium: Consortium, alone: Path) -> str:
    """That all tables equal those of one process; else the trial has failed."""
    said = compared(consortium, alone)
    if "DIFFER" in said:
        raise SystemExit(f"{said}: {consortium.folder}")
    return said


def lost_site(folder: Path) -> str:
    """A site killed for good in round 1: absent by name, the others go on to the end."""
    consortium, _ = led(folder, "fedavg", 3, "--gone", "2")
    everybody = {name: consortium.start(name) for name in consortium.data}
    everybody["coordinator"] = consortium.coordinator()
    victim = next(iter(consortium.data))
    wait_for(consortium.log(victim), "update:")
    everybody.pop(victim).kill()
    ended(everybody, consortium)
    notes = rows(consortium.run_folder(), "notes.csv")
    absent = [note["round"] for note in notes if note["kind"] == "absent"]
    check(absent[-1:] == ["3"], f"{victim} is absent to the end, not in {absent}")
    return f"absent in rounds {', '.join(absent)}; three rounds played"


def killed_coordinator(folder: Path) -> str:
    """The coordinator killed after round 1 and started again: as if unbroken."""
    consortium, alone = led(folder, "scaffold", 3)
    everybody = {name: consortium.start(name) for name in consortium.data}
    first = consortium.coordinator()
    victim = next(iter(consortium.data))
    wait_for(consortium.log(victim), "update:", 2)  # sites are in round 2
    first.kill()
    first.wait()
    everybody["coordinator"] = consortium.coordinator()
    ended(everybody, consortium)
    return equal(consortium, alone)


def killed_peer(folder: Path) -> str:
    """A peer killed after each of its first rounds, each time back: as if unbroken."""
    data = write_data(folder / "data", 3, 30)
    consortium = Consortium(folder, data, "desa", rounds=6, peers=True)
    run("run", consortium.recipe, "--out", folder / "alone", "--quiet")
    everybody = {name: consortium.start(name) for name in data}
    victim = next(iter(data))
    for round in range(1, 5):
        wait_for(consortium.log(victim), f"round {round}/6")
        everybody[victim].kill()
        everybody[victim].wait()
        everybody[victim] = consortium.start(victim)
    ended(everybody, consortium)
    return f"four times killed and back: {equal(consortium, folder / 'alone')}"


def peers(folder: Path, count: int, dead: int, back: int) -> str:
    """Peers killed after round 1, some back later, one frozen for longer than its lease.

    The others go on; whoever is back is heard again, and who is dead is absent by name.
    """
    data = write_data(folder / "data", 5, 30)
    files = list(data.values())
    data = {f"peer-{place}": files[place % len(files)] for place in range(count)}
    options = ["--gone", "2", "--deadline", "300"]
    consortium = Consortium(folder, data, "desa", rounds=ROUNDS, peers=True, options=options)
    everybody = {name: consortium.start(name) for name in data}
    names = list(data)
    watcher = names[-1]
    wait_for(consortium.log(watcher), f"round 1/{ROUNDS}")
    for name in names[:dead]:
        everybody.pop(name).kill()
    for name in names[:back]:
        everybody[name] = consortium.start(name)
        wait_for(consortium.log(name), "going on from the last checkpoint")
    frozen = names[dead]
    everybody[frozen].send_signal(signal.SIGSTOP)
    wait_for(consortium.run_folder(watcher) / "notes.csv", f",absent,{frozen},")
    everybody[frozen].send_signal(signal.SIGCONT)
    ended(everybody, consortium)
    absences = absent_in(consortium.run_folder(watcher))
    for_good = sorted(node for node, rounds in absences.items() if ROUNDS in rounds)
    check(for_good == names[back:dead], f"absent in the last round: {for_good}")
    returned = {*names[:back]}  # who is back in time was never away for the others
    check({*absences} - returned == {*names[back:dead], frozen}, f"absent: {sorted(absences)}")
    finished = [n for n in data if (consortium.run_folder(n) / "summary.json").exists()]
    check(len(finished) == count - dead + back, f"ended all rounds: {finished}")
    told = "; ".join(f"{node} in {len(rounds)} rounds" for node, rounds in absences.items())
    return f"{len(finished)} of {count} ended all {ROUNDS} rounds; absent: {told}"


def absent_in(folder: Path) -> dict[str, list[int]]:
    """In which rounds each was absent for the peer or coordinator of a run folder."""
    found: dict[str, list[int]] = {}
    for row in rows(folder, "notes.csv"):
        if row["kind"] == "absent":
            found.setdefault(row["node"], []).append(int(row["round"]))
    return found


def full_disk(folder: Path) -> str:
    """A site that may not write, and then may again: it refuses, and goes on; nothing is lost."""
    consortium, alone = led(folder, "scaffold", 3, "--least", "3")
    victim, *others = consortium.data
    everybody = {name: consortium.start(name) for name in others}
    with smallest_files():
        everybody[victim] = consortium.start(victim)
    stopped = consortium.coordinator()
    check(stopped.wait(SECONDS) != 0, "the run goes on without a site's memory")
    log = consortium.log("coordinator").read_text()
    check("cannot write to its folder: File too large" in log, log)
    everybody[victim].kill()
    everybody[victim].wait()
    everybody |= {victim: consortium.start(victim), "coordinator": consortium.coordinator()}
    ended(everybody, consortium)
    return f"refused, and with room again {equal(consortium, alone)}"


def thirty(folder: Path) -> str:
    """Thirty sites as processes of this machine: bytes of memory of each, seconds a round."""
    files = list(write_data(folder / "data", 5, 30).values())
    data = {f"site-{place}": files[place % len(files)] for place in range(30)}
    consortium = Consortium(folder, data, "fedavg", rounds=5)
    everybody = {name: consortium.start(name) for name in data}
    everybody["coordinator"] = consortium.coordinator()
    wait_for(consortium.log("coordinator"), "round 4/5")
    memory = {name: most_memory(process.pid) for name, process in everybody.items()}
    ended(everybody, consortium)
    lines = re.findall(r"round [1-5]/5.* ([0-9.]+) s", consortium.log("coordinator").read_text())
    seconds = sorted(map(float, lines))
    own = memory.pop("coordinator")
    return (
        f"a round {seconds[len(seconds) // 2]} s ({seconds[0]} to {seconds[-1]}), a site "
        f"{max(memory.values())} MB at most, {sum(memory.values())} MB in all, coordinator {own} MB"
    )


def most_memory(pid: int) -> int:
    """The most memory that a process has held, in MB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1000 if found else 0


@contextmanager
def smallest_files() -> Iterator[None]:
    """Processes that are begun meanwhile can write no file of more than 4 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check(fits: bool, text: str) -> None:
    """A trial that did not come out as it must ends here."""
    if not fits:
        raise SystemExit(text)


Trial = Callable[[Path], str]
TRIALS: dict[str, Trial] = {
    "site": killed_site,
    "lost": lost_site,
    "coordinator": killed_coordinator,
    "disk": full_disk,
    "thirty": thirty,
    "peer": killed_peer,
    "peers": lambda folder: peers(folder, 5, 2, 1),
    "ten": lambda folder: peers(folder, 10, 3, 2),
}


def asked(trials: Mapping[str, Trial], about: str | None) -> Sequence[str]:
    """The trials that are named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("trial", nargs="*", metavar="TRIAL", help=f"one of {', '.join(trials)}")
    names: list[str] = parser.parse_args().trial
    if unknown := [name for name in names if name not in trials]:
        parser.error(f"unknown trial {unknown[0]!r}; known: {', '.join(trials)}")
    return names or list(trials)


def tried(trials: Mapping[str, Trial], names: Sequence[str], prefix: str) -> None:
    """Play these trials, each in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    for name in names:
        began = time.perf_counter()
        said = trials[name](folder / name)
        print(f"{name}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    tried(TRIALS, asked(TRIALS, __doc__), "fedstill-trials-")
