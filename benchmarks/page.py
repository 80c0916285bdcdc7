"""docs/benchmarks.md from the JSON files: python benchmarks/page.py

Only what stands between a table's two marks is written; everything else on the page is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import population

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
RESULTS = HERE / "results"
TABLES = ("overhead", "small", "cifar10", "matching", "own_code")
WIDTH = 110  # of a line that is no table's
NOISE = 0.005  # of accuracy, that is never called a difference
Table = Mapping[str, Any]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in TABLES:
        text = filled(text, name, side_by_side(read(RESULTS / f"{name}.json")))
    text = filled(text, "aims", aims(read(RESULTS / "aims.json")))
    text = filled(text, "bench", own_numbers(RESULTS / "bench"))
    text = filled(text, "profile", profiles(read(RESULTS / "profile.json")))
    text = filled(text, "two_cores", two_cores(read(RESULTS / "two_cores.json")))
    text = filled(text, "population", populations(read(RESULTS / "population.json")))
    text = filled(text, "peers", populations(read(RESULTS / "population-peers.json")))
    PAGE.write_text(text, encoding="utf-8")
    print(f"→ {PAGE}")


def read(path: Path) -> Table | None:
    found: Table | None = json.loads(path.read_text()) if path.exists() else None
    return found


def filled(page: str, name: str, made: str) -> str:
    """The page with other text between the marks of a table."""
    begin, end = f"<!-- made: {name} -->", f"<!-- end: {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise SystemExit(f"{PAGE.name} needs the lines {begin} and {end} once each, in this order")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{wrapped(made)}\n{end}{after}"


def wrapped(made: str) -> str:
    """Sentences in lines of the page's width; tables as they are."""
    lines = [
        line if line.startswith("|") else textwrap.fill(line, WIDTH, break_on_hyphens=False)
        for line in made.splitlines()
    ]
    return "\n".join(lines)


def side_by_side(found: Table | None) -> str:
    """A table for each row of work, all systems in it."""
    if found is None:
        return "Not measured yet."
    parts = [measured_on(found)]
    for row in found["rows"]:
        compared = row.get("baseline", found["baseline"])
        baseline = next(s for s in row["systems"] if s["system"] == compared)
        noise = seed_noise(row["systems"])
        lines = [line(row, system, baseline, noise) for system in row["systems"]]
        parts.append(f"**{row['label']}**; ms for {row['unit']}\n\n{markdown(lines)}")
    return "\n\n".join(parts)


def aims(found: Table | None) -> str:
    """Targets on a GPU, and how far they are."""
    if found is None:
        return "Not measured yet."
    at = found["machine"]
    what = at["gpu"]["name"] if at["gpu"] else at["cpu"]
    said = f"Measured {found['when']} on {what}, torch {at['torch']}, in one run; medians of "
    said += f"at least {found['repeat']} repetitions."
    lines = []
    for row in found["rows"]:
        if row["failed"]:
            lines.append({"work": row["work"], "median": f"failed: {row['failed']}"})
            continue
        times = row["milliseconds"]
        own, aim = row.get("times", times["median"]), row["gain"] or row["most"]
        unit = "times" if row["gain"] else "ms"
        reached = own >= aim if row["gain"] else own <= aim
        lines.append({
            "work": row["work"], "case": row["case"],
            "median": f"{number(times['median'])} ms" + (f", {own:.1f} times" * bool(row["gain"])),
            "min – max, ms": f"{number(times['lowest'])} – {number(times['highest'])}",
            "target": f"{number(aim)} {unit}",
            "reached": "yes" if reached else f"no, {own / aim:.2f} × target",
        })  # fmt: skip
    return f"{said}\n\n{markdown(lines)}"


