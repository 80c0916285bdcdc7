"""Parties with keys on this machine, and a line between them that can be cut."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedstill.sites import certificates
from fedstill.sites.certificates import Authority
from fedstill.sites.credentials import Credentials


def joined(
    folder: Path, authority: Authority, name: str, days: int = 365, hosts: Any = ("127.0.0.1",)
) -> Credentials:
    """A party with a key of its own and a certificate that an authority has signed."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = certificates.request(folder, name)
    made = certificates.signed(authority, asked.read_bytes(), name, hosts, days)
    own = Credentials(folder, name)
    own.certificate.write_bytes(made)
    return own


def trusting(own: Credentials, authority: Authority) -> Credentials:
    """With the certificate of an authority that this party trusts."""
    pem = authority.certificate.public_bytes(certificates.serialization.Encoding.PEM)
    own.authority.write_bytes(pem)
    return own


class Proxy:
    """Carries bytes to an address, so many a second, but for the time that it is cut."""

    def __init__(self, target: str, rate: float = float("inf")):
        self.host, port = target.rsplit(":", 1)
        self.port, self.rate = int(port), rate
        self.whole = threading.Event()
        self.whole.set()
        self.lines: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._serving, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.door.close()
        self.cut()

    def cut(self) -> None:
        """End all lines and take no call."""
        self.whole.clear()
        for line in self.lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self.lines.clear()

    def mend(self) -> None:
        """Take calls again."""
        self.whole.set()

    def _serving(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self.door.accept()
                if not self.whole.is_set():
                    here.close()
                    continue
                there = socket.create_connection((self.host, self.port))
                self.lines += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._carrying, args=pair, daemon=True).start()

    def _carrying(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            if self.rate < float("inf"):  # else the system would take megabytes at once
                source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
                target.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            while data := source.recv(1 << 14):
                time.sleep(len(data) / self.rate)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
