"""A peer's process: no coordinator; it finds the others, plays the round loop, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from fedstill.core.errors import SiteError
from fedstill.core.files import write_whole
from fedstill.core.records import NodeId
from fedstill.deploy import folder as folders
from fedstill.deploy.folder import Deployment
from fedstill.deploy.meanwhile import meanwhile
from fedstill.deploy.place import Place
from fedstill.deploy.site import RUN, Invited, at_work, check_certificate, checked, credentials_of
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import Progress
from fedstill.runs import folder as run_folders
from fedstill.runs.digest import of_recipe
from fedstill.runs.session import Agreed, Keeping, Session
from fedstill.sites import zenoh
from fedstill.sites.away import Patience
from fedstill.sites.exchange import TWICE
from fedstill.sites.journal import Journal
from fedstill.sites.peers import Peers, Standing, check_no_server
from fedstill.sites.private_acts import PrivateActs
from fedstill.sites.release_log import DISTILLED, ReleaseLog
from fedstill.sites.zenoh import ZenohMesh

Say = Callable[[str], None]
JOURNAL = "journal"  # the folder of what was said and heard, in that of the run
OVER = "over"  # beside it once nobody waits for a word of this peer any more
LOOK = 2.0  # seconds between two looks at whether anybody is there twice
PARTING = 2.0  # seconds that a peer which refuses another stays, for all to hear what it runs
NOTICE = 60.0  # seconds in which one that is there for the second time ends, as it is told to


def start(folder: Path, say: Say) -> Path:
    """Take part as a peer, from the beginning or from the last checkpoint; returns the folder."""
    own, _ = folders.read_own(folder)
    invited, _, wrong = checked(folder)
    deployment = invited.deployment
    if deployment.address:
        raise SiteError("this deployment has a coordinator; start it with `fedstill site start`")
    check_no_server(invited.recipe.method)
    if wrong:
        raise SiteError("\n".join(wrong))
    run_folder = folder / RUN
    if (run_folder / OVER).exists():
        say(f"this run is finished: {run_folder}")
        return run_folder
    with at_work(invited, own) as place, closing(_connected(invited)) as mesh:
        _played(place, invited, mesh, run_folder, say)
        with folders.writing(folder):
            write_whole(run_folder / OVER, "")
    return run_folder


def _connected(invited: Invited) -> ZenohMesh:
    deployment = invited.deployment
    others = [name for name in deployment.sites if name != deployment.name]
    listening = deployment.addresses.get(deployment.name)
    settings = zenoh.of_peer(
        credentials_of(invited),
        deployment.run,
        listening,
        {name: deployment.addresses.get(name) for name in others},
    )
    return ZenohMesh(zenoh.opened(settings), deployment.run, deployment.name, others)


def _played(place: Place, invited: Invited, mesh: ZenohMesh, folder: Path, say: Say) -> None:
    patience, deployment = folders.read_patience(invited.folder), invited.deployment
    engines: list[Peers] = []

    def among_peers(own: InProcess) -> Peers:
        own.key, standing = place.key, place.standing(deployment.run)
        private = PrivateActs(place.me, own, folder) if own.experiment.privacy else None
        if place.spent:
            ReleaseLog(place.me, own, folder).spend(DISTILLED, place.spent)
        engines.append(Peers(own, mesh, standing, patience, Journal(folder / JOURNAL), private))
        return engines[0]

    def watch(progress: Progress) -> None:
        _check_heard(mesh, invited)
        score = "" if progress.score is None else f" · {progress.metric} {progress.score:.4f}"
        here = len(mesh.here()) + 1
        say(
            f"round {progress.round}/{progress.rounds}{score} · {here}/{len(deployment.sites)} "
            f"peers · {progress.seconds:.1f} s"
        )

    run = place.recipe.run
    session = Session(
        place.experiment,
        place.execution,
        of_recipe(place.recipe),
        folder=folder,
        keeping=Keeping(run.checkpoint_every, run.keep_checkpoints, run.pictures),
        watch=watch,
        cache=place.cache,
        agreed=Agreed(place.agreed, among_peers),
        privacy=place.privacy,
        spent=place.spent,
        notes=place.notes,
    )
    begun = run_folders.description_in(folder) is not None
    with _among(engines[0], deployment, patience, begun, say):
        if (folder / "summary.json").exists():
            say("this run has ended here; saying again what others may still wait for")
            engines[0].load(folder / "checkpoints", digest=place.agreed)
        elif begun:
            say("going on from the last checkpoint")
            session.resume(changed=False)
        else:
            session.begin()


def _check_heard(mesh: ZenohMesh, invited: Invited) -> None:
    """Refuse to play on alone where nobody can be heard any more."""
    if not mesh.here():
        check_certificate(invited)


@contextmanager
def _among(
    peers: Peers, deployment: Deployment, patience: Patience, begun: bool, say: Say
) -> Iterator[None]:
    """Find the others first, and stay until all who are connected have ended.

    At the beginning all must be there; one who comes back needs nobody's leave. Who is slower finds
    the last words here for as long as a step may take.
    """
    mesh = peers.mesh
    assert isinstance(mesh, ZenohMesh)
    peers.stand()
    try:
        with meanwhile(peers.look_for_twins, LOOK):
            say(f"{deployment.name} looks for {', '.join(peers.others)}")
            _find(peers, mesh, patience, begun)
            yield
            peers.round = peers.experiment.rounds
            peers.stand(ended=True)
            until = time.monotonic() + patience.step
            while time.monotonic() < until and not _ended(peers):
                time.sleep(0.2)
            time.sleep(0.5)  # for the last question about where this peer is
            say("the run is over")
    finally:
        peers.close()


def _find(peers: Peers, mesh: ZenohMesh, patience: Patience, begun: bool) -> None:
    seconds = 5.0 if begun else patience.start
    until = time.monotonic() + seconds
    while missing := mesh.present.wait_for(peers.others, min(0.5, until - time.monotonic())):
        if time.monotonic() >= until:
            break
        if not begun:  # who comes back hears all who are there first
            _compare(peers, peers.standings(), begun)
    if missing and not begun:
        raise SiteError(
            f"not connected within {seconds:g} s: {', '.join(sorted(missing))}. Of two peers "
            "that do not hear each other, at least one must listen at an address"
        )
    _check_standings(peers, seconds, begun)


def _check_single(peers: Peers) -> None:
    """Refuse to begin where two processes are connected in one name and neither ends.

    The one before may just have ended, and one that came later is told to end.
    """
    until = time.monotonic() + NOTICE
    found = {peer: peers.mesh.doubled(peer) for peer in peers.others}
    while None in found.values() or (any(found.values()) and time.monotonic() < until):
        peers.check_alone()
        time.sleep(0.2)
        found = {peer: peers.mesh.doubled(peer) for peer in peers.others}
    if twice := [peer for peer, doubled in found.items() if doubled]:
        raise SiteError(f"{', '.join(twice)}: {TWICE}, then start again")


def _check_standings(peers: Peers, seconds: float, begun: bool) -> None:
    """Hear from the others what they agreed to and which code they run.

    At the beginning everybody must say it, and be there once; who comes back hears those who answer
    soon.
    """
    until, silent = time.monotonic() + seconds, peers.others
    while silent and (left := until - time.monotonic()) > 0:
        if not begun:
            _check_single(peers)
        said = peers.standings(left)
        _compare(peers, said, begun)
        silent = [peer for peer in peers.others if peer not in said]
        if begun:
            return
        time.sleep(0.2 if silent else 0)
    if silent:
        raise SiteError(
            f"{', '.join(silent)}: connected, but did not say within {seconds:g} s which recipe "
            "and which code it runs; look at what it prints, then start again"
        )


def _compare(peers: Peers, said: Mapping[NodeId, Standing], begun: bool) -> None:
    """Refuse to play with peers that agreed to something else or run other code.

    Who comes back refuses only where more than half of those that it hears differ from it: one that
    lies could keep it away otherwise. Fewer are absent for it.
    """
    wrong = []
    for peer, standing in said.items():
        try:
            peers.check_standing(peer, standing)
        except SiteError as error:
            wrong.append(error)
    if wrong and (not begun or 2 * len(wrong) > len(said)):
        time.sleep(PARTING)
        raise wrong[0]


def _ended(peers: Peers) -> bool:
    """Whether all who are connected say that they have ended; who does not answer has not."""
    standings = peers.standings()
    return all(peer in standings and standings[peer].ended for peer in peers.mesh.here())
