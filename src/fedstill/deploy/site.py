"""A site's process: data and certificate checked, requests answered until the run is over."""

from __future__ import annotations

import csv
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import SiteError
from fedstill.core.files import write_secret, write_whole
from fedstill.data import Collection
from fedstill.deploy import folder as folders
from fedstill.deploy.folder import Deployment, OwnTable
from fedstill.deploy.place import (
    CACHE,
    Place,
    agreed_digest,
    check,
    own_data,
    placed,
    public_data,
    spoken,
)
from fedstill.engines.execution import device_faults, engine_of
from fedstill.privacy.ledger import composed
from fedstill.recipe.tables import Recipe
from fedstill.runs import folder as run_folders
from fedstill.sites import certificates, zenoh
from fedstill.sites.credentials import Credentials
from fedstill.sites.release_log import SPENT, read_spent
from fedstill.sites.site import Line, Policy, Site

Say = Callable[[str], None]
RUN = "run"  # memories, the last answer and the log, below the site's folder
VIRTUAL = "virtual.safetensors"  # what a private site has distilled from its data, in its run
BEGUN = "begun.json"  # of which run and from which data all else in the folder of the run is
AGAIN = 2.0  # seconds between two calls that nobody took
LOST = "the connection is lost; calling the coordinator until it is back"
MOST_LINES = 600  # of answers that are printed in a minute; a flood of questions fills no log
MINUTE = 60.0  # seconds
WAIT = 3600.0  # seconds after which a coordinator that was there is waited for no longer


@dataclass(frozen=True, eq=False)
class Invited:
    """An invitation that was opened: the recipe is the one that the coordinator named."""

    folder: Path
    deployment: Deployment
    recipe: Recipe


def opened(folder: Path, data_dir: str | None = None) -> Invited:
    """An invitation, where its recipe and its authority are those that it names."""
    deployment, recipe = folders.read_deployment(folder), folders.read_agreed(folder)
    if deployment.name not in deployment.sites:
        raise SiteError(
            f"{folder} is the coordinator's own folder; a site joins with the folder that it was "
            "sent, one of those in invitations"
        )
    check(recipe)
    here = agreed_digest(recipe, public_data(recipe, data_dir))
    folders.check_recipe(folder, here, deployment)
    folders.check_authority(folder, deployment)
    return Invited(folder, deployment, recipe)


def join(
    invited: Invited, data: Path, number: str, policy: Policy, *, data_dir: str | None, device: str
) -> Path:
    """Agree to a recipe: writes site.toml and a key that stays; returns the request to be signed.

    `number` is what the coordinator told on another way than the invitation came.
    """
    policy.check(invited.recipe.method)
    policy.check_privacy(invited.recipe.privacy)
    agreed, folder = invited.deployment.agreed, invited.folder
    if number.replace("-", "").strip() != agreed[:16]:
        raise SiteError(
            f"the invitation here has the number {spoken(agreed)}, not {number}; compare it with "
            "what the coordinator told you, and ask for the invitation again"
        )
    found = own_data(invited.recipe, invited.deployment.name, str(data.absolute()))
    own = OwnTable(str(data.absolute()), agreed, found.digest(), data_dir, device)
    if wrong := _begun_otherwise(invited, own.content):
        raise SiteError("\n".join(wrong))
    with folders.writing(folder):
        folders.write_own(folder, own, policy)
        return certificates.request(folder, invited.deployment.name)


def checked(folder: Path) -> tuple[Invited, Collection, list[str]]:
    """What a site would begin with, and what is still wrong; nothing is connected."""
    own, policy = folders.read_own(folder)
    invited = opened(folder, own.data_dir)
    folders.check_agreed(str(folder), invited.deployment.agreed, own.agreed)
    policy.check(invited.recipe.method)
    policy.check_privacy(invited.recipe.privacy)
    found = own_data(invited.recipe, invited.deployment.name, own.data)
    wrong = _begun_otherwise(invited, found.digest()) or _changed(found, own)
    wrong += certificates.faults(credentials_of(invited))
    table = folder / folders.OWN_TABLE
    wrong += [f"{table}: site.{line}" for line in device_faults(own.device)]
    return invited, found, wrong


def check_noise(invited: Invited) -> None:
    """Refuse what cannot be private with this site's own data, as the start would."""
    if invited.recipe.privacy is None:
        return
    own, _ = folders.read_own(invited.folder)
    with placed(
        invited.recipe, invited.deployment.name, invited.folder, path=own.data,
        data_dir=own.data_dir, device=own.device, key=secrets.token_bytes(32),
    ):  # fmt: skip
        return


def credentials_of(invited: Invited) -> Credentials:
    """A site's key and certificates."""
    return folders.credentials(invited.folder, invited.deployment)


