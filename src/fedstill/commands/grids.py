"""Grids on the command line: cells one after another or beside each other, and what is said."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

from fedstill.commands.options import SPEECH
from fedstill.commands.progress import progress_bar, progress_bars
from fedstill.commands.stopping import stoppable

if TYPE_CHECKING:
    from fedstill.recipe.grid import Grid
    from fedstill.runs.grid import Cell

MOST_NAMED = 3  # points of which the same is said


@dataclass(frozen=True)
class Going:
    """How the cells of a grid are played."""

    out: Path
    quiet: bool = False
    parallel: int = 1
    line: Any = None  # to the other ranks
    overrides: tuple[str, ...] = ()
    named: bool = True  # say where each went
    again: str | None = None  # what goes on after a stop; without it, resuming
    workers: Workers | None = None  # begun before; without them as many as `parallel` are begun


@dataclass
class Tally:
    """What became of cells."""

    total: int
    played: int = 0
    elsewhere: list[Cell] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """How many there is nothing more to do for."""
        return self.played + len(self.elsewhere) + len(self.failed)


def run_grid(grid: Grid, going: Going, *, continuing: bool) -> None:
    """Play a grid from its beginning, or what is left of it; then test what was chosen."""
    from fedstill.logbook.reader import GRID_FILE
    from fedstill.runs import folder as folders
    from fedstill.runs import grid as grids

    out = going.out
    with folders.writing(out):
        begun = continuing and (out / GRID_FILE).exists()
    cells = grids.first_cells(grid, out, like=grids.read_grid(out) if begun else None)
    known = cells or grids.possible_cells(grid, out)
    if grid.select:
        grids.check_score(grid.select, [cell.recipe for cell in known])
    whole: tuple[Grid, Sequence[Cell]] | None = (grid, cells)
    if continuing:
        whole = grids.whole_of(grid, cells, out)
        grids.check_same_grid(cells, out)
    else:
        grids.check_free(cells, out)
        _check_no_grid(grid, out)
    with _stoppable(cells, going):
        _check_fit(_waiting(known, going), continuing=continuing)
    if whole is not None and (len(whole[1]) > 1 or grid.select):
        grids.write_grid(*whole, out)
    if grid.search:
        cells = grids.search(grid, out, lambda some: _tried(some, going))
    else:
        tally = play_all(cells, going)
        if not grid.select:
            refuse_failed(tally)
        elif tally.elsewhere:
            typer.echo(
                "fedstill: values are chosen when all have ended; then give this command again "
                "with --continue",
                err=True,
            )
            return
    if grid.select:
        _test_chosen(grid, cells, going)


def _tried(cells: Sequence[Cell], going: Going) -> None:
    """Play a point of a search; one that fails is not chosen, and the search goes on."""
    from fedstill.core.errors import FedstillError
    from fedstill.runs.folder import Occupied

    try:
        play_all(cells, going)
    except FedstillError as error:
        if isinstance(error, Occupied) or not any(cell.begun for cell in cells):  # wrong for all
            raise
        typer.echo(f"fedstill: {cells[0].folder} failed: {error}", err=True)


def _test_chosen(grid: Grid, cells: Sequence[Cell], going: Going) -> None:
    """Choose among the points that have finished, and play what was chosen on the test sets."""
    from fedstill.runs import grid as grids

    choices = grids.chosen(grid, cells)
    for choice in choices:
        values = ", ".join(f"{key}={value}" for key, value in choice.values.items())
        said = f"{choice.method}: chosen {values or 'as it is'}"
        if not SPEECH.quiet:
            typer.echo(f"{said}, held-out {grid.select} {choice.score:.4f}", err=True)
    tested = grids.chosen_cells(grid, choices, going.out)
    grids.check_same_grid(tested, going.out)
    grids.write_grid(grid, [*cells, *tested], going.out)
    refuse_failed(play_all(tested, going))


def run_cell(grid: Grid, going: Going, number: int) -> None:
    """Play one cell of a grid, beside other processes that play others into the same folder."""
    from fedstill.core.errors import RecipeError
    from fedstill.runs import grid as grids

    cells = grids.first_cells(grid, going.out)
    if grid.search:
        raise RecipeError("--cell: the points of a search are not known before it has run")
    if not 0 <= number < len(cells):
        raise RecipeError(f"--cell {number}: the grid has the cells 0 to {len(cells) - 1}")
    grids.check_same_grid(cells[number : number + 1], going.out)
    if len(cells) > 1:
        grids.write_grid(grid, cells, going.out)
    cell = cells[number]
    refuse_failed(play_all([cell], replace(going, out=cell.folder)))  # gone on with alone


def listed(grid: Grid, out: Path, arguments: Sequence[str]) -> list[str]:
    """A command for each cell, and one more that chooses and tests where that is asked for."""
    from fedstill.core.errors import RecipeError
    from fedstill.runs import grid as grids

    if grid.search:
        raise RecipeError("--list: the points of a search are not known before it has run")
    own = [word for word in arguments if word != "--list"]
    command = shlex.join(["fedstill", *own])
    told = any(word == "--out" or word.startswith("--out=") for word in own)
    place = "" if told else f" --out {shlex.quote(str(out))}"
    cells = range(len(grids.first_cells(grid, out)))
    last = [f"{command}{place} --continue"] if grid.select else []
    return [*(f"{command}{place} --cell {number}" for number in cells), *last]


def play_all(cells: Sequence[Cell], going: Going) -> Tally:
    """Play every cell that has not finished; say where each went, and what could not be played."""
    waiting = _waiting(cells, going)
    before = len(cells) - len(waiting)
    if before and going.named and not SPEECH.quiet:
        typer.echo(f"fedstill: {before} of {len(cells)} runs had finished before", err=True)
    tally = Tally(len(cells), before)
    with _stoppable(cells, going):
        if going.parallel > 1:
            _beside_each_other(waiting, going, tally)
        else:
            _one_by_one(waiting, going, tally)
    for cell in tally.elsewhere:
        typer.echo(f"fedstill: {cell.folder} is played by another process", err=True)
    for cell, text in tally.failed:
        typer.echo(f"fedstill: {cell.folder} failed: {text}", err=True)
    return tally


def _waiting(cells: Sequence[Cell], going: Going) -> list[Cell]:
    """Those that are to be played: all that have not finished, with changes all."""
    return [cell for cell in cells if going.overrides or not cell.finished]


def refuse_failed(tally: Tally) -> None:
    """End the command where runs failed."""
    if tally.failed:
        from fedstill.core.errors import FedstillError

        raise FedstillError(
            f"{len(tally.failed)} of {tally.total} runs failed; the others are kept, and run with "
            "--continue, or resume, tries these again"
        )


def play_one(cell: Cell, going: Going, play: Callable[[Any], None]) -> None:
    """Play one run by a function that takes who watches, and say where it went."""
    title = f"{cell.title} seed {cell.recipe.run.seed}"
    with _stoppable([cell], going), progress_bar(title, going.quiet) as watch:
        play(watch)
    _finished(cell, going, Tally(1))


def _stoppable(cells: Sequence[Cell], going: Going) -> AbstractContextManager[None]:
    return stoppable(lambda: _then(cells, going))


def _then(cells: Sequence[Cell], going: Going) -> str:
    """How to go on after a stop."""
    if going.again is not None:
        return f"begin again with `{going.again}`"
    from fedstill.logbook.reader import GRID_FILE

    whole = (going.out / GRID_FILE).exists()
    if not whole and not any(cell.begun for cell in cells):
        return "nothing was begun"
    return f"go on with `fedstill resume {going.out if whole else cells[0].folder}`"


def _check_fit(cells: Sequence[Cell], *, continuing: bool) -> None:
    """Refuse points that do not fit the data or networks before another is played for hours."""
    from fedstill.core.errors import RecipeError

    points = {cell.title: cell for cell in reversed(cells)}  # the first seed of each
    if len(points) < 2:
        return  # it is refused when it begins
    alike: dict[str, list[Cell]] = {}  # by the tables that data and networks are made of
    for cell in reversed(points.values()):
        recipe = cell.recipe
        alike.setdefault(repr((recipe.data, recipe.models, recipe.run.seed)), []).append(cell)
    found = [misfit for group in alike.values() for misfit in _misfits(group)]
    if not found:
        return
    wrong: dict[str, list[str]] = {}  # by what is wrong with them
    for title, line in found:
        wrong.setdefault(line, []).append(title)
    faults = [
        line if len(titles) == len(points) else f"{_together(titles)}: {line}"
        for line, titles in wrong.items()
    ]
    faults[-1] += _instead(cells, {title for title, _ in found}, continuing)
    raise RecipeError(faults)


def _misfits(cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    """What is wrong with cells of the same data and networks, each with the cell's title."""
    from fedstill.core.errors import BadValue, FedstillError
    from fedstill.recipe.build import experiment_of, population_of

    people: Any = None
    for cell in cells:
        try:
            people = population_of(cell.recipe) if people is None else people
            experiment_of(cell.recipe, people)
        except FedstillError as error:
            faults = error.faults if isinstance(error, BadValue) else [str(error)]
            yield from ((cell.title, line) for line in faults)


