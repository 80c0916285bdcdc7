"""Ports of this machine for servers of tests."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

# Below those that a system gives to whoever calls out: a caller that tries again and again while
# nobody listens may be given the very port that it calls, and then answers itself.
FIRST, LAST = 12_000, 32_000
WORKERS = 16  # of one test run that never try the same port: nobody listens yet when it is found
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
_tried = count(os.getpid() * 37)  # test runs begin at different places


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens; never the same twice."""
    while True:
        port = FIRST + (next(_tried) * WORKERS + _worker) % (LAST - FIRST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
