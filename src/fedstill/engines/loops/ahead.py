"""Batches of a loop for several steps at a time, made for many more at once; no steps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from fedstill.core import trees
from fedstill.core.data import Batches

TOGETHER = 4  # steps in one recording, where their batches are made at once
AT_ONCE = 2**25  # bytes of batches that are made at once


class Ahead:
    """Batches of a loop for TOGETHER steps at a time, made for many times as many at once."""

    def __init__(self, batches: Sequence[Any]):
        self.batches = batches
        self.first = self.count = 0  # of the steps whose batches are here
        self.most = TOGETHER  # steps to make batches of at once
        self.stack: Any = None

    def at(self, step: int) -> Any | None:
        """The batches of TOGETHER steps, stacked; None where they are not made at once."""
        if not self.first <= step <= self.first + self.count - TOGETHER:
            self.stack = None  # its memory may be needed for the next
            self.first, self.count = step, self._made(step)
        if self.stack is None or self.count == TOGETHER:
            return self.stack
        here = slice(step - self.first, step - self.first + TOGETHER)
        return trees.map_tensors(itemgetter(here), self.stack)

    def _made(self, step: int) -> int:
        """How many steps' batches there are from a step on."""
        left = (len(self.batches) - step) // TOGETHER
        if not left or not isinstance(self.batches, Batches):
            return 0
        count = min(self.most, left * TOGETHER)
        while (stack := self.batches.ahead(step, count)) is None:
            if count == TOGETHER:
                return 0
            count = max(1, count // TOGETHER // 2) * TOGETHER
        self.stack = stack
        each = sum(tensor.nbytes for tensor in trees.tensors(stack)) // count
        self.most = max(1, AT_ONCE // max(1, each) // TOGETHER) * TOGETHER
        return count