def _together(titles: Sequence[str]) -> str:
    """Some points in words, not more than a person reads."""
    told, more = titles[:MOST_NAMED], len(titles) - MOST_NAMED
    return " and ".join([*told, f"{more} more"] if more > 0 else told)


def _instead(cells: Sequence[Cell], wrong: Collection[str], continuing: bool) -> str:
    """What can be played where some points do not fit."""
    labels = {cell.recipe.label for cell in cells if cell.title in wrong}
    others = [cell for cell in cells if cell.recipe.label not in labels]
    if any(cell.recipe.label in labels and cell.title not in wrong for cell in cells):
        return ". Nothing was played; leave these values out of the sweep"
    return f". Nothing was played; {_alone(others, continuing)}" if others else ""


def _alone(cells: Sequence[Cell], continuing: bool) -> str:
    """How to play cells of the methods that fit, where some do not."""
    labels = list(dict.fromkeys(cell.recipe.label for cell in cells))
    only = " ".join(f"--only {label}" for label in labels)
    if not continuing:
        return f"the others alone are run by {only}"
    if len(labels) > 1:
        return f"the others alone by `fedstill run` with --continue {only}"
    begun = " and ".join(f"`fedstill resume {cell.folder}`" for cell in cells if cell.begun)
    if begun:
        return f"what was begun of {labels[0]} goes on by {begun}"
    return f"{labels[0]} alone is run by {only} and a folder of its own after --out"


