"""A run's folder: whether it is free, who may write to it, which version wrote it."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedstill.core.errors import RunFolderError
from fedstill.core.files import is_draft, write_whole
from fedstill.data import Collection, counts_table
from fedstill.federation.topology import Graph
from fedstill.logbook.environment import environment
from fedstill.logbook.reader import DESCRIPTIONS
from fedstill.logbook.writer import write_json

try:
    import fcntl
except ImportError:  # not on this system: two processes in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

FOLDER_VERSION = 1
LOCK = ".lock"
BEGINNING = {"environment.json", "partition.csv", "graph.csv", LOCK}  # before the description
NO_LOCKS_OF_FOLDERS = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.EACCES)  # as NFS says it


class Occupied(RunFolderError):
    """A folder in which another process is writing."""


def description_in(folder: Path) -> Path | None:
    """The file that says what is run in a folder, or None where nothing is."""
    return next((folder / name for name in DESCRIPTIONS if (folder / name).exists()), None)


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything but the leftovers of a run that never began."""
    if (folder / "recipe.toml").exists():
        raise RunFolderError(
            f"{folder} already holds a run; continue it with `fedstill resume {folder}`, "
            "or give another folder with --out"
        )
    if description_in(folder) is not None:
        raise RunFolderError(
            f"{folder} already holds a run; continue it with `fedstill.run(…, resume=True)`, "
            "or give another folder"
        )
    with writing(folder):
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(name for name in present - BEGINNING if not is_draft(name))
    if others:
        raise RunFolderError(
            f"{folder} holds other things ({', '.join(others[:3])}{', …' if others[3:] else ''}); "
            "a run needs a folder of its own, give another one with --out"
        )


def check_version(folder: Path) -> None:
    """Refuse a folder that another version of run folders was written by."""
    path = folder / "environment.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        found, by = facts.get("folder_version"), facts.get("fedstill")
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(
            f"{path} does not say which version of fedstill wrote this folder ({error}); its "
            "tables stay readable as CSV, but to go on run the recipe again in a new folder"
        ) from error
    if found != FOLDER_VERSION:
        raise RunFolderError(
            f"{folder} is a run folder of version {found}, written by fedstill {by}; this fedstill "
            f"reads version {FOLDER_VERSION}. Its tables stay readable as CSV; to go on with the "
            f"run, install fedstill {by}"
        )


def begin(folder: Path, name: str, description: str, data: Collection | None, graph: Graph) -> None:
    """A new run's folder: the environment, how data are split, who hears whom, what is run.

    What is run is written last: a folder without it has not begun.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"folder_version": FOLDER_VERSION, **environment()}
        write_json(folder / "environment.json", facts)
        if data is not None:
            _write_partition(data, folder / "partition.csv")
        if graph.is_partial:
            _write_graph(graph, folder / "graph.csv")
        write_whole(folder / name, description)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the system refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write to {folder}: {error.strerror or error}; "
            "give another folder, on the command line with --out"
        ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder so that no second process writes to it; a kill lets go of it.

    A folder that is not there is made, and taken away again where nothing was written to it.
    """
    with writing(folder):
        made = _made(folder)
    try:
        if fcntl is None:
            yield
            return
        handle = _held(folder)
        try:
            yield
        finally:
            os.close(handle)
    finally:
        _take_away(made)


def taken(folder: Path) -> bool:
    """Whether a process is writing to a folder; where that cannot be known, as if one were."""
    if fcntl is None:
        return True
    try:
        os.close(_held(folder))
    except Occupied:
        return True
    return False


def _made(folder: Path) -> list[Path]:
    """The folder and those above it that had to be made, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _take_away(made: Sequence[Path]) -> None:
    """Empty folders that were made for nothing."""
    with suppress(OSError):  # the first that holds something ends it
        for path in made:
            path.rmdir()


def fresh_folder(wanted: Path) -> Path:
    """The folder, or the next free one beside it."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def safe(name: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", name)


def _held(folder: Path) -> int:
    """A handle that locks a folder, by the folder itself or, on file systems that lock files
    alone, by a file in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
    except OSError as error:
        os.close(handle)
        if error.errno not in NO_LOCKS_OF_FOLDERS:
            raise
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _lock(handle, folder)
        except BaseException:
            os.close(handle)
            raise
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Occupied(
            f"another process is writing to {folder}; wait until it has ended"
        ) from error


def _write_graph(graph: Graph, path: Path) -> None:
    """Every two clients that hear each other, a line each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("client", "other"))
        writer.writerows(graph.pairs())


def _write_partition(collection: Collection, path: Path) -> None:
    rows = counts_table(collection)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
