"""Liars among ten clients against every robust rule; python benchmarks/attacks.py --jobs 4

Each of the five embedded domains is two clients. One to four of the ten lie in every round:

    sign        the way of their weights turned round and four times as long
    labels      they learn from the label 9 - y
    noise       normal numbers of deviation one added to every weight
    examples    as `sign`, and they say that they have 2^40 examples, the most that is believed
    10^18       as `sign`, and they say that they have 10^18 examples, which nobody believes

Written are a CSV of all runs and a Markdown table of the accuracy at the end, mean and deviation
over seeds. FedAvg is attacked in every way, FedDM by labels. Runs that stand in the CSV already are
not played again: what was cut short goes on, and `--seconds 0` prints the table of what is there.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

import torch

import fedstill
from fedstill.core import algebra
from fedstill.core.data import Data
from fedstill.core.method import Method, Step
from fedstill.core.node import Inbox
from fedstill.core.records import Direction, NodeId
from fedstill.core.seeds import generator
from fedstill.data.sites import Collection
from fedstill.engines.engine import Outcome
from fedstill.engines.execution import Execution
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods import FedAvg, FedDM
from fedstill.models import ConvNet
from fedstill.parts.robust import Rule

ATTACKS = ("sign", "labels", "noise", "examples", "10^18")
MOST = {"examples": 2**40, "10^18": 10**18}


@dataclass(frozen=True)
class Trial:
    """One run."""

    method: str
    rule: Rule
    attack: str  # empty: nobody lies
    liars: int
    seed: int
    rounds: int


@dataclass(frozen=True)
class Found:
    """What came out."""

    trial: Trial
    accuracy: float  # of the common model, mean over the five domains
    left_out: int  # messages


def ten_clients() -> Collection:
    """The embedded digits, every domain in two halves; those who lie come first."""
    domains = fedstill.load("digits5", size=16)
    sites = [
        replace(site, name=f"{half} {site.name}", rows=site.rows[start::2])
        for start, half in enumerate("ab")
        for site in domains.sites
    ]
    return replace(domains, sites=tuple(sites))


def turned_labels(data: Data) -> Data:
    """The same examples, each with the label 9 - y."""
    x, y = data.all()
    return Data.of(x, 9 - y)


class Lying(InProcess):
    """Some clients do not send what they came to."""

    liars: Sequence[NodeId] = ()
    attack = ""

    def play(
        self,
        step: Step,
        round: int,
        inboxes: Mapping[NodeId, Inbox[Any]],
        toward: Direction | None = None,
    ) -> dict[NodeId, Outcome]:
        outcomes = super().play(step, round, inboxes, toward)
        for liar in self.liars if toward == "up" and self.attack != "labels" else ():
            up = outcomes[liar].message
            if up is not None:
                start = inboxes[liar].only().weights
                lied = self.lied(up, start, generator(round, liar))
                outcomes[liar] = replace(outcomes[liar], message=lied, bad=None)
        return outcomes

    def lied(self, up: Any, start: Any, rng: torch.Generator) -> Any:
        if self.attack == "noise":
            noise = {n: torch.randn(t.shape, generator=rng) for n, t in up.weights.items()}
            return up.replace(weights=algebra.add(up.weights, noise))
        turned = algebra.add(start, algebra.sub(up.weights, start), -4.0)
        return up.replace(weights=turned, examples=MOST.get(self.attack, up.examples))


def method_of(trial: Trial) -> Method:
    """The method with its rule; liars are as many as the rule is told."""
    told = {"aggregation": trial.rule, "byzantine": max(1, trial.liars)}
    if trial.method == "fedavg":
        return FedAvg(lr=0.1, batch_size=16, epochs=2, **told)
    return FedDM(per_class=5, steps=20, real_batch=32, server_epochs=40, server_batch=64, **told)


def played(trial: Trial) -> Found:
    """One run, alone in its process."""
    torch.set_num_threads(1)
    population = Population(ten_clients(), ConvNet((3, 16, 16), 10, depth=2, width=16))
    liars = list(population.clients)[: trial.liars]
    if trial.attack == "labels":
        given = {c: population.party(c).data for c in population.clients}
        population = population.learning_from(
            {c: turned_labels(data) if c in liars else data for c, data in given.items()}
        )
    experiment = Experiment(
        method_of(trial), population, rounds=trial.rounds, seed=trial.seed,
        evaluate_every=trial.rounds, bad_messages="leave_out",
    )  # fmt: skip
    engine = Lying(experiment, Execution(device="cpu"))
    engine.liars, engine.attack = liars, trial.attack
    log = MemoryLog()
    run(engine, log)
    last = [row.value for row in log.metrics if row.name == "accuracy" and row.step == "evaluate"]
    left_out = sum(note.kind == "left out" for note in log.notes)
    return Found(trial, mean(last), left_out)


def trials(seeds: Sequence[int], rounds: int, most: int) -> Iterator[Trial]:
    """Every rule under every attack; one seed after the other, and the long runs of each first."""
    plans: list[tuple[str, Sequence[Rule], Sequence[str], int]] = [
        ("feddm", ("mean", "multi_krum"), ("labels",), max(1, rounds // 4)),
        ("fedavg", get_args(Rule), ATTACKS, rounds),
    ]
    for seed in seeds:
        for method, rules, attacks, length in plans:
            for rule in rules:
                yield Trial(method, rule, "", 0, seed, length)
                for attack in attacks:
                    for liars in range(1, most + 1):
                        yield Trial(method, rule, attack, liars, seed, length)


COLUMNS = [*(field.name for field in fields(Trial)), "accuracy", "left_out"]


def read(path: Path) -> list[Found]:
    """What was found before."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_found(row) for row in csv.DictReader(file)]