def _one_by_one(cells: Sequence[Cell], going: Going, tally: Tally) -> None:
    from fedstill.core.errors import FedstillError
    from fedstill.runs import grid as grids
    from fedstill.runs.folder import Occupied

    for cell in cells:
        title = f"{cell.title} seed {cell.recipe.run.seed}"
        if tally.total > 1:
            title = f"{tally.ended + 1}/{tally.total} {title}"
        try:
            with progress_bar(title, going.quiet) as watch:
                grids.play(cell, watch, going.line, going.overrides)
        except Occupied:
            if tally.total == 1:
                raise
            tally.elsewhere.append(cell)
            continue
        except FedstillError as error:
            if tally.total == 1 or not (cell.begun or tally.ended):  # it is wrong for all
                raise
            tally.failed.append((cell, str(error)))
            continue
        _finished(cell, going, tally)


def _beside_each_other(cells: Sequence[Cell], going: Going, tally: Tally) -> None:
    """Hand cells to so many processes, each the next one when it is done with one."""
    count = min(going.parallel, len(cells))
    if not count:
        return
    if going.workers is not None:
        return _handed_out(cells, going, tally, going.workers)
    with workers(count) as begun:
        _handed_out(cells, going, tally, begun)


def _handed_out(cells: Sequence[Cell], going: Going, tally: Tally, hands: Workers) -> None:
    from fedstill.runs import worker

    left = list(reversed(cells))
    at: dict[int, Cell] = {}
    with progress_bars(tally.total, going.quiet) as bars:

        def next_for(number: int) -> None:
            if left:
                cell = at[number] = left.pop()
                bars.begin(number, f"{cell.title} seed {cell.recipe.run.seed}")
                hands.hand(number, worker.job(cell, going.overrides))

        for number in range(len(hands.processes)):
            next_for(number)
        while at:
            number, told = hands.answers.get()
            if told is not None and told["kind"] == worker.PROGRESS:
                bars.progress(number, told)
                continue
            if told is not None and told["kind"] == worker.PULSE:
                bars.on_the_way(number, told)
                continue
            if number not in at:  # it had nothing left to do, and ended
                continue
            cell = at.pop(number)
            bars.end(number)
            if told is None:
                tally.failed.append((cell, hands.ended(number)))
                if left:
                    hands.begin(number)
            elif told["kind"] == worker.DONE:
                _finished(cell, going, tally, bars.say)
                bars.whole(tally.played)
            elif told["kind"] == worker.OCCUPIED:
                tally.elsewhere.append(cell)
            else:
                tally.failed.append((cell, told["text"]))
            next_for(number)


