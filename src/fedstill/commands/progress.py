"""A live bar while a run is played."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from fedstill.commands.options import SPEECH

PATIENCE = 2.0  # seconds without a word before a bar says what is being done


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with round, the first metric, traffic and time left; silent when not on a terminal.

    In a round that takes long it says which step is played, and how much of it is done.
    """
    if quiet or SPEECH.quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from fedstill.core import pulse

    with _bar() as bar:
        task = bar.add_task(title, total=None, said="")
        watched = Watched()

        def watch(progress: Any) -> None:
            line = watched.line(progress)
            bar.update(task, total=progress.rounds, completed=progress.round, said=line)

        def listen(beat: Any) -> None:
            if line := watched.on_the_way(beat):
                bar.update(task, said=line)

        with pulse.heard_by(listen):
            yield watch


class Watched:
    """What is known of a run that is watched, as the line beside its bar."""

    def __init__(self) -> None:
        self.spent: list[float] = []  # seconds of each round
        self.latest: Any = None  # progress
        self.since = time.monotonic()

    def line(self, progress: Any) -> str:
        """What is told when a round has ended."""
        if progress.seconds:
            self.spent.append(progress.seconds)
        self.latest, self.since = progress, time.monotonic()
        return status_line(progress, self.spent)

    def on_the_way(self, beat: Any) -> str | None:
        """What is told inside a round; None where the last line is not old."""
        if time.monotonic() - self.since < PATIENCE:
            return None
        rounds = "" if self.latest is None else f"/{self.latest.rounds}"
        left = [] if self.latest is None else time_left(self.latest, self.spent)
        return " · ".join([f"round {beat.round}{rounds}", str(beat), *left])


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    screen = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(6, min(30, screen.width - 66))),
        TextColumn("{task.fields[said]}"),
        console=screen,
        transient=True,
    )


def status_line(progress: Any, spent: Sequence[float]) -> str:
    """`round 3/10 · accuracy 52.1 % · 1.25 MB sent · 0:12 left`"""
    from fedstill.report.amounts import human_bytes

    parts = [f"round {progress.round}/{progress.rounds}"]
    if progress.score is not None:
        percent = progress.metric == "accuracy"
        score = f"{100 * progress.score:.1f} %" if percent else f"{progress.score:.4f}"
        parts.append(f"{progress.metric} {score}")
    parts.append(f"{human_bytes(progress.bytes)} sent")
    return " · ".join([*parts, *time_left(progress, spent)])


def time_left(progress: Any, spent: Sequence[float]) -> list[str]:
    """`0:12 left`, by the mean of the rounds so far; nothing where there are none."""
    if not spent:
        return []
    left = round(sum(spent) / len(spent) * (progress.rounds - progress.round))
    hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
    clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return [f"{clock} left"]


class Bars:
    """Bars of runs beside each other below one for the whole; silent without a terminal."""

    def __init__(self, bar: Any = None, total: int = 0):
        self.bar = bar
        self.tasks: dict[int, Any] = {}
        self.watched: dict[int, Watched] = {}
        if bar is not None:
            self.all = bar.add_task("the whole grid", total=total, said="")

    def begin(self, number: int, title: str) -> None:
        """A run has begun at a place."""
        if self.bar is not None:
            self.tasks[number] = self.bar.add_task(title, total=None, said="")
            self.watched[number] = Watched()

    def progress(self, number: int, told: dict[str, Any]) -> None:
        """A round of it has ended."""
        if self.bar is None:
            return
        from fedstill.federation.run import Progress

        progress = Progress(**{name: value for name, value in told.items() if name != "kind"})
        line = self.watched[number].line(progress)
        self.bar.update(
            self.tasks[number], total=progress.rounds, completed=progress.round, said=line
        )

    def on_the_way(self, number: int, told: dict[str, Any]) -> None:
        """A round of it is not over yet."""
        if self.bar is None:
            return
        from fedstill.core.pulse import Part, Pulse

        beat = Pulse(told["round"], told["step"], tuple(Part(*part) for part in told["parts"]))
        if line := self.watched[number].on_the_way(beat):
            self.bar.update(self.tasks[number], said=line)

    def say(self, line: str, *, err: bool = False) -> None:
        """Print a line; where bars stand on the same screen, above them."""
        if self.bar is not None and (sys.stderr if err else sys.stdout).isatty():
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            typer.echo(line, err=err)

    def end(self, number: int) -> None:
        """The run at a place has ended."""
        if self.bar is not None:
            self.bar.remove_task(self.tasks.pop(number))

    def whole(self, played: int) -> None:
        """So many of all have ended."""
        if self.bar is not None:
            self.bar.update(self.all, completed=played, said=f"{played} runs finished")


@contextmanager
def progress_bars(total: int, quiet: bool) -> Iterator[Bars]:
    """A bar for the whole and one for each run beside others."""
    if quiet or SPEECH.quiet or not sys.stderr.isatty():
        yield Bars()
        return
    with _bar() as bar:
        yield Bars(bar, total)


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
