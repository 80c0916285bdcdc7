"""Peers over zenoh on this machine: who hears what, who is refused, and what is forgotten."""

from __future__ import annotations

import json
import subprocess
import sys
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
from parties import Proxy, joined, trusting
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


def test_a_question_that_cannot_be_sent_is_waited_for_no_longer_than_asked(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to one who keeps its line and takes nothing."""
    with meeting(tmp_path, authority) as mesh:
        assert mesh["south"].present.wait_for(["north"], 20) == set()
        free, sent = threading.Event(), []

        def stuck(session: Any, key: str, *given: Any, **more: Any) -> None:
            sent.append(key)
            free.wait(30)

        monkeypatch.setattr(zenoh, "Question", stuck)
        try:
            for name in ("standing", "3/0"):
                began = time.monotonic()
                assert mesh["south"].fetch("north", name, 0.3) is None
                assert mesh["south"].fetch("north", name, 0.3) is None
                assert time.monotonic() - began < 5
            assert len(sent) == 2  # each is asked once, and no more of them pile up
        finally:
            free.set()


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


def test_who_waits_for_a_word_of_a_round_that_is_over_is_told_that_it_does_not_come(
    tmp_path: Path, authority: Authority
) -> None:
    with meeting(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert south.present.wait_for(["north"], 20) == set()
        north.say("4/0", b"said in time", "south")
        found: list[bytes | None] = []
        asking = threading.Thread(target=lambda: found.append(south.fetch("north", "4/1", 30)))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()
        north.passed(5)
        asking.join(30)
        assert found == [b""]
        assert south.fetch("north", "4/0", 30) == b"said in time"
        assert south.fetch("north", "5/0", 0.2) is None


@contextmanager
def slow_for_south(folder: Path, authority: Authority) -> Iterator[dict[str, ZenohMesh]]:
    """North is called by south on a line of 150 kB a second, and by west on a fast one."""
    address = f"127.0.0.1:{free_port()}"
    owns = {n: trusting(joined(folder / n, authority, n), authority) for n in NAMES}
    with ExitStack() as held:
        slow = held.enter_context(Proxy(address, rate=150_000))
        called = {"north": (address, {}), "south": (None, {"north": slow.address})}
        called["west"] = (None, {"north": address})
        mesh = {}
        for name, (listening, addresses) in called.items():
            others = {peer: addresses.get(peer) for peer in NAMES if peer != name}
            settings = zenoh.of_peer(owns[name], RUN, listening, others)
            settings["transport"]["link"]["tls"]["so_sndbuf"] = 1 << 16
            mesh[name] = ZenohMesh(zenoh.opened(settings), RUN, name, [*others])
            held.callback(mesh[name].close)
        assert mesh["north"].present.wait_for(["south", "west"], 20) == set()
        assert mesh["south"].present.wait_for(["north"], 20) == set()
        yield mesh


def test_a_large_word_on_a_slow_line_is_waited_for_in_pieces_and_sent_once(
    tmp_path: Path, authority: Authority
) -> None:
    with slow_for_south(tmp_path, authority) as mesh:
        mesh["north"].say("standing", b"small")
        mesh["north"].say("1/0", bytes(1_200_000), "south")
        mesh["north"].say("1/0", bytes(1_200_000), "west")
        began = time.monotonic()
        assert mesh["south"].fetch("north", "1/0", 0.2) is None  # it is on its way
        assert mesh["west"].fetch("north", "1/0", 5) == bytes(1_200_000)
        assert mesh["south"].fetch("north", "standing", 5) == b"small"  # not behind the large one
        assert time.monotonic() - began < 5
        word = None
        while word is None and time.monotonic() - began < 60:
            word = mesh["south"].fetch("north", "1/0", 0.2)
        assert word == bytes(1_200_000)
        assert time.monotonic() - began < 16  # once is eight seconds


def test_a_question_behind_a_large_word_on_a_slow_line_is_waited_for_no_longer_than_asked(
    tmp_path: Path, authority: Authority
) -> None:
    """What a peer says to another and what it asks of it share a line."""
    with slow_for_south(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        north.say("1/0", bytes(1_200_000), "south")
        south.say("2/0", b"small", "north")
        assert south.fetch("north", "1/0", 1.0) is None  # it is on its way
        began = time.monotonic()
        assert north.fetch("south", "2/0", 0.2) is None
        assert time.monotonic() - began < 3
        word = None
        while word is None and time.monotonic() - began < 60:
            word = north.fetch("south", "2/0", 0.5)
        assert word == b"small"


def test_a_question_that_brings_bytes_along_is_not_kept(
    tmp_path: Path, authority: Authority
) -> None:
    with meeting(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert south.present.wait_for(["north"], 20) == set()
        key = f"{zenoh.root(RUN)}/north/for/south/5/0"
        asked: list[tuple[str, dict[str, bytes]]] = [
            (key, {"payload": b"much"}),
            (key, {"attachment": b"much"}),
            (f"{key}?much=more", {}),
            (f"{key}/{'much' * zenoh.LONGEST_PLACE}", {}),
            (key, {}),
        ]
        for selector, more in asked:
            replies = south.session.get(selector, timeout=0.5, **more)
            assert not [reply for reply in replies if reply.ok]
            kept = [query for line in north._waiting["south"].values() for query in line]
            assert len(kept) == (selector == key and not more)


def test_of_many_answers_to_one_question_one_is_kept(tmp_path: Path, authority: Authority) -> None:
    with meeting(tmp_path, authority) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert south.present.wait_for(["north"], 20) == set()
        key, sent = f"{zenoh.root(RUN)}/north/for/south/many/5/0", threading.Event()

        def flood(query: Any) -> None:
            for number in range(20):
                query.reply(query.key_expr, b"%d" % number)
            sent.wait(20)
            query.drop()

        flooding = north.session.declare_queryable(
            f"{zenoh.root(RUN)}/north/for/south/many/**", flood
        )
        question = zenoh.Question(south.session, key, 20)
        assert question.answer(20) == b"0"
        assert question.answer(1.0) is None  # nineteen more have come
        sent.set()
        flooding.undeclare()


GREEDY = """
import sys, time, zenoh
session = zenoh.open(zenoh.Config.from_json5(open(sys.argv[1]).read()))
time.sleep(1)
def heard(reply):
    print("heard", flush=True)
    time.sleep(60)
for number in range(2050):
    hearing = zenoh.handlers.Callback(heard, indirect=False)
    session.get(sys.argv[2 if number > 50 else 3], hearing, timeout=60)
time.sleep(60)
"""


@pytest.mark.parametrize("word", ["standing", "1/0"])
def test_who_asks_without_end_and_takes_no_answer_keeps_nobody_else_waiting(
    tmp_path: Path, authority: Authority, word: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    owns = {n: trusting(joined(tmp_path / n, authority, n), authority) for n in NAMES}
    called = {"north": (address, {}), "west": (None, {"north": address})}
    with ExitStack() as held:
        mesh = {}
        for name, (listening, addresses) in called.items():
            others = {peer: addresses.get(peer) for peer in NAMES if peer != name}
            settings = zenoh.of_peer(owns[name], RUN, listening, others)
            mesh[name] = ZenohMesh(zenoh.opened(settings), RUN, name, [*others])
            held.callback(mesh[name].close)
        north, west = mesh["north"], mesh["west"]
        assert west.present.wait_for(["north"], 20) == set()
        north.say("standing", bytes(100_000))
        north.say("1/0", bytes(1 << 22), "south")
        settings = zenoh.of_peer(owns["south"], RUN, None, {"north": address, "west": None})
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        call = [sys.executable, "-c", GREEDY, str(tmp_path / "settings.json")]
        call += [f"{zenoh.root(RUN)}/north/for/south/{asked}" for asked in (word, "5/0")]
        greedy = held.enter_context(subprocess.Popen(call, stdout=subprocess.PIPE, text=True))
        held.callback(greedy.kill)
        assert greedy.stdout is not None
        assert greedy.stdout.readline().strip() == "heard"
        time.sleep(2.0)
        began = time.monotonic()
        assert west.fetch("north", "standing", 5) == bytes(100_000)
        assert time.monotonic() - began < 3
        assert north._waiting["south"]
        north.say("5/0", bytes(1 << 20), "south")
        north.forget(before=9)
        assert time.monotonic() - began < 5
        north.say("standing", b"further")  # what is said to the greedy one keeps north from nothing
        assert west.fetch("north", "standing", 5) == b"further"
        assert north._sending["south"] <= zenoh.MOST_SENDING


def test_a_peer_that_speaks_in_anothers_name_is_not_heard(
    tmp_path: Path, authority: Authority
) -> None:
    unruly = {"south": {"access_control": {"enabled": False}}}
    with meeting(tmp_path, authority, **unruly) as mesh:
        north, south = mesh["north"], mesh["south"]
        assert north.present.wait_for(["south", "west"], 20) == set()
        key = f"{zenoh.root(RUN)}/west/for/north/forged"
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
