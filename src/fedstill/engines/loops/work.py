"""How much work a loop is, by its shapes alone: the same in every engine and on every device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fedstill.core import trees
from fedstill.core.data import Plan
from fedstill.core.loop import Loop, SeededBatches
from fedstill.core.torch_internals import operations
from fedstill.core.work import Work
from fedstill.engines.engine import autograd_gradient


class Counter:
    """Counts steps and, where they matter, operations.

    For these one step of every kind is played without numbers, and remembered.
    """

    def __init__(self, operations: bool):
        self.operations = operations
        self.known: dict[Any, int] = {}

    def of(self, loop: Loop[Any]) -> Work:
        """The work of a whole loop."""
        if not self.operations:
            return Work(len(loop.batches))
        each = (len(steps) * self._of_step(loop, steps[0]) for steps in _alike(loop.batches))
        return Work(len(loop.batches), sum(each))

    def _of_step(self, loop: Loop[Any], step: int) -> int:
        batch, given = loop.batches[step], dict(loop.given)
        kind = (loop.body, *map(trees.shape, (loop.carry, given, batch)))
        if kind not in self.known:
            # Without a place for numbers there are shapes alone, and no kernels of a device.
            carry, fixed, seen = (trees.to(part, "meta") for part in (loop.carry, given, batch))
            with torch.device("meta"):  # also for what a network of one's own makes within a pass
                self.known[kind] = operations(
                    lambda: loop.body(carry, fixed, seen, autograd_gradient)
                )
        return self.known[kind]


def _alike(batches: Sequence[Any]) -> Iterable[list[int]]:
    """Steps whose batches have the same shapes, together."""
    plain = batches.plain if isinstance(batches, SeededBatches) else batches
    found: dict[Any, list[int]] = {}
    for step in range(len(plain)):
        kind = plain.sizes[step] if isinstance(plain, Plan) else trees.shape(plain[step])
        found.setdefault(kind, []).append(step)
    return found.values()
