"""Accuracy along a run: by round, and by what was sent until then; means over seeds, no layout.

Also any other metric, and any number that steps log, by round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import BadValue
from fedstill.core.records import Direction
from fedstill.logbook.reader import Run
from fedstill.logbook.rows import CLOCK, EVALUATION, Kind, View, mean
from fedstill.report.amounts import human_time
from fedstill.report.groups import gather, setting_of, statistic, unknown_number

Values = NDArray[np.float64]
VIEWS: dict[View, str] = {"said": "once per sender", "heard": "once per receiver"}


class Measure(NamedTuple):
    """What of the traffic is counted: floats or bytes, said or heard, in one direction or all."""

    kind: Kind
    view: View
    direction: Direction | None = None


@dataclass(frozen=True)
class Curve:
    """Mean and spread over seeds in the rounds in which every run was evaluated."""

    name: str
    runs: Sequence[Run]
    rounds: Values
    accuracy: Values  # fractions: the mean over test sets
    spread: Values  # sample standard deviation over seeds; zero for one seed

    @property
    def seeds(self) -> int:
        """How many runs it is the mean of."""
        return len(self.runs)

    def sent(self, measure: Measure) -> Values:
        """What was sent from the start to the end of each round, the mean over seeds."""
        each = [run.traffic_by_round(*measure, cumulative=True) for run in self.runs]
        amounts = [[sent[int(round)] for round in self.rounds] for sent in each]
        averaged: Values = np.array(amounts, dtype=np.float64).mean(axis=0)
        return averaged

    def seconds(self) -> Values:
        """The time from the start to the end of each round, the mean over seeds.

        By the clock of the federation where there is one, else as it was measured here.
        """
        each = [time_by_round(run) for run in self.runs]
        times = [[spent.get(int(round), np.nan) for round in self.rounds] for spent in each]
        averaged: Values = np.array(times, dtype=np.float64).mean(axis=0)
        return averaged

    @property
    def simulated(self) -> bool:
        """Whether the time is that of a federation's clock."""
        return all(any(row.name == CLOCK for row in run.metrics) for run in self.runs)

    def where(self, seen: NDArray[np.bool_]) -> Curve:
        """The same curve with only the rounds that a mask keeps."""
        kept = {name: getattr(self, name)[seen] for name in ("rounds", "accuracy", "spread")}
        return replace(self, **kept)


def curves(runs: Sequence[Run]) -> list[Curve]:
    """A curve for each setting that was evaluated; those on different data say on which."""
    groups, _ = gather([run for run in runs if run.accuracy_by_round()])
    if not groups:
        raise BadValue("none of the runs was evaluated, so there is nothing to draw")
    data = {name: setting_of(members[0]).data for name, members in groups.items()}
    several = len(set(data.values())) > 1
    return [
        _curve(f"{name} on {data[name]}" if several else name, members)
        for name, members in groups.items()
    ]


def rows(runs: Sequence[Run], *, percent: bool = False) -> list[dict[str, Any]]:
    """The numbers behind the pictures, a row for each method and round.

    Accuracies are fractions, or texts in percent for people. Floats and bytes are those of all
    rounds so far: `sent` counts a message once per sender, `received` once per receiver.
    """
    found: list[dict[str, Any]] = []
    for curve in curves(runs):
        sent: Mapping[str, Values] = {
            "floats sent": curve.sent(Measure("floats", "said")),
            "floats received": curve.sent(Measure("floats", "heard")),
            "bytes sent": curve.sent(Measure("bytes", "said")),
            "bytes received": curve.sent(Measure("bytes", "heard")),
        }
        times = curve.seconds()
        for place, round in enumerate(curve.rounds):
            scores = (float(curve.accuracy[place]), float(curve.spread[place]))
            accuracy, spread = (f"{100 * s:.2f}" if percent else s for s in scores)
            seconds = float(times[place])
            spent = {"time": human_time(seconds)} if percent else {"seconds": seconds}
            amounts: dict[str, Any] = {
                name: _whole(float(values[place])) for name, values in sent.items()
            }
            found.append(
                {
                    "method": curve.name,
                    "round": int(round),
                    "seeds": curve.seeds,
                    "accuracy": accuracy,
                    "spread": spread if curve.seeds > 1 else None,
                    **amounts,
                    **spent,
                }
            )
    return found


