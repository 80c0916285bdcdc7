"""A door: bytes go in and out, and nobody who knocks can do harm."""

from __future__ import annotations

import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from fedstill.sites import door

SECRET = bytes(range(32))


@contextmanager
def opened(path: Path, most: int = 1 << 20) -> Iterator[None]:
    """A site behind a door that says everything twice."""
    over = Event()
    thread = Thread(
        target=door.serve, args=(path, SECRET, lambda data: data * 2, over.is_set, most)
    )
    thread.start()
    while not path.exists():
        over.wait(0.01)
    try:
        yield
    finally:
        over.set()
        thread.join(10)
        assert not thread.is_alive() and not path.exists(), "it ends with the run"


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_an_answer_comes_back(tmp_path: Path, size: int) -> None:
    with opened(tmp_path / "door"):
        assert door.ask(tmp_path / "door", SECRET, b"x" * size, 10) == b"x" * (2 * size)


def test_a_door_that_is_there_can_be_knocked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    def late(self: socket.socket, backlog: int) -> None:
        time.sleep(0.2)
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", late)
    with opened(tmp_path / "door"):
        assert door.ask(tmp_path / "door", SECRET, b"x", 10) == b"xx"


def test_only_its_owner_and_the_group_of_its_folder_may_knock(tmp_path: Path) -> None:
    with opened(tmp_path / "door"):
        assert stat.S_IMODE((tmp_path / "door").stat().st_mode) == 0o660


def test_a_caller_who_does_not_know_the_secret_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with opened(path):
        with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
            door.ask(path, bytes(32), b"question", 10)
        assert door.ask(path, SECRET, b"x", 10) == b"xx"


def test_a_caller_who_shows_the_secret_byte_by_byte_holds_the_door_no_longer_than_a_greeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GREETING", 0.5)
    path = tmp_path / "door"
    with opened(path), socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        began = time.monotonic()
        with pytest.raises(OSError):  # it is hung up on
            while time.monotonic() - began < 5:
                slow.sendall(b"x")
                time.sleep(0.2)
        assert door.ask(path, SECRET, b"x", 10) == b"xx"


def test_who_took_the_place_of_the_site_gets_no_question(tmp_path: Path) -> None:
    path, heard = tmp_path / "door", bytearray()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def impostor() -> None:
            call, _ = listener.accept()
            with call:
                call.sendall(bytes(32))
                heard.extend(call.recv(64))
                call.sendall(bytes(32))  # no proof
                heard.extend(call.recv(64))

        thread = Thread(target=impostor)
        thread.start()
        with pytest.raises(OSError, match="does not know its secret"):
            door.ask(path, SECRET, b"question", 10)
        thread.join(10)
    assert len(heard) == 64, "a proof and a challenge, and nothing after them"
    assert b"question" not in heard and SECRET not in heard


def test_who_announces_too_much_or_hangs_up_is_let_go_and_the_next_is_served(
    tmp_path: Path,
) -> None:
    path = tmp_path / "door"
    with opened(path, most=100):
        for said in ((1 << 40).to_bytes(8, "little"), b"\x05", (50).to_bytes(8, "little") + b"few"):
            with socket.socket(socket.AF_UNIX) as call:
                call.settimeout(10)
                call.connect(str(path))
                door._greet_site(call, SECRET)
                call.sendall(said)
                call.shutdown(socket.SHUT_WR)
                assert call.recv(1) == b""
        with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
            door.ask(path, SECRET, b"x" * 101, 10)
        assert door.ask(path, SECRET, b"x", 10) == b"xx"
        with pytest.raises(OSError, match="2 bytes are announced, at most 1 are taken"):
            door.ask(path, SECRET, b"x", 10, most=1)


def test_a_door_that_is_not_there_or_cannot_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        door.ask(tmp_path / "door", SECRET, b"x", 1)
    with pytest.raises(OSError, match="too long for a socket"):
        door.serve(tmp_path / ("d" * 100), SECRET, bytes)


def test_a_secret_of_another_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(OSError, match="has 5 bytes, not 32"):
        door.read_secret(tmp_path / "key")
