"""Commands that run, and what they leave: run, resume, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.commands import grids
from fedstill.commands.options import DataDir, Overrides, Quick, Quiet, data_dir_change


def run(
    job: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a .toml file.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Run folder.  [default: runs/NAME, the recipe's run.name]"
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="SEED...", help="One or more, e.g. --seeds 0 1 2")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="This method of the recipe only; may be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES", help="Run every value, e.g. method.lr=0.01,0.1; may be repeated."
        ),
    ] = None,
    going_on: Annotated[
        bool,
        typer.Option(
            "--continue", help="Keep finished runs, resume interrupted ones, run the rest."
        ),
    ] = False,
    select: Annotated[
        str | None,
        typer.Option(
            metavar="SCORE",
            help="Choose the swept values by this score on held-out examples, e.g. "
            "average_accuracy, then run them on the test sets.",
        ),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(
            metavar="TRIALS", min=1, help="Search the swept values and ranges with Optuna."
        ),
    ] = None,
    parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Run this many at a time.")] = 1,
    listing: Annotated[
        bool, typer.Option("--list", help="Print a command for each run instead of running.")
    ] = False,
    cell: Annotated[
        int | None, typer.Option(metavar="I", min=0, help="Run only this cell of the grid.")
    ] = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe: every method in it, for every seed and every swept value."""
    from fedstill import recipe as config
    from fedstill.recipe.grid import grid_of

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    labels = only or []
    tables = config.read_recipe(recipe, changes, quick=quick, only=labels)
    recipes = config.chosen(config.checked(tables), labels)
    grid = grid_of(
        tables,
        only=labels,
        seeds=None if seeds is None else seed_numbers(seeds),
        sweeps=sweep or (),
        select=select,
        search=search,
    )
    going = grids.Going(
        out or Path("runs") / recipes[0].run.name, quiet, parallel=_beside(parallel, job.obj),
        line=job.obj,
    )  # fmt: skip
    if listing:
        for command in grids.listed(grid, going.out, sys.argv[1:]):
            typer.echo(command)
    elif cell is not None:
        grids.run_cell(grid, going, cell)
    else:
        grids.run_grid(grid, going, continuing=going_on)


def resume(
    job: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of a run or a grid, finished or not.")
    ],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Run this many of a grid at a time.")
    ] = 1,
    quiet: Quiet = False,
) -> None:
    """Continue from the last checkpoint, exactly as if the run had not stopped.

    In a grid, finished runs are kept, interrupted ones resumed, the rest started.

    A run can be given more rounds: fedstill resume DIR run.rounds=20
    """
    from fedstill.core.errors import RunFolderError
    from fedstill.deploy.place import way_on
    from fedstill.logbook.reader import GRID_FILE
    from fedstill.runs import grid as of_runs
    from fedstill.runs import recipes as runs

    if way := way_on(folder):
        raise RunFolderError(f"{folder}: the data of this run are not here; {way}")
    changes = [*(overrides or []), *data_dir_change(data_dir)]
    if (folder / GRID_FILE).exists():
        going = grids.Going(
            folder, quiet, _beside(parallel, job.obj), job.obj, tuple(overrides or ())
        )
        grids.run_grid(of_runs.read_grid(folder, changes), going, continuing=True)
        return
    recipe = runs.recipe_of(folder, changes)
    only = of_runs.Cell(recipe, folder, {})

    def play(watch: Any) -> None:
        runs.resume(folder, changes, watch, line=job.obj)

    grids.play_one(only, grids.Going(folder, quiet, line=job.obj), play)


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose model: a client's name.  [default: the server's]"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the weights.  [default: in DIR/export]"),
    ] = None,
    round: Annotated[
        int | None,
        typer.Option(metavar="N", help="A round whose checkpoint was kept.  [default: the last]"),
    ] = None,
) -> None:
    """Write a model of a run as files that plain PyTorch loads."""
    from fedstill.deploy.place import networks_in
    from fedstill.runs import export as exports
    from fedstill.runs.folder import safe

    exported = exports.of_folder(folder, node, round, apart=networks_in(folder))
    for path in exports.write(exported, out or folder / "export" / safe(exported.node)):
        print(path)


def _beside(parallel: int, line: Any) -> int:
    """How many runs beside each other; ranks of one job play one run together."""
    if parallel > 1 and line is not None:
        from fedstill.core.errors import RecipeError

        raise RecipeError("--parallel: the ranks of a job play one run together; leave it out")
    return parallel


def seed_numbers(text: str) -> list[int]:
    from fedstill.core.errors import RecipeError

    try:
        numbers = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if not numbers or len({*numbers}) < len(numbers) or min(numbers) < 0:
        raise RecipeError(
            f"--seeds {text}: write whole numbers from 0 on, each once, e.g. --seeds 0 1 2"
        )
    return numbers
