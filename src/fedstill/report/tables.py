"""Means and spreads over seeds, beside reported numbers; reads the logbook only."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedstill.core.errors import BadValue, RunFolderError, unknown
from fedstill.logbook.reader import Run, read_run
from fedstill.report.amounts import human_bytes
from fedstill.report.groups import (
    ACCURACY,
    BEST_SCORE,
    CLIENT_SCORES,
    DIRECTIONS,
    SERVER_SCORE,
    Group,
    Reported,
    Statistic,
    check_metric,
    gather,
    group_of,
)
from fedstill.report.latex import PREAMBLE, latex
from fedstill.report.layout import (
    NOTHING,
    REPORTED,
    Fitting,
    Layout,
    escaped,
    html,
    markdown,
    with_network,
)
from fedstill.report.student import Paired, paired

if TYPE_CHECKING:
    from rich.console import RenderableType

SCORES_EXPLAINED = (
    "accuracies in percent; global: a client's model on all test sets, its own included "
    "(averaged_global_accuracy); inter: on the others' (inter_accuracy); local: on its own "
    "(averaged_local_accuracy)"
)
Form = Callable[[Statistic | None], str]
Spread = Literal["deviation", "interval"]
COLUMNS_FOR_TARGETS = 12  # with more test sets a table shows the lowest and the highest


@dataclass(frozen=True)
class Section:
    """The groups that share their data and may be compared."""

    data: str
    digest: str
    groups: tuple[Group, ...]
    held_out: bool = False  # scored on training examples, not on the test sets

    @property
    def title(self) -> str:
        """The data's name and the beginning of its digest."""
        name = f"{self.data} (data {self.digest[:8]})" if self.digest else self.data
        return f"{name}, held-out scores" if self.held_out else name

    @property
    def targets(self) -> list[str]:
        """Every test set of the section, in the order of first appearance."""
        return list(dict.fromkeys(name for group in self.groups for name in group.targets))


