"""run · resume · methods · show · compare · matrix · curves · data · shift · demo · bench."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from fedstill.commands import listings, ranks
from fedstill.commands.listings import Form

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedstill {version('fedstill')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Federated learning by distillation: every method on the same data with one command."""


def _check_picture(path: Path | None) -> Path | None:
    """Refuse a picture that could not be drawn, before any work is done for it."""
    if path is not None:
        from fedstill.report.canvas import check_format

        check_format(path)
    return path


Listing = Annotated[Form, typer.Option("--format", help="How the listing is printed.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar, only the result.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="The recipe's small variant, its table [quick].")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the files of named data sets, e.g. mnist.npz.")
]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders of them.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. run.rounds=5 method.lr=0.1"),
]


@app.command()
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

    changes = [*(overrides or []), *_data_dir(data_dir)]
    labels = only or []
    recipes = config.checked(config.read_recipe(recipe, changes, quick=quick, only=labels))
    recipes = config.chosen(recipes, labels)
    numbers = [recipes[0].run.seed] if seeds is None else _seeds(seeds)
    pairs = runs.folders_for(recipes, numbers, out or Path("runs") / recipes[0].run.name)
    for _, folder in pairs:  # before the first of them starts
        runs.check_free(folder)
    _run_all(pairs, quiet, partial(runs.begin, line=job.obj))


@app.command()
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

    changes = [*(overrides or []), *_data_dir(data_dir)]
    recipe = runs.recipe_of(folder, changes)

    def play(_: Any, where: Path, watch: Any) -> Path:
        return runs.resume(where, changes, watch, line=job.obj)

    _run_all([(recipe, folder)], quiet, play)


@app.command()
def methods(form: Listing = Form.table) -> None:
    """List the methods."""
    listings.print_rows(listings.method_rows(form), form)


@app.command()
def show(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A name from fedstill methods.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Hyper-parameters, e.g. per_class=20"),
    ] = None,
    shape: Annotated[str, typer.Option(help="Channels, height and width.")] = "3x32x32",
    classes: Annotated[int, typer.Option(help="Classes of the data.", min=1)] = 10,
    held: Annotated[
        int | None, typer.Option(help="How many of them a client holds.  [default: all but one]")
    ] = None,
    model: Annotated[str, typer.Option(help="Network.")] = "convnet",
    public: Annotated[
        int, typer.Option(help="Public examples, for methods that need them.", min=1)
    ] = 5000,
    form: Listing = Form.table,
) -> None:
    """Show a method: plan, what is remembered, what travels, floats a round."""
    from fedstill import recipe as config
    from fedstill.commands import show as shows

    own = [text if text.startswith("method.") else f"method.{text}" for text in overrides or []]
    data = {"name": "digits5", "public": {"name": "digits5"}}  # neither is loaded
    tables = {"method": {"name": method}, "models": {"name": model}, "data": data}
    (recipe,) = config.checked(config.overridden(tables, own))
    network = recipe.models.common.model(shows.shape_of(shape), classes)
    stage = shows.Stage(
        network,
        max(1, classes - 1) if held is None else held,
        public=public if recipe.method.needs_public else 0,
    )
    found = shows.shown(recipe.method, method, stage)
    if form is Form.json:
        listings.print_json(found)
    else:
        listings.print_method(found, form)


@app.command()
def compare(
    folders: RunFolders,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Scores by another metric, e.g. loss or auroc.")
    ] = "accuracy",
    by_client: Annotated[
        bool, typer.Option("--by-client", help="Also the scores of each client's own model.")
    ] = False,
    form: Listing = Form.table,
    picture: Annotated[
        Path | None,
        typer.Option(callback=_check_picture, help="Also draw the comparison to this file."),
    ] = None,
) -> None:
    """Compare runs: one table, mean and spread over seeds."""
    from fedstill.report.tables import comparison

    found = comparison(_run_folders(folders), metric)
    if form is Form.json:
        print(found.as_json())
    elif form is Form.markdown:
        print(found.as_markdown(by_client=by_client))
    else:
        listings.console().print(found.as_rich(by_client=by_client))
    if picture is not None:
        from fedstill.report import plots

        with _drawing():
            plots.comparison_bars(found, picture)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
def matrix(
    folders: RunFolders,
    form: Listing = Form.table,
    picture: Annotated[
        Path | None,
        typer.Option(callback=_check_picture, help="Draw it as a heat map to this file."),
    ] = None,
) -> None:
    """Show the accuracy of each client's model on each client's test set."""
    from fedstill.report import matrices
    from fedstill.report.tables import comparison

    found = matrices.crossed(comparison(_run_folders(folders)))
    if form is Form.json:
        listings.print_json([each.as_dict() for each in found])
    elif form is Form.markdown:
        print("\n".join(each.as_markdown() for each in found))
    else:
        for each in found:
            listings.console().print(each.as_rich())
    if picture is not None:
        with _drawing():
            drawn = matrices.draw(found, picture)
        for path in drawn:
            typer.echo(f"drawn: {path}", err=True)


