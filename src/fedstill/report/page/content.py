"""What a report of run folders holds, as plain values: all text and numbers, no layout."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedstill.core.errors import RunFolderError
from fedstill.core.node import SERVER
from fedstill.logbook.events import Number
from fedstill.logbook.reader import DESCRIPTIONS, Run, read_run, runs_below
from fedstill.logbook.rows import CLOCK, EVALUATION, amount, evaluated, known, mean
from fedstill.logbook.summary import summarise
from fedstill.report.groups import Group, Reported, Statistic, gather, group_of
from fedstill.report.page.pictures import pictures_of

MOST_CURVES = 20  # clients that have curves of their own
MOST_CLIENTS = 200  # in the table of who holds what
MOST_ROWS = 400  # of a table of notes or of what was spent
MOST_CELLS = 60  # rows and columns of a matrix
MOST_LISTED = 24  # entries of a list in an audit
BY_CLASS = ("recall", "confusion")  # metrics of several numbers, shown as tables


@dataclass(frozen=True)
class Found:
    """The runs in some folders, and what else lies there."""

    folders: tuple[Path, ...]  # as they were given
    runs: tuple[Run, ...]  # in the order of their folders
    missing: tuple[str, ...]  # why a folder is left out


def found_in(folders: Sequence[Path]) -> Found:
    """Every run in or below some folders, finished or not; cells of grids in their order."""
    runs, missing = [], []
    for folder in folders:
        if not folder.exists():
            raise RunFolderError(f"there is no folder {folder}")
        for place in runs_below(folder):
            try:
                runs.append(read_run(place, unfinished=True))
            except RunFolderError as error:  # it has not begun, or was written by others
                missing.append(str(error))
    return Found(tuple(folders), tuple(runs), tuple(missing))


def content(found: Found, *, title: str | None = None, images: int = 3_500_000) -> dict[str, Any]:
    """The values of a report; `images` is the room for pictures, in bytes."""
    if not found.runs:
        why = f": {found.missing[0]}" if found.missing else ""
        raise RunFolderError(
            f"{', '.join(map(str, found.folders))} holds no run{why}; give the folder of a run, or "
            "one with such folders in it"
        )
    runs = [_standing(run) for run in _with_digests(found.runs)]
    groups, notes = gather(runs)
    gathered = [(name, members) for name, members in groups.items()]
    listed = [run for _, members in gathered for run in members]
    methods = {id(run): number for number, (_, each) in enumerate(gathered) for run in each}
    partitions, recipes = _Shared(), _Shared()
    page: dict[str, Any] = {
        "title": title or _title(found, listed),
        "folder": ", ".join(map(str, found.folders)),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": _version(),
        "about": _about(listed),
        "held_out": any(_table(run.recipe, "data").get("hold_out") for run in listed),
        "methods": [_method(name, members) for name, members in gathered],
        "runs": [
            _run(run, methods[id(run)], partitions.of(_partition(run)), recipes.of(_recipe(run)))
            for run in listed
        ],
        "clients": _clients(listed),
        "partitions": partitions.values,
        "recipes": recipes.values,
        "shifts": _json_files(found.folders, "shift.json"),
        "audits": _shortened(_json_files(found.folders, "audit.json")),
        "remarks": [*notes, *found.missing],
    }
    page["images"] = pictures_of(listed, [methods[id(run)] for run in listed], images)
    return page


def _method(name: str, members: Sequence[Run]) -> dict[str, Any]:
    """What the runs of one setting have in common, means and spreads over seeds.

    Where some are finished, those alone count; else all, as far as they are.
    """
    finished = [run for run in members if _is_finished(run)]
    runs = finished or members
    group = group_of(name, runs)
    return {
        "name": group.name,
        "method": group.setting.method,
        "data": group.setting.data,
        "digest": group.setting.digest[:8],
        "seeds": list(group.seeds),
        "unfinished": len(members) - len(finished),
        "main": group.main,
        "scores": _statistics(group.scores),
        "targets": _statistics(group.targets),
        "by_client": {name: _statistics(each) for name, each in group.by_client.items()},
        "matrix": _matrix(group),
        "networks": dict(group.networks),
        "bytes": _statistics(group.bytes_said),
        "floats": _statistics(group.floats_per_round),
        "seconds": _statistic(group.seconds),
        "others": _statistics(group.others),
        "reported": None if group.reported is None else _reported(group.reported),
        "traffic": _traffic(runs),
        "by_class": _by_class(runs[-1]),
        "privacy": _privacy(runs),
        "values": _plain(_table(runs[0].recipe, "method")),
    }


def _is_finished(run: Run) -> bool:
    return run.summary.get("status") == "finished"


def _run(run: Run, method: int, partition: int | None, recipe: int | None) -> dict[str, Any]:
    """The curves of one run, and how far it is."""
    about = _table(run.recipe, "run")
    rounds = run.summary.get("rounds") or about.get("rounds")
    done = max((row.round for row in run.metrics if row.step == "round"), default=0)
    seconds = run.series("seconds", step="round")
    return {
        "method": method,
        "seed": str(run.summary.get("seed", about.get("seed", "?"))),
        "folder": str(run.folder),
        "status": str(run.summary.get("status", "unfinished")),
        "rounds": rounds,
        "done": done,
        "device": run.summary.get("device"),
        "metrics": _metrics(run),
        "logged": _logged(run.metrics),
        "bytes": _series(run.traffic_by_round("bytes", "said", cumulative=True)),
        "heard": _series(run.traffic_by_round("bytes", "heard", cumulative=True)),
        "floats": _series(run.traffic_by_round("floats", "said", cumulative=True)),
        "seconds": _series(_added(seconds)),
        "simulated": _series(run.series(CLOCK, step="round")),
        "notes": _notes(run),
        "environment": _plain(run.environment),
        "partition": partition,
        "recipe": recipe,
    }


def _metrics(run: Run) -> dict[str, Any]:
    """By metric: the mean by round, and on each client's test set."""
    found = {}
    for name in run.metric_names():
        if name.split(".")[0] in BY_CLASS:
            continue
        scores = evaluated(run.metrics, name)
        targets = dict.fromkeys(t for by in scores.values() for each in by.values() for t in each)
        few = len(targets) <= MOST_CURVES
        found[name] = {
            "mean": _series(run.metric_by_round(name)),
            "by": {target: _series(_on(scores, target)) for target in targets} if few else {},
        }
    return found


