"""Commands that look at methods and at finished runs: methods, show, compare, matrix, curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form, TableForm
from fedstill.commands.options import Listing, RunFolders, check_picture, drawing, finished_runs


class By(StrEnum):
    """What accuracy is drawn over."""

    round = "round"
    bytes = "bytes"
    floats = "floats"
    time = "time"


def say_notes(notes: Sequence[str]) -> None:
    """What a reader must know, beside the listing."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def methods(form: Listing = Form.table) -> None:
    """List the methods."""
    listings.print_rows(listings.method_rows(form), form)


def show(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A name from fedstill methods, or mine.py:Name.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Hyper-parameters, e.g. per_class=20; of a KEY alone, only that option is shown.",
        ),
    ] = None,
    shape: Annotated[
        str, typer.Option(metavar="CxHxW", help="Channels, height and width.")
    ] = "3x32x32",
    classes: Annotated[int, typer.Option(metavar="N", help="Classes of the data.", min=1)] = 10,
    held: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many of them a client holds.  [default: all but one]"),
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Network.")] = "convnet",
    public: Annotated[
        int, typer.Option(metavar="N", help="Public examples, for methods that need them.", min=1)
    ] = 5000,
    form: Listing = Form.table,
) -> None:
    """Show a method: its steps, states, messages and floats per round."""
    from fedstill import recipe as config
    from fedstill.commands import show as shows
    from fedstill.core.errors import RecipeError

    if method.endswith(".toml"):
        raise RecipeError(
            f"{method} is a recipe, and show is for a method, e.g. fedstill show feddm; how a "
            f"recipe splits its data: fedstill data {method}"
        )
    words = [text.removeprefix("method.") for text in overrides or []]
    own = [f"method.{word}" for word in words if "=" in word]
    asked = [word for word in words if "=" not in word]
    data = {"name": "digits5", "public": {"name": "digits5"}}  # neither is loaded
    tables = {"method": {"name": method}, "models": {"name": model}, "data": data}
    (recipe,) = config.checked(config.overridden(tables, own))
    if asked:
        listings.print_options(shows.options(recipe.method, asked), form)
        return
    network = recipe.models.common.model(shows.shape_of(shape), classes)
    stage = shows.Stage(
        network,
        max(1, classes - 1) if held is None else held,
        public=public if recipe.method.needs_public else 0,
    )
    described = shows.shown(recipe.method, method, stage)
    if form is Form.json:
        listings.print_json(described)
    else:
        listings.print_method(described, form)


def compare(
    folders: RunFolders,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Scores by another metric, e.g. loss or auroc.")
    ] = "accuracy",
    by_client: Annotated[
        bool, typer.Option("--by-client", help="Also the scores of each client's own model.")
    ] = False,
    interval: Annotated[
        bool,
        typer.Option(
            "--interval",
            help="± half of the 95 % confidence interval, instead of the standard deviation.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Test the others against this row, paired by seed."),
    ] = None,
    form: Annotated[
        TableForm, typer.Option("--format", help="How the listing is printed.")
    ] = TableForm.table,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_picture, help="Also draw the comparison to this file."
        ),
    ] = None,
) -> None:
    """Compare runs: one table, mean and spread over seeds."""
    from fedstill.report.tables import compare as compared

    runs, unfinished = finished_runs(folders)
    spread: Literal["deviation", "interval"] = "interval" if interval else "deviation"
    table = compared(runs, metric, spread=spread, against=against)
    table = replace(table, notes=(*table.notes, *unfinished))
    if form is TableForm.csv:
        print(table.as_csv(), end="")
        say_notes(table.notes)
    elif form is TableForm.latex:
        print(table.as_latex(by_client=by_client), end="")
    else:
        listings.print_as(
            Form(form.value),
            table.as_dict,
            partial(table.as_markdown, by_client=by_client),
            partial(table.as_rich, by_client=by_client),
        )
    if picture is not None:
        from fedstill.report import plots

        with drawing():
            plots.comparison_bars(table, picture)
        typer.echo(f"drawn: {picture}", err=True)


def matrix(
    folders: RunFolders,
    form: Listing = Form.table,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_picture, help="Draw it as a heat map to this file."
        ),
    ] = None,
) -> None:
    """Show the accuracy of each client's model on each client's test set."""
    from rich.console import Group

    from fedstill.report import matrices
    from fedstill.report.tables import compare as compared

    runs, unfinished = finished_runs(folders)
    crossed = matrices.crossed(compared(runs))
    say_notes(unfinished)
    listings.print_as(
        form,
        lambda: [each.as_dict() for each in crossed],
        lambda: "\n".join(each.as_markdown() for each in crossed),
        lambda: Group(*(each.as_rich() for each in crossed)),
    )
    if picture is not None:
        with drawing():
            drawn = matrices.draw(crossed, picture)
        for path in drawn:
            typer.echo(f"drawn: {path}", err=True)


def curves(
    folders: RunFolders,
    form: Listing = Form.table,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=check_picture,
            help="Draw the curves to this file, e.g. curves.pdf: accuracy by floats sent, or what "
            "--by or --of names.",
        ),
    ] = None,
    by: Annotated[
        By | None, typer.Option(help="Draw accuracy by rounds, bytes, floats or time.")
    ] = None,
    columns: Annotated[
        int | None,
        typer.Option(
            metavar="1|2",
            min=1,
            max=2,
            help="Draw for a paper, as wide as one of its two columns or as both.",
        ),
    ] = None,
    of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Show a metric, or a number that steps log, such as generator_loss, by round "
            "instead; may be repeated.",
        ),
    ] = None,
) -> None:
    """Show accuracy by round and the traffic so far, counted per sender and per receiver."""
    from fedstill.report.curves import logged_rows, rows

    runs, unfinished = finished_runs(folders)
    say_notes(unfinished)
    names = list(dict.fromkeys(of or ()))
    people = form is not Form.json
    table = logged_rows(runs, names, short=people) if names else rows(runs, percent=people)
    listings.print_rows(table, form, names=2)  # method and round
    if picture is not None:
        from fedstill.report import canvas, plots

        with drawing():
            if names:
                plots.logged_by_round(runs, names, picture)
            elif by is not None or columns is not None:
                wide: plots.Columns | None = None if columns is None else 1 if columns == 1 else 2
                canvas.save(plots.curve_figure(runs, (by or By.round).value, wide), picture)
            else:
                plots.accuracy_by_floats(runs, picture)
        typer.echo(f"drawn: {picture}", err=True)
