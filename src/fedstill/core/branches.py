"""Works that do not need each other, as branches of a recording; no arithmetic.

The launches of a recorded step wait for each other in a row, though a small network does not fill
a GPU. Where a step has parts that do not need each other, such as the teachers that look at one
batch, each may be a branch of the recording, and the GPU runs branches beside each other. What
comes out is the same: every branch does what it would do alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_free: ContextVar[Callable[[], Sequence[Any]]] = ContextVar("free", default=tuple)


@contextmanager
def branching(streams: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Inside, works may be put onto these streams, which no other recording uses."""
    before = _free.set(streams)
    try:
        yield
    finally:
        _free.reset(before)


def in_branches(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each of several works returns: beside each other while a step is recorded, else in turn.

    Works begin when all before them is done, and what follows begins when all of them are. Their
    gradients branch as they do. Works of a work are done in turn.
    """
    free = _free.get()() if len(works) > 1 else ()
    if not free:
        return [work() for work in works]
    here = torch.cuda.current_stream()
    lanes = [here, *free][: len(works)]
    for lane in lanes[1:]:
        lane.wait_stream(here)
    found = []
    with branching(tuple):
        for place, work in enumerate(works):
            with torch.cuda.stream(lanes[place % len(lanes)]):
                found.append(work())
    for lane in lanes[1:]:
        here.wait_stream(lane)
    return found
