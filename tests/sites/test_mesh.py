"""Peers over zenoh on this machine: who hears what, who is refused, and what is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zenoh", reason="needs fedstill[sites]")
pytest.importorskip("cryptography", reason="needs fedstill[sites]")

from fedstill.sites import certificates, zenoh
from fedstill.sites.certificates import Authority
from fedstill.sites.zenoh import ZenohMesh
from parties import joined, trusting
from ports import free_port

RUN = "trial-1"
NAMES = ("north", "south", "west")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return certificates.make_authority(tmp_path_factory.mktemp("authority"))


@contextmanager
def meeting(
    folder: Path,
    authority: Authority,
    roster: tuple[str, ...] = NAMES,
    addresses: dict[str, str] | None = None,
    **unruly: Any,
) -> Iterator[dict[str, ZenohMesh]]:
    """Everybody on the roster, each listening; whoever is unruly has other settings."""
    ports = addresses or {name: f"127.0.0.1:{free_port()}" for name in NAMES}
    with ExitStack() as held:
        found = {}
        for name in NAMES:
            own = trusting(joined(folder / name, authority, name), authority)
            others = {peer: ports[peer] for peer in roster if peer != name}
            settings = zenoh.of_peer(own, RUN, ports[name], others) | unruly.get(name, {})
            found[name] = ZenohMesh(zenoh.opened(settings), RUN, name, [*others])
            held.callback(found[name].close)
        yield found


def test_what_is_said_to_one_no_other_can_ask_for(tmp_path: Path, authority: Authority) -> None:
    with meeting(tmp_path, authority) as mesh:
        for one in mesh.values():
            assert one.present.wait_for([n for n in NAMES if n != one.me], 20) == set()
        mesh["north"].say("1/0", b"for south", "south")
        mesh["north"].say("standing", b"for all")
        assert mesh["south"].fetch("north", "1/0", 10) == b"for south"
        assert mesh["west"].fetch("north", "standing", 10) == b"for all"
        assert mesh["west"].fetch("north", "1/0", 0.5) is None  # it asks for its own word alone
        key = f"{zenoh.root(RUN)}/north/for/south/1/0"
        assert not [reply for reply in mesh["west"].session.get(key, timeout=0.5) if reply.ok]


def test_a_question_waits_until_the_word_is_said_and_one_that_was_forgotten_is_told_at_once(
    tmp_path: Path, authority: Authority
) -> None:
    with meeting(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert south.present.wait_for(["north"], 20) == set()
        found: list[bytes | None] = []
        asking = threading.Thread(target=lambda: found.append(south.fetch("north", "5/0", 30)))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()
        north.say("5/0", b"said later", "south")
        asking.join(30)
        assert found == [b"said later"]
        north.say("0/0", b"at the beginning", "south")
        north.forget(before=7)
        began = time.monotonic()
        assert south.fetch("north", "5/0", 30) == b""
        assert south.fetch("north", "6/1", 30) == b""  # was never said, and never will be
        assert time.monotonic() - began < 10
        assert south.fetch("north", "0/0", 30) == b"at the beginning"
        assert south.fetch("north", "7/0", 0.2) is None


def test_a_question_that_brings_bytes_along_is_not_kept(
    tmp_path: Path, authority: Authority
) -> None:
    with meeting(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert south.present.wait_for(["north"], 20) == set()
        key = f"{zenoh.root(RUN)}/north/for/south/5/0"
        for payload in (b"much", None):
            replies = south.session.get(key, payload=payload, timeout=0.5)
            assert not [reply for reply in replies if reply.ok]
            kept = [query.payload for line in north._waiting.values() for query in line]
            assert kept == ([] if payload else [None])


def test_a_peer_that_speaks_in_anothers_name_is_not_heard(
    tmp_path: Path, authority: Authority
) -> None:
    unruly = {"south": {"access_control": {"enabled": False}}}
    with meeting(tmp_path, authority, **unruly) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert north.present.wait_for(["south", "west"], 20) == set()
        key = f"{zenoh.root(RUN)}/west/all/forged"
        forger = south.session.declare_queryable(key, lambda query: zenoh.reply(query, b"forged"))
        assert north.fetch("west", "forged", 1.0) is None
        forger.undeclare()
        south.say("true", b"its own")
        assert north.fetch("south", "true", 10) == b"its own"  # what it says for itself is heard


def test_a_name_that_is_not_on_the_roster_sees_nobody_and_is_seen_by_nobody(
    tmp_path: Path, authority: Authority
) -> None:
    with meeting(tmp_path, authority, roster=("north", "south")) as mesh:
        north, south, west = (mesh[name] for name in NAMES)
        assert north.present.wait_for(["south"], 20) == set()  # they see each other
        north.say("standing", b"for all")
        assert south.fetch("north", "standing", 10) == b"for all"
        assert west.fetch("north", "standing", 1.0) is None
        assert west.here() == set() and north.here() == {"south"}


def wait_until(true: Any, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(true())


def test_two_processes_in_one_name_are_noticed_and_so_is_the_end_of_one(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = {name: f"127.0.0.1:{free_port()}" for name in NAMES}
    with meeting(tmp_path, authority, addresses=ports) as mesh:
        north = mesh["north"]
        north.lingering = 0.5
        assert north.present.wait_for(["south", "west"], 20) == set()
        assert north.doubled("west") is False
        monkeypatch.setattr(zenoh, "TOGETHER", 0.0)  # whoever is heard first came first
        own = trusting(joined(tmp_path / "copy", authority, "west"), authority)
        settings = zenoh.of_peer(own, RUN, None, {"north": ports["north"], "south": None})
        copy = ZenohMesh(zenoh.opened(settings), RUN, "west", ["north", "south"])
        try:
            assert wait_until(lambda: north.doubled("west") is True)
            assert north.doubled("south") is False
            assert north.later("west") == {copy.id} and north.later("south") == set()
        finally:
            copy.close()
        assert wait_until(lambda: north.doubled("west") is False)


def test_the_process_that_came_first_is_not_named_and_who_sees_both_at_once_agrees_on_one() -> None:
    here: Any = object.__new__(zenoh.Here)
    here._changed = threading.Condition()
    key = f"{zenoh.root(RUN)}/west/{zenoh.ALIVE}"
    here._signs = {"west": {f"{key}/bb": 100.0, f"{key}/aa": 100.0 + 2 * zenoh.TOGETHER}}
    assert here.later("west") == {"aa"}
    here._signs = {"west": {f"{key}/bb": 100.0, f"{key}/aa": 100.1, f"{key}/cc": 180.0}}
    assert here.later("west") == {"bb", "cc"}
    assert here.later("south") == set()
