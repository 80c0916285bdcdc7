"""A line between threads of one process, for trials of what ranks and sites say to each other."""

from __future__ import annotations

from queue import Empty, Queue

from fedstill.engines.ranks.protocol import Late

Queues = dict[tuple[int, int], "Queue[bytes]"]  # by sender and receiver


class Threads:
    """One end of a line between threads; what is sent is bytes, as between machines."""

    def __init__(self, rank: int, size: int, queues: Queues, one_job: bool = True):
        self.rank, self.size, self.local_rank = rank, size, rank
        self.queues, self.one_job = queues, one_job
        self.sent = 0  # bytes

    def send(self, rank: int, data: bytes) -> None:
        """Hand bytes to another thread."""
        self.sent += len(data)
        self.queues[self.rank, rank].put(bytes(data))

    def receive(self, rank: int, seconds: float | None = None) -> bytes:
        """What another thread sent next."""
        try:
            return self.queues[rank, self.rank].get(timeout=seconds)
        except Empty:
            raise Late(f"no answer within {seconds:g} s") from None


def transports(size: int, one_job: bool = True) -> list[Threads]:
    """The ends of a line between so many threads."""
    queues: Queues = {(a, b): Queue() for a in range(size) for b in range(size)}
    return [Threads(rank, size, queues, one_job) for rank in range(size)]
