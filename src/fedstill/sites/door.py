"""A door to a site on its own machine: a Unix socket, one question and one answer a call.

Whoever carries bytes to a site, such as an app that another program starts anew for every message,
needs neither torch nor the right to read data: it asks at the door. Both ends show that they know
the door's secret before anything is said. This file imports nothing of fedstill: it is copied into
such an app.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

MOST = 1 << 30  # bytes of a question or an answer
SIZE = 8  # bytes that say how many follow
SECRET = 32  # bytes of a secret, of a challenge and of the proof that one knows the secret
LOOK = 0.5  # seconds between two looks at whether the site has ended
GREETING = 5.0  # seconds for a caller to show that it knows the secret
PATIENCE = 60.0  # seconds without a byte after which a caller is let go
LONGEST_PATH = 100  # characters; the system's limit for sockets is a little above


def serve(
    path: Path,
    secret: bytes,
    answer: Callable[[bytes], bytes],
    over: Callable[[], bool] = lambda: False,
    most: int = MOST,
) -> None:
    """Answer one caller after the other until the run is over.

    The socket is for the owner and the group of its folder, and is there once it can be called. A
    caller that does not know the secret, breaks off, says nothing, or announces more than `most`
    bytes is let go; the next one is served.
    """
    if len(str(path)) > LONGEST_PATH:
        raise OSError(f"{path} is longer than {LONGEST_PATH} characters, too long for a socket")
    made = path.with_name(path.name + "~")
    made.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o117)
        try:
            listener.bind(str(made))
        finally:
            os.umask(before)
        listener.listen(8)
        made.replace(path)
        listener.settimeout(LOOK)
        try:
            while not over():
                _answered(listener, secret, answer, most)
        finally:
            path.unlink(missing_ok=True)


def _answered(
    listener: socket.socket, secret: bytes, answer: Callable[[bytes], bytes], most: int
) -> None:
    try:
        call, _ = listener.accept()
    except TimeoutError:
        return
    with call:
        try:
            call.settimeout(GREETING)
            _greet_caller(call, secret, time.monotonic() + GREETING)
            call.settimeout(PATIENCE)
            _put(call, answer(_taken(call, most)))
        except (OSError, EOFError):
            return  # whoever asks again is answered the same


def ask(
    path: Path | str,
    secret: bytes,
    question: bytes,
    seconds: float | None = None,
    most: int = MOST,
) -> bytes:
    """What the site behind a door answers; an OSError where it does not."""
    with socket.socket(socket.AF_UNIX) as call:
        call.settimeout(GREETING)
        call.connect(str(path))
        call.settimeout(seconds)
        try:
            _greet_site(call, secret)
            _put(call, question)
            return _taken(call, most)
        except EOFError as error:
            raise OSError(f"the site behind {path} hung up") from error


def read_secret(path: Path | str) -> bytes:
    """The secret in a file."""
    secret = Path(path).read_bytes()
    if len(secret) != SECRET:
        raise OSError(f"{path} has {len(secret)} bytes, not {SECRET}; it is no secret of a door")
    return secret


def _greet_caller(call: socket.socket, secret: bytes, until: float) -> None:
    challenge = secrets.token_bytes(SECRET)
    call.sendall(challenge)
    proof, asked = _exactly(call, SECRET, until), _exactly(call, SECRET, until)
    if not hmac.compare_digest(proof, _proof(secret, b"caller", challenge)):
        raise OSError("the caller does not know the secret of this door")
    call.sendall(_proof(secret, b"site", asked))


def _greet_site(call: socket.socket, secret: bytes) -> None:
    asked = secrets.token_bytes(SECRET)
    call.sendall(_proof(secret, b"caller", _exactly(call, SECRET)) + asked)
    if not hmac.compare_digest(_exactly(call, SECRET), _proof(secret, b"site", asked)):
        raise OSError("who listens at this door does not know its secret")


def _proof(secret: bytes, who: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, who + challenge, "sha256")


def _put(call: socket.socket, data: bytes) -> None:
    call.sendall(len(data).to_bytes(SIZE, "little"))
    if data:  # who hears that nothing comes may answer and be gone
        call.sendall(data)


def _taken(call: socket.socket, most: int) -> bytes:
    """What the other end says; its size is looked at before memory is taken for it."""
    size = int.from_bytes(_exactly(call, SIZE), "little")
    if size > most:
        raise OSError(f"{size} bytes are announced, at most {most} are taken")
    return _exactly(call, size)


def _exactly(call: socket.socket, size: int, until: float | None = None) -> bytes:
    """So many bytes; with `until` all of them by then, however often some more come."""
    made = bytearray(size)
    view, got = memoryview(made), 0
    while got < size:
        if until is not None:
            call.settimeout(max(0.001, until - time.monotonic()))
        count = call.recv_into(view[got:])
        if not count:
            raise EOFError("the other end hung up")
        got += count
    return bytes(made)
