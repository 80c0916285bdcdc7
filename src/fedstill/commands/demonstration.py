"""The demonstration: what this family of methods is for, in half a minute on embedded data."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.commands import grids, listings
from fedstill.commands.options import SPEECH, Quick, Quiet

if TYPE_CHECKING:
    from fedstill.runs.grid import Cell

PARTS = {
    "networks": "Five sites with different looks and different networks",
    "bytes": "One common network, and a budget of bytes",
}
LONGEST_FIRST = ("feddm", "desa", "fedproto", "local", "scaffold", "fedavg")
AT_ONCE = 3  # processes; more would wait for the longest run


def demo(
    job: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    show: Annotated[
        bool, typer.Option(help="Open the report at the end, where there is a desktop.")
    ] = True,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Six methods on five embedded domains of digits: tables and a report in half a minute."""
    from fedstill.report.page.content import content, found_in
    from fedstill.report.page.document import document
    from fedstill.report.tables import comparison
    from fedstill.runs import recipes as runs

    target = runs.fresh_folder(out)
    recipes = {
        part: Path(str(files("fedstill") / "recipes" / f"demo-{part}.toml")) for part in PARTS
    }
    cells = {
        part: _cells(recipe, target / f"{number}-{part}", quick=quick)
        for number, (part, recipe) in enumerate(recipes.items(), start=1)
    }
    _play([cell for some in cells.values() for cell in some], target, job.obj, quick, quiet)
    for part, title in PARTS.items():
        typer.echo(f"\n{title}")
        folders = [cell.folder for cell in cells[part]]
        listings.console().print(comparison(folders).as_rich())
        if part == "networks":
            typer.echo(f"fedavg: {_refused(recipes[part])}")
        else:
            listings.print_rows(budget_rows(folders), listings.Form.table)
    page = target / "report.html"
    page.write_text(document(content(found_in([target]), title="Demonstration")), encoding="utf-8")
    typer.echo(f"\nthe report: {page}")
    if show and not quiet and _has_desktop():
        webbrowser.open(page.resolve().as_uri())
    typer.echo("next: fedstill show desa · fedstill methods · fedstill data")


def _cells(recipe: Path, target: Path, *, quick: bool) -> Sequence[Cell]:
    """The runs of a recipe."""
    from fedstill import recipe as config
    from fedstill.recipe.grid import grid_of
    from fedstill.runs import grid as of_runs

    tables = config.read_recipe(recipe, quick=quick)
    config.checked(tables)
    return of_runs.cells_of(grid_of(tables), target)


def _play(cells: Sequence[Cell], target: Path, line: Any, quick: bool, quiet: bool) -> None:
    """Play all runs, the longest first, and as many at once as there are cores for."""
    ordered = sorted(cells, key=lambda cell: LONGEST_FIRST.index(cell.recipe.label))
    alone = quick or line is not None  # processes take longer to start than quick runs to play
    beside = 1 if alone else min(os.cpu_count() or 1, AT_ONCE)
    if not quiet and not SPEECH.quiet:
        typer.echo(f"fedstill: {len(cells)} runs, {beside} at a time", err=True)
    going = grids.Going(target, quiet, parallel=beside, line=line, named=False)
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
