"""What a site keeps in its folder: memories by their marks, the last answer, and what it was asked.

Nothing of it is sent but the answer. All of it is on the disk before an answer leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstill.core.files import write_lasting
from fedstill.core.records import NodeId, State
from fedstill.engines.outbox import channels_of
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.shelf import Shelf
from fedstill.sites.release_log import ReleaseLog, digest_of, on_disk
from fedstill.sites.words import BLANK, NEVER

SCORES = "scores"  # so begins what is kept of an examination in place of an act


class Keeper(ReleaseLog):
    """Memories by mark for one client's engine; without a folder they are kept in this process."""

    def __init__(self, name: NodeId, engine: InProcess, folder: Path | None = None):
        self._last: tuple[str, bytes] | None = None  # request's digest and answer
        super().__init__(name, engine, folder)
        memories = None if folder is None else folder / "memories"
        held = engine.experiment.method.holds
        self.shelf = Shelf(engine.kind_of, memories, held, engine.device)

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

    def remember(self) -> tuple[str, str]:
        """Keep what the client and its channels remember now; returns the two marks."""
        with on_disk():
            return self._kept(self.name), self._kept(channels_of(self.name))

    def tidy(self, wanted: Sequence[str]) -> None:
        """Forget all memories but those under these marks."""
        with on_disk():
            self.shelf.forget_others(wanted)

    def answer_to(self, request: bytes) -> bytes | None:
        """The last answer, if this very thing was asked."""
        return self._last[1] if self._last and self._last[0] == digest_of(request) else None

    def answered(self, request: bytes, answer: bytes) -> None:
        """Keep an answer, so that it can be given again."""
        digest = digest_of(request)
        self._last = (digest, answer)
        if self.folder is not None:
            with on_disk():
                write_lasting(self.folder / "last-answer", digest.encode() + answer)

    def allowed(self, act: str, request: bytes, most: int) -> bool:
        """Whether no more than `most` different acts, or scores, were asked for, with this.

        It is on the disk then; what is beyond is not kept, however often others are asked for.
        """
        scores = act.startswith(SCORES)
        alike = [
            known for known, other in self._asked.items() if other.startswith(SCORES) == scores
        ]
        if len(alike) >= most and digest_of(request) not in self._asked:
            return False
        self.ask(act, request)
        return True

    def _kept(self, node: NodeId) -> str:
        states = self.engine.states
        if node not in states:
            return NEVER
        state: State | None = states[node]
        return BLANK if state is None else self.shelf.keep(state)

    def _read_back(self, folder: Path) -> None:
        super()._read_back(folder)
        last = folder / "last-answer"
        if last.exists():
            data = last.read_bytes()
            self._last = (data[:64].decode("ascii", "replace"), data[64:])