@dataclass(frozen=True)
class Comparison:
    """Groups of runs by data, and what a reader must know about them."""

    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    metric: str = ACCURACY  # whose values the scores are
    spread: Spread = "deviation"  # what stands after ±
    against: str | None = None  # the row to which the others are compared, seed by seed

    @property
    def groups(self) -> list[Group]:
        """All groups of all sections."""
        return [group for section in self.sections for group in section.groups]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, unrounded; accuracies are fractions."""
        return {
            "metric": self.metric,
            "sections": [
                {
                    "data": section.data,
                    "digest": section.digest,
                    "held_out": section.held_out,
                    "groups": [
                        _group_as_dict(group, _paired(group, section, self.against))
                        for group in section.groups
                    ],
                }
                for section in self.sections
            ],
            "notes": list(self.notes),
        }

    def as_markdown(self, *, by_client: bool = False) -> str:
        """One table for each section, or one more of each client's model, then the notes."""
        parts = []
        for title, layout in self._layouts(by_client):
            parts += markdown(title, layout)
        if self.notes:
            parts.append("\n".join(f"- {escaped(note)}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def __str__(self) -> str:
        return self.as_markdown().rstrip()

    def __repr__(self) -> str:
        names = ", ".join(group.name for group in self.groups)
        return f"<{type(self).__name__} of {names}; print() shows the table>"

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in self.notes)
        return "".join(html(title, layout) for title, layout in self._layouts(False)) + notes

    def as_latex(self, *, by_client: bool = False) -> str:
        """The same for a paper: booktabs, the best of each column in bold."""
        tables = [latex(title, layout) for title, layout in self._layouts(by_client)]
        notes = [f"% note: {note}\n" for note in self.notes]
        return PREAMBLE + "".join(notes) + "\n".join(tables)

    def as_csv(self) -> str:
        """A line for each row with all numbers, unrounded; accuracies are fractions."""
        rows = [line for section in self.sections for line in _csv_rows(section, self.against)]
        columns = dict.fromkeys(column for row in rows for column in row)
        written = StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow(_headers(list(columns)))
        writer.writerows([row.get(column) for column in columns] for row in rows)
        return written.getvalue()

    def as_rich(self, *, by_client: bool = False) -> RenderableType:
        """The same for a terminal."""
        from rich.console import Group as Together
        from rich.text import Text

        parts: list[RenderableType] = []
        for title, layout in self._layouts(by_client):
            parts.append(Fitting(title, layout))
            parts += [Text(line, "dim") for line in layout.footnotes]
        parts += [Text(f"note: {note}", "yellow") for note in self.notes]
        return Together(*parts)

    def _layouts(self, by_client: bool) -> Iterator[tuple[str, Layout]]:
        for section in self.sections:
            metric = self.metric
            title = section.title if metric == ACCURACY else f"{section.title}: {metric}"
            yield title, _laid_out(section, metric, self.spread, self.against)
            if by_client and any(group.by_client for group in section.groups):
                yield f"{title}: each client's model", _by_client_laid_out(section, metric)


def comparison(folders: Iterable[Path | str], metric: str = ACCURACY) -> Comparison:
    """The runs of some folders, grouped over seeds."""
    return compare([read_run(folder) for folder in folders], metric)


def compare(
    runs: Sequence[Run],
    metric: str = ACCURACY,
    *,
    spread: Spread = "deviation",
    against: str | None = None,
) -> Comparison:
    """Runs grouped over seeds; runs on other data, or with other values, are kept apart.

    With a metric, such as `"auroc"`, all scores are its values in place of accuracies. After ±
    stands the sample standard deviation, or with `spread="interval"` half of the 95 % confidence
    interval. `against` names a row with which the others are compared in a paired test.
    """
    if not runs:
        raise RunFolderError("there is nothing to compare; give the folders of finished runs")
    check_metric(metric, runs)
    gathered, notes = gather(runs)
    groups = [group_of(name, members, metric) for name, members in gathered.items()]
    notes += [note for members in gathered.values() for note in _unequal(members)]
    sections: dict[tuple[str, str, bool], list[Group]] = {}
    for group in groups:
        setting = group.setting
        place = (setting.data, setting.digest, setting.held_out)
        sections.setdefault(place, []).append(group)
    if len(sections) > 1:
        notes.insert(0, "the runs do not share their data: compare within a table, not across")
    names = [data for data, _, held_out in sections if not held_out]
    for name in sorted({name for name in names if names.count(name) > 1}):
        notes.insert(1, f"{name}: the runs name the same data, but the digests of it differ")
    ordered = (
        Section(data, digest, tuple(each), held_out)
        for (data, digest, held_out), each in sections.items()
    )
    if against is not None and against not in gathered:
        raise BadValue(unknown("row", against, gathered))
    return Comparison(tuple(ordered), tuple(notes), metric, spread, against)


def _unequal(runs: Sequence[Run]) -> list[str]:
    """What makes the runs of a group less than repetitions of each other."""
    notes = []
    for run in runs:
        if (status := run.summary.get("status")) not in (None, "finished"):
            notes.append(f"{run.folder}: the run's status is {status!r}")
    rounds = {str(run.summary.get("rounds")) for run in runs}
    if len(rounds) > 1:
        where = ", ".join(str(run.folder) for run in runs)
        notes.append(f"rounds differ between seeds ({', '.join(sorted(rounds))}): {where}")
    return notes


SHORT_NAMES = {
    SERVER_SCORE: "average",
    BEST_SCORE: "best round",
    "averaged_global_accuracy": "global",
    "inter_accuracy": "inter",
    "averaged_local_accuracy": "local",
}


def _laid_out(
    section: Section, metric: str, spread: Spread = "deviation", against: str | None = None
) -> Layout:
    """The cells of a section as text, with the same columns for a terminal and for a page."""
    said = _form(metric, spread)
    others, crowded = _others(section)
    targets = [] if _one_test_set(section) else section.targets
    few = len(targets) <= COLUMNS_FOR_TARGETS
    scores = _scores(section)
    directions = [name for name in DIRECTIONS if name != "peer" or _any_peers(section)]
    head = [
        "method",
        *([] if _same_seeds(section) else ["seeds"]),
        *(targets if few else ["lowest", "highest"]),
        *(SHORT_NAMES[name] for name in scores),
        *others,
        *(f"{end} {metric}" for metric in crowded for end in ("lowest", "highest")),
        *([f"against {against}", "p"] if against else []),
        *(f"bytes {name}" for name in directions),
        "seconds",
    ]
    body: list[list[str]] = []
    sources: list[str] = []
    for group in section.groups:
        body.append(
            [
                group.name,
                *([] if _same_seeds(section) else [_seeds_in_words(group)]),
                *(_by_target(group, targets, said) if few else extremes(group.targets, said)),
                *(said(_score(group, name, scores)) for name in scores),
                *(plain(group.others.get(name), spread) for name in others),
                *(cell for each in crowded for cell in extremes(_several(group, each), plain)),
                *(_test_cells(_paired(group, section, against), metric) if against else []),
                *(_bytes(group.bytes_said, direction) for direction in directions),
                NOTHING if group.seconds is None else f"{group.seconds.mean:,.1f}",
            ]
        )
        if group.reported is not None:
            mark = _mark(group.reported.source, sources)
            shown = targets if few else ["", ""]
            cells = [] if _same_seeds(section) else [""]
            cells += _reported_cells(group.reported, shown, scores)
            body.append([f"{REPORTED} [{mark}]", *cells, *[""] * (len(head) - 1 - len(cells))])
    notes = [*_explained(section, metric, spread, against), *_cited(sources)]
    first = 1 if _same_seeds(section) else 2
    columns = (targets if few else [], scores, others, 0 if few else 2)
    return Layout(head, body, notes, best=_best(section, metric, first, columns))


def _others(section: Section) -> tuple[list[str], list[str]]:
    """Further numbers with a column each, and metrics of more numbers than there are columns."""
    names = dict.fromkeys(name for group in section.groups for name in group.others)
    counts = Counter(name.partition(".")[0] for name in names)
    crowded = [metric for metric, count in counts.items() if count > COLUMNS_FOR_TARGETS]
    return [name for name in names if name.partition(".")[0] not in crowded], crowded


def _several(group: Group, metric: str) -> dict[str, Statistic]:
    """The numbers of a metric that has several, by what follows its name."""
    parts = ((name.partition("."), value) for name, value in group.others.items())
    return {rest: value for (head, _, rest), value in parts if head == metric}


def _best(
    section: Section,
    metric: str,
    first: int,
    shown: tuple[Sequence[str], Sequence[str], Sequence[str], int],
) -> list[tuple[int, int]]:
    """Row and column of the best mean of each column of scores; nothing where there is one row."""
    targets, scores, others, skipped = shown
    rows: list[tuple[int, Group]] = []
    for group in section.groups:
        place = rows[-1][0] + 1 + (rows[-1][1].reported is not None) if rows else 0
        rows.append((place, group))
    found: list[tuple[int, int]] = []
    columns: list[tuple[str, list[Statistic | None]]] = [
        *((metric, [g.targets.get(name) for _, g in rows]) for name in targets),
        *((metric, []) for _ in range(skipped)),
        *((metric, [_score(g, name, scores) for _, g in rows]) for name in scores),
        *((name, [g.others.get(name) for _, g in rows]) for name in others),
    ]
    for column, (name, values) in enumerate(columns, start=first):
        known = [value.mean for value in values if value is not None]
        if len(known) > 1:
            lower = any(name in group.lower for _, group in rows)
            best = min(known) if lower else max(known)
            found += [
                (place, column)
                for (place, _), value in zip(rows, values, strict=True)
                if value is not None and value.mean == best
            ]
    return found


def _paired(group: Group, section: Section, against: str | None) -> Paired | None:
    """A group's main score against that of another row, over the seeds that both have."""
    other = next((g for g in section.groups if g.name == against), None)
    if against is None or other is None or other is group or group.main is None:
        return None
    mine = group.by_seed.get(group.main, {})
    theirs = other.by_seed.get(other.main or "", {})
    seeds = [seed for seed in mine if seed in theirs]
    return paired(against, [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _test_cells(test: Paired | None, metric: str) -> list[str]:
    if test is None:
        return [NOTHING, NOTHING]
    scale, digits = (100, 2) if metric == ACCURACY else (1, 4)
    low, mean, high = (scale * value for value in (test.low, test.difference, test.high))
    p = "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [f"{mean:+.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]", p]


class Column(NamedTuple):
    """Of a table in CSV: a value of a test set, named as people like, or of none."""

    value: str
    test_set: str = ""


def _headers(columns: Sequence[Column]) -> list[str]:
    """The columns' names; a test set that is named like another column says what it is."""
    short = [f"{test_set} {value}".strip() for value, test_set in columns]
    long = [f"{value} of test set {test_set}".removeprefix(" of ") for value, test_set in columns]
    known = Counter(short)
    return [
        full if column.test_set and known[name] > 1 else name
        for column, name, full in zip(columns, short, long, strict=True)
    ]


def _csv_rows(section: Section, against: str | None) -> Iterator[dict[Column, Any]]:
    for group in section.groups:
        row: dict[str, Any] = {
            "data": section.data,
            "digest": section.digest,
            "scored on": "held-out" if section.held_out else "test",
            "method": group.name,
            "seeds": " ".join(group.seeds),
        }
        scores = {SHORT_NAMES[name]: value for name, value in group.scores.items()}
        for name, value in {**scores, **group.others}.items():
            more = {f"{name} {kind}": number for kind, number in _csv_spread(value).items()}
            row |= {name: value.mean, **more}
        by_test_set = {
            Column(kind, name): number
            for name, value in group.targets.items()
            for kind, number in {"": value.mean, **_csv_spread(value)}.items()
        }
        after: dict[str, Any] = {}
        if group.reported is not None:
            by_test_set |= {Column("reported", n): v for n, v in group.reported.targets.items()}
            printed = {SHORT_NAMES[name]: v for name, v in group.reported.scores.items()}
            after |= {f"{name} reported": value for name, value in printed.items()}
            after |= {"average reported": printed.get("average", group.reported.average)}
        after |= {f"bytes {way}": value.mean for way, value in group.bytes_said.items()}
        after["seconds"] = None if group.seconds is None else group.seconds.mean
        test = _paired(group, section, against)
        if test is not None:
            after |= {f"against {against}": test.difference, "p": test.p}
        yield {**_plain(row), **by_test_set, **_plain(after)}


def _plain(row: Mapping[str, Any]) -> dict[Column, Any]:
    return {Column(name): value for name, value in row.items()}


def _csv_spread(value: Statistic) -> dict[str, float | None]:
    half = value.half_width
    low, high = (None, None) if half is None else (value.mean - half, value.mean + half)
    return {"deviation": value.spread, "low": low, "high": high}


def _by_client_laid_out(section: Section, metric: str) -> Layout:
    """A row for each method and score, a column for each client's model."""
    said = _form(metric)
    groups = [group for group in section.groups if group.by_client]
    owners = list(dict.fromkeys(n for g in groups for each in g.by_client.values() for n in each))
    few = len(owners) <= COLUMNS_FOR_TARGETS
    names = [_owner_and_network(name, groups) for name in owners] if few else ["lowest", "highest"]
    body: list[list[str]] = []
    sources: list[str] = []
    for group in groups:
        for score in (name for name in CLIENT_SCORES if name in group.by_client):
            found = group.by_client[score]
            cells = [said(found.get(name)) for name in owners] if few else extremes(found, said)
            named = f"{group.name}: {SHORT_NAMES[score]}"
            body.append([named, *cells, said(group.scores.get(score))])
            printed = {} if group.reported is None else group.reported.by_client.get(score, {})
            if group.reported is not None and printed:
                mark = _mark(group.reported.source, sources)
                values = [printed.get(name) for name in owners] if few else [None, None]
                cells = [printed_percent(value) for value in values]
                average = printed_percent(group.reported.scores.get(score))
                body.append([f"{REPORTED} [{mark}]", *cells, average])
    explained = SCORES_EXPLAINED.replace("accuracies in percent", _unit(metric))
    return Layout(["method: score", *names, "mean"], body, [explained, *_cited(sources)])


def _owner_and_network(name: str, groups: Sequence[Group]) -> str:
    """A client and its network, where all methods give it the same."""
    found = {group.networks.get(name, "") for group in groups}
    return with_network(name, found.pop() if len(found) == 1 else "")


def _mark(source: str, sources: list[str]) -> int:
    """The number of a source, which is added where it is new."""
    if source not in sources:
        sources.append(source)
    return sources.index(source) + 1


def _explained(
    section: Section, metric: str, spread: Spread = "deviation", against: str | None = None
) -> list[str]:
    seeds = _seeds_in_words(section.groups[0]) if _same_seeds(section) else ""
    unit = _unit(metric)
    after = {
        "deviation": "sample standard deviation",
        "interval": "half of the 95 % confidence interval (Student's t)",
    }
    over = seeds if seeds.endswith("seeds") else f"seeds {seeds}".strip()
    lines = [f"{unit}, mean ± {after[spread]} over {over}"]
    if not any(len(group.seeds) > 1 for group in section.groups):
        lines = [f"{unit}, {f'only seed {seeds}' if seeds else 'one seed each'}"]
    if against:
        lines.append(
            f"against {against}: mean difference over the seeds that both have, its 95 % "
            "confidence interval, and p of a two-sided paired t-test, not corrected for the "
            "number of rows"
        )
    lines.append("bytes of all rounds, each message counted once, not per receiver")
    if section.held_out:
        lines.append(
            "scored on training examples that were held out, not on the test sets: for choosing "
            "values, not for reporting"
        )
    if _one_test_set(section):
        shared = "one held-out set" if section.held_out else "one test set"
        lines.append(f"all clients share {shared}")
    if BEST_SCORE in _scores(section):
        where = "held-out examples" if section.held_out else "test data"
        lines.append(f"best round: chosen on {where}")
    for crowded in _others(section)[1]:
        lines.append(f"{crowded}: the lowest and the highest, and in brackets which")
    crossed = {*CLIENT_SCORES} <= {*_scores(section)}
    if SERVER_SCORE not in _scores(section) and not crossed:
        lines.append(
            "if clients keep their own models, each is scored on its own test set alone; one "
            "common model is scored on all of them"
        )
    elif SERVER_SCORE not in _scores(section):
        lines.append(
            "if clients keep their own models, a column is the mean of all models on that test "
            "set; global: every model on every test set; inter: on the others'; local: on its "
            "own; one common model has one value for all three"
        )
    return ["; ".join(lines)]


def _cited(sources: Sequence[str]) -> list[str]:
    return [
        f"[{number}] {source or 'the recipe gives no source'}"
        for number, source in enumerate(sources, start=1)
    ]


def _scores(section: Section) -> list[str]:
    """One average where all models are the server's, else the three of clients' models.

    Both where clients' models are scored beside the server's. The best round stands beside the
    last where a paper reports it.
    """
    found = {name for group in section.groups for name in group.scores}
    clients = [name for name in CLIENT_SCORES if name in found]
    beside = any(
        SERVER_SCORE in group.scores and {*CLIENT_SCORES} & {*group.scores}
        for group in section.groups
    )
    printed = {name for group in section.groups if group.reported for name in group.reported.scores}
    best = [BEST_SCORE] if BEST_SCORE in found & printed else []
    server = [SERVER_SCORE, *best] if beside or best or not clients else []
    return [*server, *clients]


def _score(group: Group, name: str, shown: Sequence[str]) -> Statistic | None:
    """A score of a group; a common model is every client's, so its average is each of them.

    Where averages have a column of their own, it stands there alone.
    """
    if SERVER_SCORE in shown:
        return group.scores.get(name)
    return group.scores.get(name) or group.scores.get(SERVER_SCORE)


def _one_test_set(section: Section) -> bool:
    """Whether clients share their test set: each common model scores the same for all of them."""
    if any(SERVER_SCORE not in group.scores or group.apart for group in section.groups):
        return False
    scored = [set(group.targets.values()) for group in section.groups]
    return len(section.targets) > 1 and all(len(values) == 1 for values in scored)


def _same_seeds(section: Section) -> bool:
    return len({group.seeds for group in section.groups}) == 1


def _any_peers(section: Section) -> bool:
    sent = (group.bytes_said.get("peer") for group in section.groups)
    return any(found is not None and found.mean > 0 for found in sent)


def _by_target(group: Group, targets: Sequence[str], said: Form) -> list[str]:
    return [said(group.targets.get(name)) for name in targets]


def extremes(values: Mapping[str, Statistic], said: Form | None = None) -> list[str]:
    """The lowest and the highest, each with whose it is."""
    if not values:
        return [NOTHING, NOTHING]
    said = said or percent
    ordered = sorted(values, key=lambda name: values[name].mean)
    ends = (ordered[0], ordered[-1])
    return [f"{said(Statistic(values[name].mean, None, 1))} ({name})" for name in ends]


def _reported_cells(reported: Reported, targets: Sequence[str], scores: Sequence[str]) -> list[str]:
    values = [reported.targets.get(name) for name in targets]
    average = reported.scores.get(SERVER_SCORE, reported.average)
    alone = SERVER_SCORE in scores
    values += [
        reported.scores.get(name, None if alone and name != SERVER_SCORE else average)
        for name in scores
    ]
    return [printed_percent(value) for value in values]


def printed_percent(value: float | None) -> str:
    """A reported fraction in percent."""
    return NOTHING if value is None else f"{100 * value:.2f}"


def _seeds_in_words(group: Group) -> str:
    if len(group.seeds) > 4:
        return f"{len(group.seeds)} seeds"
    return ", ".join(group.seeds)


def percent(value: Statistic | None, spread: Spread = "deviation") -> str:
    """A mean in percent, with its spread where there is one."""
    if value is None:
        return NOTHING
    mean, after = f"{100 * value.mean:.2f}", _after(value, spread)
    return mean if after is None else f"{mean} ± {100 * after:.2f}"


def plain(value: Statistic | None, spread: Spread = "deviation") -> str:
    """A mean of a metric as it is, with its spread where there is one."""
    if value is None:
        return NOTHING
    after = _after(value, spread)
    return f"{value.mean:.4f}" if after is None else f"{value.mean:.4f} ± {after:.4f}"


def _after(value: Statistic, spread: Spread) -> float | None:
    """What stands after ±."""
    return value.half_width if spread == "interval" else value.spread


def _form(metric: str, spread: Spread = "deviation") -> Form:
    """How a metric's values are written: accuracies in percent, others as they are."""
    return partial(percent if metric == ACCURACY else plain, spread=spread)


def _unit(metric: str) -> str:
    return "accuracies in percent" if metric == ACCURACY else metric


def _bytes(amounts: Mapping[str, Statistic], direction: str) -> str:
    return human_bytes(amounts[direction].mean) if direction in amounts else NOTHING


def _group_as_dict(group: Group, test: Paired | None) -> dict[str, Any]:
    setting = group.setting
    return {
        "name": group.name,
        "by_seed": {score: dict(found) for score, found in group.by_seed.items() if found},
        "paired": None if test is None else asdict(test),
        "method": setting.method,
        "label": setting.label,
        "recipe": json.loads(setting.details),
        **{
            name: {key: asdict(value) for key, value in getattr(group, name).items()}
            for name in ("scores", "targets", "floats_per_round", "bytes_said", "others")
        },
        **{
            name: {
                outer: {key: asdict(value) for key, value in inner.items()}
                for outer, inner in getattr(group, name).items()
            }
            for name in ("by_client", "matrix")
        },
        "networks": dict(group.networks),
        "seconds": None if group.seconds is None else asdict(group.seconds),
        "reported": None if group.reported is None else asdict(group.reported),
        "seeds": list(group.seeds),
        "folders": list(group.folders),
    }
