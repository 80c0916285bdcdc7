"""A live bar while a run is played."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with round, the first metric, traffic and time left; silent when not on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    screen = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(6, min(30, screen.width - 66))),
        TextColumn("{task.fields[said]}"),
        console=screen,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None, said="")
        spent: list[float] = []

        def watch(progress: Any) -> None:
            if progress.seconds:
                spent.append(progress.seconds)
            line = status_line(progress, spent)
            bar.update(task, total=progress.rounds, completed=progress.round, said=line)

        yield watch


def status_line(progress: Any, spent: Sequence[float]) -> str:
    """`round 3/10 · accuracy 52.1 % · 1.25 MB sent · 0:12 left`"""
    from fedstill.report.amounts import human_bytes

    parts = [f"round {progress.round}/{progress.rounds}"]
    if progress.score is not None:
        percent = progress.metric == "accuracy"
        score = f"{100 * progress.score:.1f} %" if percent else f"{progress.score:.4f}"
        parts.append(f"{progress.metric} {score}")
    parts.append(f"{human_bytes(progress.bytes)} sent")
    if spent:
        left = round(sum(spent) / len(spent) * (progress.rounds - progress.round))
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        parts.append(f"{clock} left")
    return " · ".join(parts)


@contextmanager
def work_bar(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar for work with parts, told a part's name and its share done; silent without a terminal.

    What is left is told from the time that the part took so far.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda title, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def watch(title: str, share: float) -> None:
            if title not in tasks:
                tasks[title] = bar.add_task(title, total=1.0)
            bar.update(tasks[title], completed=share)

        yield watch
