"""Options and arguments that several commands share, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstill.commands.listings import Form

if TYPE_CHECKING:
    from fedstill.logbook.reader import Run


@dataclass
class Speech:
    """How much a command says, for the whole of it."""

    verbose: bool = False
    quiet: bool = False


SPEECH = Speech()


def check_picture(path: Path | None) -> Path | None:
    """Refuse a picture that could not be drawn, before any work is done for it."""
    if path is not None:
        from fedstill.report.canvas import check_format

        check_format(path)
    return path


Listing = Annotated[Form, typer.Option("--format", help="How the listing is printed.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Use the recipe's small variant, from its table [quick]."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder with the files of named data sets, e.g. mnist.npz."),
]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="Run folders, or folders of them.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Changes of the recipe, e.g. run.rounds=5 method.lr=0.1"
    ),
]


@contextmanager
def drawing() -> Iterator[None]:
    """Turn a missing library into a message that says what to install."""
    try:
        yield
    except ImportError as error:
        from fedstill.core.errors import FedstillError

        raise FedstillError(str(error)) from error


def data_dir_change(data_dir: Path | None) -> list[str]:
    """The option --data-dir as a change to a recipe."""
    return [] if data_dir is None else [f"data.data_dir={json.dumps(str(data_dir))}"]


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Each folder that holds a run, in or below the given ones, grids in their own order."""
    from fedstill.logbook.reader import runs_below

    return [folder for path in paths for folder in runs_below(path) or [path]]


def finished_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in or below folders that have finished, and a note of those that have not."""
    from fedstill.logbook.reader import read_run

    folders = run_folders(paths)
    unfinished = [f for f in folders if f.is_dir() and not (f / "summary.json").exists()]
    if len(unfinished) == len(folders) or not unfinished:
        return [read_run(folder) for folder in folders], []
    some = ", ".join(map(str, unfinished[:3])) + (", …" if unfinished[3:] else "")
    note = f"{len(unfinished)} of {len(folders)} runs have not finished and are left out: {some}"
    return [read_run(folder) for folder in folders if folder not in unfinished], [note]
