"""Runs that differ in their seed alone, gathered: means and spreads; no layout."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from typing import Any

from fedstill.core.errors import BadValue, unknown
from fedstill.core.files import without_folder
from fedstill.logbook.reader import Run
from fedstill.logbook.summary import short
from fedstill.report.student import half_width

ACCURACY = "accuracy"
SERVER_SCORE = "average_accuracy"
BEST_SCORE = "best_average_accuracy"  # over rounds, chosen on test data
CLIENT_SCORES = ("averaged_global_accuracy", "inter_accuracy", "averaged_local_accuracy")
SCORES = (SERVER_SCORE, BEST_SCORE, *CLIENT_SCORES)
BY_CLIENT = {  # a score of clients' models, and where summaries and recipes keep it by client
    "averaged_global_accuracy": "averaged_global_accuracy_by_client",
    "inter_accuracy": "inter_accuracy_by_client",
    "averaged_local_accuracy": "local_accuracy_by_client",
}
DIRECTIONS = ("up", "down", "peer")

_OF_ACCURACY = (*SCORES, *BY_CLIENT.values(), "accuracy_by_client", "accuracy_matrix")
_SEED = "seed"
_OWN_SEEDS = ("run.seed", _SEED)
MOST_DIFFERENCES = 4  # values by which a row is named
_NOT_THE_EXPERIMENT = (
    "engine",
    "about",
    "reported",
    "content",
)  # tables that leave the numbers alone
_PLACES = ("data_dir", "folder", "path", "root")  # where data lies does not change what it is
_ABOUT_REPORTED = ("average", "source", "unit")


@dataclass(frozen=True)
class Statistic:
    """A mean over runs; the sample standard deviation where there are two or more."""

    mean: float
    spread: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % confidence interval of the mean, by Student's t."""
        return None if self.spread is None else half_width(self.spread, self.n)


@dataclass(frozen=True)
class Reported:
    """What a paper prints for this setting, as fractions."""

    source: str
    average: float | None
    targets: Mapping[str, float]
    scores: Mapping[str, float]
    by_client: Mapping[str, Mapping[str, float]]  # by score, then by whose model


@dataclass(frozen=True)
class Setting:
    """What runs that differ in nothing but their seed have in common."""

    method: str
    label: str
    data: str
    digest: str
    details: str  # the rest of the recipe, in one canonical line
    held_out: bool = False  # scored on training examples, not on the test sets


@dataclass(frozen=True)
class Group:
    """Runs of one setting over seeds."""

    setting: Setting
    name: str
    seeds: tuple[str, ...]
    folders: tuple[str, ...]
    scores: Mapping[str, Statistic]
    targets: Mapping[str, Statistic]
    by_client: Mapping[str, Mapping[str, Statistic]]  # by score, then by whose model
    matrix: Mapping[str, Mapping[str, Statistic]]  # by whose model, then by whose test set
    networks: Mapping[str, str]  # of each client
    floats_per_round: Mapping[str, Statistic]
    bytes_said: Mapping[str, Statistic]
    seconds: Statistic | None
    reported: Reported | None
    others: Mapping[str, Statistic]  # by metric, the average that stands for the runs
    by_seed: Mapping[str, Mapping[str, float]]  # by score, then by seed
    lower: frozenset[str] = frozenset()  # metrics whose best value is the lowest
    apart: bool = False  # some metric differs between test sets, so these are not one

    @property
    def main(self) -> str | None:
        """The name of the score that stands for the runs: of the server's model where scored."""
        return next((name for name in (SERVER_SCORE, *CLIENT_SCORES) if name in self.scores), None)


def gather(runs: Sequence[Run]) -> tuple[dict[str, list[Run]], list[str]]:
    """Runs of one setting under one readable name; a seed given twice counts once."""
    by_setting: dict[Setting, dict[str, Run]] = {}
    notes = []
    for run in runs:
        seeds = by_setting.setdefault(setting_of(run), {})
        every_seed = json.dumps(_seeds(run.recipe), sort_keys=True)
        if every_seed in seeds:
            kept = _whereabouts(seeds[every_seed])
            notes.append(f"{_whereabouts(run)} has the setting and seed of {kept} and is left out")
        else:
            seeds[every_seed] = run
    names = _names(list(by_setting))
    return {
        name: list(seeds.values()) for name, seeds in zip(names, by_setting.values(), strict=True)
    }, notes


