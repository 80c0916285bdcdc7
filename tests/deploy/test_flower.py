"""A deployment over Flower: the files it is given, and the filter before it."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import stat
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from demo_sites import write_data
from fedstill.commands.cli import app
from fedstill.core.errors import SiteError
from fedstill.deploy import flower
from fedstill.deploy import folder as folders
from fedstill.deploy import site as sites
from fedstill.deploy.flower_app import FLEET, PACKAGE
from fedstill.recipe import checked
from fedstill.recipe.tables import Recipe
from fedstill.sites import door
from fedstill.sites.site import Policy
from flower_trial import listening, wait
from ports import free_port

NAMES = ("north", "south")


def recipe_of(folder: Path, method: str = "fedavg") -> Recipe:
    data = write_data(folder / "data", 2)
    clients = {name: str(path) for name, path in zip(NAMES, data.values(), strict=True)}
    classes = [str(digit) for digit in range(10)]
    options = {"clients": clients, "class_names": classes}
    tables: dict[str, Any] = {
        "run": {"name": "trial", "rounds": 1, "scores": "own", "device": "cpu"},
        "data": {"name": "own", "size": 16, "channels": 3, "options": options},
        "models": {"name": "convnet", "depth": 2, "width": 4},
        "method": {"name": method, "preset": "small"},
    }
    (recipe,) = checked(tables)
    return recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deployment whose two sites have joined and have their certificates."""
    folder = tmp_path_factory.mktemp("flower")
    recipe, out = recipe_of(folder), folder / "consortium"
    folders.make(recipe, out, address=f"127.0.0.1:{free_port()}")
    for name in NAMES:
        place = out / "invitations" / name
        invited = sites.opened(place)
        path = Path(recipe.data.options["clients"][name])
        number = invited.deployment.number
        asked = sites.join(invited, path, number, Policy(), data_dir=None, device="cpu")
        signed = folders.sign(out, asked)
        (place / signed.name).write_bytes(signed.read_bytes())
    return out