@app.command()
def curves(
    folders: RunFolders,
    form: Listing = Form.table,
    picture: Annotated[
        Path | None,
        typer.Option(
            callback=_check_picture,
            help="Draw accuracy by floats sent, or what --of names, to this file.",
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
    """Show accuracy by round, with all that was sent so far, once per sender and per receiver."""
    from fedstill.logbook.reader import read_run
    from fedstill.report.curves import logged_rows, rows

    runs = [read_run(folder) for folder in _run_folders(folders)]
    names = list(dict.fromkeys(of or ()))
    people = form is not Form.json
    found = logged_rows(runs, names, short=people) if names else rows(runs, percent=people)
    listings.print_rows(found, form)
    if picture is not None:
        from fedstill.report import plots

        with _drawing():
            if names:
                plots.logged_by_round(runs, names, picture)
            else:
                plots.accuracy_by_floats(runs, picture)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
def data(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="Preview how this recipe splits its data."),
    ] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    picture: Annotated[
        Path | None, typer.Option(callback=_check_picture, help="Draw the partition to this file.")
    ] = None,
    form: Listing = Form.table,
) -> None:
    """List the data sets; with a recipe, how many examples of each class its clients get."""
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

    changes = [*(overrides or []), *_data_dir(data_dir)]
    first = config.checked(config.read_recipe(recipe, changes, quick=quick))[0]
    collection = build.load_data(first)
    public = build.load_public(first, collection)
    listings.print_rows(counts_table(collection), form)
    for note in (*collection.notes, *public_notes(public, collection)):
        typer.echo(f"note: {note}", err=True)
    if picture is not None:
        from fedstill.report import grids

        counts = [site.counts(collection.classes).tolist() for site in collection.sites]
        names = [site.name for site in collection.sites]
        with _drawing():
            grids.partition(counts, names, picture, classes=collection.class_names)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
def shift(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="One with a data.virtual table.")
    ],
    overrides: Overrides = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    most: Annotated[int, typer.Option(help="Examples of each client.", min=2)] = 100,
    picture: Annotated[
        Path | None, typer.Option(callback=_check_picture, help="Draw a t-SNE map to this file.")
    ] = None,
    form: Listing = Form.table,
) -> None:
    """Measure how far apart clients' data are, before and after distillation."""
    from fedstill import recipe as config
    from fedstill.commands import shift as shifts

    changes = [*(overrides or []), *_data_dir(data_dir)]
    first = config.checked(config.read_recipe(recipe, changes, quick=quick))[0]
    real, distilled = shifts.measured(first, most)
    listings.print_rows(shifts.pairs(real, distilled), form)
    if picture is not None:
        with _drawing():
            shifts.draw_map(real, distilled, first.run.seed, picture)
        typer.echo(f"drawn: {picture}", err=True)


@app.command()
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
    found = comparison([folder for _, folder in pairs])
    listings.console().print(found.as_rich())
    drawn = pictures.pictures_of(target)
    try:
        every = [read_run(folder) for _, folder in pairs]
        drawn += [
            plots.comparison_bars(found, target / "comparison.png"),
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


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="matching, local-step or small-step; all by default."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    repeat: Annotated[int, typer.Option(help="Repetitions that count.", min=1)] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the raw numbers.")] = Path("runs/bench"),
    small: Annotated[
        bool | None,
        typer.Option("--small/--full", help="Sizes.  [default: full on CUDA, small on a CPU]"),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Also with engine.compile, which takes minutes.")
    ] = False,
    form: Listing = Form.table,
) -> None:
    """Measure how fast fedstill is on this machine: time of a step, spread, memory."""
    from fedstill.commands import bench as benches
    from fedstill.engines.execution import Execution
    from fedstill.runs import recipes as runs

    wanted = benches.chosen(names or [])
    where = Execution(device=device).torch_device
    reduced = where.type == "cpu" if small is None else small
    target = runs.fresh_folder(out)
    found = []
    for name in wanted:
        sizes = benches.BENCHMARKS[name].sizes(reduced)
        found.append(benches.measured(name, where, sizes=sizes, repeat=repeat, compile=compile))
        benches.write(found[-1], target)
    if form is Form.json:
        listings.print_json(found)
        return
    listings.print_rows(benches.rows(found), form)
    for each in found:
        typer.echo(benches.explained(each))
    typer.echo(f"ms: for one client and one step, the median of {repeat}; raw numbers → {target}")


Player = Callable[..., Path]


