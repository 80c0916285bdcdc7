"""A live bar while a run is played; without a terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from fedstill.commands.options import SPEECH

PATIENCE = 2.0  # seconds without a word before a bar says what is being done
LINES_APART = 30.0  # seconds between lines without a terminal, a tenth of the time so far if longer
LINES_APART_AT_MOST = 600.0
KEPT_WITHIN = 1.0  # seconds after a part began in which what was kept from before is found


class Lines:
    """Lines on stderr where no terminal is: few, and none of what is soon over."""

    def __init__(self) -> None:
        self.began = self.latest = time.monotonic()

    def tell(self, title: str, line: str) -> None:
        """Print a line, unless the last one is not old."""
        now = time.monotonic()
        apart = min(LINES_APART_AT_MOST, max(LINES_APART, (now - self.began) / 10))
        if now - self.latest >= apart:
            self.latest = now
            typer.echo(f"fedstill: {title}: {line}", err=True)


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with round, the first metric, traffic and time left; lines when not on a terminal.

    In a round that takes long it says which step is played, and how much of it is done.
    """
    if quiet or SPEECH.quiet:
        yield lambda progress: None
        return
    from fedstill.core import pulse

    watched = Watched()
    with _shown(title) as show:

        def watch(progress: Any) -> None:
            show(watched.line(progress), progress)

        def listen(beat: Any) -> None:
            if line := watched.on_the_way(beat):
                show(line, None)

        with pulse.heard_by(listen):
            yield watch


@contextmanager
def _shown(title: str) -> Iterator[Callable[[str, Any], None]]:
    """What shows a line beside a title, and how many rounds are over where that is told."""
    if not sys.stderr.isatty():
        lines = Lines()
        yield lambda line, progress: lines.tell(title, line)
        return
    with _bar() as bar:
        task = bar.add_task(title, total=None, said="")

        def show(line: str, progress: Any) -> None:
            over = {} if progress is None else _over(progress)
            bar.update(task, said=line, **over)

        yield show


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


def _over(progress: Any) -> dict[str, int]:
    """Where a bar stands."""
    return {"total": progress.rounds, "completed": progress.round}


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
    return [f"{clock(sum(spent) / len(spent) * (progress.rounds - progress.round))} left"]


def clock(seconds: float) -> str:
    """`0:12` or `1:02:03`"""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Bars:
    """Bars of runs beside each other below one for the whole; without a terminal lines, or none."""

    def __init__(self, bar: Any = None, total: int = 0, *, silent: bool = False):
        self.bar, self.silent = bar, silent
        self.titles: dict[int, str] = {}
        self.tasks: dict[int, Any] = {}
        self.lines: dict[int, Lines] = {}
        self.watched: dict[int, Watched] = {}
        if bar is not None:
            self.all = bar.add_task("the whole grid", total=total, said="")

    def begin(self, number: int, title: str) -> None:
        """A run has begun at a place."""
        self.titles[number], self.watched[number] = title, Watched()
        if self.bar is None:
            self.lines[number] = Lines()
        else:
            self.tasks[number] = self.bar.add_task(title, total=None, said="")

    def progress(self, number: int, told: dict[str, Any]) -> None:
        """A round of it has ended."""
        if self.silent:
            return
        from fedstill.federation.run import Progress

        progress = Progress(**{name: value for name, value in told.items() if name != "kind"})
        self._show(number, self.watched[number].line(progress), **_over(progress))

    def on_the_way(self, number: int, told: dict[str, Any]) -> None:
        """A round of it is not over yet."""
        if self.silent:
            return
        from fedstill.core.pulse import Part, Pulse

        beat = Pulse(told["round"], told["step"], tuple(Part(*part) for part in told["parts"]))
        if line := self.watched[number].on_the_way(beat):
            self._show(number, line)

    def _show(self, number: int, line: str, **over: int) -> None:
        if self.bar is None:
            self.lines[number].tell(self.titles[number], line)
        else:
            self.bar.update(self.tasks[number], said=line, **over)

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
    silent = quiet or SPEECH.quiet
    if silent or not sys.stderr.isatty():
        yield Bars(silent=silent)
        return
    with _bar() as bar:
        yield Bars(bar, total)


@contextmanager
def work_bar(quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar for work with parts, told a part's name and its share done; lines without a terminal.

    What is left is told from the time that the part took so far.
    """
    if quiet or SPEECH.quiet:
        yield lambda title, share: None
        return
    if not sys.stderr.isatty():
        from fedstill.core import pulse

        shares = Shares()
        with pulse.heard_by(lambda beat: shares.beat()):
            yield shares.watch
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


class Shares:
    """Lines that tell which share of a part is done, and from its pace how long the rest takes."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.title, self.share = "", 0.0
        self.began = 0.0
        self.since = (0.0, 0.0)  # a moment, and the share that was done by then

    def watch(self, title: str, share: float) -> None:
        """So much of a part is done."""
        now = time.monotonic()
        if title != self.title:
            self.began = now
        if now - self.began < KEPT_WITHIN:
            self.since = (now, share)
        self.title, self.share = title, share
        self.beat()

    def beat(self) -> None:
        """Work goes on."""
        if self.title:
            self.lines.tell(self.title, ", ".join([f"{100 * self.share:.0f} %", *self._left()]))

    def _left(self) -> list[str]:
        moment, done = self.since
        if self.share <= done:
            return []
        pace = (self.share - done) / max(1e-9, time.monotonic() - moment)
        return [f"{clock((1 - self.share) / pace)} left"]
