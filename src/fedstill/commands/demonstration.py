"""The demonstration: what this family of methods is for, in half a minute on embedded data."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstill.commands import grids, listings
from fedstill.commands.options import SPEECH, Quiet

if TYPE_CHECKING:
    from fedstill.runs.grid import Cell

PARTS = {
    "networks": "Five clients with different domains and different networks",
    "bytes": "One common network, and a budget of bytes",
}
LONGEST_FIRST = ("feddm", "desa", "fedproto", "local", "scaffold", "fedavg")
AT_ONCE = 3  # processes; more would wait for the longest run


def demo(
    job: typer.Context,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the runs.")] = Path(
        "runs/demo"
    ),
    show: Annotated[
        bool, typer.Option(help="Open the report at the end, if there is a desktop.")
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller demo that takes seconds.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Six methods on five embedded domains of digits: tables and a report in half a minute."""
    recipes = {
        part: Path(str(files("fedstill") / "recipes" / f"demo-{part}.toml")) for part in PARTS
    }
    alone = quick or job.obj is not None  # processes take longer to start than quick runs to play
    beside = 1 if alone else min(os.cpu_count() or 1, AT_ONCE)
    # Processes load torch while this one does, and what averaging says is found while they play.
    begun = grids.workers(beside) if beside > 1 else nullcontext()
    with begun as workers, ThreadPoolExecutor(1) as aside:
        target, cells = _planned(recipes, out, quick=quick)
        refusal = aside.submit(_refused, recipes["networks"])
        going = grids.Going(
            target, quiet, beside, job.obj, named=False, again="fedstill demo", workers=workers
        )
        _play([cell for some in cells.values() for cell in some], going)
    _tell_tables(cells, refusal.result())
    page = _reported(target)
    if show and not quiet and _has_desktop():
        webbrowser.open(page.resolve().as_uri())
    typer.echo("next: fedstill show desa · fedstill methods · fedstill data")


def _planned(
    recipes: Mapping[str, Path], out: Path, *, quick: bool
) -> tuple[Path, dict[str, Sequence[Cell]]]:
    """The folder, and the runs of each part in it."""
    from fedstill.runs import recipes as runs

    target = runs.fresh_folder(out)
    return target, {
        part: _cells(recipe, target / f"{number}-{part}", quick=quick)
        for number, (part, recipe) in enumerate(recipes.items(), start=1)
    }


def _tell_tables(cells: Mapping[str, Sequence[Cell]], refusal: str) -> None:
    """What came out, part after part."""
    from fedstill.report.tables import comparison

    for part, title in PARTS.items():
        typer.echo(f"\n{title}")
        folders = [cell.folder for cell in cells[part]]
        listings.console().print(comparison(folders).as_rich())
        if part == "networks":
            typer.echo(listings.broken(f"fedavg cannot take part: {refusal}"))
        else:
            listings.print_rows(budget_rows(folders), listings.Form.table)


def _reported(target: Path) -> Path:
    """The report of all runs."""
    from fedstill.report.page.content import content, found_in
    from fedstill.report.page.document import document

    page = target / "report.html"
    page.write_text(document(content(found_in([target]), title="Demonstration")), encoding="utf-8")
    typer.echo(f"\nthe report: {page}")
    return page


def _cells(recipe: Path, target: Path, *, quick: bool) -> Sequence[Cell]:
    """The runs of a recipe."""
    from fedstill import recipe as config
    from fedstill.recipe.grid import grid_of
    from fedstill.runs import grid as of_runs

    tables = config.read_recipe(recipe, quick=quick)
    config.checked(tables)
    return of_runs.cells_of(grid_of(tables), target)


def _play(cells: Sequence[Cell], going: grids.Going) -> None:
    """Play all runs, the longest first."""
    ordered = sorted(cells, key=lambda cell: LONGEST_FIRST.index(cell.recipe.label))
    if not going.quiet and not SPEECH.quiet:
        typer.echo(f"fedstill: {len(cells)} runs, {going.parallel} at a time", err=True)
    grids.refuse_failed(grids.play_all(ordered, going))


def _refused(recipe: Path) -> str:
    """What averaging says to these networks."""
    from fedstill import recipe as config
    from fedstill.core.errors import FedstillError
    from fedstill.recipe.build import experiment_of

    tables = dict(config.read_recipe(recipe))
    try:
        (averaging,) = config.checked({**tables, "method": [{"name": "fedavg"}]})
        experiment_of(averaging)
    except FedstillError as error:
        return str(error)
    return "can average these networks"


def budget_rows(folders: Sequence[Path]) -> list[listings.Row]:
    """How far each method gets with the bytes that the most sparing one sends in all its rounds."""
    from fedstill.logbook.reader import read_run
    from fedstill.report.amounts import human_bytes
    from fedstill.report.curves import within

    runs = [read_run(folder) for folder in folders]
    totals = [sum(row.bytes for row in run.messages) for run in runs]
    budget = min(totals)
    rows = []
    for run, total in zip(runs, totals, strict=True):
        found = within(run, budget)
        last = run.accuracy_by_round()[max(run.accuracy_by_round())]
        rows.append(
            {
                "method": str(run.summary["method"]),
                f"rounds for {human_bytes(budget)}": 0 if found is None else found[0],
                "accuracy then": "–" if found is None else f"{100 * found[1]:.2f}",
                "in the end": f"{100 * last:.2f}",
                "bytes in the end": human_bytes(total),
            }
        )
    return rows


def _has_desktop() -> bool:
    """Whether somebody sits before a screen that a browser can open on."""
    if not sys.stdout.isatty():
        return False
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
