"""Commands that attack: audit mechanism, audit canaries, audit membership."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form, Row
from fedstill.commands.options import (
    DataDir,
    Listing,
    Overrides,
    Quick,
    Quiet,
    data_dir_change,
)
from fedstill.commands.progress import work_bar
from fedstill.commands.stopping import stoppable

if TYPE_CHECKING:
    from fedstill.audit.result import Result
    from fedstill.federation.experiment import Experiment
    from fedstill.methods.virtual import Virtual
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
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the findings.")]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", help="This method of the recipe only; may be repeated."),
]


@app.command(short_help="Guess who was in the training data, with shadow runs.")
def membership(
    recipe: Recipes,
    overrides: Overrides = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Whose records are guessed about; may be repeated.  [default: the first client]",
        ),
    ] = None,
    shadows: Annotated[
        int, typer.Option(metavar="N", help="Shadow federations; 64 are good.", min=4)
    ] = 64,
    records: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Records of a client, at most, that are guessed about; others always take part.",
            min=20,
        ),
    ] = 2000,
    together: Annotated[
        int, typer.Option(metavar="N", help="Shadows that run together as one federation.", min=1)
    ] = 16,
    delta: Annotated[
        float, typer.Option(metavar="NUMBER", help="Delta of the lower bound of epsilon.")
    ] = 1e-5,
    control_epochs: Annotated[
        int,
        typer.Option(
            metavar="N", help="Epochs of local training, the control that must be caught.", min=1
        ),
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
    """Guess who was in the training data, with shadow federations (LiRA); can be continued.

    Every method of the recipe is attacked through everything that it reveals: models, weights and
    synthetic sets that are sent. See docs/audits.md.
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
            attack.Subject(
                each.label, experiment, epsilon=promised(experiment), virtual=virtual_of(each)
            )
            for each, experiment in zip(recipes, experiments, strict=True)
        ),
    ]
    digests = {
        each.label: digest(decisive(each), experiment.population)
        for each, experiment in zip(recipes, experiments, strict=True)
    } | {"controls": str(asdict(attack.Controls(local_epochs=control_epochs)))}
    folder = out or Path("runs") / f"{recipes[0].run.name}-membership"
    networks = {network for experiment in experiments for network in experiment.networks}
    again = stoppable(lambda: "go on with the same command")
    with again, execution.applied(networks), work_bar(quiet) as watch:
        result = attack.membership(
            subjects, execution, asked, folder,
            guessing=attack.Guessing(delta=delta), digests=digests, notes=notes, watch=watch,
        )  # fmt: skip
    _tell(result, folder, form)


@app.command(short_help="Run the privacy mechanisms many thousand times.")
def mechanism(
    epsilon: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER", help="A budget to audit at; may be repeated.  [default: 1, 4 and 10]"
        ),
    ] = None,
    delta: Annotated[float, typer.Option(metavar="NUMBER", help="Delta of the budgets.")] = 1e-5,
    trials: Annotated[
        int,
        typer.Option(
            metavar="N", help="Trials at a budget; below epsilon = 4 there are more.", min=1000
        ),
    ] = 40_000,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all draws.", min=0)] = 0,
    out: Out = None,
    quiet: Quiet = False,
    form: Listing = Form.table,
) -> None:
    """Run the privacy mechanisms' own code many thousand times, with and without one record.

    If the code is right, the lower bound is just below the ledger's epsilon. A copy with a tenth of
    the noise must be caught.
    """
    from fedstill.audit import mechanism as attack

    asked = attack.Trials(tuple(epsilon or (1.0, 4.0, 10.0)), delta, trials, seed)
    folder = out or Path("runs") / "audit-mechanism"
    with work_bar(quiet) as watch:
        result = attack.mechanism(asked, folder, watch=watch)
    _tell(result, folder, form)


