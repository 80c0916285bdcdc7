"""Synthetic images of runs as a report shows them: by method, party and round."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedstill.core.errors import RunFolderError
from fedstill.logbook.reader import Run
from fedstill.report import image_sets
from fedstill.report.image_sets import ImageSet

FOLDER = Path("pictures") / "synthetic"
MOST_IN_A_ROW = 12  # images of a class


def pictures_of(runs: Sequence[Run], methods: Sequence[int], room: int) -> dict[str, Any]:
    """Mosaics as texts that a page can show, and how many were left out.

    Of each method (`methods` has its number for every run) the first run that has any is shown.
    The last round of all comes first, then the rounds before it, as far as there is room.
    """
    shown: list[dict[str, Any]] = []
    left_out = 0
    for number, round, each in _by_importance(runs, methods):
        images, there = each.images[:, :MOST_IN_A_ROW], each.there[:, :MOST_IN_A_ROW]
        text = base64.b64encode(image_sets.mosaic(images)).decode("ascii")
        if len(text) > room:
            left_out += 1
            continue
        room -= len(text)
        classes, count, height, width, _ = images.shape
        shown.append(
            {
                "run": number,
                "round": round,
                "node": each.node,
                "classes": classes,
                "count": count,
                "size": [width, height],
                "there": ["".join("1" if one else "0" for one in row) for row in there],
                "png": text,
            }
        )
    return {"shown": shown, "left_out": left_out}


def _by_importance(
    runs: Sequence[Run], methods: Sequence[int]
) -> Iterator[tuple[int, int, ImageSet]]:
    files: list[dict[int, Path]] = []
    shown: set[int] = set()
    for run, method in zip(runs, methods, strict=True):
        place = None if run.folder is None or method in shown else run.folder / FOLDER
        files.append({} if place is None else image_sets.rounds(place))
        if files[-1]:
            shown.add(method)
    for back in range(max((len(each) for each in files), default=0)):
        for number, by_round in enumerate(files):
            if back >= len(by_round):
                continue
            round = sorted(by_round)[-1 - back]
            try:
                sets = image_sets.read(by_round[round])
            except RunFolderError:  # being written, or by others
                continue
            yield from ((number, round, each) for each in sets)
