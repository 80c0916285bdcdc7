"""Work: how much a node computed in a step; no seconds."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Steps of loops, and floating-point operations in them."""

    steps: int = 0
    operations: int = 0

    def more(self, other: Work) -> Work:
        """Both together."""
        return Work(self.steps + other.steps, self.operations + other.operations)