@app.command(short_help="Plant canaries in one run, and find them again.")
def canaries(
    recipe: Recipes,
    overrides: Overrides = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The client among whose records canaries are planted.  [default: the first]",
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--canaries", metavar="N", help="How many.  [default: 1000, or half of the records]"
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(metavar="NUMBER", help="Delta of the lower bound of epsilon.")
    ] = 1e-5,
    only: Only = None,
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    quiet: Quiet = False,
    form: Listing = Form.table,
) -> None:
    """Plant canaries in one run of a recipe, or of a run's recipe, and guess which were there.

    A private run is repeated without noise, which must be caught.
    """
    from fedstill.audit import canaries as attack
    from fedstill.audit.membership import Controls, Subject, controls
    from fedstill.core.errors import RecipeError
    from fedstill.recipe.build import execution_of, experiment_of

    recipes = _recipes(recipe, overrides, data_dir, quick, only)
    for each in recipes:
        if virtual_of(each) is not None:
            raise RecipeError(
                f"{each.label}: data.virtual makes sets before the run, in which no canaries are "
                "planted; use fedstill audit membership, audit a method that distils (feddm, "
                "fedlgd), or take the table away"
            )
    execution = execution_of(recipes[0])
    experiments = [experiment_of(each) for each in recipes]
    population = experiments[0].population
    whose = client or population.clients[0]
    if number is None:
        known = whose in population.clients
        number = min(1000, len(population.party(whose).data) // 2) if known else 1000
    asked = attack.Canaries(whose, number, delta=delta, seed=recipes[0].run.seed)
    private = any(experiment.privacy is not None for experiment in experiments)
    made, notes = ([], []) if private else controls(experiments[0], Controls(), [whose])
    subjects = [
        *made,
        *(
            Subject(each.label, experiment, epsilon=promised(experiment))
            for each, experiment in zip(recipes, experiments, strict=True)
        ),
    ]
    folder = out or Path("runs") / f"{recipes[0].run.name}-canaries"
    networks = {network for experiment in experiments for network in experiment.networks}
    again = stoppable(lambda: "begin again with the same command")
    with again, execution.applied(networks), work_bar(quiet) as watch:
        result = attack.canaries(subjects, execution, asked, folder, notes=notes, watch=watch)
    _tell(result, folder, form)


def virtual_of(recipe: Recipe) -> Virtual | None:
    """With what clients distil their records before the run; None for methods that do it alone."""
    return None if recipe.method.distils else recipe.data.virtual


def promised(experiment: Experiment) -> float | None:
    """The epsilon that an experiment's ledger keeps to; None where it promises nothing."""
    privacy = experiment.privacy
    return privacy.epsilon if privacy is not None and privacy.valid else None


def _recipes(
    path: Path,
    overrides: Sequence[str] | None,
    data_dir: Path | None,
    quick: bool,
    only: Sequence[str] | None,
) -> list[Recipe]:
    """The methods of a recipe, or the one of a run's folder."""
    from fedstill import recipe as config
    from fedstill.runs.recipes import recipe_of

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    if path.is_dir():
        recipes = [recipe_of(path, changes)]
    else:
        labels = list(only or [])
        recipes = config.checked(config.read_recipe(path, changes, quick=quick, only=labels))
        recipes = config.chosen(recipes, labels)
    return recipes


def _print_findings(rows: Sequence[Row], form: Form) -> None:
    """In a terminal a table for each thing audited, so that bounds stand beside what was seen."""
    if form is not Form.table:
        listings.print_rows(rows, form)
        return
    for subject, own in groupby(rows, lambda row: str(row["audited"])):
        listings.console().print(listings.table([_by_view(row) for row in own], subject))


def _by_view(row: Row) -> Row:
    """A row that begins with what was seen, and whose records were looked for."""
    rest = {name: value for name, value in row.items() if name not in ("audited", "seen")}
    if "records of" not in row:
        return {"seen": row["seen"], **rest}
    return {"seen, records of": f"{row['seen']}, {rest.pop('records of')}", **rest}


def _tell(result: Result, folder: Path, form: Form) -> None:
    """Print what was found, draw it, say where it is, and fail where it proves something wrong."""
    from fedstill.report import audits

    told: dict[str, Any] = result.as_dict()
    if form is Form.json:
        listings.print_json(told)
    else:
        _print_findings(audits.rows(told["findings"]), form)
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
            "more shadows, records or canaries, or more epochs of the control",
            err=True,
        )
    if result.missed or result.refuted:
        raise typer.Exit(1)
