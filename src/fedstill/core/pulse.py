"""Pulse: how far the work at hand has come, for whoever waits for the end of a round.

A round of distillation can take minutes. Who listens is told now and then which step is played and
how much of it is done; where nobody listens, nothing is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

T = TypeVar("T")
APART = 0.1  # seconds between what is told


class Part(NamedTuple):
    """One of several things that are done in turn."""

    name: str  # of what is counted; empty for nodes
    number: int  # which one is being done, from 1
    of: int


class Pulse(NamedTuple):
    """A step, and what is being done of it: the node first, then the iteration of its loop."""

    round: int
    step: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        several = [part for part in self.parts if part.of > 1]
        told = [f"{part.name} {part.number}/{part.of}".strip() for part in several]
        return f"{self.step} {', '.join(told)}".strip()


Listener = Callable[[Pulse], None]


class _Heart:
    """What is being done now, told no more often than is worth it."""

    def __init__(self, listener: Listener):
        self.listener = listener
        self.round, self.step = 0, ""
        self.parts: list[Part] = []
        self.told = time.monotonic()

    def counted(self, items: Collection[T], name: str) -> Iterator[T]:
        depth = len(self.parts)
        for number, item in enumerate(items, 1):
            self.parts[depth:] = [Part(name, number, len(items))]
            self.beat()
            yield item
        del self.parts[depth:]

    def beat(self) -> None:
        now = time.monotonic()
        if now - self.told >= APART:
            self.told = now
            self.listener(Pulse(self.round, self.step, tuple(self.parts)))


_HEARD: ContextVar[_Heart | None] = ContextVar("heard", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside, this listener is told how far the work at hand has come."""
    token = _HEARD.set(_Heart(listener))
    try:
        yield
    finally:
        _HEARD.reset(token)


@contextmanager
def working_on(step: str, round: int) -> Iterator[None]:
    """Inside, this step is being played."""
    heart = _HEARD.get()
    if heart is None:
        yield
        return
    heart.round, heart.step, heart.parts = round, step, []
    try:
        yield
    finally:
        heart.parts = []


def counted(items: Collection[T], name: str = "") -> Iterable[T]:
    """The same items, each of which is told of when it is asked for."""
    heart = _HEARD.get()
    return items if heart is None else heart.counted(items, name)
