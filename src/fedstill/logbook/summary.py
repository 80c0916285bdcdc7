"""The numbers of summary.json, computed from the rows; the names are those of the papers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstill.core.files import for_json
from fedstill.core.node import SERVER
from fedstill.logbook.events import Traffic
from fedstill.logbook.rows import (
    CLOCK,
    Rows,
    Scores,
    amount,
    evaluated,
    known,
    matrix_of,
    mean,
    ordered,
)
from fedstill.logbook.writer import write_json

LARGEST_DIAGONAL = 30  # models scored on nothing but their own sets, whose matrix is written
CHOSEN_ON_TEST_DATA = "chosen on test data: report beside the last"
CHOSEN_ON_HELD_OUT = "chosen on held-out examples: report beside the last"
HELD_OUT = "training examples held out, not the test sets"


def summarise(
    rows: Rows,
    *,
    status: str = "finished",
    rounds: int | None = None,
    seconds: float | None = None,
    lower_is_better: Collection[str] = ("loss",),
    held_out: int = 0,
    counts: Collection[str] = ("confusion",),
    examples: Mapping[str, int] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """A run in one table: last and best scores, traffic, time, and other facts as given.

    Accuracies stand at the top; `metrics` holds, by name, the same of every other metric but of
    `counts`, which have no mean. With `held_out` the scores are those on so many training
    examples, and the summary says so. With `examples`, the training examples of each client, the
    accuracy of clients' models on their own test sets is also averaged by them.

    Round 0 is what happens before the first round; without `rounds`, the last round of any row
    counts. Without `seconds`, the rows named `seconds` are added up, so that a resumed run counts
    its time once.
    """
    if rounds is None:
        tables = (rows.metrics, rows.messages)
        rounds = max((row.round for table in tables for row in table), default=0)
    if seconds is None:
        seconds = math.fsum(row.value for row in rows.metrics if row.name == "seconds")
    clock = [row.value for row in rows.metrics if row.name == CLOCK and row.step == "round"]
    simulated = {"simulated_seconds": clock[-1]} if clock else {}
    scored = {"held_out": held_out, "scored_on": HELD_OUT} if held_out else {}
    others = [n for n in rows.metric_names() if n != "accuracy" and not _among(n, counts)]
    summary = {
        "status": status,
        "rounds": rounds,
        "seconds": seconds,
        **simulated,
        **facts,
        **scored,
        **_scores(rows, "accuracy"),
        **by_examples(evaluated(rows.metrics, "accuracy"), examples or {}),
        "metrics": {
            name: {
                **_without_accuracy(_scores(rows, name, _among(name, lower_is_better))),
                **({"lower_is_better": True} if _among(name, lower_is_better) else {}),
            }
            for name in others
        },
        "traffic": traffic(rows.messages),
        "floats_per_round": floats_per_round(rows.messages, rounds),
    }
    found = {name: for_json(value) for name, value in summary.items()}
    return _on_held_out(found) if held_out else found


def _on_held_out(summary: dict[str, Any]) -> dict[str, Any]:
    """The same with notes that say on what the best round was chosen."""
    return {
        key: _on_held_out(value)
        if isinstance(value, dict)
        else CHOSEN_ON_HELD_OUT
        if value == CHOSEN_ON_TEST_DATA
        else value
        for key, value in summary.items()
    }


def write_summary(folder: Path | str, summary: dict[str, Any]) -> None:
    """Write summary.json, which marks the run as finished."""
    write_json(Path(folder) / "summary.json", summary)


def _among(name: str, metrics: Collection[str]) -> bool:
    """Whether a name is that of a metric, or of one of its several numbers."""
    return any(name == metric or name.startswith(f"{metric}.") for metric in metrics)


def short(key: str) -> str:
    """The key of a score of accuracy as it stands under another metric: without the word."""
    return key.replace("_accuracy", "").replace("accuracy_", "")


def _scores(rows: Rows, metric: str, lower_is_better: bool = False) -> dict[str, Any]:
    scores = evaluated(rows.metrics, metric)
    return {
        **server_scores(scores, lower_is_better),
        **client_scores(scores, lower_is_better),
    }


def _without_accuracy(scores: dict[str, Any]) -> dict[str, Any]:
    return {short(key): value for key, value in scores.items()}


def server_scores(scores: dict[int, Scores], lower_is_better: bool = False) -> dict[str, Any]:
    """The server's model: last round and best round; nothing where it was never scored."""
    by_round = {round: by_node[SERVER] for round, by_node in scores.items() if SERVER in by_node}
    if not by_round:
        return {}
    last = max(by_round)
    averages = {round: _mean(by_target.values()) for round, by_target in by_round.items()}
    best = _best(averages, lower_is_better)
    return {
        "evaluated_round": last,
        "average_accuracy": averages[last],
        "accuracy_by_client": by_round[last],
        "best_average_accuracy": averages[best],
        "best_average_accuracy_round": best,
        "best_average_accuracy_note": CHOSEN_ON_TEST_DATA,
    }


