"""Deaths and returns, with real processes: who is killed goes on, and the tables stay the same.

    python benchmarks/sites_trials.py             # all trials
    python benchmarks/sites_trials.py site        # one of them

Each trial plays an unbroken run in one process first and compares; times are those of this machine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from demo_sites import Consortium, compared, rows, run, write_data

SECONDS = 1800.0
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
    """A site killed after its first and its second act, each time back: as if unbroken."""
    consortium, alone = led(folder, "scaffold", 3, "--gone", "1500")
    everybody = {name: consortium.start(name) for name in consortium.data}
    everybody["coordinator"] = consortium.coordinator()
    victim = next(iter(consortium.data))
    for times in (1, 2):
        wait_for(consortium.log(victim), "update:", times)
        everybody[victim].kill()
        everybody[victim].wait()
        everybody[victim] = consortium.start(victim)
    ended(everybody, consortium)
    return compared(consortium, alone)


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
    return compared(consortium, alone)


def peers(folder: Path, count: int, dead: int, back: int) -> str:
    """Peers killed in round 2, some back later, one frozen for a while: the rest go on."""
    data = write_data(folder / "data", 5, 30)
    files = list(data.values())
    data = {f"peer-{place}": files[place % len(files)] for place in range(count)}
    options = ["--gone", "2", "--deadline", "120"]
    consortium = Consortium(folder, data, "desa", rounds=6, peers=True, options=options)
    everybody = {name: consortium.start(name) for name in data}
    names = list(data)
    wait_for(consortium.log(names[-1]), "round 1/6")
    for name in names[:dead]:
        everybody[name].kill()
        everybody[name].wait()
    frozen = everybody[names[dead]]
    frozen.send_signal(signal.SIGSTOP)
    time.sleep(3)
    frozen.send_signal(signal.SIGCONT)
    for name in names[back:dead]:
        del everybody[name]
    for name in names[:back]:
        everybody[name] = consortium.start(name)
    ended(everybody, consortium)
    absences = [
        (row["node"], row["round"])
        for row in rows(consortium.run_folder(names[-1]), "notes.csv")
        if row["kind"] == "absent"
    ]
    finished = [n for n in data if (consortium.run_folder(n) / "summary.json").exists()]
    for_good = sorted({node for node, round in absences if round == "6"})
    return f"{len(finished)} of {count} ended all rounds; absent in the last: {', '.join(for_good)}"


TRIALS: dict[str, Callable[[Path], str]] = {
    "site": killed_site,
    "lost": lost_site,
    "coordinator": killed_coordinator,
    "peers": lambda folder: peers(folder, 5, 2, 1),
    "ten": lambda folder: peers(folder, 10, 3, 2),
}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fedstill-trials-"))
    for name in sys.argv[1:] or TRIALS:
        began = time.perf_counter()
        said = TRIALS[name](folder / name)
        print(f"{name}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
