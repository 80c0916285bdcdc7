"""Pictures of runs; no computation of results. Needs the extra `report`, imported when drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import BadValue
from fedstill.logbook.events import Direction
from fedstill.logbook.reader import Run
from fedstill.report import canvas
from fedstill.report.amounts import human_bytes
from fedstill.report.grids import accuracy_matrix, image_grid, partition
from fedstill.report.groups import SERVER_SCORE, Group, gather, setting_of, statistic
from fedstill.report.tables import Comparison, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "accuracy_by_bytes",
    "accuracy_by_round",
    "accuracy_matrix",
    "comparison_bars",
    "image_grid",
    "partition",
]

COLOURED_DOTS_UP_TO = 7  # more test sets than this are dots of one colour


class Curve(NamedTuple):
    """Mean and spread over seeds along an axis; the spread is zero for one seed."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]  # in percent
    spread: NDArray[np.float64]


def accuracy_by_round(runs: Sequence[Run], path: Path | str) -> Path:
    """Mean accuracy over test sets against rounds, one curve per method, a band over seeds."""
    figure = canvas.figure(7.0, 4.2)
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    groups = _gathered(runs)
    for number, (name, members) in enumerate(groups.items()):
        _draw(axes, _by_round(members), name, number)
    axes.set_xlabel("round", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("accuracy (%)", fontsize=9.5)
    canvas.plain(axes)
    canvas.title(axes, "Accuracy by round", _averaged(groups))
    canvas.legend(axes)
    return canvas.save(figure, path)


def accuracy_by_bytes(
    runs: Sequence[Run], path: Path | str, direction: Direction | None = None
) -> Path:
    """Mean accuracy against the bytes said so far; a method that sends nothing is a line."""
    figure = canvas.figure(7.0, 4.2)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    groups = _gathered(runs)
    for number, (name, members) in enumerate(groups.items()):
        curve = _by_round(members)
        sent = _bytes_at(curve.x, members, direction)
        seen = sent > 0  # zero, before anything is sent, has no place on a logarithmic axis
        if seen.any():
            _draw(axes, Curve(sent[seen], curve.y[seen], curve.spread[seen]), name, number)
        else:
            colour, dashes, _ = canvas.look(number)
            name = f"{name} (sends nothing)"
            axes.axhline(curve.y[-1], color=colour, linestyle=dashes, linewidth=1.6, label=name)
    _byte_ticks(axes)
    which = f" {direction}" if direction else ""
    axes.set_xlabel(f"bytes sent{which} since the start, each message counted once", fontsize=9.5)
    axes.set_ylabel("accuracy (%)", fontsize=9.5)
    canvas.plain(axes)
    canvas.title(axes, "Accuracy by traffic", _averaged(groups))
    canvas.legend(axes)
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
        _bars(axes, section)
    return canvas.save(figure, path)


def _gathered(runs: Sequence[Run]) -> Mapping[str, Sequence[Run]]:
    """Evaluated runs by name; curves on different data say on which."""
    groups, _ = gather([run for run in runs if run.accuracy_by_round()])
    if not groups:
        raise BadValue("none of the runs was evaluated, so there is nothing to draw")
    data = {name: setting_of(members[0]).data for name, members in groups.items()}
    if len(set(data.values())) == 1:
        return groups
    return {f"{name} on {data[name]}": members for name, members in groups.items()}


def _by_round(runs: Sequence[Run]) -> Curve:
    """The rounds in which every run was evaluated."""
    curves = [run.accuracy_by_round() for run in runs]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    found = [statistic(curve[round] for curve in curves) for round in rounds]
    known = [each for each in found if each is not None]
    return Curve(
        np.array(rounds, dtype=np.float64),
        100 * np.array([each.mean for each in known]),
        100 * np.array([each.spread or 0.0 for each in known]),
    )


def _bytes_at(
    rounds: NDArray[np.float64], runs: Sequence[Run], direction: Direction | None
) -> NDArray[np.float64]:
    """Bytes said up to each round, the mean over seeds."""
    each = [run.traffic_by_round("bytes", "said", direction, cumulative=True) for run in runs]
    said = np.array([[sent[int(round)] for round in rounds] for sent in each], dtype=np.float64)
    mean: NDArray[np.float64] = said.mean(axis=0)
    return mean


def _draw(axes: Axes, curve: Curve, name: str, number: int) -> None:
    colour, dashes, marker = canvas.look(number)
    few = len(curve.x) <= 25
    axes.plot(
        curve.x,
        curve.y,
        color=colour,
        linestyle=dashes,
        marker=marker if few else None,
        markersize=3.5,
        linewidth=1.6,
        label=name,
    )
    if curve.spread.any():
        low, high = curve.y - curve.spread, curve.y + curve.spread
        axes.fill_between(curve.x, low, high, color=colour, alpha=0.15, linewidth=0)


def _averaged(groups: Mapping[str, Sequence[Run]]) -> str:
    most = max(len(members) for members in groups.values())
    if most == 1:
        return "mean over test sets, one seed"
    return f"mean over test sets; band: sample standard deviation over {most} seeds"


def _byte_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    between = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=between, numticks=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _bars(axes: Axes, section: Section) -> None:
    """For every method a bar with its number and spread, and under it a dot for every test set."""
    groups = [group for group in section.groups if group.main is not None]
    places = np.arange(len(groups))
    for place, group in zip(places - 0.15, groups, strict=True):
        average = group.scores[group.main or ""]
        percent = 100 * average.mean
        spread = None if average.spread is None else 100 * average.spread
        line = {"ecolor": "#333333", "elinewidth": 1.3, "capsize": 3}
        axes.barh(place, percent, xerr=spread, height=0.4, color="#A9C8E0", error_kw=line)
        axes.text(1, place, f"{percent:.1f}", va="center", fontsize=8.5)
    _dots(axes, groups, section.targets)
    _reported_marks(axes, groups)
    axes.set_yticks(places, [_name_and_seeds(group) for group in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("accuracy (%)", fontsize=9.5)
    canvas.plain(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    canvas.title(axes, f"Average accuracy on {section.title}", _bar_detail(groups))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)


def _dots(axes: Axes, groups: Sequence[Group], targets: Sequence[str]) -> None:
    """Each test set a little below the one before, so that equal numbers stay apart."""
    coloured = len(targets) <= COLOURED_DOTS_UP_TO
    for number, target in enumerate(targets):
        lane = 0.14 + 0.24 * number / max(1, len(targets) - 1)
        known = [
            (100 * group.targets[target].mean, place + lane)
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


def _bar_detail(groups: Sequence[Group]) -> str:
    mains = dict.fromkeys((group.main or "").replace("_", " ") for group in groups)
    spread = any(group.scores[group.main or ""].spread is not None for group in groups)
    line = "; line: sample standard deviation over seeds" if spread else ""
    return f"bar: {' or '.join(mains)}{line}"
