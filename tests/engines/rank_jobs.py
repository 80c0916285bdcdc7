"""Jobs of several processes, as torchrun starts them, and ways to wreck one of the ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedstill.commands.cli import main
from fedstill.data.sites import Collection
from fedstill.engines.play.in_process import InProcess
from ports import free_port

Wreck = Callable[[int], None]  # of a rank


class Ended(NamedTuple):
    """Exit codes by rank, and all that the ranks left on the screen."""

    codes: list[int | None]
    screen: str


def start(folder: Path, ranks: int, *arguments: object, wreck: Wreck | None = None) -> list[Any]:
    """The processes of `torchrun --nproc-per-node RANKS -m fedstill ARGUMENTS`, without its own.

    The server they are forked from has imported everything, so that they start in a moment.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstill.runs.session", "fedstill.engines.ranks.gloo"])
    port = free_port()
    words = [str(word) for word in arguments]
    made = [
        context.Process(target=_rank, args=(rank, ranks, port, words, folder / "screen", wreck))
        for rank in range(ranks)
    ]
    for process in made:
        process.start()
    return made


def ended(folder: Path, processes: list[Any], seconds: float = 60) -> Ended:
    """What became of a job; one that hangs is an error."""
    for process in processes:
        process.join(seconds)
    stuck = [process for process in processes if process.exitcode is None]
    for process in stuck:
        process.kill()
    assert not stuck, (folder / "screen").read_text()
    return Ended([process.exitcode for process in processes], (folder / "screen").read_text())


def job(folder: Path, ranks: int, *arguments: object, wreck: Wreck | None = None) -> Ended:
    """A whole job."""
    return ended(folder, start(folder, ranks, *arguments, wreck=wreck))


def _rank(
    rank: int, size: int, port: int, words: list[str], screen: Path, wreck: Wreck | None
) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    file = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if wreck is not None:
        wreck(rank)
    sys.argv = ["fedstill", *words]
    main()


def step_fails(rank: int) -> None:
    """Loops fail on rank 1 in the second round."""
    plain = InProcess._run

    def fails(self: Any, loop: Any, node: Any) -> Any:
        if rank == 1 and node.round == 2:
            raise ValueError("no more")
        return plain(self, loop, node)

    InProcess._run = fails  # type: ignore[method-assign]


def dies(rank: int) -> None:
    """Rank 1 ends without a word in the second round."""
    plain = InProcess._run

    def killed(self: Any, loop: Any, node: Any) -> Any:
        if rank == 1 and node.round == 2:
            os._exit(9)
        return plain(self, loop, node)

    InProcess._run = killed  # type: ignore[method-assign]


def has_other_data(rank: int) -> None:
    """Rank 1 sees other data than the leader."""
    if rank == 1:
        Collection.digest = lambda self: "other"  # type: ignore[method-assign]
