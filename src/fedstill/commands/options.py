"""Options and arguments that several commands share, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedstill.commands.listings import Form


def check_picture(path: Path | None) -> Path | None:
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
    """Each folder that holds a run, in or below the given ones."""
    from fedstill.logbook.reader import DESCRIPTIONS

    folders: list[Path] = []
    for path in paths:
        files = (file for name in DESCRIPTIONS for file in path.rglob(name))
        below = sorted({file.parent for file in files}) if path.is_dir() else []
        folders += below or [path]
    return folders