def _found(row: Mapping[str, Any]) -> Found:
    numbers = {name: int(row[name]) for name in ("liars", "seed", "rounds")}
    trial = Trial(row["method"], row["rule"], row["attack"], **numbers)
    return Found(trial, float(row["accuracy"]), int(row["left_out"]))


def append(path: Path, found: Found) -> None:
    """Write a run down as soon as it has ended."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        row = {**asdict(found.trial), "accuracy": found.accuracy, "left_out": found.left_out}
        writer.writerow(row)


def play(wanted: Sequence[Trial], path: Path, *, jobs: int, seconds: float) -> None:
    """Play side by side, for so many seconds at most."""
    until = time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:  # ended with the block
        running = pool.imap_unordered(played, wanted)
        for _ in wanted:
            try:
                append(path, running.next(timeout=max(0.0, until - time.monotonic())))
            except multiprocessing.TimeoutError:
                print(f"{seconds:g} s are over; what is missing is played by the next call")
                return


def table(found: Sequence[Found]) -> str:
    """Rows are attacks and numbers of liars, columns rules; accuracy in percent."""
    lines: list[str] = []
    for method in sorted({each.trial.method for each in found}):
        mine = [each for each in found if each.trial.method == method]
        rules = [rule for rule in get_args(Rule) if any(e.trial.rule == rule for e in mine)]
        lines += [
            f"| {method}: attack | attackers | " + " | ".join(rules) + " |",
            "|---" * (2 + len(rules)) + "|",
        ]
        rows = {(e.trial.attack, e.trial.liars) for e in mine}
        for attack, liars in sorted(rows, key=lambda row: (("", *ATTACKS).index(row[0]), row[1])):
            here = [e for e in mine if (e.trial.attack, e.trial.liars) == (attack, liars)]
            cells = (cell([e.accuracy for e in here if e.trial.rule == rule]) for rule in rules)
            lines.append(f"| {attack or 'no attack'} | {liars} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def cell(values: Sequence[float]) -> str:
    """Mean and deviation in percent."""
    if not values:
        return ""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("attacks.csv"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--liars", type=int, default=4, help="the most")
    parser.add_argument("--seconds", type=float, default=86400.0, help="stop after so many")
    options = parser.parse_args()
    there = {found.trial for found in read(options.out)}
    wanted = trials(options.seeds, options.rounds, options.liars)
    missing = [trial for trial in wanted if trial not in there]
    if missing and options.seconds:
        play(missing, options.out, jobs=options.jobs, seconds=options.seconds)
    text = table(read(options.out))
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
