"""A cache as one engine may use it: what another one rounds otherwise lies under other keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from fedstill.core.node import Cache
from fedstill.core.records import Record

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution

R = TypeVar("R", bound=Record)


class CachedAs:
    """A cache whose keys say too how an engine computes; `how` is asked when a key is made."""

    def __init__(self, cache: Cache, how: Callable[[], str]):
        self.cache, self.how = cache, how

    def key(self, made_by: str) -> str:
        """The key of what is made so and computed as it is here."""
        return hashlib.sha256(f"{self.how()} {made_by}".encode()).hexdigest()

    def find(self, key: str, kind: type[R]) -> R | None:
        """The record of a key, or None."""
        return self.cache.find(key, kind)

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