def check_certificate(invited: Invited) -> None:
    """Refuse to wait for others with a certificate that has expired since the start."""
    if wrong := certificates.faults(credentials_of(invited)):
        raise SiteError("\n".join(wrong))


@dataclass
class Absence:
    """For how long the coordinator has not been there; before it first was, nobody counts."""

    invited: Invited
    wait: float
    known: bool = False  # whether it ever was
    since: float | None = None  # when it was first found to be away; None while it is there

    @classmethod
    def begun(cls, invited: Invited, wait: float) -> Absence:
        """As a site starts: it knows from its log whether it has answered before."""
        return cls(invited, wait, bool(answers(invited.folder)))

    def noted(self, here: bool) -> None:
        """Say whether the coordinator is there; refuse to wait for it any longer, or in vain.

        Nobody looks while a step is played, which may take longer than the whole wait: only what
        was seen counts.
        """
        now = time.monotonic()
        if here:
            self.known, self.since = True, None
            return
        check_certificate(self.invited)
        self.since = now if self.since is None else self.since
        if self.known and now - self.since >= self.wait:
            raise SiteError(
                f"the coordinator at {self.invited.deployment.address} has been away for "
                f"{self.wait:g} s. If the run is over, nothing is left to be done here; if it goes "
                f"on, start this site again: fedstill site start {self.invited.folder}, with "
                "--wait SECONDS to wait longer"
            )


def start(
    folder: Path, say: Say, ended: Callable[[], bool] = lambda: False, wait: float = WAIT
) -> None:
    """Answer the coordinator until the run is over; calls again whenever the line is lost.

    One that this site has answered before, and that is away for `wait` seconds, is called no more.
    """
    if [row["said"] for row in answers(folder) if row["asked"] == "over"][-1:] == ["ok"]:
        say("the run is over")
        return
    with answering(folder, say) as (invited, site), ExitStack() as held:
        deployment, absence = invited.deployment, Absence.begun(invited, wait)
        say(f"{deployment.name} calls the coordinator at {deployment.address}")
        session = _called(invited, say, ended, absence)
        if session is None:
            return
        held.callback(zenoh.closed, session)
        say("connected")

        def over() -> bool:
            if not site.over:
                was, here = absence.since is None, zenoh.connected(session)
                absence.noted(here)
                if here != was:
                    say("connected" if here else LOST)
            return site.over or ended()

        zenoh.serve(session, deployment.run, deployment.name, site.answer, over)
        say("the run is over" if site.over else "stopped")


@contextmanager
def at_work(invited: Invited, own: OwnTable) -> Iterator[Place]:
    """What a party plays with, while no other process has its run's folder."""
    folder, run_folder = invited.folder, invited.folder / RUN
    with folders.writing(folder):
        for made in (run_folder, folder / CACHE):  # memories and failures tell of data
            made.mkdir(mode=0o700, exist_ok=True)
    with run_folders.alone(run_folder):
        _begin(invited, own.content)
        private = invited.recipe.privacy is not None
        placing = placed(
            invited.recipe, invited.deployment.name, folder, path=own.data, data_dir=own.data_dir,
            device=own.device, key=noise_key(run_folder, own.content) if private else None,
            kept=run_folder / VIRTUAL,
        )  # fmt: skip
        with placing as place:
            yield place


@contextmanager
def answering(folder: Path, say: Say) -> Iterator[tuple[Invited, Site]]:
    """A site with its data and memories while it lasts, whoever carries bytes to it."""
    own, policy = folders.read_own(folder)
    invited, found, wrong = checked(folder)
    if not invited.deployment.address:
        raise SiteError(f"this deployment has no coordinator; use `fedstill peer start {folder}`")
    if wrong:
        raise SiteError("\n".join(wrong))
    say_some = sparing(say)
    with at_work(invited, own) as place:
        site = Site(
            engine_of(place.experiment, place.execution, cache=place.cache),
            place.standing(invited.deployment.run),
            policy=policy,
            folder=folder / RUN,
            watch=lambda line: say_some(told(line)),
            class_names=found.class_names,
            key=place.key,
            privacy=place.privacy,
            spent=place.spent,
        )
        yield invited, site


def _called(
    invited: Invited, say: Say, ended: Callable[[], bool], absence: Absence
) -> zenoh.Session | None:
    """A line to the coordinator; it is called until it takes the call, or is away for too long."""
    deployment, told_once = invited.deployment, False
    settings = zenoh.of_site(credentials_of(invited), deployment.run, deployment.address)
    while not ended():
        try:
            session = zenoh.opened(settings)
        except SiteError as error:
            absence.noted(False)
            if not told_once:
                say(f"{error} Calling again every {AGAIN:g} s")
                told_once = True
            time.sleep(min(AGAIN, absence.wait))
        else:
            absence.noted(True)
            return session
    return None


