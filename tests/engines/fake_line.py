"""Ranks that are threads of one process, for tests of what ranks say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread

from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.protocol import Late
from fedstill.engines.ranks.spread import Leader, Site, serve


class Threads:
    """A line between threads."""

    def __init__(
        self,
        rank: int,
        size: int,
        queues: dict[tuple[int, int], Queue[bytes]],
        one_job: bool = True,
    ):
        self.rank, self.size, self.local_rank, self.queues = rank, size, rank, queues
        self.one_job = one_job
        self.sent = 0  # bytes

    def send(self, rank: int, data: bytes) -> None:
        assert isinstance(data, bytes)
        self.sent += len(data)
        self.queues[self.rank, rank].put(data)

    def receive(self, rank: int, seconds: float | None = None) -> bytes:
        try:
            return self.queues[rank, self.rank].get(timeout=60 if seconds is None else seconds)
        except Empty:
            raise Late(f"no answer within {seconds:g} s") from None


def transports(size: int, one_job: bool = True) -> list[Threads]:
    queues: dict[tuple[int, int], Queue[bytes]] = {
        (a, b): Queue() for a in range(size) for b in range(size)
    }
    return [Threads(rank, size, queues, one_job) for rank in range(size)]


@contextmanager
def spread(engines: list[InProcess]) -> Iterator[Leader]:
    """An engine over as many ranks as engines are given, while the others serve."""
    leader, *others = transports(len(engines))
    threads = [
        Thread(target=serve, args=(Site(engine), transport), daemon=True)
        for engine, transport in zip(engines[1:], others, strict=True)
    ]
    for thread in threads:
        thread.start()
    leading = Leader(engines[0], leader)
    yield leading
    leading.over()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
