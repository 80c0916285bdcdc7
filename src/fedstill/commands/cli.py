"""The command line: which commands there are, and what every one of them shares."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, EIO, ENOSPC, EPIPE
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any

import typer
from typer.main import get_command

import fedstill
from fedstill.commands import (
    auditing,
    budget,
    data,
    demonstration,
    deploying,
    ledger,
    listings,
    looking,
    measuring,
    ranks,
    reporting,
    running,
    starting,
)
from fedstill.commands.options import SPEECH

UNWRITTEN = (ENOSPC, EDQUOT, EFBIG, EIO, EPIPE)  # what is printed did not arrive
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which one meets them; a line that is not cut in eighty columns.
COMMANDS: dict[Callable[..., None], str] = {
    demonstration.demo: "Six methods on embedded digits, tables and a report; half a minute.",
    starting.init: "Write a recipe to start from.",
    running.run: "Run a recipe: its methods, for every seed and swept value.",
    running.resume: "Continue a run from its last checkpoint.",
    running.export: "Write a model of a run as files that plain PyTorch loads.",
    looking.compare: "Compare runs: one table, mean and spread over seeds.",
    looking.curves: "Show accuracy by round, and the traffic so far.",
    looking.matrix: "Show each client's model on each client's test set.",
    reporting.report: "Write one HTML file: tables, curves, images, recipe.",
    reporting.view: "Show the report live while runs go on, on this machine only.",
    looking.methods: "List the methods.",
    looking.show: "Show a method: its steps, states and messages.",
    data.data: "List the data sets, or show how a recipe splits its data.",
    data.shift: "Measure how different clients' data are.",
    budget.privacy: "Show what a run spent of its privacy budget, or a recipe would.",
    measuring.bench: "Measure how fast fedstill is on this machine.",
    ledger.ledger: "Compare papers' printed numbers with those of runs.",
}
for command, line in COMMANDS.items():
    app.command(short_help=line)(command)
app.add_typer(auditing.app, name="audit", short_help="Attack a run to test its privacy guarantee.")
for name, group in deploying.GROUPS.items():
    app.add_typer(group, name=name)


def _print_version(asked: bool) -> None:
    if asked:
        from fedstill.core import source  # which imports torch

        typer.echo(source.written(source.OURS, fedstill.__version__, source.own_digest()))
        raise typer.Exit


@app.callback(
    epilog="Start with fedstill demo. Then fedstill init writes a recipe, fedstill run recipe.toml "
    "runs it, and fedstill report runs/NAME shows the results."
)
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and a digest of the code.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Also print the notes of runs, and the traceback of an error."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print neither progress nor results.")
    ] = False,
) -> None:
    """Federated learning by distillation: every method on the same data with one command."""
    SPEECH.verbose, SPEECH.quiet = verbose, quiet


@cache
def _built() -> Any:
    """All commands with their options, read from the functions' hints once."""
    built = get_command(app)
    for parameter in _parameters(built):
        if parameter.param_type_name == "argument":
            # Typer puts a type of Python behind an argument's name, such as <list[Path]>.
            parameter.display_type_rich = lambda ctx: None
    return built


def _parameters(command: Any) -> Iterator[Any]:
    """The arguments and options of a command and of all below it."""
    yield from command.params
    for below in getattr(command, "commands", {}).values():
        yield from _parameters(below)


def joined_seeds(arguments: Sequence[str]) -> list[str]:
    """`--seeds 0 1 2` as one argument, so that it may stand before or after others."""
    joined: list[str] = []
    listing = False
    for argument in arguments:
        if listing and argument.isdigit():
            joined[-1] += f",{argument}"
            continue
        listing = argument.startswith("--seeds=") or joined[-1:] == ["--seeds"]
        joined.append(argument)
    return joined


def check_options(arguments: Sequence[str]) -> None:
    """Say how a value of a recipe is changed to whoever writes it as an option."""
    commands = {command.name: command for command in _built().commands.values()}
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
        table = table_of(key)
        if table and (name != "show" or table == "method"):  # a method is shown without a recipe
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


def _drop_what_is_left() -> None:
    """Nothing more goes to standard output, which may be what cannot be written."""
    if isinstance(sys.stdout, TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def _own_warnings_in_a_sentence() -> Iterator[None]:
    """Meanwhile, what fedstill itself warns of is told without a place in its code."""
    former, ours = warnings.formatwarning, str(Path(__file__).parents[1])

    def told(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if category is UserWarning and filename.startswith(ours):
            return f"fedstill: warning: {message}\n"
        return former(message, category, filename, lineno, line)

    warnings.formatwarning = told
    try:
        yield
    finally:
        warnings.formatwarning = former


def main() -> None:
    """The command line; a refusal, and a file that cannot be used, is a message and exit code 2.

    Under torchrun it is rank 0's: the others play for it.
    """
    _replace_what_cannot_be_shown()
    SPEECH.verbose, SPEECH.quiet = False, False
    try:
        arguments = joined_seeds(sys.argv[1:])
        check_options(arguments)
        with ranks.joined() as line, _own_warnings_in_a_sentence():
            try:
                _built()(args=arguments, prog_name="fedstill", obj=line)
            finally:
                print(end="", flush=True)  # else Python does so at its end, and fails in its words
    except Exception as error:
        # They import torch, so not before they are needed.
        from fedstill.core.errors import FedstillError, StepError

        if isinstance(error, OSError) and error.filename is None and error.errno in UNWRITTEN:
            _drop_what_is_left()
            if error.errno == EPIPE:  # whoever read has seen enough
                raise SystemExit(1) from None
            error.filename = "cannot write the output"
        of_a_file = isinstance(error, OSError) and error.filename is not None
        if not isinstance(error, FedstillError) and not of_a_file:
            raise
        if SPEECH.verbose:
            typer.echo("".join(format_exception(error)), err=True)
        typer.echo(listings.refusal(error), err=True)
        told = SPEECH.verbose or isinstance(error.__cause__, FedstillError)
        if isinstance(error, StepError | OSError) and not told:
            typer.echo("for the traceback, run the same command with fedstill --verbose", err=True)
        raise SystemExit(2) from None