def _whereabouts(run: Run) -> str:
    """Where a run lies, or which of those in memory it is."""
    if run.folder is not None:
        return str(run.folder)
    label, seed = run.summary.get("label"), run.summary.get("seed")
    return f"a run of {label} with seed {seed}"


def setting_of(run: Run) -> Setting:
    """What a run shares with its repetitions under other seeds."""
    recipe = run.recipe
    method, data, about = (_table(recipe, name) for name in ("method", "data", "run"))
    rest: dict[str, Any] = {
        name: _kept(value)
        for name, value in recipe.items()
        if name not in (*_NOT_THE_EXPERIMENT, "run", _SEED)
    }
    if "rounds" in about:
        rest["rounds"] = about["rounds"]
    digest = run.summary.get("data_digest")
    if "hold_out" in data and "held_out" not in run.summary:
        digest = None  # of an earlier fedstill: that of what this seed held out
    return Setting(
        method=str(method.get("name", "unnamed method")),
        label=str(method.get("label", "")),
        data=without_folder(str(data.get("name", "unnamed data"))),
        digest=str(digest or _digest(_kept(data))),
        details=json.dumps(rest, sort_keys=True, default=str),
        held_out="hold_out" in data or bool(run.summary.get("held_out")),
    )


def statistic(values: Iterable[float | None]) -> Statistic | None:
    """The mean and the sample spread of the values there are; None where there are none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Statistic(statistics.fmean(known), spread, len(known))


def reported_of(recipe: Mapping[str, Any]) -> Reported | None:
    """The `[reported]` table of a recipe: accuracies in percent unless `unit = "fraction"`."""
    table = _table(recipe, "reported")
    scale = 1.0 if table.get("unit") == "fraction" else 0.01
    numbers = _numbers(table, scale)
    each = {score: _numbers(_table(table, name), scale) for score, name in BY_CLIENT.items()}
    by_client = {score: found for score, found in each.items() if found}
    if not numbers and not by_client:
        return None
    scores = {name: numbers[name] for name in SCORES if name in numbers}
    targets = {
        name: value
        for name, value in numbers.items()
        if name not in _ABOUT_REPORTED and name not in scores
    }
    source = str(table.get("source", ""))
    return Reported(source, numbers.get("average"), targets, scores, by_client)


def scores_of(summary: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """A summary whose scores are those of a metric, under the names that accuracy has."""
    if metric == ACCURACY:
        return summary
    found = _table(_table(summary, "metrics"), metric)
    return {**summary, **{key: found.get(short(key)) for key in _OF_ACCURACY}}


def unknown_number(kind: str, name: str, known: Iterable[str]) -> str:
    """A line for a name that no number has; numbers by class are told as their first and last."""
    names = sorted(known, key=_with_classes)
    hint = unknown(kind, name, names).rpartition(" known: ")[0]
    families: dict[str, list[str]] = {}
    for each in names:
        families.setdefault(_with_classes(each)[0], []).append(each)
    told = [each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in families.values()]
    return f"{hint} known: {', '.join(told) or 'none'}"


def _with_classes(name: str) -> tuple[str, list[int]]:
    """`confusion`, 0 and 1 of `confusion.0.1`."""
    words = name.split(".")
    classes: list[int] = []
    while len(words) > 1 and words[-1].isdecimal():
        classes.insert(0, int(words.pop()))
    return ".".join(words), classes


def check_metric(metric: str, runs: Sequence[Run]) -> None:
    """Refuse a metric that no summary has."""
    known = {ACCURACY, *(name for run in runs for name in _table(run.summary, "metrics"))}
    if metric not in known:
        line = unknown_number("metric", metric, known)
        raise BadValue(f"{line}; a run has those that run.metrics named when it was made")


def group_of(name: str, runs: Sequence[Run], metric: str = ACCURACY) -> Group:
    """Runs of one setting; the scores are those of a metric, under the names of accuracy."""
    summaries = [scores_of(run.summary, metric) for run in runs]
    scores = {
        score: found
        for score in SCORES
        if (found := statistic(summary.get(score) for summary in summaries)) is not None
    }
    return Group(
        setting=setting_of(runs[0]),
        name=name,
        seeds=tuple(_seed(run) for run in runs),
        folders=tuple(str(run.folder) for run in runs),
        scores=scores,
        targets=_statistics([by_test_set(summary) for summary in summaries]),
        by_client=_by_client(summaries),
        matrix=_matrix(summaries),
        networks=_table(summaries[0], "networks"),
        floats_per_round=_statistics(
            [_table(summary, "floats_per_round") for summary in summaries]
        ),
        bytes_said=_statistics([_bytes_said(summary) for summary in summaries]),
        seconds=statistic(summary.get("seconds") for summary in summaries),
        reported=reported_of(runs[0].recipe) if metric == ACCURACY else None,
        others=_others([run.summary for run in runs]) if metric == ACCURACY else {},
        by_seed=_by_seed(runs, summaries),
        lower=frozenset(_lower(runs)),
        apart=any(_apart(run.summary) for run in runs),
    )


def _apart(summary: Mapping[str, Any]) -> bool:
    """Whether any metric of a run, not only the one shown, differs between test sets."""
    shown = [scores_of(summary, metric) for metric in (ACCURACY, *_table(summary, "metrics"))]
    return any(len({*by_test_set(scores).values()}) > 1 for scores in shown)


def _by_seed(
    runs: Sequence[Run], summaries: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Each score of each seed, for tests that pair runs."""
    return {
        score: {
            _every_seed(run): float(summary[score])
            for run, summary in zip(runs, summaries, strict=True)
            if summary.get(score) is not None
        }
        for score in SCORES
    }


