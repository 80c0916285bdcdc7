"""A deployment over Flower, for consortia that have it: folders, the coordinator, a site's door.

The ServerApp is our coordinator; the ClientApp carries bytes to the site's door and imports nothing
but flwr. docs/flower.md says what Flower does not protect.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fedstill.core.errors import SiteError
from fedstill.core.files import write_whole
from fedstill.deploy import coordinator
from fedstill.deploy import flower_app as text
from fedstill.deploy import folder as folders
from fedstill.deploy import site as sites
from fedstill.deploy.board import Board
from fedstill.deploy.folder import Deployment
from fedstill.sites import certificates, door
from fedstill.sites.away import Patience
from fedstill.sites.credentials import Credentials
from fedstill.sites.flower import Nodes
from fedstill.sites.zenoh import COORDINATOR

Say = Callable[[str], None]
FOLDER = "flower"  # below the deployment's
PORT = 8000  # of the SuperLink, on this machine alone
LINK = "link"  # the name in the SuperLink's certificate
MOST = "1100m"  # of a request's body, as nginx writes it; a little more than `door.MOST`


def write(out: Path, port: int = PORT) -> Path:
    """Write what Flower needs for a deployment whose sites have their certificates."""
    own, place = out / COORDINATOR, (out / FOLDER).absolute()
    deployment = folders.read_deployment(own)
    if not deployment.address:
        raise SiteError("this deployment has no coordinator, and Flower always has one")
    signed = _signed(out, deployment)
    place.mkdir(exist_ok=True)
    _write_app(place / "app", out)
    shutil.copyfile(own / "ca.crt", place / "ca.crt")
    _write_link_certificate(own, place)
    for name, path in signed.items():
        (place / "keys").mkdir(exist_ok=True)
        write_whole(place / "keys" / f"{name}.pub", certificates.for_ssh(path) + b"\n")
    (place / "home").mkdir(exist_ok=True)
    home = text.HOME.format(inner=port, authority=json.dumps(str(place / "ca.crt")))
    write_whole(place / "home" / "config.toml", home)
    write_whole(place / "nginx.conf", _filter(own, place, deployment, port))
    _write_command(place / "superlink.sh", text.SUPERLINK.format(inner=port))
    _write_command(place / "register.sh", text.REGISTER.format(sites=" ".join(deployment.sites)))
    _write_command(place / "run.sh", text.RUN)
    return place


def coordinate(grid: Any, out: Path, say: Say) -> Path:
    """Play a deployment over a Grid, from its beginning or its last checkpoint."""

    def connect(own: Path, deployment: Deployment, patience: Patience, board: Board) -> Nodes:
        return Nodes(grid, keys_of(out), patience.gone, lambda: board.stopped)

    return coordinator.start(out, say, connect=connect)


def keys_of(out: Path) -> dict[str, bytes]:
    """The public key of each site, from the certificate that was signed for it."""
    signed = _signed(out, folders.read_deployment(out / COORDINATOR))
    return {name: certificates.public_key(path) for name, path in signed.items()}


def start_site(
    folder: Path, node: Path, say: Say, ended: Callable[[], bool] = lambda: False
) -> None:
    """Answer at a door in the folder of this machine's SuperNode until the run is over."""
    with sites.answering(folder, say) as (invited, site):
        write_node(invited, node)
        path = (node / "door").absolute()
        say(f"{site.name} answers at {path}; its SuperNode: {node / 'supernode.sh'}")
        try:
            door.serve(
                path, door.read_secret(node / "door.key"), site.answer,
                lambda: site.over or ended(),
            )  # fmt: skip
        except OSError as error:
            raise SiteError(f"no door can be opened at {path}: {error}") from error
        say("the run is over" if site.over else "stopped")


def write_node(invited: sites.Invited, node: Path) -> None:
    """Write what the SuperNode of a site needs: keys for its group alone, and its command."""
    name, address = invited.deployment.name, invited.deployment.address
    node.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(invited.folder / "ca.crt", node / "ca.crt")
    _write_secret(node / "node.key", certificates.own_for_ssh(sites.credentials_of(invited)))
    _write_secret(node / "door.key", secrets.token_bytes(door.SECRET))
    _write_command(node / "supernode.sh", text.SUPERNODE.format(name=name, address=address))


def _signed(out: Path, deployment: Deployment) -> dict[str, Path]:
    """The certificate of each site."""
    folder = out / COORDINATOR / "signed"
    found = {name: folder / f"{name}.pem" for name in deployment.sites}
    missing = [name for name, path in found.items() if not path.exists()]
    if missing:
        raise SiteError(
            f"no certificate was signed for {', '.join(missing)}; each site joins and sends its "
            f"request: fedstill deploy sign {out} SITE.csr"
        )
    return found


def _write_app(app: Path, out: Path) -> None:
    package = app / text.PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    deployment = json.dumps(str(out.absolute()))
    write_whole(app / "pyproject.toml", text.PROJECT.format(deployment=deployment))
    write_whole(app / "LICENSE", text.LICENSE)
    for name, content in text.package(Path(door.__file__).read_text(encoding="utf-8")).items():
        write_whole(package / name, content)


def _write_link_certificate(own: Path, place: Path) -> None:
    asked = certificates.request(place, LINK)
    authority = certificates.read_authority(own)
    pem = certificates.signed(authority, asked.read_bytes(), LINK, ["127.0.0.1"])
    write_whole(Credentials(place, LINK).certificate, pem)
    asked.unlink()


def _filter(own: Path, place: Path, deployment: Deployment, port: int) -> str:
    host, outer = deployment.address.rsplit(":", 1)
    given = folders.credentials(own, deployment)
    return text.FILTER.format(
        folder=place, inner=port, outer=deployment.address if _is_address(host) else outer,
        certificate=given.certificate.absolute(), key=given.key.absolute(),
        fleet="|".join(text.FLEET), most=MOST,
    )  # fmt: skip


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _write_command(path: Path, content: str) -> None:
    write_whole(path, content)
    path.chmod(0o755)


def _write_secret(path: Path, content: bytes) -> None:
    """A file for its owner and the group of its folder."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o640)  # whatever the mask of this process says
        file.write(content)
