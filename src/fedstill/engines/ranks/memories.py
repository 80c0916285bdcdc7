"""The memories of a run whose clients are at other ranks: fetched, or kept where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from fedstill.core.method import Method, Place, memory_of
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId, Record, State
from fedstill.engines.memories import Memories
from fedstill.engines.outbox import kind_of, owner
from fedstill.engines.ranks.letters import (
    packed,
    unpacked,
)
from fedstill.engines.ranks.protocol import (
    LEADER,
    AtSite,
    Drop,
    Keep,
    Memory,
    Recall,
    Remember,
    Restore,
    SpillTo,
    Transport,
    ask_one,
)

T = TypeVar("T")


class RemoteMemories(Memories):
    """The memory of every node that has acted; those of other ranks' clients are fetched.

    From behind walls they are not: a site keeps its own, and a mark of it is what one gets.
    """

    def __init__(
        self, own: Memories, transport: Transport, owners: Mapping[NodeId, int], method: Method
    ):
        super().__init__(own.limit, own.device)
        self.transport = transport
        self.owners = owners
        self.kind, self.held = memory_of(method, Place.CLIENTS), method.holds
        self.times = 2  # how often a site keeps what a client remembered
        self._far: set[NodeId] = set()  # who remembers something, at another rank

    def __getitem__(self, node: NodeId) -> State | None:
        if node not in self._far:
            return super().__getitem__(node)
        if not self.transport.one_job:
            asked = Keep(node, self.times)
            return cast(AtSite, ask_one(self.transport, self.rank_of(node), asked))
        answer = cast(Memory, ask_one(self.transport, self.rank_of(node), Recall(node)))
        return unpacked(answer.data, kind_of(node, self.kind), self.device, self.held)

    def __setitem__(self, node: NodeId, state: State | None) -> None:
        if self.rank_of(node) == LEADER:
            super().__setitem__(node, state)
            return
        told: Record = Remember(node, packed(state))
        if isinstance(state, AtSite):
            told = Restore(node, state.mark)
        ask_one(self.transport, self.rank_of(node), told)
        self.note(node, blank=state is None)

    def __delitem__(self, node: NodeId) -> None:
        super().__delitem__(node)
        if self.rank_of(node) != LEADER:
            ask_one(self.transport, self.rank_of(node), Drop(node))
            self._far.discard(node)

    def is_blank(self, node: NodeId) -> bool:
        return node not in self._far and super().is_blank(node)

    def rank_of(self, node: NodeId) -> int:
        """Who plays a node, or has what channels remember at it; the leader plays the server."""
        return LEADER if owner(node) == SERVER else self.owners[owner(node)]

    def note(self, node: NodeId, *, blank: bool) -> None:
        """Another rank's client remembers something else now, or nothing."""
        self._held[node] = None
        self._far.discard(node)
        if not blank:
            self._far.add(node)
        self.changed.add(node)

    @contextmanager
    def spilling_to(self, folder: Path) -> Iterator[None]:
        with super().spilling_to(folder):
            if not self.transport.one_job:
                yield
                return
            for rank in range(1, self.transport.size):
                ask_one(self.transport, rank, SpillTo(str((folder / f"rank-{rank}").absolute())))
            yield