def client_scores(scores: dict[int, Scores], lower_is_better: bool = False) -> dict[str, Any]:
    """The clients' models: the three averages of the last round, each also by client.

    A model that was not scored on every test set has no averaged global or inter accuracy; the
    means are over the models that have the value. Many models that were scored on their own test
    sets alone have no matrix: it would be empty but for what is listed by client.
    """
    by_round = {
        round: {node: by_target for node, by_target in by_node.items() if node != SERVER}
        for round, by_node in scores.items()
    }
    by_round = {round: by_node for round, by_node in by_round.items() if by_node}
    if not by_round:
        return {}
    last = max(by_round)
    everywhere, elsewhere, own = _by_client(by_round[last])
    curve = {
        round: value
        for round, each in by_round.items()
        if (value := _mean_of_known(_by_client(each)[0].values())) is not None
    }
    best = _best(curve, lower_is_better) if curve else None
    return {
        "evaluated_round_of_clients": last,
        "averaged_global_accuracy": _mean_of_known(everywhere.values()),
        "inter_accuracy": _mean_of_known(elsewhere.values()),
        "averaged_local_accuracy": _mean_of_known(own.values()),
        "averaged_global_accuracy_by_client": everywhere,
        "inter_accuracy_by_client": elsewhere,
        "local_accuracy_by_client": own,
        "best_averaged_global_accuracy": None if best is None else curve[best],
        "best_averaged_global_accuracy_round": best,
        "best_averaged_global_accuracy_note": CHOSEN_ON_TEST_DATA,
        **_matrix(by_round[last]),
    }


def by_examples(scores: dict[int, Scores], examples: Mapping[str, int]) -> dict[str, Any]:
    """Clients' models on their own test sets, averaged by examples: last round and best round."""
    curve: dict[int, float] = {}
    for round, by_node in scores.items():
        own = {node: by_node[node][node] for node in examples if node in by_node.get(node, ())}
        total = sum(examples[node] for node in own)
        if total and len(own) == len(examples):
            curve[round] = math.fsum(examples[node] * own[node] for node in own) / total
    if not curve:
        return {}
    best = _best(curve, lower_is_better=False)
    return {
        "local_accuracy_by_examples": curve[max(curve)],
        "best_local_accuracy_by_examples": curve[best],
        "best_local_accuracy_by_examples_round": best,
        "best_local_accuracy_by_examples_note": CHOSEN_ON_TEST_DATA,
    }


def _matrix(scores: Scores) -> dict[str, Any]:
    """The table of models and test sets, where it says more than the scores by client."""
    alone = all(by_target.keys() == {node} for node, by_target in scores.items())
    if alone and len(scores) > LARGEST_DIAGONAL:
        return {}
    matrix = matrix_of(scores)
    return {
        "accuracy_matrix": {
            "models": list(matrix.nodes),
            "test_sets": list(matrix.targets),
            "values": matrix.values.tolist(),
        }
    }


def traffic(messages: Iterable[Traffic]) -> dict[str, Any]:
    """Totals by direction, by view (said, heard) and in floats and bytes."""
    totals = {
        direction: {view: {"floats": 0, "bytes": 0} for view in ("said", "heard")}
        for direction in ("up", "down", "peer")
    }
    for row in messages:
        said, heard = totals[row.direction]["said"], totals[row.direction]["heard"]
        said["floats"] += amount(row, "floats", "said")
        said["bytes"] += amount(row, "bytes", "said")
        heard["floats"] += amount(row, "floats", "heard")
        heard["bytes"] += amount(row, "bytes", "heard")
    return totals


def floats_per_round(messages: Iterable[Traffic], rounds: int) -> dict[str, float | None]:
    """Floats said in rounds 1 to the last, by direction, over their number; None without rounds."""
    totals = {"up": 0, "down": 0, "peer": 0}
    for row in messages:
        if 1 <= row.round <= rounds:
            totals[row.direction] += row.floats
    return {name: total / rounds if rounds else None for name, total in totals.items()}


def _by_client(scores: Scores) -> tuple[dict[str, float | None], ...]:
    """Each model's mean over all test sets, over those of others, and on its own."""
    nodes, targets = ordered(scores)
    known = set(targets)
    everywhere: dict[str, float | None] = {}
    elsewhere: dict[str, float | None] = {}
    own: dict[str, float | None] = {}
    for node in nodes:
        by_target = scores[node]
        everywhere[node] = elsewhere[node] = None
        if len(by_target) == len(targets):
            everywhere[node] = _known(_mean(by_target[target] for target in targets))
        foreign = len(targets) - (node in known)
        if foreign and len(by_target) - (node in by_target) == foreign:
            others = (by_target[target] for target in targets if target != node)
            elsewhere[node] = _known(_mean(others))
        own[node] = _known(by_target.get(node, math.nan))
    return everywhere, elsewhere, own


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: Iterable[float]) -> float:
    """The mean of the values that are numbers; NaN where none is."""
    numbers = known(values)
    return mean(numbers) if numbers else math.nan


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return mean(there) if there else None


def _best(curve: dict[int, float], lower_is_better: bool) -> int:
    """The earliest of the rounds with the highest value, or with the lowest."""
    numbers = {round: value for round, value in curve.items() if not math.isnan(value)} or curve
    chosen = min if lower_is_better else max
    return chosen(sorted(numbers), key=numbers.__getitem__)