def populations(found: Table | None) -> str:
    """Memory and time by the number of clients."""
    if found is None:
        return "Not measured yet."
    at, turns = found["hardware"], max(run["turn"] for run in found["runs"]) + 1
    said = f"Measured on {at['processor']}, cores {at['cores']}, torch {found['versions']['torch']}"
    begun, ended = found["load_at_begin_and_end"]
    said += f" with one thread; load {begun:.1f} at the beginning and {ended:.1f} at the end. "
    said += f"Medians over {turns} turns; a ratio is taken within a turn, then its median."
    return f"{said}\n\n{population.table(found)}"


def two_cores(found: Table | None) -> str:
    """fedstill beside a plain loop, in processor time."""
    if found is None:
        return "Not measured yet."
    at = found["machine"]
    lines = [
        {
            "one time is for": row["what"], "engine": f"`{row['engine']}`",
            "fedstill, ms": number(row["ours_ms"]), "plain loop, ms": number(row["plain_ms"]),
            "ratio": f"{row['ratio']:.2f}",
        }
        for row in found["rows"]
    ]  # fmt: skip
    said = f"Measured {found['when']} on {at['cpu']}, torch {at['torch']}, one thread; minimum of "
    said += f"{found['repeat']} repetitions."
    return f"{said}\n\n{markdown(lines)}"


def measured_on(found: Table) -> str:
    """When, where, and how busy the machine was."""
    at = found["machine"]
    what = at["gpu"]["name"] if found["device"].startswith("cuda") else at["cpu"]
    said = f"Measured {found['when']} on {what}, CPUs {at['cpus']}, torch threads {at['threads']}, "
    said += f"Python {at['python']}; {packages(found)}; seeds: {found['seeds']}."
    if at["load"] and at["load"][0] > at["cpus"] / 4:
        loads = ", ".join(f"{load:.1f}" for load in at["load"])
        said += f" **The machine was busy** (load {loads} before the start): times are noisy."
    return said + (" **Reduced size.**" if found["small"] else "")


def packages(found: Table) -> str:
    """Every version that was at work."""
    seen: dict[str, str] = {}
    for row in found["rows"]:
        for system in row["systems"]:
            for run in system["runs"]:
                seen.update(run["versions"])
    return ", ".join(f"{name} {version}" for name, version in sorted(seen.items()))


def line(row: Table, system: Table, baseline: Table, noise: float | None) -> dict[str, str]:
    """One system in a table; a time that does not count is struck out."""
    runs = system["runs"]
    if system["skipped"] or not runs:
        return {"system": system["title"], "median": f"not measured: {system['skipped']}"}
    times = milliseconds(row, system)
    verdict = agreement(system, baseline, noise)
    middle = number(statistics.median(times))
    shown = {
        "system": system["title"],
        "median": f"~~{middle}~~" if verdict == "no" else middle,
        "min – max": f"{number(min(times))} – {number(max(times))}",
    }
    base = milliseconds(row, baseline)
    if base:
        ratio = statistics.median(times) / statistics.median(base)
        shown[f"ratio to {baseline['title']}"] = f"{ratio:.2f} ×"
    if len(runs[0]["seconds"]) > 1:
        shown["first round, s"] = number(statistics.median(run["seconds"][0] for run in runs))
    shown["start-up, s"] = number(statistics.median(run["start_up"] for run in runs))
    scores = accuracies(system)
    if scores:
        spread = f" ± {100 * statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        count = f", {len(scores)} seeds" if system.get("more_seeds") else ""
        shown["accuracy, %"] = f"{100 * statistics.mean(scores):.2f}{spread}{count}"
        shown["agrees"] = verdict
    return shown


def milliseconds(row: Table, system: Table) -> list[float]:
    """Of one unit of work, all timed pieces of all runs; the first of several warms up."""
    pieces = [
        second
        for run in system["runs"]
        for second in (run["seconds"][1:] if len(run["seconds"]) > 1 else run["seconds"])
    ]
    return [1000 * second / row["parts"] for second in pieces]


def accuracies(system: Table) -> list[float]:
    """Of all runs; `more_seeds` are of runs beside other work, whose times do not count."""
    timed = [run["accuracy"] for run in system["runs"] if run["accuracy"] is not None]
    return timed + list(system.get("more_seeds", ()))


