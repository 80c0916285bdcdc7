"""Ranks that are threads of one process, for tests of what ranks say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Thread
from typing import Any

from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.spread import Spread, Worker, serve


class Threads:
    """A line between threads."""

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], Queue[bytes]]):
        self.rank, self.size, self.local_rank, self.queues = rank, size, rank, queues
        self.sent = 0  # bytes

    def send(self, rank: int, data: bytes) -> None:
        assert isinstance(data, bytes)
        self.sent += len(data)
        self.queues[self.rank, rank].put(data)

    def receive(self, rank: int) -> bytes:
        return self.queues[rank, self.rank].get(timeout=60)


def transports(size: int) -> list[Threads]:
    queues: dict[tuple[int, int], Queue[bytes]] = {
        (a, b): Queue() for a in range(size) for b in range(size)
    }
    return [Threads(rank, size, queues) for rank in range(size)]


@contextmanager
def spread(engines: list[InProcess], question: Any = None) -> Iterator[Spread]:
    """An engine over as many ranks as engines are given, while the others serve."""
    leader, *others = transports(len(engines))
    threads = [
        Thread(target=serve, args=(Worker(engine, question), transport), daemon=True)
        for engine, transport in zip(engines[1:], others, strict=True)
    ]
    for thread in threads:
        thread.start()
    made = Spread(engines[0], leader)
    yield made
    made.over()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
