"""run · resume · methods · show · compare · data · demo; parse and call, no logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.core.errors import FedstillError, RecipeError

app = typer.Typer(
    help="Federated learning by distillation: every method on the same data with one command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Form(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"
    markdown = "markdown"


Listing = Annotated[Form, typer.Option("--format", help="table, json or markdown")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the named data sets' files.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, e.g. run.rounds=5 method.lr=0.1")
]


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, a .toml file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME by default.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Several seeds, e.g. --seeds 0 1 2")] = None,
    data_dir: DataDir = None,
    quiet: Annotated[bool, typer.Option(help="Print nothing but the result.")] = False,
) -> None:
    """Run a recipe: every method in it, for every seed."""
    from fedstill import config, runs

    changes = [*(overrides or []), *_data_dir(data_dir)]
    recipes = config.checked(config.read_recipe(recipe, changes))
    numbers = _seeds(seeds) or [recipes[0].run.seed]
    target = out or Path("runs") / recipes[0].run.name
    _run_all(runs.folders_for(recipes, numbers, target), quiet, runs.begin)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quiet: bool = False,
) -> None:
    """Go on from the last checkpoint; the result equals that of an unbroken run."""
    from fedstill import config, runs

    changes = [*(overrides or []), *_data_dir(data_dir)]
    (recipe,) = config.checked(config.read_recipe(runs.recipe_of(folder), changes))
    _run_all([(recipe, folder)], quiet, lambda _, where, watch: runs.resume(where, changes, watch))


@app.command()
def methods(form: Listing = Form.table) -> None:
    """List the methods."""
    from fedstill.methods import METHODS

    rows = []
    for name, kind in METHODS.items():
        module = (sys.modules[kind.__module__].__doc__ or "").strip().split("\n")
        rows.append(
            {
                "method": name,
                "what it does": module[0].partition(": ")[2],
                "paper": " ".join(" ".join(module[1:]).split()),
            }
        )
    _print_rows(rows, form)


@app.command()
def show(
    method: Annotated[str, typer.Argument(help="A name that `fedstill methods` lists.")],
    overrides: Overrides = None,
    shape: Annotated[str, typer.Option(help="Image shape.")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    held: Annotated[int | None, typer.Option(help="Classes the client holds; all but one.")] = None,
    model: Annotated[str, typer.Option(help="Network.")] = "convnet",
    form: Listing = Form.table,
) -> None:
    """Show a method: its plan, what is remembered, what travels, floats a round."""
    from fedstill import config
    from fedstill import show as shows

    prefixed = [
        text if text.startswith("method.") else f"method.{text}" for text in overrides or []
    ]
    tables = {
        "method": {"name": method},
        "models": {"name": model},
        "data": {"name": "digits5"},
    }
    (recipe,) = config.checked(config.overridden(tables, prefixed))
    network = config.network(recipe.models, shows.shape_of(shape), classes)
    stage = shows.Stage(network, max(1, classes - 1) if held is None else held)
    found = shows.shown(recipe.method, method, stage)
    if form is Form.json:
        _print_json(found)
    else:
        _print_method(found)


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of them.")],
    form: Listing = Form.table,
    picture: Annotated[Path | None, typer.Option(help="Also draw the comparison.")] = None,
) -> None:
    """Compare runs: one table, mean and spread over seeds."""
    from fedstill.report.tables import comparison

    found = comparison(_run_folders(folders))
    if form is Form.json:
        print(found.as_json())
    elif form is Form.markdown:
        print(found.as_markdown())
    else:
        _console().print(found.as_rich())
    if picture is not None:
        from fedstill.report import plots

        plots.comparison_bars(found, picture)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
def data(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe whose partition is shown; all sets if none.")
    ] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the partition to this file.")] = None,
    form: Listing = Form.table,
) -> None:
    """List the data sets, or preview how a recipe splits its data."""
    from fedstill.data import DATASETS, counts_table

    if recipe is None:
        _print_rows([_entry(name, entry, data_dir) for name, entry in DATASETS.items()], form)
        return
    from fedstill import config

    changes = [*(overrides or []), *_data_dir(data_dir)]
    first = config.checked(config.read_recipe(recipe, changes))[0]
    collection = config.load_data(first)
    _print_rows(counts_table(collection), form)
    for note in collection.notes:
        typer.echo(f"note: {note}", err=True)
    if picture is not None:
        from fedstill.report import grids

        counts = [site.counts(collection.classes).tolist() for site in collection.sites]
        names = [site.name for site in collection.sites]
        grids.partition(counts, names, picture, classes=collection.class_names)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    quiet: bool = False,
) -> None:
    """Four methods on five embedded domains of digits: a table and pictures in two minutes."""
    from fedstill import config, runs
    from fedstill.logbook.reader import read_run
    from fedstill.report import plots
    from fedstill.report.tables import comparison

    place = files("fedstill") / "recipes" / "demo.toml"
    recipes = config.checked(config.read_recipe(Path(str(place))))
    target = runs.fresh_folder(out)
    pairs = runs.folders_for(recipes, [recipes[0].run.seed], target)
    _run_all(pairs, quiet, runs.begin, named=False)
    found = comparison([folder for _, folder in pairs])
    _console().print(found.as_rich())
    drawn = runs.pictures_of(target)
    try:
        every = [read_run(folder) for _, folder in pairs]
        drawn += [
            plots.comparison_bars(found, target / "comparison.png"),
            plots.accuracy_by_round(every, target / "accuracy-by-round.png"),
            plots.accuracy_by_bytes(every, target / "accuracy-by-bytes.png"),
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
        title = f"{recipe.label} · {recipe.data.name} · seed {recipe.run.seed}"
        with _progress(title, recipe.run.rounds, quiet) as watch:
            play(recipe, folder, watch)
        if named:
            typer.echo(f"{title}: {_result(folder)} → {folder}")


def _result(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    score = summary.get("average_accuracy", summary.get("averaged_global_accuracy"))
    return "not evaluated" if score is None else f"accuracy {100 * score:.2f} %"


@contextmanager
def _progress(title: str, rounds: int, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with round, accuracy, traffic and time left; silent when not on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from fedstill.report.amounts import human_bytes

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TextColumn("{task.fields[traffic]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(title, total=rounds, score="", traffic="")

        def watch(progress: Any) -> None:
            score = "" if progress.accuracy is None else f"accuracy {100 * progress.accuracy:.1f} %"
            sent = f"{human_bytes(progress.bytes)} sent"
            bar.update(task, completed=progress.round, score=score, traffic=sent)

        yield watch


def _entry(name: str, entry: Any, data_dir: Path | None) -> dict[str, Any]:
    missing = [f for f in entry.files if data_dir is None or not (data_dir / f).exists()]
    state = "ready" if not missing else f"needs {', '.join(missing)} in --data-dir"
    if entry.kind == "public":
        state = "through torchvision"
    elif entry.kind == "own":
        state = "yours"
    return {
        "data": name,
        "kind": entry.kind,
        "shape": "x".join(map(str, entry.shape)) if entry.shape else "",
        "train / test": " / ".join(map(str, entry.counts)) if entry.counts else "",
        "what": entry.description,
        "state": state,
    }


def _data_dir(data_dir: Path | None) -> list[str]:
    return [] if data_dir is None else [f"data.data_dir={json.dumps(str(data_dir))}"]


def _seeds(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RecipeError(f"--seeds {text}: write whole numbers, e.g. --seeds 0 1 2") from None
    if len(set(found)) < len(found) or min(found) < 0:
        raise RecipeError(f"--seeds {text}: each seed once, none below 0")
    return found


def _run_folders(paths: Sequence[Path]) -> list[Path]:
    """Each folder that holds a run, in or below the given ones."""
    found: list[Path] = []
    for path in paths:
        below = sorted(p.parent for p in path.rglob("recipe.toml")) if path.is_dir() else []
        found += below or [path]
    return found


def _print_rows(rows: Sequence[dict[str, Any]], form: Form) -> None:
    if form is Form.json:
        _print_json(rows)
    elif form is Form.markdown:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    else:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name, value in rows[0].items():
            table.add_column(name, justify="right" if isinstance(value, int) else "left")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        _console().print(table)


def _print_method(found: dict[str, Any]) -> None:
    example = found["example"]
    typer.echo(found["paper"] + "\n")
    shape = "x".join(map(str, example["model"]["shape"]))
    typer.echo(
        f"counted for {example['model']['name']} on {shape}, {example['classes']} classes, "
        f"a client that holds {example['held']} ({example['model_floats']:,} model floats)\n"
    )
    steps = [
        {
            "part": step["part"],
            "at": step["at"],
            "step": step["name"],
            "reads": step["reads"] or "",
            "sends": _sent(step["sends"]),
            "what": step["purpose"],
        }
        for step in found["steps"]
    ]
    _print_rows(steps, Form.table)
    for place, memory in found["memories"].items():
        kept = (
            ", ".join(f"{k} ({v['floats']:,})" for k, v in memory["fields"].items())
            if memory
            else "nothing"
        )
        typer.echo(f"{place} remembers: {kept}")
    ways = ", ".join(f"{way} {count:,}" for way, count in found["floats_per_round"].items())
    typer.echo(f"floats a round, of one speaker: {ways}\n")
    _print_rows(
        [{"hyper-parameter": k, "default": str(v)} for k, v in found["hyper_parameters"].items()],
        Form.table,
    )
    for name, values in found["presets"].items():
        typer.echo(f"preset {name}: " + ", ".join(f"{k} = {v}" for k, v in values.items()))


def _sent(message: dict[str, Any] | None) -> str:
    if message is None:
        return ""
    fields = ", ".join(f"{name} {field['floats']:,}" for name, field in message["fields"].items())
    return f"{message['name']}: {fields}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def _console() -> Any:
    from rich.console import Console

    return Console()


def joined_seeds(arguments: Sequence[str]) -> list[str]:
    """`--seeds 0 1 2` as one argument, so that it may stand before or after others."""
    made: list[str] = []
    for argument in arguments:
        listing = len(made) >= 2 and made[-2] == "--seeds"
        if listing and argument.isdigit():
            made[-1] += f",{argument}"
        else:
            made.append(argument)
    return made


def main() -> None:
    """The command line; a refusal is one clear message and exit code 2."""
    try:
        app(args=joined_seeds(sys.argv[1:]), prog_name="fedstill")
    except FedstillError as error:
        typer.echo(f"fedstill: {error}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        typer.echo("fedstill: stopped; go on with `fedstill resume DIR`", err=True)
        raise SystemExit(130) from None
