"""Ranks that are threads of one process, for tests of what ranks say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from fedstill.engines.play.in_process import InProcess
from fedstill.engines.ranks.follower import Follower, serve
from fedstill.engines.ranks.leader import Leader
from fedstill.engines.ranks.threads import transports


@contextmanager
def spread(engines: list[InProcess]) -> Iterator[Leader]:
    """An engine over as many ranks as engines are given, while the others serve."""
    leader, *others = transports(len(engines))
    threads = [
        Thread(target=serve, args=(Follower(engine), transport), daemon=True)
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
