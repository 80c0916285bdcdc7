"""Commands that are stopped, by Ctrl-C or by a scheduler, say how they go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import typer


class Terminated(KeyboardInterrupt):
    """Somebody asked the process to end, as a scheduler does when time is up."""


def _end(number: int, frame: Any) -> None:
    raise Terminated


@contextmanager
def stoppable(then: Callable[[], str]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the command with how to go on; each has its exit code."""
    alone = current_thread() is main_thread()  # others may not listen to signals
    before = signal.signal(signal.SIGTERM, _end) if alone else None
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(f"fedstill: stopped; {then()}", err=True)
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)
