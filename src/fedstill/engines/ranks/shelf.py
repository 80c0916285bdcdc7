"""What a site keeps of its clients' memories when the leader saves; nothing of it is sent.

The leader knows a memory by its mark, the SHA-256 of its bytes. So a run that goes on from a
checkpoint goes on from the very memories that it was saved with, or says which is missing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from fedstill.core.errors import RankError
from fedstill.core.files import write_lasting
from fedstill.core.records import NodeId, Record, State
from fedstill.wire import codec

_MARK = re.compile("[0-9a-f]{64}")


class Shelf:
    """Memories by their marks, of the last few times that each was put here.

    With a folder they lie in files of it, so that a site can be ended and begun again; `kind_of`
    says which memory a node has, `held` what it may hold in fields of any kind.
    """

    def __init__(
        self,
        kind_of: Callable[[NodeId], type[State] | None],
        folder: Path | None = None,
        held: Sequence[type[Record]] = (),
        device: torch.device | str = "cpu",
    ):
        self.kind_of, self.folder, self.held, self.device = kind_of, folder, held, device
        self._marks: dict[NodeId, list[str]] = {}  # of each node, the newest last
        self._held: dict[str, State] = {}  # where there is no folder

    def keep(self, state: State) -> str:
        """Keep a memory until it is told otherwise; returns its mark."""
        data = codec.encode(state)
        mark = hashlib.sha256(data).hexdigest()
        if self.folder is None:
            self._held[mark] = state
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._file(mark).exists():
                write_lasting(self._file(mark), data, by_several=True)
        return mark

    def forget_others(self, wanted: Collection[str]) -> None:
        """Forget all memories but those under these marks."""
        known = {*self._held}
        if self.folder is not None:
            known |= {file.stem for file in self.folder.glob("*.safetensors")}
        for mark in known - {*wanted}:
            self._forget(mark)

    def put(self, node: NodeId, state: State, times: int) -> str:
        """Keep a memory and forget those before the last so many; returns its mark."""
        mark = self.keep(state)
        marks = [other for other in self._marks.get(node, []) if other != mark] + [mark]
        self._marks[node] = marks[-times:]
        needed = {other for each in self._marks.values() for other in each}
        for old in set(marks) - needed:
            self._forget(old)
        return mark

    def get(self, node: NodeId, mark: str) -> State:
        """The memory of a node under a mark; an error where it is lost or is another."""
        state = self._read(node, mark) if _MARK.fullmatch(mark) else None
        if state is None or hashlib.sha256(codec.encode(state)).hexdigest() != mark:
            raise RankError(
                f"it has no memory {mark[:8]} of {node}; it was lost, or never made here"
            )
        return state

    def _read(self, node: NodeId, mark: str) -> State | None:
        kind = self.kind_of(node)
        if self.folder is None:
            return self._held.get(mark)
        if kind is None or not self._file(mark).exists():
            return None
        return codec.load(self._file(mark), kind, held=self.held, device=self.device)

    def _forget(self, mark: str) -> None:
        self._held.pop(mark, None)
        if self.folder is not None:
            self._file(mark).unlink(missing_ok=True)

    def _file(self, mark: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{mark}.safetensors"
