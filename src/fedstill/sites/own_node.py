"""What a coordinator's and a peer's engine share: one node is played here, all others elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedstill.core.errors import SiteError
from fedstill.core.node import Node
from fedstill.core.records import NodeId, State
from fedstill.engines.checkpoint import Saved
from fedstill.engines.play.in_process import InProcess


class OwnNode:
    """One node's memory, in an engine of its own; others keep theirs to themselves."""

    def __init__(self, inner: InProcess, me: NodeId):
        self.inner, self.me = inner, me
        self.notes = inner.notes
        self.experiment, self.population = inner.experiment, inner.population
        self._at = (-1, 0)  # the round, and the number of the act in it

    def save(
        self,
        folder: Path,
        round: int,
        *,
        digest: str,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """A checkpoint of what is remembered here."""
        self.inner.save(folder, round, digest=digest, keep=keep, extra=extra)

    def load(self, folder: Path, *, digest: str | None) -> Saved | None:
        """Go on from the newest checkpoint that is whole."""
        return self.inner.load(folder, digest=digest)

    def memory(self, node: NodeId) -> State | None:
        """What the node that is played here remembers."""
        return self.inner.memory(node) if node == self.me else None

    def spilling_to(self, folder: Path) -> AbstractContextManager[None]:
        """For a while, put memories beyond the limit into files of this folder."""
        return self.inner.spilling_to(folder)

    def node(self, id: NodeId, round: int, step: str) -> Node[Any]:
        """The node that is played here, as a step sees it."""
        if id != self.me:
            raise SiteError(f"{id} is at its own place, not here")
        return self.inner.node(id, round, step)

    def _next_act(self, round: int) -> None:
        """Count acts: a step may be listed several times in a round."""
        self._at = (round, self._at[1] + 1 if self._at[0] == round else 0)
