"""What a process of a deployment does again and again beside its run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def meanwhile(action: Callable[[], object], seconds: float) -> Iterator[None]:
    """While this lasts, do something every few seconds; at the end none of it is under way."""
    over = threading.Event()

    def acting() -> None:
        while not over.wait(seconds):
            action()

    thread = threading.Thread(target=acting, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