def _on(scores: Mapping[int, Mapping[str, Mapping[str, float]]], target: str) -> dict[int, float]:
    """On one client's test set: the common model, else the client's own, else the mean of all."""
    curve = {}
    for round, by_node in scores.items():
        nodes = [node for node in (SERVER, target) if target in by_node.get(node, {})]
        chosen = nodes[:1] or [node for node, each in by_node.items() if target in each]
        values = known(by_node[node][target] for node in chosen)
        if values:
            curve[round] = mean(values)
    return curve


def _logged(metrics: Iterable[Number]) -> dict[str, Any]:
    """Numbers that steps logged, the mean over those who did."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in metrics:
        if row.step not in (EVALUATION, "round") and not math.isnan(row.value):
            name = f"{row.step}: {row.name}"
            found.setdefault(name, {}).setdefault(row.round, []).append(row.value)
    return {
        name: _series({round: mean(values) for round, values in by_round.items()})
        for name, by_round in found.items()
    }


def _by_class(run: Run) -> dict[str, Any]:
    """Recall and confusions of the last evaluation, of each model on all its test sets."""
    last = max((r.round for r in run.metrics if r.name.split(".")[0] in BY_CLASS), default=None)
    if last is None:
        return {}
    counts: dict[str, dict[tuple[int, int], float]] = {}
    recalls: dict[str, dict[int, list[float]]] = {}
    for row in run.metrics:
        name, *classes = row.name.split(".")
        if row.round != last or name not in BY_CLASS or not all(c.isdigit() for c in classes):
            continue
        if name == "confusion" and len(classes) == 2:
            pair = (int(classes[0]), int(classes[1]))
            own = counts.setdefault(row.node, {})
            own[pair] = own.get(pair, 0.0) + row.value
        elif name == "recall" and len(classes) == 1 and not math.isnan(row.value):
            recalls.setdefault(row.node, {}).setdefault(int(classes[0]), []).append(row.value)
    return {
        "round": last,
        "confusion": {node: [[*p, v] for p, v in by.items()] for node, by in counts.items()},
        "recall": {
            node: {str(c): _digits(mean(values)) for c, values in sorted(by.items())}
            for node, by in recalls.items()
        },
    }


def _traffic(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What travelled in a run, by field of each message; means over seeds."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        for row in run.messages:
            own = totals.setdefault((row.direction, row.step, row.field), [0.0] * 4)
            own[0] += 1
            own[1] += row.floats
            own[2] += row.bytes
            own[3] += amount(row, "bytes", "heard")
    return [
        {
            "direction": direction,
            "step": step,
            "field": field,
            **{
                name: _digits(value / len(runs), 7)
                for name, value in zip(("messages", "floats", "said", "heard"), own, strict=True)
            },
        }
        for (direction, step, field), own in totals.items()
    ]


def _privacy(runs: Sequence[Run]) -> dict[str, Any]:
    """What the runs say of privacy: the summary's table, and the ledger of the first run."""
    for run in runs:
        said = run.summary.get("privacy")
        ledger = _csv(run.folder / "privacy.csv") if run.folder is not None else None
        if said or ledger:
            return {"summary": _plain(said), "ledger": ledger}
    return {}


