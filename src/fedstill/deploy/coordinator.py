"""The coordinator's process: waits for sites, plays the round loop, goes on where it was killed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from fedstill.core.errors import LONGEST, SiteError, told
from fedstill.core.node import SERVER
from fedstill.deploy import folder as folders
from fedstill.deploy.board import Board, Row
from fedstill.deploy.folder import Deployment
from fedstill.deploy.place import Place, placed
from fedstill.engines import checkpoint
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import Progress
from fedstill.runs import folder as run_folders
from fedstill.runs.digest import of_recipe
from fedstill.runs.session import Agreed, Keeping, Session
from fedstill.sites import certificates, zenoh
from fedstill.sites.away import Away, Patience, spent_before
from fedstill.sites.exchange import Connection, Silence, Stopped
from fedstill.sites.words import Present
from fedstill.sites.zenoh import COORDINATOR, Calls

Say = Callable[[str], None]
RUN = "run"  # the run folder, below the coordinator's


Connect = Callable[[Path, Deployment, Patience, Board], Connection]


def start(out: Path, say: Say, data_dir: str | None = None, connect: Connect | None = None) -> Path:
    """Play a deployment from its beginning, or from its last checkpoint; returns the run folder.

    Sites call over zenoh, unless another line is given.
    """
    own = out / COORDINATOR
    deployment, recipe = folders.read_deployment(own), folders.read_agreed(own)
    if not deployment.address:
        raise SiteError("this deployment has no coordinator; start each peer: fedstill peer start")
    patience = folders.read_patience(own)
    if connect is None:
        _check_certificate(own, deployment, folders.host_of(deployment.address))
    run_folder = own / RUN
    if (run_folder / "summary.json").exists():
        say(f"this run is finished: {run_folder}")
        return run_folder
    with folders.writing(own):
        run_folder.mkdir(mode=0o700, exist_ok=True)  # what sites sent is for its user alone
    rows = {name: Row() for name in deployment.sites}
    board = Board(deployment.run, run_folder, rows, rounds=recipe.run.rounds)
    with ExitStack() as held:
        held.enter_context(run_folders.alone(run_folder))
        board.begin()
        place = held.enter_context(placed(recipe, SERVER, own, data_dir=data_dir))
        folders.check_recipe(own, place.agreed, deployment)
        calls = (connect or _connected)(own, deployment, patience, board)
        board.here = calls.here.names
        held.callback(calls.close)
        held.enter_context(board.shown())
        _wait(calls, deployment, patience, board, say)
        played(place, deployment, calls, patience, board, say)
    return run_folder


def played(
    place: Place,
    deployment: Deployment,
    calls: Connection,
    patience: Patience,
    board: Board,
    say: Say,
) -> None:
    """Play with all sites connected."""
    engines: list[Away] = []

    def away(own: InProcess) -> Away:
        standing = place.standing(deployment.run)
        engines.append(Away(own, calls, standing, patience, board.asked))
        return engines[0]

    def watch(progress: Progress) -> None:
        board.progress(progress)
        say(_line(progress, len(calls.here.names()), len(deployment.sites)))
        if board.stopped:
            raise Stopped(
                f"stopped after round {progress.round}; go on with `fedstill deploy start`"
            )

    run = place.recipe.run
    session = Session(
        place.experiment,
        replace(place.execution, memory_limit=None),
        of_recipe(place.recipe),
        folder=board.folder,
        keeping=Keeping(run.checkpoint_every, run.keep_checkpoints, run.pictures),
        watch=watch,
        cache=place.cache,
        agreed=Agreed(place.agreed, away),
        privacy=place.privacy,
        notes=place.notes,
    )
    if _needs_all(board.folder):
        for name, present in engines[0].hello().items():
            say(f"  {name}: {_told(present)}")
            session.spent = [*session.spent, *spent_before(name, present, place.privacy)]
    else:
        here = [name for name in deployment.sites if name in calls.here.names()]
        for name, found in engines[0].met(here).items():
            say(f"  {name}: {_told(found)}")
    if run_folders.description_in(board.folder) is not None:
        say("going on from the last checkpoint")
        session.resume(changed=False)
    else:
        session.begin()
    board.ended = True
    engines[0].over()


def _connected(own: Path, deployment: Deployment, patience: Patience, board: Board) -> Calls:
    settings = zenoh.of_coordinator(
        folders.credentials(own, deployment), deployment.run, deployment.address, deployment.sites
    )
    return Calls(
        zenoh.opened(settings),
        deployment.run,
        deployment.sites,
        lost=patience.gone,
        stopped=lambda: board.stopped,
    )


def _wait(
    calls: Connection, deployment: Deployment, patience: Patience, board: Board, say: Say
) -> None:
    """Wait for all sites; a run that has begun goes on without who is gone, where enough came."""
    say(f"waiting at {deployment.address} for {', '.join(deployment.sites)}")
    sites, whole = deployment.sites, _needs_all(board.folder)
    enough = len(sites) if whole else max(1, patience.least)
    first = patience.start if whole else min(patience.gone, patience.start)
    missing = calls.here.wait_for(sites, first, lambda: board.stopped)
    if len(sites) - len(missing) < enough and first < patience.start:
        missing = calls.here.wait_for(sites, patience.start - first, lambda: board.stopped)
    if missing and board.stopped:
        raise Stopped("stopped while sites were waited for; begin with `fedstill deploy start`")
    if missing and len(sites) - len(missing) >= enough:
        say(f"going on without {', '.join(sorted(missing))}, absent until back")
    elif missing:
        raise SiteError(
            f"not connected within {patience.start:g} s: {', '.join(sorted(missing))}. Each site "
            "runs `fedstill site start`, with a certificate signed here and a clock that is right"
        )


def _needs_all(folder: Path) -> bool:
    """Whether all sites must be there: until what comes before the first round is complete."""
    return checkpoint.latest(folder / "checkpoints") is None


def _check_certificate(own: Path, deployment: Deployment, host: str | None) -> None:
    wrong = certificates.faults(folders.credentials(own, deployment), host)
    if wrong:
        raise SiteError("\n".join(wrong))


def _told(present: Present | Silence) -> str:
    if isinstance(present, Silence):
        return f"{present.reason}; absent until it is as was agreed"
    if present.examples is None:
        return "the same recipe, the same fedstill"
    counts = ", ".join(f"{name} {count}" for name, count in present.counts.items())
    counts = told(counts, 10 * LONGEST)  # of some hundred classes
    return f"the same recipe, the same fedstill; {present.examples} examples ({counts})"


def _line(progress: Progress, here: int, sites: int) -> str:
    score = "" if progress.score is None else f" · {progress.metric} {progress.score:.4f}"
    return (
        f"round {progress.round}/{progress.rounds}{score} · {progress.bytes} bytes · "
        f"{here}/{sites} sites · {progress.seconds:.1f} s"
    )
