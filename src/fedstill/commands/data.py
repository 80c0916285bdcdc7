"""Commands that look at data: data, shift."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form
from fedstill.commands.options import (
    DataDir,
    Listing,
    Overrides,
    Quick,
    check_picture,
    data_dir_change,
    drawing,
)


def data(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE", help="Preview how this recipe splits its data; or a data set's name."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. data.partition.alpha=0.1"),
    ] = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            callback=check_picture, metavar="FILE", help="Draw the partition to this file."
        ),
    ] = None,
    form: Listing = Form.table,
) -> None:
    """List the data sets; with a recipe or a set, how many examples of each class clients get."""
    if recipe is None:
        rows = listings.data_rows(data_dir)
        if form is Form.table:
            listings.print_data(rows, data_dir)
        else:
            listings.print_rows(rows, form)
        return
    from fedstill import recipe as config
    from fedstill.data import counts_table
    from fedstill.federation.population import public_notes
    from fedstill.recipe import build

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    if _is_a_set(recipe):
        alone = {"data": {"name": str(recipe)}, "method": {"name": "local"}}
        first = config.checked(config.overridden(alone, changes))[0]
    else:
        first = config.checked(config.read_recipe(recipe, changes, quick=quick))[0]
    collection = build.load_data(first)
    public = build.load_public(first, collection.shape)
    listings.print_rows(counts_table(collection), form)
    for note in (*collection.notes, *public_notes(public, collection)):
        typer.echo(f"note: {note}", err=True)
    if picture is not None:
        from fedstill.report import grids

        counts = [site.counts(collection.classes).tolist() for site in collection.sites]
        names = [site.name for site in collection.sites]
        with drawing():
            grids.partition(counts, names, picture, classes=collection.class_names)
        typer.echo(f"drawn: {picture}", err=True)


def _is_a_set(recipe: Path) -> bool:
    """Whether no file but a data set has this name; refuse what is neither."""
    from fedstill.core.errors import DataError, RecipeError
    from fedstill.data import entry_named

    if recipe.exists():
        return False
    try:
        entry_named(str(recipe))
    except DataError as error:
        if recipe.suffix == ".toml":
            return False
        neither = f"no recipe at {recipe}; give the path of a .toml file, or a data set: {error}"
        raise RecipeError(neither) from error
    return True


def shift(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE", help="With a table data.virtual, also for the distilled sets."
        ),
    ],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    most: Annotated[
        int, typer.Option(metavar="N", help="Examples of each client to compare.", min=2)
    ] = 100,
    picture: Annotated[
        Path | None,
        typer.Option(callback=check_picture, metavar="FILE", help="Draw a t-SNE map to this file."),
    ] = None,
    histogram: Annotated[
        Path | None,
        typer.Option(
            callback=check_picture,
            metavar="FILE",
            help="Draw histograms of brightness to this file.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Use the features of this run's final server network."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write shift.json here, which fedstill report shows."),
    ] = None,
    form: Listing = Form.table,
) -> None:
    """Measure how different clients' data are, before and after distillation."""
    from fedstill import recipe as config
    from fedstill.commands import shift as shifts

    changes = [*(overrides or []), *data_dir_change(data_dir)]
    first = config.checked(config.read_recipe(recipe, changes, quick=quick))[0]
    real, distilled = shifts.measured(first, most, run)
    rows = shifts.pairs(real, distilled)
    listings.print_rows(rows if form is Form.json else shifts.for_people(rows), form)
    if picture is not None:
        with drawing():
            shifts.draw_map(real, distilled, first.run.seed, picture)
        typer.echo(f"drawn: {picture}", err=True)
    if histogram is not None:
        with drawing():
            shifts.draw_levels(real, distilled, histogram)
        typer.echo(f"drawn: {histogram}", err=True)
    if into is not None:
        typer.echo(f"written: {shifts.write(real, distilled, first.run.seed, into)}", err=True)