def test_the_app_names_its_deployment_and_carries_the_door_that_sites_open(made: Path) -> None:
    place = flower.write(made, free_port())
    project = tomllib.loads((place / "app" / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == {"deployment": str(made)}
    package = place / "app" / PACKAGE
    assert (package / "door.py").read_text() == Path(door.__file__).read_text()
    for file in package.glob("*.py"):
        compile(file.read_text(), str(file), "exec")
    assert "fedstill." not in (package / "client.py").read_text(), "a SuperNode has flwr alone"


def test_a_site_has_the_same_key_in_its_certificate_and_at_its_node(
    made: Path, tmp_path: Path
) -> None:
    place = flower.write(made, free_port())
    flower.write_node(sites.opened(made / "invitations" / "north"), tmp_path / "node")
    own = serialization.load_ssh_private_key((tmp_path / "node" / "node.key").read_bytes(), None)
    told = serialization.load_ssh_public_key((place / "keys" / "north.pub").read_bytes())
    other = serialization.load_ssh_public_key((place / "keys" / "south.pub").read_bytes())
    assert own.public_key() == told != other
    for name in ("node.key", "door.key"):
        assert stat.S_IMODE((tmp_path / "node" / name).stat().st_mode) == 0o640
    command = (tmp_path / "node" / "supernode.sh").read_text()
    assert f"--superlink {folders.read_deployment(made / 'coordinator').address} " in command
    assert not list((made / "flower").rglob("north.key")), "a site's key is not the coordinator's"


def test_a_superlink_listens_on_this_machine_alone_and_asks_nodes_for_keys(made: Path) -> None:
    place = flower.write(made, 8123)
    command = (place / "superlink.sh").read_text()
    for words in (
        "--host 127.0.0.1 --port 8123", "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "FLWR_TELEMETRY_ENABLED=0",
    ):  # fmt: skip
        assert words in command
    assert stat.S_IMODE((place / "link.key").stat().st_mode) == 0o600
    assert os.access(place / "run.sh", os.X_OK)
    before = (place / "link.key").read_bytes()
    assert (flower.write(made, 8123) / "link.key").read_bytes() == before, "written again, not new"


def test_a_deployment_that_is_not_ready_for_flower_says_why(tmp_path: Path) -> None:
    out = tmp_path / "c"
    recipe = recipe_of(tmp_path)
    folders.make(recipe, out, address="127.0.0.1:7447")
    with pytest.raises(SiteError, match=r"no certificate was signed for north, south"):
        flower.write(out)
    peers = recipe_of(tmp_path / "p", "desa")
    folders.make(peers, tmp_path / "d", address="", addresses={"north": "127.0.0.1:7447"})
    with pytest.raises(SiteError, match=r"has no coordinator, and Flower always has one"):
        flower.write(tmp_path / "d")


def test_the_command_says_what_was_written_and_what_is_dangerous(made: Path) -> None:
    said = CliRunner().invoke(app, ["deploy", "flower", str(made), "--port", "8000"]).output
    assert "superlink.sh, register.sh, nginx.conf, run.sh" in said
    assert "can run code at all sites" in said


def test_a_site_answers_at_the_door_of_its_node(made: Path, tmp_path: Path) -> None:
    node, over = tmp_path / "node", threading.Event()
    said: list[str] = []
    thread = threading.Thread(
        target=flower.start_site,
        args=(made / "invitations" / "north", node, said.append, over.is_set),
    )
    thread.start()
    try:
        wait((node / "door").exists, "the door", 60)
        answer = door.ask(node / "door", door.read_secret(node / "door.key"), b"nonsense", 30)
    finally:
        over.set()
        thread.join(60)
    assert b"none of the records that sites exchange" in answer, "a refusal in words"
    assert said[-1] == "stopped" and not (node / "door").exists()


class Upstream(BaseHTTPRequestHandler):
    """Stands in the place of a SuperLink: answers everything, and keeps what it was asked."""

    asked: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        Upstream.asked.append(f"{self.command} {self.path}")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def filtered(made: Path) -> Iterator[tuple[str, int, Path]]:
    """nginx with the written configuration, before a server that answers everything."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx")
    inner = free_port()
    place = flower.write(made, inner)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "link.pem", place / "link.key")
    server = ThreadingHTTPServer(("127.0.0.1", inner), Upstream)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    words = ["nginx", "-e", "stderr", "-g", "daemon off;", "-c", str(place / "nginx.conf")]
    nginx = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    host, port = folders.read_deployment(made / "coordinator").address.split(":")
    Upstream.asked.clear()
    try:
        wait(lambda: listening(int(port)), "nginx", 30)
        yield host, int(port), place
    finally:
        nginx.send_signal(signal.SIGTERM)
        nginx.wait(30)
        server.shutdown()
        server.server_close()


def asked(where: tuple[str, int, Path], path: str, method: str = "POST", size: int = 0) -> int:
    context = ssl.create_default_context(cafile=where[2] / "ca.crt")
    call = HTTPSConnection(where[0], where[1], context=context, timeout=20)
    try:
        headers = {"Content-Length": str(size)} if size else {}
        call.request(method, path, headers=headers)
        return call.getresponse().status
    finally:
        call.close()


def test_the_filter_lets_through_what_nodes_call_and_nothing_else(
    filtered: tuple[str, int, Path],
) -> None:
    for name in FLEET:
        assert asked(filtered, f"/v1/fleet/{name}") == 200
    assert Upstream.asked == [f"POST /v1/fleet/{name}" for name in FLEET]
    Upstream.asked.clear()
    refused = [
        "/", "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-messages",
        "/v1/fleet", "/v1/fleet/", "/v1/fleet/start-run", "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/pull-messages/../../control/start-run", "//v1/control/start-run",
        "/v1/fleet/pull-messages%00/v1/control/start-run", "/V1/CONTROL/start-run",
    ]  # fmt: skip
    assert {path: asked(filtered, path) // 100 for path in refused} == dict.fromkeys(refused, 4)
    assert asked(filtered, "/v1/fleet/pull-messages", "GET") == 403
    assert asked(filtered, "/v1/fleet/push-object", size=2 << 30) == 413
    assert Upstream.asked == [], "the SuperLink has heard of none of them"


def test_a_path_that_means_a_nodes_call_arrives_as_that_call(
    filtered: tuple[str, int, Path],
) -> None:
    assert asked(filtered, "/v1/control/../fleet/get-run?x=/v1/control/start-run") == 200
    assert Upstream.asked == ["POST /v1/fleet/get-run"]
