"""Maps of examples, one dot each, coloured by client; and how bright their pixels are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstill.report import canvas


class Panel(NamedTuple):
    """One map: for each example a place, whose it is, and its class."""

    title: str
    places: NDArray[np.float64]  # [example, 2]
    clients: Sequence[str]
    classes: Sequence[int]


def side_by_side(panels: Sequence[Panel], path: Path | str) -> Path:
    """Maps beside each other, clients in the same colours."""
    figure = canvas.figure(5.4 * len(panels), 5.0)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        for number, client in enumerate(dict.fromkeys(panel.clients)):
            own = np.array([name == client for name in panel.clients])
            places, classes = panel.places[own], np.asarray(panel.classes)[own]
            colour, _, _ = canvas.look(number)
            axes.scatter(*places.T, s=46, color=colour, alpha=0.35, linewidth=0, label=client)
            for (x, y), label in zip(places, classes, strict=True):
                axes.text(x, y, str(label), color=colour, fontsize=6, ha="center", va="center")
        axes.set_xticks([])
        axes.set_yticks([])
        canvas.title(axes, panel.title, "a dot for each example, its number the class")
    every[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    return canvas.save(figure, path)


Shares = NDArray[np.float64]  # [channel, level], of all pixels
PRIMARY = ("#C03030", "#2E8B2E", "#2F4FC0")  # red, green, blue


def brightness(found: Mapping[str, Sequence[Shares]], path: Path | str) -> Path:
    """For each client a row: how often each brightness occurs in its examples, and in its set."""
    columns = max(map(len, found.values()))
    figure = canvas.figure(6.6, 0.9 + 1.25 * len(found))
    every = figure.subplots(len(found), columns, squeeze=False, sharex=True, sharey="row")
    for row, (client, sets) in zip(every, found.items(), strict=True):
        for axes, shares in zip(row, sets, strict=True):
            colours = PRIMARY if len(shares) == len(PRIMARY) else canvas.COLOURS
            edges = np.linspace(0, 255, shares.shape[1] + 1)
            for number, channel in enumerate(shares):
                axes.stairs(100 * channel, edges, color=colours[number % len(colours)])
            canvas.plain(axes)
        row[0].set_ylabel(f"{client}\n% of pixels", fontsize=8)
    for axes, name in zip(every[0], ("Clients' examples", "Distilled sets"), strict=False):
        canvas.title(axes, name)
    for axes in every[-1]:
        axes.set_xlabel("brightness", fontsize=8)
    return canvas.save(figure, path)
