"""Commands that run, and what they leave: run, resume, export, demo."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.commands import listings
from fedstill.commands.options import DataDir, Overrides, Quick, Quiet, data_dir_change
from fedstill.commands.progress import progress_bar


def run(
    job: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a .toml file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME by default.")] = None,
    seeds: Annotated[str | None, typer.Option(help="One or more, e.g. --seeds 0 1 2")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="This method of the recipe only; may be repeated."),
    ] = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe: every method in it, for every seed."""
    from fedstill import recipe as config
    from fedstill.runs import recipes as runs

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    labels = only or []
    recipes = config.checked(config.read_recipe(recipe, changes, quick=quick, only=labels))
    recipes = config.chosen(recipes, labels)
    numbers = [recipes[0].run.seed] if seeds is None else seed_numbers(seeds)
    pairs = runs.folders_for(recipes, numbers, out or Path("runs") / recipes[0].run.name)
    for _, folder in pairs:  # before the first of them starts
        runs.check_free(folder)
    _run_all(pairs, quiet, partial(runs.begin, line=job.obj))


def resume(
    job: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, finished or not.")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Go on from the last checkpoint, exactly as if the run had not stopped.

    More rounds may be asked for: fedstill resume DIR run.rounds=20
    """
    from fedstill.runs import recipes as runs

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    recipe = runs.recipe_of(folder, changes)

    def play(_: Any, where: Path, watch: Any) -> Path:
        return runs.resume(where, changes, watch, line=job.obj)

    _run_all([(recipe, folder)], quiet, play)


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    node: Annotated[
        str | None, typer.Option(help="Whose model: a client's name.  [default: the server's]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the weights.  [default: in DIR/export]")
    ] = None,
    round: Annotated[
        int | None, typer.Option(help="Of a round whose checkpoint was kept.  [default: the last]")
    ] = None,
) -> None:
    """Write a model of a run as files that plain PyTorch loads."""
    from fedstill.runs import export as exports
    from fedstill.runs.folder import safe

    exported = exports.of_folder(folder, node, round)
    for path in exports.write(exported, out or folder / "export" / safe(exported.node)):
        print(path)


def demo(
    job: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """Four methods on five embedded domains of digits: a table and pictures in two minutes."""
    from fedstill import recipe as config
    from fedstill.logbook.reader import read_run
    from fedstill.report import plots
    from fedstill.report.tables import comparison
    from fedstill.runs import pictures
    from fedstill.runs import recipes as runs

    place = files("fedstill") / "recipes" / "demo.toml"
    recipes = config.checked(config.read_recipe(Path(str(place))))
    target = runs.fresh_folder(out)
    pairs = runs.folders_for(recipes, [recipes[0].run.seed], target)
    _run_all(pairs, quiet, partial(runs.begin, line=job.obj), named=False)
    table = comparison([folder for _, folder in pairs])
    listings.console().print(table.as_rich())
    drawn = pictures.pictures_of(target)
    try:
        every = [read_run(folder) for _, folder in pairs]
        drawn += [
            plots.comparison_bars(table, target / "comparison.png"),
            plots.accuracy_by_round(every, target / "accuracy-by-round.png"),
            plots.accuracy_by_bytes(every, target / "accuracy-by-bytes.png"),
            plots.accuracy_by_floats(every, target / "accuracy-by-floats.png"),
        ]
    except ImportError as error:
        typer.echo(f"no pictures: {error}", err=True)
    typer.echo("\npictures:")
    for path in drawn:
        typer.echo(f"  {path}")
    typer.echo("\nnext: fedstill show feddm · fedstill methods · fedstill data")


Player = Callable[..., Path]


def _run_all(
    pairs: Sequence[tuple[Any, Path]], quiet: bool, play: Player, *, named: bool = True
) -> None:
    """Play every run with a live bar on a terminal; say where each went."""
    for recipe, folder in pairs:
        try:
            with progress_bar(f"{recipe.label} seed {recipe.run.seed}", quiet) as watch:
                play(recipe, folder, watch)
        except KeyboardInterrupt:
            begun = (folder / "recipe.toml").exists()
            then = f"go on with `fedstill resume {folder}`" if begun else "nothing was begun"
            typer.echo(f"fedstill: stopped; {then}", err=True)
            raise typer.Exit(130) from None
        if named:
            title = f"{recipe.label} · {recipe.data.name} · seed {recipe.run.seed}"
            typer.echo(f"{title}: {_result(folder, recipe.run.metrics[0])} → {folder}")


def _result(folder: Path, metric: str) -> str:
    """The average that stands for a run, and that of the metric named first in its recipe."""
    from fedstill.metrics import name_of
    from fedstill.report.groups import scores_of

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    names = ("average_accuracy", "averaged_global_accuracy", "averaged_local_accuracy")
    said = []
    for name in dict.fromkeys(("accuracy", name_of(metric))):
        table = scores_of(summary, name)
        scores = [table[score] for score in names if table.get(score) is not None]
        percent = name == "accuracy"
        said += [f"{name} {100 * x:.2f} %" if percent else f"{name} {x:.4f}" for x in scores[:1]]
    return ", ".join(said) or "not evaluated"


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
