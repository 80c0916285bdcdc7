"""The folders of a deployment: what the coordinator hands out, and what each site adds for itself.

    consortium/coordinator         the authority's key, the recipe, the run folder
    consortium/invitations/NAME    what is sent to a site: recipe, roster, authority's certificate

A site puts its own `site.toml`, its key and its certificate beside what it was sent.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.core import ranges
from fedstill.core.errors import BadValue, SiteError
from fedstill.core.files import write_whole
from fedstill.core.names import installed_alone
from fedstill.core.records import NodeId
from fedstill.deploy.place import (
    agreed_digest,
    check,
    check_private,
    names_of,
    networks,
    spoken,
    without_paths,
)
from fedstill.recipe.build import load_public
from fedstill.recipe.check import checked
from fedstill.recipe.fields import read_table
from fedstill.recipe.read import read_recipe
from fedstill.recipe.tables import Recipe, Table, values
from fedstill.recipe.toml import toml_text
from fedstill.runs.folder import safe
from fedstill.sites import certificates
from fedstill.sites.away import Patience
from fedstill.sites.credentials import Credentials
from fedstill.sites.peers import check_no_server
from fedstill.sites.site import Policy
from fedstill.sites.zenoh import COORDINATOR

HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")  # a name, or an address of either kind
OPTIONS = {  # by which each kind of patience is given
    "start": "--start-deadline", "step": "--deadline", "gone": "--gone", "least": "--least",
}  # fmt: skip
AGREEMENT, OWN_TABLE, RECIPE = "deployment.toml", "site.toml", "recipe.toml"


@dataclass(frozen=True)
class Deployment:
    """What all parties of a run are told; `name` is the party whose folder it is."""

    run: str
    recipe: str  # the digest
    sites: tuple[str, ...]
    name: str = COORDINATOR
    address: str = ""  # of the coordinator; empty for peers
    addresses: Mapping[NodeId, str] = field(default_factory=dict)  # of peers that listen
    authority: str = ""  # the digest of its certificate; empty where an older fedstill made it

    @property
    def agreed(self) -> str:
        """The digest of all that must not be changed on the way to a site.

        The authority is in it: who could give a site another one would be its coordinator.
        """
        if not self.authority:
            return self.recipe
        text = "\n".join([self.run, self.recipe, self.authority, *self.sites])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def number(self) -> str:
        """The number of recipe, roster and authority, as it is told by telephone."""
        return spoken(self.agreed)


@dataclass(frozen=True)
class OwnTable:
    """What a site says for itself."""

    data: str  # a folder or an .npz file
    agreed: str  # the digest of what it has agreed to: recipe, roster and authority
    content: str  # the digest of its data when it joined
    data_dir: str | None = None  # for public data
    device: str = "auto"


def make(
    recipe: Recipe, out: Path, *, address: str, addresses: Mapping[NodeId, str] | None = None,
    patience: Patience | None = None,
) -> Deployment:  # fmt: skip
    """A new deployment: a folder for the coordinator, and an invitation for each site."""
    patience = patience or Patience()
    if wrong := ranges.faults(patience):
        lines = [f"patience.{line} ({OPTIONS[line.split()[0]]})" for line in wrong]
        raise BadValue(lines)
    check(recipe)
    names = names_of(recipe)
    _check_names(names)
    _check_address(address, addresses or {}, names)
    if not address:
        check_no_server(recipe.method)
    if out.exists() and any(out.iterdir()):
        raise SiteError(f"{out} holds other things; a deployment needs a folder of its own")
    models, _ = networks(recipe)  # refuses networks that nobody could build
    shape = next(iter(models.values())).shape
    public = load_public(recipe, shape)
    check_private(recipe, public)
    digest = agreed_digest(recipe, public)
    run = f"{safe(recipe.run.name)}-{secrets.token_hex(4)}"
    with writing(out):
        return _made(out, recipe, run, digest, address, addresses or {}, patience)


def _made(
    out: Path, recipe: Recipe, run: str, digest: str, address: str,
    addresses: Mapping[NodeId, str], patience: Patience,
) -> Deployment:  # fmt: skip
    own, names = out / COORDINATOR, names_of(recipe)
    own.mkdir(parents=True)
    authority = certificates.make_authority(own)
    made = Deployment(
        run, digest, tuple(names), COORDINATOR, address, dict(addresses),
        certificates.digest(own / "ca.crt"),
    )  # fmt: skip
    host = host_of(address)
    asked = certificates.request(own, COORDINATOR)
    hosts = [host] if host else []
    pem = certificates.signed(authority, asked.read_bytes(), COORDINATOR, hosts, days=None)
    write_whole(own / f"{COORDINATOR}.pem", pem)
    asked.unlink()
    text = toml_text(without_paths(recipe).as_tables())
    waiting = {"patience": values(patience)}
    _write(own, made, text, waiting)
    for name in names:
        place = out / "invitations" / name
        place.mkdir(parents=True)
        _write(place, replace(made, name=name), text, {} if address else waiting)
        shutil.copy(own / "ca.crt", place / "ca.crt")
    return made


def _write(folder: Path, made: Deployment, recipe: str, more: Table) -> None:
    write_whole(folder / RECIPE, recipe)
    write_whole(folder / AGREEMENT, toml_text({"deployment": values(made), **more}))


def sign(out: Path, file: Path, days: int = 365) -> Path:
    """Sign a site's request; returns the certificate that goes back to it."""
    own = out / COORDINATOR
    deployment, name = read_deployment(own), file.stem
    if name not in deployment.sites:
        raise SiteError(
            f"{name} is not a site of this deployment; known: {', '.join(deployment.sites)}"
        )
    address = deployment.addresses.get(name, "")
    hosts = [host_of(address)] if address else []
    try:
        asked = file.read_bytes()
    except OSError as error:
        raise SiteError(f"cannot read {file}: {error.strerror or error}") from error
    pem = certificates.signed(certificates.read_authority(own), asked, name, hosts, days)
    target = own / "signed" / f"{name}.pem"
    with writing(own):
        target.parent.mkdir(exist_ok=True)
        write_whole(target, pem)
    return target