def _lower(runs: Sequence[Run]) -> list[str]:
    """The metrics whose best value is the lowest, as summaries say."""
    tables = [_table(run.summary, "metrics") for run in runs]
    said = [n for table in tables for n in table if _table(table, n).get("lower_is_better")]
    return ["loss", *said]


def _others(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Statistic]:
    """The average of each further metric, but of the loss, which is always there.

    Of the server's model where it was scored, else of the clients' on all test sets, else on
    their own.
    """
    names = dict.fromkeys(n for each in summaries for n in _table(each, "metrics") if n != "loss")
    found = {}
    for name in names:
        tables = [scores_of(summary, name) for summary in summaries]
        each = (statistic(t.get(score) for t in tables) for score in (SERVER_SCORE, *CLIENT_SCORES))
        value = next((value for value in each if value is not None), None)
        if value is not None:
            found[name] = value
    return found


def by_test_set(summary: Mapping[str, Any]) -> Mapping[str, float]:
    """Accuracy on each test set: the server's model's, or the mean over the clients' models."""
    if summary.get("accuracy_by_client") is not None:
        return _table(summary, "accuracy_by_client")
    matrix = _table(summary, "accuracy_matrix")
    names = matrix.get("test_sets", [])
    columns = zip(names, zip(*matrix.get("values", []), strict=True), strict=False)
    known = {name: [v for v in column if v is not None] for name, column in columns}
    means = {name: statistics.fmean(column) for name, column in known.items() if column}
    return means or _table(summary, "local_accuracy_by_client")


def _by_client(summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Statistic]]:
    """The scores of each client's model, over seeds."""
    found = {
        score: _statistics([_table(summary, name) for summary in summaries])
        for score, name in BY_CLIENT.items()
    }
    return {score: each for score, each in found.items() if each}


def _matrix(summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Statistic]]:
    """Every client's model on every test set, over seeds."""
    tables = [_table(summary, "accuracy_matrix") for summary in summaries]
    rows: list[dict[str, dict[str, Any]]] = [
        {
            model: dict(zip(table["test_sets"], values, strict=True))
            for model, values in zip(table["models"], table["values"], strict=True)
        }
        for table in tables
        if table
    ]
    models = dict.fromkeys(model for each in rows for model in each)
    return {model: _statistics([each.get(model, {}) for each in rows]) for model in models}


