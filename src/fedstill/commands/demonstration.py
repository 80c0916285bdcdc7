"""The demonstration: what this family of methods is for, in two minutes on embedded data."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.commands import grids, listings
from fedstill.commands.options import Quick, Quiet

PARTS = {
    "networks": "Five sites with different looks and different networks",
    "bytes": "One common network, and a budget of bytes",
}


def demo(
    job: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    show: Annotated[
        bool, typer.Option(help="Open the report at the end, where there is a desktop.")
    ] = True,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Six methods on five embedded domains of digits: tables and a report in two minutes."""
    from fedstill.report.page.content import content, found_in
    from fedstill.report.page.document import document
    from fedstill.report.tables import comparison
    from fedstill.runs import recipes as runs

    target = runs.fresh_folder(out)
    for number, (part, title) in enumerate(PARTS.items(), start=1):
        typer.echo(f"\n{title}")
        recipe = Path(str(files("fedstill") / "recipes" / f"demo-{part}.toml"))
        folders = _played(recipe, target / f"{number}-{part}", job.obj, quick=quick, quiet=quiet)
        listings.console().print(comparison(folders).as_rich())
        if part == "networks":
            typer.echo(f"fedavg: {_refused(recipe)}")
        else:
            listings.print_rows(budget_rows(folders), listings.Form.table)
    page = target / "report.html"
    page.write_text(document(content(found_in([target]), title="Demonstration")), encoding="utf-8")
    typer.echo(f"\nthe report: {page}")
    if show and not quiet and _has_desktop():
        webbrowser.open(page.resolve().as_uri())
    typer.echo("next: fedstill show desa · fedstill methods · fedstill data")


def _played(recipe: Path, target: Path, line: Any, *, quick: bool, quiet: bool) -> Sequence[Path]:
    """The folders of a recipe's runs."""
    from fedstill import recipe as config
    from fedstill.recipe.grid import grid_of
    from fedstill.runs import grid as of_runs

    tables = config.read_recipe(recipe, quick=quick)
    config.checked(tables)
    cells = of_runs.cells_of(grid_of(tables), target)
    grids.play_all(cells, grids.Going(target, quiet, line=line, named=False))
    return [cell.folder for cell in cells]


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
