"""What a site keeps in its folder: memories by their marks, the last answer, what it was asked,
and what its answers have spent of its privacy.

Nothing of it is sent but the answer. All of it is on the disk before an answer leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedstill.core.errors import SiteError
from fedstill.core.files import write_whole
from fedstill.core.records import NodeId, State
from fedstill.core.release import Spending
from fedstill.engines import spending
from fedstill.engines.outbox import channels_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.shelf import Shelf
from fedstill.sites.words import BLANK, NEVER

SCORES = "scores"  # so begins what is kept of an examination in place of an act


class Keeper:
    """Memories by mark for one client's engine; without a folder they are kept in this process."""

    def __init__(self, name: NodeId, engine: InProcess, folder: Path | None = None):
        self.name, self.engine, self.folder = name, engine, folder
        memories = None if folder is None else folder / "memories"
        held = engine.experiment.method.holds
        self.shelf = Shelf(engine.kind_of, memories, held, engine.device)
        self._last: tuple[str, bytes] | None = None  # request's digest and answer
        self._asked: dict[str, str] = {}  # what was asked by its digest, and which act it was
        self._spent: dict[str, list[Spending]] = {}  # by what was asked, in the order of answers
        self._released: dict[str, str] = {}  # the digest of each answer, by what was asked
        if folder is not None:
            with _on_disk():
                folder.mkdir(parents=True, exist_ok=True)
                self._read_back(folder)

    def recall(self, after: str, channels: str) -> None:
        """Put the engine's client back to the memories of these marks."""
        for node, mark in ((self.name, after), (channels_of(self.name), channels)):
            states = self.engine.states
            if mark == NEVER:
                states.pop(node, None)
            elif mark == BLANK:
                states[node] = None
            else:
                states[node] = self.shelf.get(node, mark)

    def recall_ledger(self, request: bytes) -> None:
        """Let the client have spent what all answers before the one to this request did.

        The ledger beside a memory is as old as the memory, and which one to start from is for
        others to say. A request that comes again finds what was spent when it first came.
        """
        before: list[Spending] = []
        for known, rows in self._spent.items():
            if known == _digest(request):
                break
            before += rows
        states = self.engine.states
        own: dict[NodeId, State | None] = {}
        spending.put(own, self.name, before)
        if before and spending.spent(own, self.name) != spending.spent(states, self.name):
            spending.put(states, self.name, before)

    def spend(self, request: bytes, rows: Sequence[Spending]) -> None:
        """Write down what the answer to a request spends; on the disk when it returns."""
        digest = _digest(request)
        if digest in self._spent:
            return
        every = {**self._spent, digest: [*rows]}
        if self.folder is not None:
            table = {
                known: [(r.mechanism, r.sigma, r.rate, r.releases) for r in own]
                for known, own in every.items()
            }
            with _on_disk():
                write_whole(self.folder / "spent.json", json.dumps(table))
        self._spent = every

    def release(self, request: bytes, answer: bytes) -> None:
        """Let an answer leave, and never another one to the same request.

        One that is made again, on another device or by another torch, may be rounded otherwise;
        with the same noise both would tell more than one.
        """
        asked, said = _digest(request), _digest(answer)
        if self._released.setdefault(asked, said) != said:
            raise SiteError(
                "it has answered this act before and comes to another answer now, on another "
                "device or with other versions; under privacy an act is released once"
            )
        if self.folder is not None:
            with _on_disk():
                write_whole(self.folder / "released.json", json.dumps(self._released))

    def remember(self) -> tuple[str, str]:
        """Keep what the client and its channels remember now; returns the two marks."""
        with _on_disk():
            return self._kept(self.name), self._kept(channels_of(self.name))

    def tidy(self, wanted: Sequence[str]) -> None:
        """Forget all memories but those under these marks."""
        with _on_disk():
            self.shelf.forget_others(wanted)

    def answer_to(self, request: bytes) -> bytes | None:
        """The last answer, if this very thing was asked."""
        return self._last[1] if self._last and self._last[0] == _digest(request) else None

    def answered(self, request: bytes, answer: bytes) -> None:
        """Keep an answer, so that it can be given again."""
        digest = _digest(request)
        self._last = (digest, answer)
        if self.folder is not None:
            with _on_disk():
                write_whole(self.folder / "last-answer", digest.encode() + answer)

    def asked_otherwise(self, act: str, request: bytes) -> bool:
        """Whether the same act was asked for with something else in it."""
        digest = _digest(request)
        return any(act == other and known != digest for known, other in self._asked.items())

    def allowed(self, act: str, request: bytes, most: int) -> bool:
        """Whether no more than `most` different acts, or scores, were asked for, with this.

        It is on the disk then; what is beyond is not kept, however often others are asked for.
        """
        digest = _digest(request)
        if digest in self._asked:
            return True
        scores = act.startswith(SCORES)
        if sum(other.startswith(SCORES) == scores for other in self._asked.values()) >= most:
            return False
        if self.folder is not None:
            with _on_disk():
                _add_line(self.folder / "asked", f"{digest} {act}")
        self._asked[digest] = act
        return True

    def _kept(self, node: NodeId) -> str:
        states = self.engine.states
        if node not in states:
            return NEVER
        state: State | None = states[node]
        return BLANK if state is None else self.shelf.keep(state)

    def _read_back(self, folder: Path) -> None:
        asked, last, spent, released = (
            folder / name for name in ("asked", "last-answer", "spent.json", "released.json")
        )
        if asked.exists():
            whole = [line for line in asked.read_text().splitlines(True) if line.endswith("\n")]
            lines = (line.rstrip("\n").split(" ", 1) for line in whole)
            self._asked = {line[0]: line[1] for line in lines if len(line) == 2}
        if last.exists():
            data = last.read_bytes()
            self._last = (data[:64].decode("ascii", "replace"), data[64:])
        if released.exists():
            self._released = json.loads(released.read_text())
        self._spent = read_spent(spent, self.name)


def read_spent(path: Path, name: NodeId) -> dict[str, list[Spending]]:
    """What a site has spent of its privacy, by what was asked, in the order of its answers."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    return {known: [Spending(0, "", name, *row) for row in rows] for known, rows in table.items()}


def _add_line(path: Path, line: str) -> None:
    """One line more; what a full disk or a kill left of an earlier one stays a line of its own."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _on_disk() -> Iterator[None]:
    """A disk that is full or cannot be written is said as such."""
    try:
        yield
    except OSError as error:
        raise SiteError(
            f"it cannot write to its folder: {error.strerror or error}; make room on its disk"
        ) from error
