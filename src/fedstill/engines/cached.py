"""A cache as one engine may use it: what another one rounds otherwise lies under other keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import torch

from fedstill.core.node import Cache
from fedstill.core.records import Record

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution

R = TypeVar("R", bound=Record)
T = TypeVar("T")


class HalfKept(BaseException):
    """Some of the nodes that play a step found what they looked for, and others did not.

    It ends the step, not the run, so what treats mistakes of methods does not see it.
    """


class CachedAs:
    """A cache whose keys say too how an engine computes; `how` is asked when a key is made."""

    def __init__(self, cache: Cache, how: Callable[[], str]):
        self.cache, self.how = cache, how
        self._looks = True
        self._found: set[bool] | None = None  # whether nodes found something, where all must

    def all_or_nobody(self, play: Callable[[], T]) -> T:
        """Play a step whose nodes all find what they look for, or nobody does.

        A run that was killed, or that plays beside this one, may have kept a part. Then the step
        is begun again and all is made: a part of a stack would be rounded otherwise.
        """
        self._found = set()
        try:
            with suppress(HalfKept):
                return play()
            self._looks = False
            return play()
        finally:
            self._looks, self._found = True, None

    def key(self, made_by: str) -> str:
        """The key of what is made so and computed as it is here."""
        return hashlib.sha256(f"{self.how()} {made_by}".encode()).hexdigest()

    def find(self, key: str, kind: type[R]) -> R | None:
        """The record of a key, or None."""
        if not self._looks:
            return None
        record = self.cache.find(key, kind)
        if self._found is not None:
            self._found.add(record is not None)
            if len(self._found) > 1:
                raise HalfKept
        return record

    def keep(self, key: str, record: Record) -> None:
        """Put a record under its key."""
        self.cache.keep(key, record)


def rounding(execution: Execution) -> str:
    """What decides on the last digits of results beside the engine."""
    device = execution.torch_device
    if device.type == "cuda":
        name, recorded = torch.cuda.get_device_name(device), execution.record
        where = f"{name}, {execution.precision}, recorded: {recorded}"
    else:
        where = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {where}, compiled: {execution.compile}"