def signed_for(out: Path, name: NodeId) -> str | None:
    """The digest of the key that a certificate was signed for; None where there is none yet."""
    path = out / COORDINATOR / "signed" / f"{safe(name)}.pem"
    return certificates.key_digest(path) if path.exists() else None


def read_deployment(folder: Path) -> Deployment:
    """What a folder of a deployment says; its names are those of files, so they are looked at."""
    found: Deployment = _read(Deployment, folder / AGREEMENT, "deployment", _not_one(folder))
    try:
        _check_names(found.sites)
        _check_address(found.address, found.addresses, found.sites)
    except BadValue as error:
        raise BadValue([f"{folder / AGREEMENT}: {line}" for line in error.faults]) from error
    if found.name not in (COORDINATOR, *found.sites) or safe(found.run) != found.run:
        raise SiteError(
            f"{folder / AGREEMENT}: {found.name!r} is no party of {found.run!r}; ask for the "
            "invitation again"
        )
    return found


def read_patience(folder: Path) -> Patience:
    """How long the coordinator of a deployment waits."""
    found: Patience = _read(Patience, folder / AGREEMENT, "patience", _not_one(folder))
    return found


def read_own(folder: Path) -> tuple[OwnTable, Policy]:
    """What a site says for itself, and what it allows."""
    missing = f"{folder} has no {OWN_TABLE}; join first: fedstill site join {folder} --data PATH"
    own = _read(OwnTable, folder / OWN_TABLE, "site", missing)
    return own, _read(Policy, folder / OWN_TABLE, "policy", missing)


def write_own(folder: Path, own: OwnTable, policy: Policy) -> None:
    """Write what a site says for itself."""
    text = toml_text({"site": values(own), "policy": values(policy)})
    write_whole(folder / OWN_TABLE, text)