def seed_noise(systems: Sequence[Table]) -> float | None:
    """The deviation of accuracy over seeds, pooled over systems; None with a single seed."""
    several = [scores for scores in map(accuracies, systems) if len(scores) > 1]
    if not several:
        return None
    return math.sqrt(statistics.mean(statistics.variance(scores) for scores in several))


def agreement(system: Table, baseline: Table, noise: float | None) -> str:
    """Whether a mean lies within twice the standard error of a difference of the baseline's."""
    mine, theirs = accuracies(system), accuracies(baseline)
    if not mine or not theirs:
        return ""
    if noise is None or len(mine) < 2 or len(theirs) < 2:
        return "not judged, one seed"
    allowed = max(NOISE, 2 * noise * math.sqrt(1 / len(mine) + 1 / len(theirs)))
    return "yes" if abs(statistics.mean(mine) - statistics.mean(theirs)) <= allowed else "no"


def own_numbers(folder: Path) -> str:
    """What `fedstill bench` found, with the ratio to one client after another unrecorded."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return "Not measured yet."
    parts = []
    for found in map(read, files):
        assert found is not None
        at, size = found["machine"], found["settings"]
        what = at["gpu"]["name"] if at["gpu"] else at["cpu"]
        lines = []
        first = found["cases"][0]["milliseconds"].get("median")
        for case in found["cases"]:
            if case["failed"]:
                lines.append({"engine": case["title"], "ms": f"failed: {case['failed']}"})
                continue
            times = case["milliseconds"]
            peak = case["peak_bytes"]
            lines.append({
                "engine": case["title"], "clients": str(case["clients"]),
                "ms": number(times["median"]),
                "min – max": f"{number(times['lowest'])} – {number(times['highest'])}",
                "speed-up": f"{first / times['median']:.1f} ×" if first else "",
                "first repetition, s": number(case["first_seconds"]),
                "peak MB": "" if peak is None else f"{peak / 1e6:.0f}",
            })  # fmt: skip
        synthetic = f", {size['per_class']} synthetic a class" if size["per_class"] else ""
        busy = f", load {at['load'][0]:.1f}" if at["load"] else ""
        parts.append(
            f"**{found['benchmark']}**: {found['what']}; width {size['width']}, batch "
            f"{size['batch']}{synthetic}, {size['size']} size; {what}, torch {at['torch']}{busy}"
            f"\n\n{markdown(lines)}"
        )
    return "\n\n".join(parts)


def profiles(found: Table | None) -> str:
    """Where the time of each loop goes, and its lower bound."""
    if found is None:
        return "Not measured yet."
    at = found["machine"]
    what = at["gpu"]["name"] if at["gpu"] else at["cpu"]
    parts = [f"Measured {found['when']} on {what}, torch {at['torch']}."]
    for loop in found["loops"]:
        lines = [
            {
                "kernels": kind,
                "kernel time, µs": number(told["us"]),
                "launches": number(told["launches"]),
            }
            for kind, told in loop["kinds"].items()
            if told["us"]
        ]
        busy = sum(told["us"] for told in loop["kinds"].values())
        lines.append({"kernels": "total", "kernel time, µs": number(busy)})
        least = loop["floor"]
        memory = "" if least["memory"] is None else f", {number(least['memory'])} µs (memory)"
        parts.append(
            f"**{loop['loop']}**, {loop['title']}: wall-clock time {number(loop['us'])} µs for "
            f"{loop.get('unit', 'a step of a client')}; lower bound {number(least['arithmetic'])} "
            f"µs (arithmetic){memory}\n\n{markdown(lines)}"
        )
    return "\n\n".join(parts)


def markdown(lines: Sequence[Mapping[str, str]]) -> str:
    """Lines as a table; a key that a line lacks is an empty cell."""
    keys = list(dict.fromkeys(key for each in lines for key in each))
    rows = [keys, ["---"] * len(keys), *([each.get(key, "") for key in keys] for each in lines)]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in rows)


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