def _notes(run: Run) -> list[list[Any]]:
    return [[n.round, n.kind, n.node, n.text] for n in run.notes[:MOST_ROWS]]


def _matrix(group: Group) -> dict[str, Any] | None:
    """Every client's model on every test set, where there are few enough to be seen."""
    models = list(group.matrix)
    targets = list(dict.fromkeys(t for row in group.matrix.values() for t in row))
    if not models or max(len(models), len(targets)) > MOST_CELLS:
        return None
    values = [
        [_digits(row[t].mean) if t in row else None for t in targets]
        for row in group.matrix.values()
    ]
    return {"models": models, "targets": targets, "values": values}


def _reported(reported: Reported) -> dict[str, Any]:
    return {
        "source": reported.source,
        "average": reported.average,
        "targets": dict(reported.targets),
        "scores": dict(reported.scores),
    }


def _partition(run: Run) -> dict[str, Any] | None:
    """Who holds how many examples of which class."""
    table = None if run.folder is None else _csv(run.folder / "partition.csv")
    if not table or len(table["columns"]) < 2:
        return None
    classes = [name for name in table["columns"][1:] if name != "total"]
    width = 1 + len(classes)
    rows = [row for row in table["rows"] if all(cell.isdigit() for cell in row[1:width])]
    shown = rows[:MOST_CLIENTS]
    return {
        "classes": classes,
        "clients": [row[0] for row in shown],
        "counts": [[int(cell) for cell in row[1:width]] for row in shown],
        "more": len(rows) - len(shown) + table["left_out"],
    }


def _recipe(run: Run) -> dict[str, Any] | None:
    """What a run was made of, as the text that can be run again."""
    for name in DESCRIPTIONS:
        path = None if run.folder is None else run.folder / name
        if path is not None and path.exists():
            return {"file": name, "text": path.read_text(encoding="utf-8", errors="replace")}
    return None


def _about(runs: Sequence[Run]) -> dict[str, Any]:
    """The recipe's own words, and facts that all runs share."""
    about = dict(_table(runs[0].recipe, "about"))
    models = _table(runs[0].recipe, "models")
    return {
        "source": str(about.get("source", "")),
        "note": " ".join(str(about.get("note", "")).split()),
        "network": str(models.get("name", "")),
    }


def _clients(runs: Sequence[Run]) -> list[str]:
    """Whose test sets were used, in the order of first appearance."""
    names = (
        row.target
        for run in runs
        for row in run.metrics
        if row.step == EVALUATION and row.name == "accuracy"
    )
    return list(dict.fromkeys(names))


