"""What a private party has released, on its disk before anything leaves it.

Its noise follows from its key, the round and the step. So an act that is played again, for
whatever reason, must come to the very same answer: two with the same noise would tell more than
one. And what was spent counts, whichever memory is gone on from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedstill.core.errors import SiteError
from fedstill.core.files import sync_folder, write_lasting
from fedstill.core.records import NodeId, State
from fedstill.core.release import Spending
from fedstill.engines import spending
from fedstill.engines.play.in_process import InProcess

SPENT = "spent.json"  # a party's own ledger
DISTILLED = b"virtual data"  # in place of a request: what was spent before any came


class ReleaseLog:
    """What was asked of one client's engine, what it spent, and how it was answered.

    What is asked is known by its bytes, everything that the answer depends on. Without a folder all
    of it is kept in this process.
    """

    def __init__(self, name: NodeId, engine: InProcess, folder: Path | None = None):
        self.name, self.engine, self.folder = name, engine, folder
        self._asked: dict[str, str] = {}  # what was asked by its digest, and which act it was
        self._spent: dict[str, list[Spending]] = {}  # by what was asked, in the order of answers
        self._released: dict[str, str] = {}  # the digest of each answer, by what was asked
        if folder is not None:
            with on_disk():
                folder.mkdir(parents=True, exist_ok=True)
                self._read_back(folder)

    def recall_ledger(self, request: bytes) -> None:
        """Let the client have spent what all answers before the one to this request did.

        The ledger beside a memory is as old as the memory, and which one to start from is for
        others to say. A request that comes again finds what was spent when it first came.
        """
        before: list[Spending] = []
        for known, rows in self._spent.items():
            if known == digest_of(request):
                break
            before += rows
        states = self.engine.states
        own: dict[NodeId, State | None] = {}
        spending.put(own, self.name, before)
        if before and spending.spent(own, self.name) != spending.spent(states, self.name):
            spending.put(states, self.name, before)

    def spend(self, request: bytes, rows: Sequence[Spending]) -> None:
        """Write down what the answer to a request spends; on the disk when it returns."""
        digest = digest_of(request)
        if digest in self._spent:
            return
        every = {**self._spent, digest: [*rows]}
        if self.folder is not None:
            table = {
                known: [(r.mechanism, r.sigma, r.rate, r.releases) for r in own]
                for known, own in every.items()
            }
            with on_disk():
                write_lasting(self.folder / SPENT, json.dumps(table))
        self._spent = every

    def release(self, request: bytes, answer: bytes) -> None:
        """Let an answer leave, and never another one to the same request.

        One that is made again, on another device or by another torch, may be rounded otherwise;
        with the same noise both would tell more than one.
        """
        asked, said = digest_of(request), digest_of(answer)
        if self._released.setdefault(asked, said) != said:
            raise SiteError(
                "it has answered this act before and comes to another answer now, on another "
                "device or with other versions; under privacy an act is released once. Go on with "
                "the device and the versions that it began with"
            )
        if self.folder is not None:
            with on_disk():
                write_lasting(self.folder / "released.json", json.dumps(self._released))

    def asked_otherwise(self, act: str, request: bytes) -> bool:
        """Whether the same act was asked for with something else in it."""
        digest = digest_of(request)
        return any(act == other and known != digest for known, other in self._asked.items())

    def ask(self, act: str, request: bytes) -> None:
        """Write down that this is asked; on the disk when it returns."""
        digest = digest_of(request)
        if self._asked.get(digest) == act:  # a line that was cut off names another act
            return
        if self.folder is not None:
            with on_disk():
                _add_line(self.folder / "asked", f"{digest} {act}")
        self._asked[digest] = act

    def _read_back(self, folder: Path) -> None:
        asked, released = folder / "asked", folder / "released.json"
        if asked.exists():
            whole = [line for line in asked.read_text().splitlines(True) if line.endswith("\n")]
            lines = (line.rstrip("\n").split(" ", 1) for line in whole)
            self._asked = {line[0]: line[1] for line in lines if len(line) == 2}
        if released.exists():
            self._released = json.loads(released.read_text())
        self._spent = read_spent(folder / SPENT, self.name)


def read_spent(path: Path, name: NodeId) -> dict[str, list[Spending]]:
    """What a site has spent of its privacy, by what was asked, in the order of its answers."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    return {known: [Spending(0, "", name, *row) for row in rows] for known, rows in table.items()}


def _add_line(path: Path, line: str) -> None:
    """One line more; what a full disk or a kill left of an earlier one stays a line of its own."""
    new = not path.exists()
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def digest_of(data: bytes) -> str:
    """By which bytes are known here."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def on_disk() -> Iterator[None]:
    """A disk that is full or cannot be written is said as such."""
    try:
        yield
    except OSError as error:
        raise SiteError(
            f"it cannot write to its folder: {error.strerror or error}; make room on its disk"
        ) from error
