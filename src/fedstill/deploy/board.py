"""A board that says who is in which step: written to a file every second, read by anybody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedstill.core.errors import SiteError
from fedstill.core.files import write_whole
from fedstill.core.records import NodeId
from fedstill.deploy.meanwhile import meanwhile
from fedstill.federation.run import Progress
from fedstill.runs.folder import taken
from fedstill.sites.away import ASKED, Asked

EVERY = 1.0  # seconds
FILE, STOP = "status.json", "stop"


@dataclass
class Row:
    """One site as the coordinator sees it."""

    here: bool = False
    round: int = 0
    step: str = ""
    said: str = ""
    last_seen: float | None = None  # seconds of the clock
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass
class Board:
    """Where a run stands, and every site of it."""

    run: str
    folder: Path
    rows: dict[NodeId, Row]
    here: Callable[[], set[NodeId]] = set
    round: int = 0
    rounds: int = 0
    score: float | None = None
    ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, asked: Asked) -> None:
        """A site was asked something, or has answered."""
        with self._lock:
            row = self.rows[asked.node]
            row.round, row.step, row.said = asked.round, asked.step, asked.said
            if asked.said == ASKED:
                row.bytes_sent += asked.sent
            elif asked.received:
                row.bytes_received += asked.received
                row.last_seen = time.time()

    def progress(self, progress: Progress) -> None:
        """A round is complete."""
        with self._lock:
            self.round, self.rounds, self.score = progress.round, progress.rounds, progress.score

    @property
    def stopped(self) -> bool:
        """Whether somebody asked the run to stop."""
        return (self.folder / STOP).exists()

    def begin(self) -> None:
        """Forget that an earlier process was asked to stop; from now on this one is."""
        (self.folder / STOP).unlink(missing_ok=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While a run lasts, write the board down every second."""
        self.write()
        try:
            with meanwhile(self.write, EVERY):
                yield
        finally:
            self.write()

    def write(self) -> None:
        """Write the board down; a full disk is no reason to stop."""
        with self._lock:
            here = self.here()
            for name, row in self.rows.items():
                row.here = name in here
                if row.here:
                    row.last_seen = time.time()
            table = {
                "run": self.run, "round": self.round, "rounds": self.rounds, "score": self.score,
                "ended": self.ended, "at": time.time(),
                "sites": {name: asdict(row) for name, row in self.rows.items()},
            }  # fmt: skip
        try:
            write_whole(self.folder / FILE, json.dumps(table, indent=2))
        except OSError:
            return


def read_board(folder: Path) -> Mapping[str, Any]:
    """What a board says."""
    path = folder / FILE
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.parent.exists():
            raise SiteError(f"there is no folder {folder.parent}; give a deployment's") from None
        raise SiteError(
            f"nothing runs in {folder} yet; start it with `fedstill deploy start`"
        ) from None
    except (OSError, ValueError) as error:
        raise SiteError(f"{path} cannot be read: {error}") from error
    return found


def ask_to_stop(folder: Path) -> None:
    """Leave word that the run is to stop."""
    if read_board(folder)["ended"]:
        raise SiteError(f"the run in {folder} has ended; there is nothing to stop")
    if not taken(folder):
        raise SiteError(
            f"nothing runs in {folder} now: it was stopped or killed; `fedstill deploy start` goes "
            "on from there"
        )
    (folder / STOP).touch()
