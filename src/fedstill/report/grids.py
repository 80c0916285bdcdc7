"""Pictures that are tables: who holds what, who scores what where, and synthetic images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedstill.core.errors import BadValue
from fedstill.report import canvas
from fedstill.report.layout import with_network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

MOST_CLIENTS = 200  # of a picture of who holds what
NUMBERS_UP_TO = 20  # a heat map with more rows or columns than this shows colours only
_LETTER = 0.075  # inches that one letter of a label takes
_ABSENT = 0.9  # the grey of an image that is not there


def partition(
    counts: ArrayLike,  # [client, class]
    names: Sequence[str],
    path: Path | str,
    *,
    classes: Sequence[str] | None = None,
) -> Path:
    """How many examples of each class each client holds, and how many in all."""
    table = np.asarray(counts, dtype=np.float64)
    if classes is None:
        classes = [str(number) for number in range(table.shape[-1])]
    _check_names(table, names, classes)
    if len(names) <= NUMBERS_UP_TO:
        return _partition_by_rows(table, list(names), list(classes), path)
    return _partition_by_columns(table, list(names), list(classes), path)


def accuracy_matrix(
    matrix: ArrayLike,  # [model, test set], fractions; NaN where not scored
    names: Sequence[str],
    path: Path | str,
    *,
    targets: Sequence[str] | None = None,
    networks: Mapping[str, str] | None = None,
    detail: str = "",
) -> Path:
    """Every client's model on every client's test set; own test sets are framed."""
    values = 100 * np.asarray(matrix, dtype=np.float64)
    targets = names if targets is None else targets
    _check_names(values, names, targets)
    labels = [with_network(name, (networks or {}).get(name, "")) for name in names]
    numbers = max(values.shape) <= NUMBERS_UP_TO
    cell = _wide_enough(targets) if numbers else max(0.07, min(0.2, 12 / max(values.shape)))
    height = 0.36 if numbers else cell
    turned = _too_long(targets, cell)
    figure = canvas.figure(
        max(3.8, cell * len(targets)) + _LETTER * max(map(len, labels)) + 1.3,
        max(1.2, height * len(names)) + (_LETTER * max(map(len, targets)) if turned else 0.2) + 0.8,
    )
    from matplotlib.patches import Rectangle

    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(values), cmap=canvas.blues(), aspect="auto")
    axes.patch.set(hatch="////", edgecolor=canvas.GREY)  # seen where nothing was scored
    axes.spines[:].set_visible(False)
    canvas.name_ticks(axes.xaxis, targets, cell, turned=turned)
    canvas.name_ticks(axes.yaxis, labels, height)
    axes.set_xlabel("test set of", fontsize=9.5)
    axes.set_ylabel("model of", fontsize=9.5)
    if numbers:
        canvas.write_numbers(axes, image, "{:.1f}")
        for row, name in enumerate(names):
            if name in targets:
                corner = (list(targets).index(name) - 0.5, row - 0.5)
                frame = Rectangle(corner, 1, 1, fill=False, edgecolor=canvas.COLOURS[1])
                frame.set(linewidth=1.8, clip_on=False)
                axes.add_patch(frame)
    canvas.colour_bar(figure, image, axes, "accuracy (%)")
    canvas.title(axes, "Each client's model on each test set", detail)
    return canvas.save(figure, path)


def image_grid(
    images: ArrayLike,  # [class, image, channel, height, width]; an image with NaN is absent
    labels: Sequence[str],
    path: Path | str,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Path:
    """Synthetic images, a row for each class; without mean and std each image fills the range."""
    stack = np.asarray(images)
    if stack.ndim != 5 or stack.shape[2] not in (1, 3):
        raise BadValue(
            "images are [class, image, channel, height, width] with one channel or three, "
            f"found the shape {list(stack.shape)}"
        )
    if len(labels) != len(stack):
        raise BadValue(f"{len(stack)} rows of images, but {len(labels)} labels")
    rows, columns, _, height, width = stack.shape
    shown = visible(stack, mean, std)
    cell = max(0.32, min(0.8, 12 / max(rows, columns)))  # inches of an image's height
    mosaic = _mosaic(shown, zoom=max(1, round(cell * canvas.DPI / height)))
    margin = _LETTER * max(map(len, labels), default=0) + 0.4
    figure = canvas.figure(max(3.2, cell * width / height * columns + margin), cell * rows + 0.65)
    axes = figure.add_subplot()
    axes.imshow(mosaic, interpolation="antialiased")
    axes.set_anchor("W")
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    step = mosaic.shape[0] / rows
    axes.set_yticks([(row + 0.5) * step for row in range(rows)], labels)
    axes.tick_params(length=0, labelsize=8.5)
    absent = "; grey: not held" if np.isnan(shown).any() else ""
    canvas.title(axes, "Synthetic images by class", f"{columns} for each class{absent}")
    return canvas.save(figure, path)


def _partition_by_rows(
    table: NDArray[np.float64], names: list[str], classes: list[str], path: Path | str
) -> Path:
    """Few clients: a row each, with numbers where they fit, and totals to the right."""
    numbers = len(classes) <= NUMBERS_UP_TO
    cell = _wide_enough(classes) if numbers else max(0.09, min(0.25, 11 / len(classes)))
    width = max(3.0, cell * len(classes))
    figure = canvas.figure(width + 3.4, max(1.6, 0.3 * len(names) + 1.1))
    axes, totals = figure.subplots(1, 2, sharey=True, width_ratios=(width, 1.3))
    image = _counts(axes, table)
    canvas.name_ticks(axes.xaxis, classes, cell, turned=_too_long(classes, cell))
    canvas.name_ticks(axes.yaxis, names, 0.3)
    axes.set_xlabel("class", fontsize=9.5)
    if numbers:
        canvas.write_numbers(axes, image, "{:,.0f}", size=7.5)
    sums = table.sum(axis=1)
    totals.barh(range(len(names)), sums, color=canvas.GREY, height=0.6)
    for row, value in enumerate(sums):
        totals.annotate(
            f"{value:,.0f}",
            (value, row),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )
    totals.set_xlim(0, 1.6 * max(sums.max(), 1))
    totals.axis("off")
    totals.set_title("in all", fontsize=8.5, color=canvas.GREY, loc="left")
    if not numbers:
        canvas.colour_bar(figure, image, [axes, totals], "examples")
    canvas.title(axes, "Examples by client and class")
    return canvas.save(figure, path)


def _partition_by_columns(
    table: NDArray[np.float64], names: list[str], classes: list[str], path: Path | str
) -> Path:
    """Many clients: a column each, totals above; of very many the first ones."""
    detail = (
        f"the first {MOST_CLIENTS} of {len(names)} clients" if len(names) > MOST_CLIENTS else ""
    )
    table, names = table[:MOST_CLIENTS], names[:MOST_CLIENTS]
    cell = max(0.04, min(0.16, 13 / len(names)))
    row = max(0.09, min(0.22, 9 / len(classes)))
    height = row * len(classes)
    figure = canvas.figure(max(6.0, cell * len(names) + 1.8), height + 2.4)
    totals, axes = figure.subplots(2, 1, sharex=True, height_ratios=(0.8, height))
    image = _counts(axes, table.T)
    canvas.name_ticks(axes.xaxis, names, cell, turned=True)
    canvas.name_ticks(axes.yaxis, classes, row)
    axes.set_xlabel("client", fontsize=9.5)
    axes.set_ylabel("class", fontsize=9.5)
    totals.bar(range(len(names)), table.sum(axis=1), color=canvas.GREY, width=0.8)
    totals.set_ylabel("examples\nin all", fontsize=8.5)
    canvas.plain(totals, grid="y")
    totals.tick_params(axis="x", which="both", length=0, labelbottom=False)
    canvas.colour_bar(figure, image, axes, "examples")
    canvas.title(totals, "Examples by client and class", detail)
    return canvas.save(figure, path)


def _counts(axes: Axes, table: NDArray[np.float64]) -> AxesImage:
    """A heat map of counts in which one example shows and none is blank."""
    from matplotlib.colors import PowerNorm

    shown = np.ma.masked_equal(table, 0)
    scale = PowerNorm(0.5, vmin=0, vmax=max(float(table.max(initial=0)), 1.0))
    image = axes.imshow(shown, cmap=canvas.blues(), norm=scale, aspect="auto")
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(table.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(table.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=canvas.PALE, linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    return image


def visible(
    stack: NDArray[np.generic], mean: Sequence[float] | None, std: Sequence[float] | None
) -> NDArray[np.float64]:
    """Images between 0 and 1, NaN where absent: [class, image, height, width, channel]."""
    images = np.moveaxis(stack.astype(np.float64), 2, -1)
    absent = ~np.isfinite(images).all(axis=(2, 3, 4), keepdims=True)
    if stack.dtype == np.uint8:
        images = images / 255
    elif mean is not None or std is not None:
        images = images * np.asarray(1.0 if std is None else std, dtype=np.float64)
        images = images + np.asarray(0.0 if mean is None else mean, dtype=np.float64)
    else:
        filled = np.where(absent, 0.0, images)
        low = filled.min(axis=(2, 3, 4), keepdims=True)
        high = filled.max(axis=(2, 3, 4), keepdims=True)
        images = (filled - low) / np.where(high > low, high - low, 1.0)
    return np.where(absent, np.nan, images.clip(0, 1))


def _mosaic(images: NDArray[np.float64], *, zoom: int) -> NDArray[np.uint8]:
    """All images in one, each pixel a square of `zoom` pixels, white lines between.

    As bytes: of floats, matplotlib makes copies in double precision at every step.
    """
    grey = (255 * np.where(np.isnan(images), _ABSENT, images)).round().astype(np.uint8)
    large = np.broadcast_to(grey, (*grey.shape[:-1], 3)).repeat(zoom, axis=2).repeat(zoom, axis=3)
    gap = max(2, round(0.04 * large.shape[2]))
    framed = np.pad(large, ((0, 0), (0, 0), (gap, gap), (gap, gap), (0, 0)), constant_values=255)
    rows, columns, height, width, channels = framed.shape
    return framed.swapaxes(1, 2).reshape(rows * height, columns * width, channels)


def _wide_enough(names: Sequence[str]) -> float:
    """Inches of a cell that holds a number, and its name below where that is not too long."""
    return max(0.48, min(0.9, _LETTER * max(map(len, names)) + 0.08))


def _too_long(names: Sequence[str], cell: float) -> bool:
    """Whether names would run into each other under cells of some inches."""
    return max(map(len, names)) * _LETTER > cell


def _check_names(table: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str]) -> None:
    if table.ndim != 2 or table.shape != (len(rows), len(columns)) or table.size == 0:
        raise BadValue(
            f"a table of the shape {list(table.shape)} does not fit "
            f"{len(rows)} names of rows and {len(columns)} of columns"
        )
