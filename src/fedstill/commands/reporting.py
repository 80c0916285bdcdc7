"""Commands that hand results to people: report, view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedstill.commands.options import RunFolders


def report(
    folders: RunFolders,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The HTML file.  [default: report.html in the first DIR]"
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its heading.  [default: the recipe's name]")
    ] = None,
) -> None:
    """Write one HTML file with tables, curves, images and the recipe; it needs no network."""
    from fedstill.core.errors import RunFolderError
    from fedstill.core.files import write_whole
    from fedstill.report.amounts import human_bytes
    from fedstill.report.page.content import content, found_in
    from fedstill.report.page.document import document

    page = document(content(found_in(folders), title=title))
    path = out or folders[0] / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; give another file with --out"
        ) from error
    typer.echo(f"{path} ({human_bytes(len(page.encode()))})")


def view(
    folders: RunFolders,
    port: Annotated[
        int,
        typer.Option(metavar="N", help="Port to listen on; 0 takes a free one.", min=0, max=65535),
    ] = 0,
    limit: Annotated[
        float | None,
        typer.Option(
            "--for", metavar="SECONDS", help="Stop after this time.  [default: with Ctrl-C]"
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its heading.  [default: the recipe's name]")
    ] = None,
) -> None:
    """Show the report live on this machine while runs go on: progress, losses, latest images."""
    from fedstill.core.errors import RunFolderError
    from fedstill.report.page import live

    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}; give one in which runs are or come")
    made = live.server(live.Watched(folders, title), port)
    typer.echo(f"http://{live.LOOPBACK}:{made.server_address[1]}/  (Ctrl-C ends)")
    live.serve(made, limit)