class Workers:
    """Processes that play cells; what they say comes into one queue, None where one has ended."""

    def __init__(self, count: int):
        self.command = [sys.executable, "-m", "fedstill.runs.worker", str(count)]
        self.answers: Queue[tuple[int, dict[str, Any] | None]] = Queue()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.listening: dict[int, Thread] = {}
        for number in range(count):
            self.begin(number)

    def begin(self, number: int) -> None:
        """Begin a process at a place, where none is or has ended."""
        process = self.processes[number] = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            encoding="utf-8", start_new_session=True,  # a Ctrl-C is ours to pass on
        )  # fmt: skip
        thread = Thread(target=self._listen, args=(number, process), daemon=True)
        self.listening[number] = thread
        thread.start()

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.answers.put((number, json.loads(line)))
        self.answers.put((number, None))

    def hand(self, number: int, job: str) -> None:
        """Give a process its next cell; of one that has ended, that is heard soon."""
        stream = self.processes[number].stdin
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.write(job + "\n")
            stream.flush()

    def ended(self, number: int) -> str:
        """Wait for the end of a process that says nothing more, and tell what it was."""
        code = self._close(number)
        if code >= 0:
            return f"its process ended with code {code}"
        memory = ", as happens where memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was ended by signal {-code}{memory}"

    def _close(self, number: int) -> int:
        """Wait for the end of a process, and give its exit code."""
        process = self.processes[number]
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        self.listening[number].join()
        process.stdout.close()
        return code

    def kill(self) -> None:
        """End what is being played; what was written is whole at any moment."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of what is being played."""
        for process in self.processes.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for number in self.processes:
            self._close(number)


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Processes that play cells; they load what they need while cells are still looked for."""
    begun = Workers(count)
    try:
        yield begun
    except BaseException:
        begun.kill()
        raise
    finally:
        begun.close()


def _finished(cell: Cell, going: Going, tally: Tally, say: Any = typer.echo) -> None:
    tally.played += 1
    if SPEECH.verbose:
        _tell_notes(cell.folder, say)
    if going.named and not SPEECH.quiet:
        from fedstill.core.files import without_folder

        recipe = cell.recipe
        place = f" ({tally.played} of {tally.total})" if tally.total > 1 else ""
        title = f"{cell.title} · {without_folder(recipe.data.name)} · seed {recipe.run.seed}"
        say(f"{title}: {result(cell.folder, recipe.run.metrics[0])} → {cell.folder}{place}")


def _tell_notes(folder: Path, say: Any) -> None:
    from fedstill.logbook.reader import read_rows

    for note in read_rows(folder).notes:
        say(f"note: {note.kind}: {note.text}", err=True)


def result(folder: Path, metric: str) -> str:
    """The average that stands for a run, and that of the metric named first in its recipe."""
    from fedstill.metrics import name_of
    from fedstill.report.groups import scores_of

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    names = ("average_accuracy", "averaged_global_accuracy", "averaged_local_accuracy")
    held = "held-out " if summary.get("held_out") else ""
    said = []
    for name in dict.fromkeys(("accuracy", name_of(metric))):
        table = scores_of(summary, name)
        scores = [table[score] for score in names if table.get(score) is not None]
        percent = name == "accuracy"
        said += [
            f"{held}{name} {100 * x:.2f} %" if percent else f"{held}{name} {x:.4f}"
            for x in scores[:1]
        ]
    return ", ".join(said) or "not evaluated"


def _check_no_grid(grid: Grid, out: Path) -> None:
    from fedstill.core.errors import RunFolderError
    from fedstill.logbook.reader import GRID_FILE

    if grid.select and (out / GRID_FILE).exists():
        raise RunFolderError(
            f"{out} already holds a grid; go on with it by --continue, or give another folder "
            "with --out"
        )
