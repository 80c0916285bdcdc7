"""The command `ledger`: printed numbers beside ours, and runs entered into it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstill.commands import listings
from fedstill.commands.listings import Form
from fedstill.commands.options import Listing, run_folders

if TYPE_CHECKING:
    from fedstill.report.ledger import Entry, Ledger

HOW = {"evaluate_every", "checkpoint_every", "keep_checkpoints", "pictures", "cache_dir", "seed"}
"""Keys of the table `run` that leave the numbers alone, but for which rounds are scored."""


def ledger(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Run folders, or folders of them, to include."),
    ] = None,
    papers: Annotated[
        Path, typer.Option(metavar="DIR", help="The ledger: papers/*.toml and runs/*.json.")
    ] = Path("docs/ledger"),
    recipes: Annotated[
        Path, typer.Option(metavar="DIR", help="The recipes that printed cells name.")
    ] = Path("recipes"),
    add: Annotated[
        bool, typer.Option("--add", help="Keep the given runs in the ledger, as runs/*.json.")
    ] = False,
    claims_only: Annotated[
        bool,
        typer.Option(
            "--claims-only", help="Use the given runs for claims only, because they are short."
        ),
    ] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ledger as a page of Markdown.")
    ] = None,
    missing: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1000,
            help="Print the commands that would give every cell and claim N seeds.",
        ),
    ] = None,
    form: Listing = Form.table,
) -> None:
    """Compare papers' printed numbers with those of runs: differences, and which claims hold."""
    from rich.console import Group

    from fedstill.report import ledger_page
    from fedstill.report.layout import Fitting
    from fedstill.report.ledger import ledger_of

    entries = [
        replace(entry_of(folder, recipes), claims_only=claims_only)
        for folder in run_folders(folders or [])
    ]
    if add:
        for path in kept(papers, entries):
            typer.echo(f"kept: {path}", err=True)
    whole = ledger_of(papers, entries)
    if missing is not None:
        print_missing(whole, missing, recipes, form)
        return
    if write is not None:
        write.write_text(ledger_page.page(whole), encoding="utf-8")
        typer.echo(f"written: {write}", err=True)
        return
    listings.print_as(
        form,
        whole.as_dict,
        lambda: ledger_page.page(whole),
        lambda: Group(
            *(Fitting(title, layout) for title, layout in ledger_page.layouts(whole)),
            *ledger_page.counted(whole),
        ),
    )


def print_missing(whole: Ledger, seeds: int, recipes: Path, form: Form) -> None:
    """The runs that a ledger lacks: commands for a shell, what each is for as a comment."""
    from fedstill.report.ledger_gaps import gaps

    found = gaps(whole, seeds)
    if form is Form.json:
        listings.print_json([gap.as_dict(recipes) for gap in found])
        return
    for gap in found:
        typer.echo(f"# {gap.purpose()}\n{gap.command(recipes)}")
    if not found:
        typer.echo(f"# nothing is missing: every cell and claim has {seeds} seeds")


def entry_of(folder: Path, recipes: Path) -> Entry:
    """A run folder as an entry: which recipe it is of, and what was changed of it."""
    from fedstill.core.errors import FedstillError
    from fedstill.logbook.reader import read_run
    from fedstill.report.ledger import Entry

    run = read_run(folder)
    if "name" not in run.recipe["run"]:
        raise FedstillError(
            f"{folder} holds a run that was begun from Python; the ledger is of runs of recipes, "
            "which have the names that its cells give"
        )
    name, label = run.recipe["run"]["name"], run.recipe["method"]["label"]
    for path in sorted(recipes.rglob("*.toml")):
        if (shipped := _tables(path, name, label)) is not None:
            device = run.summary.get("device", "")
            asked = run.recipe.get("engine", {}).get("precision", "")
            precision = "single precision" if device == "cpu" else asked
            return Entry(
                path.relative_to(recipes).with_suffix("").as_posix(),
                label,
                int(run.recipe["run"]["seed"]),
                {key: value for key, value in run.summary.items() if key != "accuracy_matrix"},
                tuple(changes(shipped, run.recipe)),
                ", ".join(part for part in (device, precision) if part),
            )
    raise FedstillError(
        f"{folder} is a run of {name!r} with the method {label!r}, and no recipe below {recipes} "
        "has these names; give --recipes"
    )


def changes(shipped: Mapping[str, Any], played: Mapping[str, Any]) -> Iterator[str]:
    """Values that decide numbers and are not those of the recipe.

    An option that one of the two lacks has the default of another version. Where a recipe lacks a
    whole table, or has tables by a user's own names, what a run has there was added.
    """
    before, after = dict(_flat(shipped)), dict(_flat(played))
    for key in sorted(before.keys() & after.keys()):
        table, _, name = key.partition(".")
        beside = table in ("engine", "about", "reported") or (table == "run" and name in HOW)
        if not beside and name != "data_dir" and before[key] != after[key]:
            yield f"{key}={json.dumps(after[key])}"
    for key in sorted(after.keys() - before.keys()):
        table = key.partition(".")[0]
        added = table in ("data", "models") or table not in shipped
        if added and not key.endswith("data_dir"):
            yield f"{key}={json.dumps(after[key])}"


def kept(papers: Path, entries: list[Entry]) -> list[Path]:
    """Write entries into the files of their recipes; an equal run of before is replaced."""
    from fedstill.report.ledger import RUNS, entries_text, read_entries

    paths = []
    folder = papers / RUNS
    for recipe in dict.fromkeys(entry.recipe for entry in entries):
        new = [entry for entry in entries if entry.recipe == recipe]
        names = {(entry.label, entry.seed, entry.changes) for entry in new}
        old = [
            entry
            for entry in read_entries(papers)
            if entry.recipe == recipe and (entry.label, entry.seed, entry.changes) not in names
        ]
        path = folder / f"{recipe.replace('/', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        every = sorted([*old, *new], key=lambda e: (e.label, e.changes, e.seed))
        path.write_text(entries_text(every), encoding="utf-8")
        paths.append(path)
    return paths


def _tables(path: Path, name: str, label: str) -> dict[str, Any] | None:
    """What a recipe says of one of its methods, with every default; None if it is another one."""
    from fedstill import recipe as config

    tables = config.read_recipe(path)
    if tables.get("run", {}).get("name") != name:
        return None
    found = [each for each in config.checked(tables) if each.label == label]
    return found[0].as_tables() if found else None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