@dataclass(frozen=True)
class Trace:
    """A metric, or a number that steps log, in the rounds in which every run of a method has it."""

    method: str
    seeds: int
    rounds: Values
    values: Values  # the mean over nodes and seeds
    spread: Values  # sample standard deviation over seeds; zero for one seed


def logged(runs: Sequence[Run]) -> list[str]:
    """What steps log in these runs: names, or `step.name` where several steps log one name.

    Then the metrics: by name, or `evaluate.name` where a step logs that name too.
    """
    pairs = dict.fromkeys((row.step, row.name) for run in runs for row in run.metrics)
    by_steps = [pair for pair in pairs if pair[0] != EVALUATION]
    names = [name for _, name in by_steps]
    metrics = [name for step, name in pairs if step == EVALUATION]
    return [
        *(name if names.count(name) == 1 else f"{step}.{name}" for step, name in by_steps),
        *(f"{EVALUATION}.{name}" if name in names else name for name in metrics),
    ]


def traces(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[Trace]]:
    """For each name the curves of the methods that log it."""
    known = logged(runs)
    for name in names:
        if name not in known:
            raise BadValue(unknown_number("number", name, known))
    groups, _ = gather(runs)
    each = {
        name: [
            found
            for method, members in groups.items()
            if (found := _trace(method, members, name)) is not None
        ]
        for name in names
    }
    for name in names:
        if not each[name]:
            raise BadValue(f"{name}: there is no round in which all seeds of a method have it")
    return each


def logged_rows(
    runs: Sequence[Run], names: Sequence[str], *, short: bool = False
) -> list[dict[str, Any]]:
    """What steps logged, a row for each method and round; texts of four digits for people."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name, each in traces(runs, names).items():
        for trace in each:
            for round, value in zip(trace.rounds, trace.values, strict=True):
                key = (trace.method, int(round))
                start = {"method": key[0], "round": key[1], "seeds": trace.seeds}
                row = found.setdefault(key, {**start, **dict.fromkeys(names)})
                row[name] = f"{value:.4g}" if short else float(value)
    return list(found.values())


def _trace(method: str, runs: Sequence[Run], name: str) -> Trace | None:
    """The curve of one method, or None if it does not log the number."""
    each = [_by_round(run, name) for run in runs]
    rounds = sorted(set.intersection(*(set(values) for values in each)))
    found = [statistic(values[round] for values in each) for round in rounds]
    known = [value for value in found if value is not None]
    if not known:
        return None
    return Trace(
        method,
        len(runs),
        np.array(rounds, dtype=np.float64),
        np.array([value.mean for value in known]),
        np.array([value.spread or 0.0 for value in known]),
    )


def _by_round(run: Run, name: str) -> dict[int, float]:
    """What steps logged under a name, the mean over those who did; or a metric by round."""
    found: dict[int, list[float]] = {}
    for row in run.metrics:
        if row.step != EVALUATION and name in (row.name, f"{row.step}.{row.name}"):
            found.setdefault(row.round, []).append(row.value)
    if found:
        return {round: mean(values) for round, values in found.items()}
    metric = name.removeprefix(f"{EVALUATION}.")
    return run.metric_by_round(metric) if metric in run.metric_names() else {}


def _curve(name: str, runs: Sequence[Run]) -> Curve:
    each = [run.accuracy_by_round() for run in runs]
    rounds = sorted(set.intersection(*(set(scores) for scores in each)))
    found = [statistic(scores[round] for scores in each) for round in rounds]
    known = [value for value in found if value is not None]
    return Curve(
        name,
        runs,
        np.array(rounds, dtype=np.float64),
        np.array([value.mean for value in known]),
        np.array([value.spread or 0.0 for value in known]),
    )


def time_by_round(run: Run) -> dict[int, float]:
    """The time at the end of each round since the start."""
    clock = {row.round: row.value for row in run.metrics if row.name == CLOCK}
    if clock:
        return clock
    spent = {row.round: row.value for row in run.metrics if row.name == "seconds"}
    return dict(zip(sorted(spent), accumulate(spent[r] for r in sorted(spent)), strict=True))


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def within(run: Run, budget: float) -> tuple[int, float] | None:
    """The last round that was scored before more than these bytes were sent, and its accuracy.

    Each message counts once, however many hear it. None where the first score came too late.
    """
    sent, scores = run.traffic_by_round("bytes", "said", cumulative=True), run.accuracy_by_round()
    rounds = [round for round in scores if sent[round] <= budget]
    return (max(rounds), scores[max(rounds)]) if rounds else None
