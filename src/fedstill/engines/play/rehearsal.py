"""The engine that plays every step and skips every loop: exact messages, no training."""

from __future__ import annotations

from typing import Any

from fedstill.core.loop import Loop
from fedstill.core.node import Node
from fedstill.engines.play.in_process import InProcess
from fedstill.engines.spending import Purse


class Rehearsal(InProcess):
    """A loop's result has the shape of its start, so messages have their true sizes."""

    name = "rehearsal"

    def _purse(self) -> Purse | None:
        """Everything is granted, and what was asked is kept."""
        privacy = self.experiment.privacy
        return None if privacy is None else Purse(privacy, self.states, unlimited=True)

    def _run(self, loop: Loop[Any], node: Node[Any]) -> Any:
        return loop.carry