def _numbers(table: Mapping[str, Any], scale: float) -> dict[str, float]:
    return {
        name: value * scale
        for name, value in table.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _statistics(tables: Sequence[Mapping[str, Any]]) -> dict[str, Statistic]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {
        name: found
        for name in names
        if (found := statistic(table.get(name) for table in tables)) is not None
    }


def _bytes_said(summary: Mapping[str, Any]) -> dict[str, Any]:
    traffic = _table(summary, "traffic")
    return {
        direction: _table(_table(traffic, direction), "said").get("bytes")
        for direction in DIRECTIONS
    }


def _names(settings: Sequence[Setting]) -> list[str]:
    """Method and label, and, where these are the same, the values that tell settings apart.

    Settings on other data stand in another table, so only those on the same data are told apart.
    """
    plain = [_method_and_label(each) for each in settings]
    names: list[str] = []
    for setting, name in zip(settings, plain, strict=True):
        alike = [
            other
            for other, its in zip(settings, plain, strict=True)
            if its == name and _place(other) == _place(setting)
        ]
        if len(alike) > 1:
            name = f"{name} ({_difference(setting, alike)})"
        elif plain.count(name) > 1:
            name = f"{name} ({_where(setting, settings)})"
        # Values too many to name may leave several alike; numbers keep them all.
        numbered = (f"{name} #{number}" for number in count(2))
        names.append(name if name not in names else next(n for n in numbered if n not in names))
    return names


def _place(setting: Setting) -> tuple[str, str, bool]:
    return setting.data, setting.digest, setting.held_out


def _where(setting: Setting, others: Sequence[Setting]) -> str:
    """What tells the data of a setting from those of others."""
    if len({other.data for other in others}) == len({_place(other) for other in others}):
        return setting.data
    if setting.held_out:
        return f"{setting.data}, held-out"
    same = {other.digest for other in others if other.data == setting.data and not other.held_out}
    return setting.data if len(same) == 1 else f"{setting.data} {setting.digest[:8]}"


def _method_and_label(setting: Setting) -> str:
    """The label alone where it names the method itself; of one's own method in a file its name."""
    method = setting.method.rpartition(":")[2]
    return setting.label if method in setting.label else f"{method} {setting.label}".strip()


def _difference(setting: Setting, alike: Sequence[Setting]) -> str:
    """The values in which a setting differs from those of the same name on the same data."""
    mine = _flat(json.loads(setting.details))
    others = [_flat(json.loads(other.details)) for other in alike]
    keys = sorted({key for each in (mine, *others) for key in each})
    differ = [key for key in keys if any(other.get(key) != mine.get(key) for other in others)]
    differ = [key for key in differ if not any(key.startswith(f"{one}.") for one in differ)]
    shown = differ[:MOST_DIFFERENCES]
    words = [f"{key.removeprefix('method.')}={_word(mine.get(key, 'absent'))}" for key in shown]
    return ", ".join(words)


def _word(value: Any) -> str:
    """A value in a name: a whole number without a point."""
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _table(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = mapping.get(name)
    return value if isinstance(value, Mapping) else {}


def _seed(run: Run) -> str:
    return str(_table(run.recipe, "run").get(_SEED, run.recipe.get(_SEED, "?")))


def _seeds(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Every seed of a recipe, so that only a true repetition counts as one."""
    return {key: value for key, value in _flat(recipe).items() if key.split(".")[-1] == _SEED}


def _every_seed(run: Run) -> str:
    """The seed of a run, with others of its recipe but those that are 0, as they are untold."""
    others = {key: value for key, value in _seeds(run.recipe).items() if key not in _OWN_SEEDS}
    said = sorted(f"{key} {value}" for key, value in others.items() if value)
    return ", ".join([_seed(run), *said])


def _kept(value: Any) -> Any:
    """A table without its seeds and places."""
    if isinstance(value, Mapping):
        dropped = (_SEED, *_PLACES)
        return {name: _kept(item) for name, item in value.items() if name not in dropped}
    return value


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables under dotted names; of a list of tables their names too, as one text."""
    flat = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flat(item, f"{prefix}{name}."))
        elif item and isinstance(item, list) and all(isinstance(one, Mapping) for one in item):
            flat[f"{prefix}{name}"] = " + ".join(_last_name(one) for one in item)
            for place, one in enumerate(item):
                flat.update(_flat(one, f"{prefix}{name}.{place}."))
        else:
            flat[f"{prefix}{name}"] = item
    return flat


def _last_name(table: Mapping[str, Any]) -> str:
    """The name of a part, of one's own part in a file without the file."""
    return str(table.get("name", "unnamed")).rpartition(":")[2]


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
