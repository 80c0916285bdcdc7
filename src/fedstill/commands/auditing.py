"""Commands that attack: audit mechanism, audit canaries, audit membership."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form
from fedstill.commands.options import (
    DataDir,
    Listing,
    Overrides,
    Quick,
    Quiet,
    data_dir_change,
)
from fedstill.commands.progress import work_bar

if TYPE_CHECKING:
    from fedstill.audit.result import Result
    from fedstill.recipe.tables import Recipe

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Attack a mechanism, a run or a recipe, and say what the attack proves.",
)
Recipes = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe, a .toml file, or a run folder.")
]
Out = Annotated[Path | None, typer.Option(help="Folder for what is found.")]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", help="This method of the recipe only; may be repeated."),
]


@app.command()
def membership(
    recipe: Recipes,
    overrides: Overrides = None,
    client: Annotated[
        list[str] | None,
        typer.Option(help="Whose records are guessed about; may be repeated.  [default: first]"),
    ] = None,
    shadows: Annotated[int, typer.Option(help="Shadow federations; 64 are good.", min=4)] = 64,
    records: Annotated[
        int, typer.Option(help="Of a client, at most; the others always stay inside.", min=20)
    ] = 2000,
    together: Annotated[
        int, typer.Option(help="Shadows that are played as one federation.", min=1)
    ] = 16,
    delta: Annotated[float, typer.Option(help="Of the lower bound of epsilon.")] = 1e-5,
    control_epochs: Annotated[
        int, typer.Option(help="Of local training, the control that must be caught.", min=1)
    ] = 40,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also attack what must be caught.")
    ] = True,
    only: Only = None,
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    quiet: Quiet = False,
    form: Listing = Form.table,
) -> None:
    """Guess who was in the training data, by shadow federations (LiRA); goes on where it stopped.

    Every method of the recipe is attacked by all that it shows: models, weights and synthetic sets
    that are sent. See docs/audits.md.
    """
    from dataclasses import asdict

    from fedstill.audit import membership as attack
    from fedstill.audit.shadows import Shadowing
    from fedstill.recipe.build import execution_of, experiment_of
    from fedstill.runs.digest import decisive, digest

    recipes = _recipes(recipe, overrides, data_dir, quick, only)
    execution = execution_of(recipes[0])
    experiments = [experiment_of(each) for each in recipes]
    first = experiments[0].population.clients[0]
    clients = tuple(dict.fromkeys(client or [first]))
    asked = Shadowing(clients, records, shadows, together, seed=recipes[0].run.seed)
    made, notes = (
        attack.controls(experiments[0], attack.Controls(local_epochs=control_epochs), clients)
        if controls
        else ([], [])
    )
    subjects = [
        *made,
        *(
            attack.Subject(each.label, experiment)
            for each, experiment in zip(recipes, experiments, strict=True)
        ),
    ]
    digests = {
        each.label: digest(decisive(each), experiment.population)
        for each, experiment in zip(recipes, experiments, strict=True)
    } | {"controls": str(asdict(attack.Controls(local_epochs=control_epochs)))}
    folder = out or Path("runs") / f"{recipes[0].run.name}-membership"
    networks = {network for experiment in experiments for network in experiment.networks}
    with execution.applied(networks), work_bar(quiet) as watch:
        result = attack.membership(
            subjects, execution, asked, folder,
            guessing=attack.Guessing(delta=delta), digests=digests, notes=notes, watch=watch,
        )  # fmt: skip
    _tell(result, folder, form)


def _recipes(
    path: Path,
    overrides: Sequence[str] | None,
    data_dir: Path | None,
    quick: bool,
    only: Sequence[str] | None,
) -> list[Recipe]:
    """The methods of a recipe, or the one of a run's folder."""
    from fedstill import recipe as config
    from fedstill.core.errors import RecipeError
    from fedstill.runs.recipes import recipe_of

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    if path.is_dir():
        recipes = [recipe_of(path, changes)]
    else:
        labels = list(only or [])
        recipes = config.checked(config.read_recipe(path, changes, quick=quick, only=labels))
        recipes = config.chosen(recipes, labels)
    for each in recipes:
        if each.data.virtual is not None and not each.method.distils:
            raise RecipeError(
                f"{each.label}: data.virtual makes sets before the run, which an audit does not "
                "play; audit a method that distils (feddm, fedlgd), or take the table away"
            )
    return recipes


def _tell(result: Result, folder: Path, form: Form) -> None:
    """Print what was found, draw it, say where it is, and fail where it proves something wrong."""
    from fedstill.report import audits

    told: dict[str, Any] = result.as_dict()
    if form is Form.json:
        listings.print_json(told)
    else:
        listings.print_rows(audits.rows(told["findings"]), form)
    try:
        drawn = audits.draw_curves(told["findings"], folder / "curves.png")
        typer.echo(f"drawn: {drawn}", err=True)
    except ImportError as error:
        typer.echo(f"no picture: {error}", err=True)
    typer.echo(f"written: {folder / 'audit.json'}, {folder / 'audit.csv'}", err=True)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    for found in result.refuted:
        typer.echo(
            f"REFUTED: {found.subject}, {found.view}: at least {found.epsilon_at_least:.2f} leaks, "
            f"but the ledger says {found.epsilon_ledger:g}",
            err=True,
        )
    for subject in result.missed:
        typer.echo(
            f"NOT CAUGHT: {subject}: an attack that misses this says nothing of the others; try "
            "more shadows or records, or more epochs of the control",
            err=True,
        )
    if result.missed or result.refuted:
        raise typer.Exit(1)