def noise_key(folder: Path, content: str) -> bytes:
    """What a site's noise is made with: of 32 bytes that nobody else may read; made once.

    They lie with the memories of a run, and are joined with what the data are: a run that begins
    anew, or with other data, never has the noise of the one before.
    """
    path, place = folder / "noise.key", folder / "noise.place"
    with folders.writing(folder):
        if not path.exists():
            place.unlink(missing_ok=True)
            write_secret(path, secrets.token_bytes(32))
        check_original(path, place)
        key = path.read_bytes()
    if len(key) != 32:
        raise SiteError(f"{path} has {len(key)} bytes, not 32; noise cannot be made again with it")
    return hmac.digest(key, content.encode(), "sha256")


def check_original(path: Path, place: Path) -> None:
    """Refuse a copy of a file, such as a noise key in a copied folder.

    Beside it lies where it was when it was first used: its number in the file system, which moving
    its folder leaves as it is and copying does not.
    """
    here = str(path.stat().st_ino)
    if not place.exists():
        write_whole(place, here)
    elif place.read_text().strip() != here:
        raise SiteError(
            f"{path} is a copy: expected the file number {place.read_text()[:20].strip()}, found "
            f"{here}. The site that it was copied from would use the same noise with a ledger of "
            "its own, and both together would spend more than the budget. Start that one. If it "
            f"is gone for good, and gave no answer after this copy was made, remove {place} and "
            "start again"
        )


def sparing(say: Say, now: Callable[[], float] = time.monotonic) -> Say:
    """Say no more than `MOST_LINES` in a minute, and afterwards how many were left out."""
    since, count = now(), 0

    def some(text: str) -> None:
        nonlocal since, count
        if now() - since >= MINUTE:
            if count > MOST_LINES:
                say(f"{count - MOST_LINES} lines of answers were left out")
            since, count = now(), 0
        count += 1
        if count <= MOST_LINES:
            say(text)
        elif count == MOST_LINES + 1:
            say(
                f"{MOST_LINES} answers within a minute; further ones are in {RUN}/answers.csv alone"
            )

    return some


def told(line: Line) -> str:
    """A line of the site's log, for people."""
    where = "" if line.round is None else f"round {line.round} "
    return (
        f"{line.at[11:19]} {where}{line.asked}: {line.bytes_in} bytes in, {line.bytes_out} out, "
        f"{line.seconds:.3f} s, {line.said}"
    )


def answers(folder: Path) -> list[dict[str, str]]:
    """The site's own log, a row for each answer."""
    path = folder / RUN / "answers.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def spent(folder: Path) -> str | None:
    """What this site's own ledger says; None where nothing is promised.

    The coordinator knows less of it where answers came too late.
    """
    deployment, privacy = folders.read_deployment(folder), folders.read_agreed(folder).privacy
    if privacy is None or not privacy.valid:
        return None
    ledger = read_spent(folder / RUN / SPENT, deployment.name)
    found = composed([row for rows in ledger.values() for row in rows], privacy.delta)
    return (
        f"epsilon = {found:.4g} spent of {privacy.epsilon:g} at delta = {privacy.delta:g}, by "
        "this site's own ledger"
    )


def _changed(found: Collection, own: OwnTable) -> list[str]:
    if found.digest() == own.content:
        return []
    return [
        f"the data at {own.data} have changed since this site joined: their number was "
        f"{spoken(own.content)} and is {spoken(found.digest())}; put them back, or join again"
    ]


def _begin(invited: Invited, content: str) -> None:
    """Write down which run and which data the folder of the run is of, before anything is kept."""
    if wrong := _begun_otherwise(invited, content):
        raise SiteError("\n".join(wrong))
    path = invited.folder / RUN / BEGUN
    if not path.exists():
        with folders.writing(invited.folder):
            write_whole(path, json.dumps({"run": invited.deployment.run, "data": content}))


def _begun_otherwise(invited: Invited, content: str) -> list[str]:
    """Why the folder of the run cannot be gone on with, where it is of another run or other data.

    Memories, virtual data and the ledger are made from what they began with.
    """
    folder, run = invited.folder / RUN, invited.deployment.run
    if not (folder / BEGUN).exists():
        return []
    begun = json.loads((folder / BEGUN).read_text(encoding="utf-8"))
    if begun["run"] != run:
        return [
            f"{folder} was begun for the run {begun['run']}, this is {run}; put this invitation "
            "into a folder of its own and join there"
        ]
    if begun["data"] == content:
        return []
    again = "the coordinator may count this site as absent, as one that has lost its memories"
    if invited.recipe.privacy is not None:
        again += "; records that are in both spend their privacy budget twice"
    return [
        f"{folder} was begun with other data: their number was {spoken(begun['data'])} and is "
        f"{spoken(content)}. What is kept there was made from the former: put them back, or "
        f"remove {folder} and join again, to begin anew with these ({again})"
    ]