def _run_all(
    pairs: Sequence[tuple[Any, Path]], quiet: bool, play: Player, *, named: bool = True
) -> None:
    """Play every run with a live bar on a terminal; say where each went."""
    for recipe, folder in pairs:
        try:
            with _progress(f"{recipe.label} seed {recipe.run.seed}", quiet) as watch:
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
    from fedstill.report.groups import scores_of

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    names = ("average_accuracy", "averaged_global_accuracy", "averaged_local_accuracy")
    said = []
    for name in dict.fromkeys(("accuracy", metric)):
        table = scores_of(summary, name)
        scores = [table[score] for score in names if table.get(score) is not None]
        percent = name == "accuracy"
        said += [f"{name} {100 * x:.2f} %" if percent else f"{name} {x:.4f}" for x in scores[:1]]
    return ", ".join(said) or "not evaluated"


@contextmanager
def _progress(title: str, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar with round, the first metric, traffic and time left; silent when not on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    screen = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=max(6, min(30, screen.width - 66))),
        TextColumn("{task.fields[said]}"),
        console=screen,
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None, said="")
        spent: list[float] = []

        def watch(progress: Any) -> None:
            if progress.seconds:
                spent.append(progress.seconds)
            said = _said(progress, spent)
            bar.update(task, total=progress.rounds, completed=progress.round, said=said)

        yield watch


def _said(progress: Any, spent: Sequence[float]) -> str:
    """`round 3/10 · accuracy 52.1 % · 1.25 MB sent · 0:12 left`"""
    from fedstill.report.amounts import human_bytes

    parts = [f"round {progress.round}/{progress.rounds}"]
    if progress.score is not None:
        percent = progress.metric == "accuracy"
        score = f"{100 * progress.score:.1f} %" if percent else f"{progress.score:.4f}"
        parts.append(f"{progress.metric} {score}")
    parts.append(f"{human_bytes(progress.bytes)} sent")
    if spent:
        left = round(sum(spent) / len(spent) * (progress.rounds - progress.round))
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        parts.append(f"{clock} left")
    return " · ".join(parts)


@contextmanager
def _drawing() -> Iterator[None]:
    """Turn a missing library into a message that says what to install."""
    try:
        yield
    except ImportError as error:
        from fedstill.core.errors import FedstillError

        raise FedstillError(str(error)) from error


def _data_dir(data_dir: Path | None) -> list[str]:
    return [] if data_dir is None else [f"data.data_dir={json.dumps(str(data_dir))}"]


def _seeds(text: str) -> list[int]:
    from fedstill.core.errors import RecipeError

    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or len({*found}) < len(found) or min(found) < 0:
        raise RecipeError(
            f"--seeds {text}: write whole numbers from 0 on, each once, e.g. --seeds 0 1 2"
        )
    return found


def _run_folders(paths: Sequence[Path]) -> list[Path]:
    """Each folder that holds a run, in or below the given ones."""
    from fedstill.logbook.reader import DESCRIPTIONS

    found: list[Path] = []
    for path in paths:
        files = (file for name in DESCRIPTIONS for file in path.rglob(name))
        below = sorted({file.parent for file in files}) if path.is_dir() else []
        found += below or [path]
    return found


def joined_seeds(arguments: Sequence[str]) -> list[str]:
    """`--seeds 0 1 2` as one argument, so that it may stand before or after others."""
    made: list[str] = []
    listing = False
    for argument in arguments:
        if listing and argument.isdigit():
            made[-1] += f",{argument}"
            continue
        listing = argument.startswith("--seeds=") or made[-1:] == ["--seeds"]
        made.append(argument)
    return made


def check_options(arguments: Sequence[str]) -> None:
    """Say how a value of a recipe is changed to whoever writes it as an option."""
    commands = {command.name: command for command in get_command(app).commands.values()}  # type: ignore[attr-defined]
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name not in commands or "overrides" not in {p.name for p in commands[name].params}:
        return
    known = {word for p in commands[name].params for word in (*p.opts, *p.secondary_opts)}
    for place, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if not option.startswith("--") or get_close_matches(option, [*known, "--help"], cutoff=0.8):
            continue  # an option, or one that is only misspelt
        from fedstill.core.errors import RecipeError
        from fedstill.recipe.read import table_of

        key = option.removeprefix("--").replace("-", "_")
        if table := table_of(key):
            follows = arguments[place + 1 : place + 2]
            value = value or next(iter(follows), "…")
            raise RecipeError(
                f"{name} has no option {option}; a value of a recipe is changed without dashes: "
                f"{table}.{key}={value}"
            )


def _replace_what_cannot_be_shown() -> None:
    """Let a terminal that lacks a character show a question mark instead of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """The command line; a refusal is one clear message and exit code 2.

    Under torchrun it is rank 0's: the others play for it.
    """
    _replace_what_cannot_be_shown()
    try:
        arguments = joined_seeds(sys.argv[1:])
        check_options(arguments)
        with ranks.joined() as line:
            app(args=arguments, prog_name="fedstill", obj=line)
    except Exception as error:
        from fedstill.core.errors import FedstillError  # imports torch, so not before it is needed

        if not isinstance(error, FedstillError):
            raise
        typer.echo(listings.refusal(error), err=True)
        raise SystemExit(2) from None
