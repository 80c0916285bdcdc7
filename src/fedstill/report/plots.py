"""Pictures of runs; no computation of results. Needs the extra `report`, imported when drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedstill.core.errors import BadValue
from fedstill.core.records import Direction
from fedstill.logbook.reader import Run
from fedstill.logbook.rows import Kind
from fedstill.report import canvas
from fedstill.report.amounts import human_bytes, human_floats, human_time
from fedstill.report.curves import VIEWS, Curve, Measure, Trace, Values, curves, traces
from fedstill.report.grids import accuracy_matrix, image_grid, partition
from fedstill.report.groups import ACCURACY, SERVER_SCORE, Group, setting_of
from fedstill.report.tables import Comparison, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "accuracy_by_bytes",
    "accuracy_by_floats",
    "accuracy_by_round",
    "accuracy_matrix",
    "comparison_bars",
    "image_grid",
    "logged_by_round",
    "partition",
]

Axis = Literal["round", "bytes", "floats", "time"]
Columns = Literal[1, 2]
PAPER: dict[Columns, tuple[float, float]] = {1: (3.3, 2.2), 2: (6.9, 2.6)}  # inches
ACROSS = 3  # panels of logged numbers side by side
COLOURED_DOTS_UP_TO = 7  # more test sets than this are dots of one colour


def accuracy_by_round(runs: Sequence[Run], path: Path | str) -> Path:
    """Mean accuracy over test sets against rounds, one curve per method, a band over seeds."""
    return canvas.save(by_round(runs), path)


def by_round(runs: Sequence[Run]) -> Figure:
    """The figure of `accuracy_by_round`."""
    figure = canvas.figure(7.0, 4.2)
    axes = figure.add_subplot()
    found = curves(runs)
    for number, curve in enumerate(found):
        _draw(axes, curve.rounds, curve, number)
    _round_ticks(axes, found)
    axes.set_ylabel("accuracy (%)", fontsize=9.5)
    canvas.plain(axes)
    canvas.title(axes, "Accuracy by round", _averaged(found))
    canvas.legend(axes)
    return figure


def accuracy_by_bytes(
    runs: Sequence[Run], path: Path | str, direction: Direction | None = None
) -> Path:
    """Mean accuracy against the bytes said so far; a method that sends nothing is a line."""
    return canvas.save(by_bytes(runs, direction), path)


def by_bytes(runs: Sequence[Run], direction: Direction | None = None) -> Figure:
    """The figure of `accuracy_by_bytes`."""
    figure = canvas.figure(7.0, 4.2)
    axes = figure.add_subplot()
    found = curves(runs)
    _by_traffic(axes, found, Measure("bytes", "said", direction))
    canvas.title(axes, "Accuracy by traffic", _averaged(found))
    canvas.legend(axes)
    return figure


def accuracy_by_floats(
    runs: Sequence[Run], path: Path | str, direction: Direction | None = None
) -> Path:
    """Mean accuracy against the floats sent so far: once per sender, and once per receiver."""
    figure = canvas.figure(11.6, 4.4)
    found = curves(runs)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, view in zip(panels, VIEWS, strict=True):
        _by_traffic(axes, found, Measure("floats", view, direction))
        canvas.title(axes, f"Accuracy by floats, {VIEWS[view]}", _averaged(found))
    panels[1].set_ylabel("")
    panels[1].tick_params(axis="y", labelleft=False, length=0)
    canvas.legend_beside(panels[1])
    return canvas.save(figure, path)


def curve_figure(runs: Sequence[Run], by: Axis = "round", paper: Columns | None = None) -> Figure:
    """Accuracy by round, bytes, floats or time: a curve per method, a band over seeds.

    For a `paper` the figure is as wide as one of two columns, or as both, with small type and no
    title; a caption says what is seen.
    """
    found = curves(runs)
    figure = canvas.figure(*((7.0, 4.2) if paper is None else PAPER[paper]))
    axes = figure.add_subplot()
    if by in ("bytes", "floats"):
        kind: Kind = "bytes" if by == "bytes" else "floats"
        _by_traffic(axes, found, Measure(kind, "said"))
    else:
        for number, curve in enumerate(found):
            _draw(axes, curve.rounds if by == "round" else curve.seconds(), curve, number)
        canvas.plain(axes)
        axes.set_ylabel("accuracy (%)", fontsize=9.5)
        if by == "round":
            _round_ticks(axes, found)
        else:
            _time_ticks(axes, found)
    held = any(setting_of(curve.runs[0]).held_out for curve in found)
    if held:
        axes.set_ylabel("held-out accuracy (%)", fontsize=9.5)
    if paper is None:
        words = {"round": "round", "bytes": "traffic", "floats": "traffic", "time": "time"}
        canvas.title(axes, f"Accuracy by {words[by]}", _averaged(found))
        canvas.legend(axes)
    else:
        canvas.small(axes)
    return figure


def _round_ticks(axes: Axes, found: Sequence[Curve]) -> None:
    """Whole rounds; a single one stands in the middle."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    rounds = {float(round) for curve in found for round in curve.rounds}
    if len(rounds) == 1:
        (only,) = rounds
        axes.set_xlim(only - 0.5, only + 0.5)
        axes.set_xticks([only], [f"{only:g}"])