def read_agreed(folder: Path) -> Recipe:
    """The recipe of a folder of a deployment; nothing that came with it is run."""
    with installed_alone():
        (recipe,) = checked(read_recipe(folder / RECIPE))
    return recipe


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in words why a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise SiteError(
            f"cannot write to {folder}: {error.strerror or error}; make room there, or let this "
            "user write to it"
        ) from error


def credentials(folder: Path, deployment: Deployment) -> Credentials:
    """Key and certificates of the party whose folder it is."""
    return Credentials(folder, deployment.name)


def check_authority(folder: Path, deployment: Deployment) -> None:
    """Refuse a certificate of another authority than the one that is in the number."""
    path = folder / "ca.crt"
    if deployment.authority and certificates.digest(path) != deployment.authority:
        raise SiteError(
            f"{path} is not of the authority that {folder / AGREEMENT} names; ask the coordinator "
            "for the invitation again"
        )


def check_recipe(folder: Path, here: str, deployment: Deployment) -> None:
    """Refuse a recipe that is not the deployment's, with both numbers."""
    changed = replace(deployment, recipe=here).agreed
    what_to_do = JOIN_ANEW if deployment.name != COORDINATOR else MAKE_ANEW
    check_agreed(str(folder / RECIPE), changed, deployment.agreed, what_to_do)


JOIN_ANEW = "ask the coordinator for the recipe again, or join anew"
MAKE_ANEW = "put back the recipe that the sites were sent, or make a new deployment"


def check_agreed(what: str, here: str, agreed: str, what_to_do: str = JOIN_ANEW) -> None:
    """Refuse what is not what was agreed on, with both values."""
    if here != agreed:
        raise SiteError(
            f"{what} has the number {spoken(here)}, but {spoken(agreed)} was agreed on; "
            f"{what_to_do}"
        )


def _read(kind: type[Any], path: Path, table: str, missing: str) -> Any:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SiteError(missing) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SiteError(f"{path} cannot be read: {error}") from error
    wrong: list[str] = []
    found = read_table(kind, tables.get(table, {}), table, wrong)
    if found is not None:
        wrong += [f"{table}.{line}" for line in ranges.faults(found)]
    if wrong or found is None:
        raise BadValue([f"{path}: {line}" for line in dict.fromkeys(wrong)])
    return found


def _not_one(folder: Path) -> str:
    return (
        f"{folder} is no folder of a deployment: there is no {AGREEMENT} in it; a coordinator "
        "makes one with `fedstill deploy make`, a site is sent one"
    )


def _check_names(names: Sequence[NodeId]) -> None:
    wrong = [
        name
        for name in names
        if name == COORDINATOR or not name.strip(".") or safe(name) != name or len(name) > 60
    ]
    if wrong:
        raise BadValue(
            [
                f"data.options.clients: {name!r} cannot name a site; use letters, digits, . _ + -"
                for name in wrong
            ]
        )


def host_of(address: str) -> str:
    """The name or number in an address; one of IPv6 is written in brackets, but is none."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    if not (HOST.fullmatch(host) and port.isdecimal() and 0 < int(port) < 65536):
        return False
    try:
        return not host.startswith("[") or bool(ipaddress.IPv6Address(host_of(text)))
    except ValueError:
        return False


def _check_address(address: str, addresses: Mapping[NodeId, str], names: Sequence[NodeId]) -> None:
    strangers = [name for name in addresses if name not in names]
    lines = [f"--peer {name}: no such site; known: {', '.join(names)}" for name in strangers]
    for text in [*([address] if address else []), *addresses.values()]:
        if not _is_address(text):
            lines.append(
                f"{text!r} is no address; write it as HOST:PORT, e.g. fl.example.org:7447 or "
                "[2001:db8::1]:7447"
            )
    places = [*addresses.values()]
    for text in sorted({text for text in places if places.count(text) > 1}):
        both = " and ".join(name for name in addresses if addresses[name] == text)
        lines.append(f"{both} cannot both listen at {text}; give each peer an address of its own")
    if lines:
        raise BadValue(lines)
