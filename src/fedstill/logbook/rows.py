"""The rows of a run and the questions asked of them; no files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import BadValue, unknown
from fedstill.core.node import SERVER
from fedstill.core.records import Direction
from fedstill.core.release import Spending
from fedstill.logbook.events import Note, Number, Traffic

EVALUATION = "evaluate"
CLOCK = "clock"  # the simulated time at the end of a round, in seconds

Kind = Literal["floats", "bytes"]
View = Literal["said", "heard"]
Scores = dict[str, dict[str, float]]  # by whose model, then by whose test set


@dataclass(frozen=True)
class Matrix:
    """Accuracies of one round; NaN where a model was not scored on a test set."""

    nodes: tuple[str, ...]
    targets: tuple[str, ...]
    values: NDArray[np.float64]  # [node, target]


@dataclass(frozen=True)
class Rows:
    """Everything a run wrote, as typed rows in the order of writing."""

    metrics: Sequence[Number]
    messages: Sequence[Traffic]
    notes: Sequence[Note]
    privacy: Sequence[Spending] = field(default=(), kw_only=True)  # the ledger

    def series(
        self, name: str, node: str | None = None, target: str | None = None, step: str | None = None
    ) -> dict[int, float]:
        """The value of each round; the mean over the rows of a round where several remain."""
        found: dict[int, list[float]] = {}
        for row in self.metrics:
            if (
                row.name == name
                and node in (None, row.node)
                and target in (None, row.target)
                and step in (None, row.step)
            ):
                found.setdefault(row.round, []).append(row.value)
        return {round: mean(values) for round, values in sorted(found.items())}

    def accuracy_by_round(self, node: str | None = None) -> dict[int, float]:
        """The unweighted mean over test sets: of one node, else the server, else all clients."""
        return self.metric_by_round("accuracy", node)

    def metric_by_round(self, name: str, node: str | None = None) -> dict[int, float]:
        """The same of any metric; where it is undefined, a test set is left out of the mean."""
        scores = evaluated(self.metrics, name)
        if node is None and any(SERVER in by_node for by_node in scores.values()):
            node = SERVER
        curve = {}
        for round, by_node in sorted(scores.items()):
            each = [by_node[other].values() for other in by_node if node in (None, other)]
            means = [mean(values) for by in each if (values := known(by))]
            if means:
                curve[round] = mean(means)
        return curve

    def metric_names(self) -> list[str]:
        """The metrics that were measured, in the order of their first rows."""
        return list(dict.fromkeys(row.name for row in self.metrics if row.step == EVALUATION))

    def traffic_by_round(
        self,
        kind: Kind = "floats",
        view: View = "said",
        direction: Direction | None = None,
        *,
        cumulative: bool = False,
    ) -> dict[int, int]:
        """What travelled in each round that left a row, or from the start to the end of it."""
        _check_words(kind, view, direction)
        totals = {row.round: 0 for table in (self.metrics, self.messages) for row in table}
        for row in self.messages:
            if direction in (None, row.direction):
                totals[row.round] += amount(row, kind, view)
        rounds = sorted(totals)
        values: Iterable[int] = (totals[round] for round in rounds)
        return dict(zip(rounds, accumulate(values) if cumulative else values, strict=True))

    def matrix(self, round: int | None = None) -> Matrix:
        """Every client's model (rows) on every test set (columns), by default at the last score."""
        scored = {
            round: {node: by_target for node, by_target in by_node.items() if node != SERVER}
            for round, by_node in evaluated(self.metrics, "accuracy").items()
        }
        scored = {round: by_node for round, by_node in scored.items() if by_node}
        if not scored:
            raise BadValue("no client's model was scored in this run, so there is no matrix")
        if round is not None and round not in scored:
            rounds = ", ".join(map(str, sorted(scored)))
            raise BadValue(f"no client's model was scored in round {round}; scored: {rounds}")
        return matrix_of(scored[max(scored) if round is None else round])


def evaluated(metrics: Iterable[Number], name: str) -> dict[int, Scores]:
    """A metric's values by round; of two rows for one place the later counts."""
    scores: dict[int, Scores] = {}
    for row in metrics:
        if row.step == EVALUATION and row.name == name:
            scores.setdefault(row.round, {}).setdefault(row.node, {})[row.target] = row.value
    return scores


def matrix_of(scores: Mapping[str, Mapping[str, float]]) -> Matrix:
    """Scores as a table; a model stands in the row that has its own test set on the diagonal."""
    nodes, targets = ordered(scores)
    missing = float("nan")
    values = [[scores[node].get(target, missing) for target in targets] for node in nodes]
    return Matrix(nodes, targets, np.array(values, dtype=np.float64).reshape(len(nodes), -1))


def ordered(scores: Mapping[str, Mapping[str, float]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Models and test sets; a model stands at the place of its own test set, if that was used."""
    targets = tuple(dict.fromkeys(target for by in scores.values() for target in by))
    own = dict.fromkeys(target for target in targets if target in scores)
    return (*own, *(node for node in scores if node not in own)), targets


def amount(row: Traffic, kind: Kind, view: View) -> int:
    """What one row counts: once as said, once per hearer as heard."""
    once = row.floats if kind == "floats" else row.bytes
    return once * (row.hearers if view == "heard" else 1)


def _check_words(kind: str, view: str, direction: str | None) -> None:
    """Refuse words for what is counted that would count something else, or nothing."""
    said = [("kind", kind, Kind), ("view", view, View)]
    if direction is not None:
        said.append(("direction", direction, Direction))
    strange = [
        unknown(what, str(word), get_args(words))
        for what, word, words in said
        if word not in get_args(words)
    ]
    if strange:
        raise BadValue(strange)


def mean(values: Iterable[float]) -> float:
    """The unweighted mean of one value or more."""
    kept = list(values)
    return sum(kept) / len(kept)


def known(values: Iterable[float]) -> list[float]:
    """The values that are numbers."""
    return [value for value in values if not math.isnan(value)]
