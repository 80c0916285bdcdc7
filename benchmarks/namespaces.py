"""Machines of a trial: a network namespace each, with a cable to a switch that can be impaired.

Frames pass through this process, which delays, drops or throttles them, or lets them vanish: a
cable that is pulled closes no connection, as the end of a process does. It needs Linux and root.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

ALL_PROTOCOLS = 3
FRAME = 1 << 16  # bytes, more than any frame has
MOST_QUEUED = 1 << 18  # bytes that wait for a slow cable; more are dropped
# Requests of ethtool: without these a frame leaves its machine larger than a cable takes, and
# without checksums.
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # checksums, segments, and segments joined both ways
SIOCETHTOOL = 0x8946


@dataclass
class Way:
    """One direction of a cable."""

    delay: float = 0.0  # seconds
    loss: float = 0.0  # share of frames that are dropped
    rate: float = float("inf")  # bytes a second
    dark: bool = False  # whether all frames vanish
    carried: int = 0  # bytes so far
    dropped: int = 0  # frames so far
    _free: float = 0.0  # when the frame before has left

    def leaves(self, now: float, size: int, chance: float) -> float | None:
        """When a frame arrives at the other end; None if it never does."""
        begins = max(now, self._free)
        if self.dark or chance < self.loss or (begins - now) * self.rate > MOST_QUEUED:
            self.dropped += 1
            return None
        self._free = begins + size / self.rate
        self.carried += size
        return self._free + self.delay


@dataclass
class Cable:
    """Between a machine and the switch."""

    up: Way = field(default_factory=Way)  # from the machine
    down: Way = field(default_factory=Way)

    def both(self, **changes: float | bool) -> None:
        """Change both directions."""
        for way in (self.up, self.down):
            for name, value in changes.items():
                setattr(way, name, value)


class Network:
    """Some machines, their addresses, and the switch between them."""

    def __init__(self, names: Sequence[str], prefix: str):
        self.names, self.prefix = list(names), prefix
        self.hub = self.space("hub")
        self.cables = {name: Cable() for name in names}
        self._over = threading.Event()

    def space(self, name: str) -> str:
        """The namespace of a machine."""
        return f"{self.prefix}-{name}"

    def address(self, name: str) -> str:
        """Where a machine is found at first."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def address6(self, name: str) -> str:
        """The same with IPv6."""
        return f"fd00::{self.names.index(name) + 1:x}"

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """A command on one of the machines."""
        return ["ip", "netns", "exec", self.space(name), *words]

    def ip(self, name: str, *words: str) -> str:
        """Configure a machine, as by hand."""
        return _called("ip", "-n", self.space(name), *words)

    def __enter__(self) -> Network:
        try:
            self._made()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing behind; its interfaces end with a namespace."""
        self._over.set()
        if hasattr(self, "_switch"):
            self._switch.join()
        for space in (self.hub, *map(self.space, self.names)):
            with suppress(SystemExit):
                _called("ip", "netns", "del", space)
            (Path("/etc/netns") / space / "hosts").unlink(missing_ok=True)
            with suppress(OSError):
                (Path("/etc/netns") / space).rmdir()

    def _made(self) -> None:
        hosts = "".join(f"{self.address(name)} {name}.example\n" for name in self.names)
        hosts += "".join(f"{self.address6(name)} {name}6.example\n" for name in self.names)
        _called("ip", "netns", "add", self.hub)
        doors: dict[str, socket.socket] = {}
        for place, name in enumerate(self.names):
            folder = Path("/etc/netns") / self.space(name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n" + hosts)
            _called("ip", "netns", "add", self.space(name))
            _called(
                "ip", "-n", self.hub, "link", "add", f"port{place}", "type", "veth", "peer",
                "name", "eth0", "netns", self.space(name),
            )  # fmt: skip
            _called("ip", "-n", self.hub, "link", "set", f"port{place}", "up")
            self.ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.ip(name, "addr", "add", f"{self.address6(name)}/64", "dev", "eth0", "nodad")
            self.ip(name, "link", "set", "lo", "up")
            self.ip(name, "link", "set", "eth0", "up")
            with inside(self.space(name)):
                _without_offloads("eth0")
            with inside(self.hub):
                _without_offloads(f"port{place}")
                doors[name] = socket.socket(
                    socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)
                )
                doors[name].bind((f"port{place}", ALL_PROTOCOLS))
        self._switch = threading.Thread(target=self._switching, args=(doors,), daemon=True)
        self._switch.start()

    def _switching(self, doors: dict[str, socket.socket]) -> None:
        """Carry frames until the end: each over the cable of its sender, then its receiver's."""
        owner = {door.fileno(): name for name, door in doors.items()}
        homes: dict[bytes, str] = {}  # where each address of hardware was last seen
        waiting: list[tuple[float, int, str, bool, bytes]] = []
        numbers, chances = count(), random.Random(0)

        def sent(way: Way, name: str, over: bool, frame: bytes) -> None:
            at = way.leaves(time.monotonic(), len(frame), chances.random())
            if at is not None:
                heapq.heappush(waiting, (at, next(numbers), name, over, frame))

        for door in doors.values():
            door.setblocking(False)
        while not self._over.is_set():
            left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            ready, _, _ = select.select(owner, [], [], min(0.1, left))
            for number in ready:
                source = owner[number]
                for frame in _frames(doors[source]):
                    homes[frame[6:12]] = source
                    sent(self.cables[source].up, source, False, frame)
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, name, over, frame = heapq.heappop(waiting)
                if over:
                    with suppress(OSError):  # its interface may be down
                        doors[name].send(frame)
                    continue
                home = homes.get(frame[:6])
                for target in [home] if home else self.names:
                    if target != name:
                        sent(self.cables[target].down, target, True, frame)
        for door in doors.values():
            door.close()


@contextmanager
def inside(space: str) -> Iterator[None]:
    """What this thread opens meanwhile is opened in a namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{space}") as there:
        if library.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        try:
            yield
        finally:
            library.setns(before.fileno(), 0)


def possible() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "namespaces need Linux and root"
    try:
        probe = f"fedstill-probe-{os.getpid()}"
        _called("ip", "netns", "add", probe)
        _called("ip", "netns", "del", probe)
    except (OSError, SystemExit) as error:
        return f"namespaces cannot be made: {error}"
    return None


def _frames(door: socket.socket) -> Iterator[bytes]:
    """What has come by now; what this process has sent itself does not count."""
    with suppress(BlockingIOError, OSError):
        for _ in range(64):
            frame, sender = door.recvfrom(FRAME)
            if sender[2] != socket.PACKET_OUTGOING:
                yield frame


def _without_offloads(interface: str) -> None:
    with socket.socket() as any_socket:
        for request in OFFLOADS:
            value = array.array("B", struct.pack("II", request, 0))
            asked = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, asked)


def _called(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