def _with_digests(runs: Sequence[Run]) -> list[Run]:
    """An unfinished run has the data and networks of a finished one made of the same tables."""
    known: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, tables in _SETTLED.items():
            if run.summary.get(name):
                known.setdefault(_tables(run, tables), {})[name] = run.summary[name]
    filled = []
    for run in runs:
        facts = {
            name: value
            for name, tables in _SETTLED.items()
            if not run.summary.get(name)
            and (value := known.get(_tables(run, tables), {}).get(name))
        }
        filled.append(replace(run, summary={**run.summary, **facts}) if facts else run)
    return filled


_SETTLED = {"data_digest": ("data",), "networks": ("data", "models")}  # by which tables


def _tables(run: Run, names: Sequence[str]) -> str:
    return json.dumps([_table(run.recipe, name) for name in names], sort_keys=True, default=str)


def _standing(run: Run) -> Run:
    """A run with the scores it has so far, where it has no summary yet."""
    if run.summary.get("status"):
        return run
    about, method = (_table(run.recipe, name) for name in ("run", "method"))
    facts = {"method": method.get("name"), "seed": about.get("seed"), **run.summary}
    done = summarise(run, status="unfinished")
    return replace(run, summary={**done, **facts, "rounds": about.get("rounds", done["rounds"])})


def _title(found: Found, runs: Sequence[Run]) -> str:
    names = {str(_table(run.recipe, "run").get("name", "")) for run in runs} - {"", "run"}
    return names.pop() if len(names) == 1 else found.folders[0].resolve().name


def _json_files(folders: Sequence[Path], name: str) -> list[dict[str, Any]]:
    """Files of this name in or below the folders; what cannot be read is said."""
    found = []
    for path in sorted({path for folder in folders for path in folder.rglob(name)}):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            value = {"cannot be read": str(error)}
        found.append({"folder": str(path.parent), "content": _plain(value)})
    return found


def _shortened(value: Any) -> Any:
    """The same without long lists, such as the points of a curve, and without empty columns."""
    if isinstance(value, Mapping):
        return {name: _shortened(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    plain = not any(isinstance(item, Mapping) for item in value)
    if plain and len(value) > MOST_LISTED:
        return f"{len(value)} values, in the file"
    told = {name for item in value if isinstance(item, Mapping) for name in item if item[name]}
    return [
        _shortened({name: item[name] for name in item if name in told})
        if isinstance(item, Mapping)
        else _shortened(item)
        for item in value
    ]


def _csv(path: Path) -> dict[str, Any] | None:
    """A small table of texts; None where there is none."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = list(csv.reader(file))
    if not lines:
        return None
    rows = [line for line in lines[1:] if len(line) == len(lines[0])]
    return {"columns": lines[0], "rows": rows[:MOST_ROWS], "left_out": len(rows[MOST_ROWS:])}


class _Shared:
    """Values that many runs have alike, each kept once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def of(self, value: Any) -> int | None:
        """The place of a value; None has none."""
        if value is None:
            return None
        key = json.dumps(value, sort_keys=True)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def _series(values: Mapping[int, float]) -> list[list[float]]:
    """Rounds and values side by side; undefined values are left out."""
    known = {r: v for r, v in sorted(values.items()) if math.isfinite(v)}
    return [list(known), [_digits(value) for value in known.values()]]


def _added(values: Mapping[int, float]) -> dict[int, float]:
    total, found = 0.0, {}
    for round, value in sorted(values.items()):
        total += 0.0 if math.isnan(value) else value
        found[round] = total
    return found


def _digits(value: float, count: int = 5) -> float:
    """As many digits as can be seen."""
    if float(value).is_integer() and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{count}g}")


def _statistic(value: Statistic | None) -> list[Any] | None:
    if value is None:
        return None
    spread = None if value.spread is None else _digits(value.spread)
    return [_digits(value.mean, 7), spread, value.n]


def _statistics(values: Mapping[str, Statistic]) -> dict[str, Any]:
    return {name: _statistic(value) for name, value in values.items()}


def _table(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = mapping.get(name)
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _version() -> str:
    try:
        return version("fedstill")
    except PackageNotFoundError:
        return "not installed as a package"
