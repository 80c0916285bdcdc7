"""What every picture shares: figure, colours, ticks, legend, saving; needs the extra `report`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.core.errors import BadValue, RunFolderError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DPI = 150
GREY = "#666666"
PALE = "#E6E6E6"
# Okabe and Ito's colours, told apart with any kind of colour vision; their yellow is too pale.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")
FORMATS = ("png", "pdf", "svg", "eps", "jpg", "tif", "webp")  # by the suffix of a file
# Fonts that publishers accept in PDF, and texts of SVG that stay texts.
FONTS: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}
_LABEL = 0.125  # inches that one line of the smallest label takes
_NEARLY = 0.9  # of a width, since letters are a little wider at another resolution
_KEPT: ContextVar[list[Figure] | None] = ContextVar("kept", default=None)


def figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, with a layout that keeps labels apart."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'fedstill[report]'", name="matplotlib"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows without further ado."""

        def _repr_png_(self) -> bytes:
            written = BytesIO()
            self.savefig(written, format="png", dpi=DPI, facecolor="white")
            return written.getvalue()

    made = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def check_format(path: Path | str) -> None:
    """Refuse a file whose suffix is no format that pictures are drawn in."""
    suffix = Path(path).suffix
    if suffix.lower().removeprefix(".") not in FORMATS:
        came = f"has {suffix!r}" if suffix else "has none"
        raise BadValue(
            f"a picture's format is that of its suffix, and {path} {came}; "
            f"use one of .{', .'.join(FORMATS)}"
        )


@contextmanager
def kept() -> Iterator[list[Figure]]:
    """Pictures that are saved meanwhile are kept here as figures, and nothing is written."""
    figures: list[Figure] = []
    before = _KEPT.set(figures)
    try:
        yield figures
    finally:
        _KEPT.reset(before)


def save(figure: Figure, path: Path | str) -> Path:
    """Write a picture in the format of its suffix, and say where it is."""
    path = Path(path)
    check_format(path)
    figures = _KEPT.get()
    if figures is not None:
        figures.append(figure)
        return path
    from matplotlib import rc_context

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context(FONTS):
            figure.savefig(path, dpi=DPI, facecolor="white")
    except OSError as error:
        raise RunFolderError(f"cannot write the picture {path}: {error}") from error
    return path


def look(number: int) -> tuple[str, str, str]:
    """Colour, dashes and marker of the n-th thing; never the same three twice in twenty-eight."""
    return (
        COLOURS[number % len(COLOURS)],
        _DASHES[number // len(COLOURS) % len(_DASHES)],
        MARKERS[number % len(MARKERS)],
    )


def title(axes: Axes, seen: str, detail: str = "") -> None:
    """What is seen, in bold, and a line of detail under it."""
    if detail:
        axes.set_title(f"{detail}\n", fontsize=8.5, color=GREY, loc="left", linespacing=0.2)
        axes.annotate(
            seen,
            (0, 1),
            (0, 22),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=11,
            fontweight="bold",
            annotation_clip=False,
        )
    else:
        axes.set_title(seen, fontsize=11, fontweight="bold", loc="left")


def legend(axes: Axes) -> None:
    """Inside where there are few entries, to the right where there are many."""
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) <= 4 and max(map(len, labels), default=0) <= 28:
        axes.legend(fontsize=8.5, framealpha=0.85, edgecolor="none")
    else:
        legend_beside(axes)


def small(axes: Axes) -> None:
    """Type of seven and eight points and thin lines, as a column of a paper has it."""
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.set_xlabel(axes.get_xlabel().partition(", each message")[0])
    axes.tick_params(labelsize=7)
    for line in axes.lines:
        line.set_linewidth(1.2)
        line.set_markersize(2.5)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        legend_above(axes)


def legend_above(axes: Axes) -> None:
    """Above the axes, in as many columns as the figure is wide enough for; rows make it taller."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, names = axes.get_legend_handles_labels()
    for columns in range(min(3, len(names)), 0, -1):
        made = figure.legend(
            handles, names, fontsize=7, frameon=False, ncols=columns, loc="outside upper left",
            borderaxespad=0.2, handlelength=1.6, columnspacing=1.0,
        )  # fmt: skip
        if columns == 1 or made.get_window_extent().width <= _NEARLY * figure.bbox.width:
            break
        made.remove()
    width, height = figure.get_size_inches()
    more = math.ceil(len(names) / columns) - 2  # rows that the size of the figure has no room for
    figure.set_size_inches(width, height + _LABEL * max(0, more))


def legend_beside(axes: Axes) -> None:
    """To the right of the axes."""
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False, borderaxespad=0
    )


def plain(axes: Axes, *, grid: str = "both") -> None:
    """Thin grey lines behind, no box around."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=8.5, color=GREY)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=PALE, linewidth=0.7)  # type: ignore[arg-type]


def name_ticks(axis: Axis, names: Sequence[str], cell: float, *, turned: bool = False) -> None:
    """Names beside cells of some inches; where they are too narrow, every second, third, …"""
    step = max(1, math.ceil(_LABEL / cell))
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [names[place] for place in places])
    size = 8.5 if cell * step >= 0.2 else 7.0
    axis.set_tick_params(length=0, labelsize=size, labelrotation=90 if turned else 0)


def blues() -> Colormap:
    """White to blue without the palest part, so that the smallest value differs from none."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["Blues"](np.linspace(0.12, 1.0, 256)))


def write_numbers(axes: Axes, image: AxesImage, form: str, *, size: float = 8.0) -> None:
    """Every known number in its cell, dark on light and light on dark."""
    values: Any = np.ma.asarray(image.get_array())
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if value is not np.ma.masked:
            red, green, blue, _ = image.to_rgba(np.array([float(value)]))[0]
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = form.format(float(value))
            colour = "white" if dark else "#222222"
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def colour_bar(figure: Figure, image: Any, axes: Any, label: str) -> None:
    """The scale of a heat map."""
    width, height = figure.get_size_inches()
    bar = figure.colorbar(image, ax=axes, fraction=0.2 / width, pad=0.02, aspect=height / 0.2)
    bar.set_label(label, fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
