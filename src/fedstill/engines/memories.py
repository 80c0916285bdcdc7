"""What nodes remember between steps; what outgrows a limit sleeps on disk. No knowledge of runs."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from fedstill.core.errors import BadValue, RunFolderError, WireError
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, Record, State
from fedstill.wire import codec


class Asleep(NamedTuple):
    """A memory that lies in a file."""

    file: Path
    kind: type[State]
    held: tuple[type[Record], ...]  # the kinds of records in fields of any kind


class Memories(MutableMapping[NodeId, State | None]):
    """The memory of every node that has acted, in the order of their first acts.

    With a limit, clients' memories at hand take so many bytes together; those not used for the
    longest time are put into files and come back, bit for bit, when they are asked for. The
    server's memory and the one used last stay at hand whatever their size.
    """

    def __init__(self, limit: int | None = None, device: torch.device | str = "cpu"):
        if limit is not None and limit < 0:
            raise BadValue(f"memory_limit = {limit}: must be at least 0 bytes")
        self.limit = limit
        self.device = device
        self.folder: Path | None = None  # of the files; a temporary one unless it is set
        self.changed: set[NodeId] = set()  # whose memory was set since this was last cleared
        self._held: dict[NodeId, State | Asleep | None] = {}
        self._files: dict[NodeId, Asleep] = {}  # files that hold what their node remembers now
        self._at_hand: dict[NodeId, int] = {}  # bytes of clients' memories, the last used one last
        self._bytes = 0
        self._written = 0

    def __getitem__(self, node: NodeId) -> State | None:
        held = self._held[node]
        if isinstance(held, Asleep):
            held = self._held[node] = self._woken(node, held)
        self._used(node, held)
        return held

    def __setitem__(self, node: NodeId, state: State | None) -> None:
        if node not in self._held or self._held[node] is not state:
            self._forget_file(node)
            self._held[node] = state
            self.changed.add(node)
        self._used(node, state)

    def __delitem__(self, node: NodeId) -> None:
        del self._held[node]
        self._forget_file(node)
        self._bytes -= self._at_hand.pop(node, 0)
        self.changed.discard(node)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, node: object) -> bool:
        return node in self._held  # without waking anybody

    def clear(self) -> None:
        for node in list(self):  # without waking anybody
            del self[node]

    def is_blank(self, node: NodeId) -> bool:
        """Whether a node remembers nothing; nobody is woken."""
        return self._held.get(node) is None

    @property
    def asleep(self) -> list[NodeId]:
        """The clients whose memories lie on disk."""
        return [node for node, held in self._held.items() if isinstance(held, Asleep)]

    @contextmanager
    def spilling_to(self, folder: Path) -> Iterator[None]:
        """Put files here; what an earlier run left is deleted first, and all of it at the end."""
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _used(self, node: NodeId, state: State | None) -> None:
        """Put a memory last in the line of those that may have to leave, and keep the limit."""
        if self.limit is None or node == SERVER:
            return
        self._bytes -= self._at_hand.pop(node, 0)
        if state is None:
            return
        self._at_hand[node] = sum(state.bytes().values())
        self._bytes += self._at_hand[node]
        while self._bytes > self.limit and len(self._at_hand) > 1:
            self._put_aside(next(iter(self._at_hand)))

    def _put_aside(self, node: NodeId) -> None:
        state = self._held[node]
        if node not in self._files:
            assert isinstance(state, State)
            self._files[node] = self._filed(node, state)
        self._held[node] = self._files[node]
        self._bytes -= self._at_hand.pop(node)

    def _filed(self, node: NodeId, state: State) -> Asleep:
        folder = self._place()
        file = folder / f"{self._written}.safetensors"
        self._written += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(codec.encode(state))
        except OSError as error:
            raise RunFolderError(
                f"cannot put the memory of {node} aside in {folder}: {error.strerror or error}; "
                "make room on the disk, or raise engine.memory_limit"
            ) from error
        return Asleep(file, type(state), tuple(state.held_kinds()))

    def _woken(self, node: NodeId, asleep: Asleep) -> State:
        try:
            return codec.load(asleep.file, asleep.kind, device=self.device, held=asleep.held)
        except (OSError, WireError) as error:
            raise RunFolderError(
                f"the memory of {node}, put aside in {asleep.file}, cannot be read back: {error}; "
                "resume the run from its last checkpoint"
            ) from error

    def _forget_file(self, node: NodeId) -> None:
        old = self._files.pop(node, None)
        if old is not None:
            old.file.unlink(missing_ok=True)

    def _place(self) -> Path:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="fedstill-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        return self.folder