def _time_ticks(axes: Axes, found: Sequence[Curve]) -> None:
    from matplotlib.ticker import FuncFormatter

    simulated = all(curve.simulated for curve in found)
    axes.set_xlabel("simulated time" if simulated else "measured time", fontsize=9.5)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_time(value)))


def logged_by_round(runs: Sequence[Run], names: Sequence[str], path: Path | str) -> Path:
    """Numbers that steps log against rounds: a panel for each, a curve per method."""
    found = traces(runs, names)
    methods = list(dict.fromkeys(trace.method for each in found.values() for trace in each))
    across = min(ACROSS, len(names))
    down = -(-len(names) // across)
    figure = canvas.figure(4.2 * across + 1.6, 3.1 * down)
    from matplotlib.ticker import MaxNLocator

    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (name, each) in zip(panels, found.items(), strict=False):
        for trace in each:
            _draw_trace(axes, trace, methods.index(trace.method))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xlabel("round", fontsize=9.5)
        canvas.plain(axes)
        canvas.title(axes, name.replace("_", " ").replace(".", ": "), _seeds_of(each))
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    handles = {
        label: line
        for axes in panels[: len(names)]
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [handles[method] for method in methods],
        methods,
        loc="outside right upper",
        fontsize=8.5,
        frameon=False,
    )
    return canvas.save(figure, path)


def comparison_bars(comparison: Comparison, path: Path | str) -> Path:
    """The average of every method with its spread, a dot for every test set, and the reported."""
    sections = [each for each in comparison.sections if any(g.main for g in each.groups)]
    if not sections:
        raise BadValue("none of the runs was evaluated, so there is nothing to draw")
    heights = [0.5 * len(section.groups) + 1.0 for section in sections]
    figure = canvas.figure(7.6, sum(heights) + 0.3)
    panels = figure.subplots(len(sections), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, section in zip(panels, sections, strict=True):
        _bars(axes, section, comparison.metric)
    return canvas.save(figure, path)


def _by_traffic(axes: Axes, found: Sequence[Curve], measure: Measure) -> None:
    """A curve for each method over what it sent; one that sends nothing is a line."""
    axes.set_xscale("log")
    for number, curve in enumerate(found):
        sent = curve.sent(measure)
        seen = sent > 0  # zero, before anything is sent, has no place on a logarithmic axis
        if seen.any():
            _draw(axes, sent[seen], curve.where(seen), number)
        else:
            colour, dashes, _ = canvas.look(number)
            name, last = f"{curve.name} (sends nothing)", 100 * curve.accuracy[-1]
            axes.axhline(last, color=colour, linestyle=dashes, linewidth=1.6, label=name)
    if any((curve.sent(measure) > 0).any() for curve in found):
        _amount_ticks(axes, human_bytes if measure.kind == "bytes" else human_floats)
    else:  # an axis of amounts would be invented
        axes.set_xscale("linear")
        axes.set_xticks([])
    which = f" {measure.direction}" if measure.direction else ""
    counted = f"each message counted {VIEWS[measure.view]}"
    if axes.get_xticks().size:
        axes.set_xlabel(f"{measure.kind} sent{which} since the start, {counted}", fontsize=9.5)
    else:
        axes.set_xlabel("nothing is sent", fontsize=9.5)
    axes.set_ylabel("accuracy (%)", fontsize=9.5)
    canvas.plain(axes)


def _draw(axes: Axes, x: Values, curve: Curve, number: int) -> None:
    colour, dashes, marker = canvas.look(number)
    few = len(x) <= 25
    axes.plot(
        x,
        100 * curve.accuracy,
        color=colour,
        linestyle=dashes,
        marker=marker if few else None,
        markersize=3.5,
        linewidth=1.6,
        label=curve.name,
    )
    if curve.spread.any():
        low, high = curve.accuracy - curve.spread, curve.accuracy + curve.spread
        axes.fill_between(x, 100 * low, 100 * high, color=colour, alpha=0.15, linewidth=0)


def _draw_trace(axes: Axes, trace: Trace, number: int) -> None:
    colour, dashes, marker = canvas.look(number)
    few = len(trace.rounds) <= 25
    axes.plot(
        trace.rounds, trace.values, color=colour, linestyle=dashes, marker=marker if few else None,
        markersize=3.5, linewidth=1.6, label=trace.method,
    )  # fmt: skip
    if trace.spread.any():
        low, high = trace.values - trace.spread, trace.values + trace.spread
        axes.fill_between(trace.rounds, low, high, color=colour, alpha=0.15, linewidth=0)


def _seeds_of(found: Sequence[Trace]) -> str:
    most = max(trace.seeds for trace in found)
    return "one seed" if most == 1 else f"band: standard deviation over {most} seeds"


def _averaged(found: Sequence[Curve]) -> str:
    most = max(curve.seeds for curve in found)
    if most == 1:
        return "mean over test sets, one seed"
    return f"mean over test sets; band: sample standard deviation over {most} seeds"


def _amount_ticks(axes: Axes, said: Callable[[float], str]) -> None:
    """Powers of ten, where few of them are seen also twice and five times, else round numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_xlim()
    if high < 2.5 * 2.5 * low:  # a range in which two of 1, 2, 5, 10 need not be
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    else:
        between = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=between, numticks=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _bars(axes: Axes, section: Section, metric: str) -> None:
    """For every method a bar with its number and spread, and under it a dot for every test set."""
    groups = [group for group in section.groups if group.main is not None]
    scale, digits = (100, 1) if metric == ACCURACY else (1, 3)
    places = np.arange(len(groups))
    for place, group in zip(places - 0.15, groups, strict=True):
        average = group.scores[group.main or ""]
        length = scale * average.mean
        spread = None if average.spread is None else scale * average.spread
        line = {"ecolor": "#333333", "elinewidth": 1.3, "capsize": 3}
        axes.barh(place, length, xerr=spread, height=0.4, color="#A9C8E0", error_kw=line)
        axes.annotate(
            f"{length:.{digits}f}", (0, place), (4, 0), textcoords="offset points", va="center",
            fontsize=8.5,
        )  # fmt: skip
    if not _one_dot(groups):
        _dots(axes, groups, section.targets, scale)
    _reported_marks(axes, groups)
    axes.set_yticks(places, [_name_and_seeds(group) for group in groups])
    axes.invert_yaxis()
    if metric == ACCURACY:
        axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy (%)" if metric == ACCURACY else metric, fontsize=9.5)
    canvas.plain(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    canvas.title(axes, f"Average {metric} on {section.title}", _bar_detail(groups, metric))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)


def _one_dot(groups: Sequence[Group]) -> bool:
    """Whether every method scores the same on all test sets, which are then one."""
    return all(len({value.mean for value in group.targets.values()}) == 1 for group in groups)


def _dots(axes: Axes, groups: Sequence[Group], targets: Sequence[str], scale: float) -> None:
    """Each test set a little below the one before, so that equal numbers stay apart."""
    coloured = len(targets) <= COLOURED_DOTS_UP_TO
    for number, target in enumerate(targets):
        lane = 0.14 + 0.24 * number / max(1, len(targets) - 1)
        known = [
            (scale * group.targets[target].mean, place + lane)
            for place, group in enumerate(groups)
            if target in group.targets
        ]
        x, y = zip(*known, strict=True)
        if coloured:
            colour, _, marker = canvas.look(number)
            axes.scatter(x, y, s=20, color=colour, marker=marker, linewidths=0, label=target)
        else:
            label = "one client" if number == 0 else None
            axes.scatter(x, y, s=9, color=canvas.GREY, linewidths=0, alpha=0.7, label=label)


def _reported_marks(axes: Axes, groups: Sequence[Group]) -> None:
    known = [
        (100 * group.reported.average, place - 0.15)
        for place, group in enumerate(groups)
        if group.reported is not None and group.reported.average is not None
    ]
    if known:
        x, y = zip(*known, strict=True)
        axes.scatter(
            x, y, marker="d", s=36, facecolor="white", edgecolor="#B00020", linewidth=1.4,
            label="reported average", zorder=4,
        )  # fmt: skip


def _name_and_seeds(group: Group) -> str:
    seeds = f"{len(group.seeds)} seed{'s' if len(group.seeds) > 1 else ''}"
    return f"{group.name}\n{seeds}{'' if group.main == SERVER_SCORE else ', client models'}"


def _bar_detail(groups: Sequence[Group], metric: str) -> str:
    named = ((group.main or "").replace(ACCURACY, metric).replace("_", " ") for group in groups)
    mains = dict.fromkeys(named)
    spread = any(group.scores[group.main or ""].spread is not None for group in groups)
    line = "; line: sample standard deviation over seeds" if spread else ""
    return f"bar: {' or '.join(mains)}{line}"
