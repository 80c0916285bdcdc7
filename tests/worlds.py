"""The tiny federations of `fedstill.testing.worlds`, under a short name; messages meddled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from fedstill.core import Addressed, Message
from fedstill.engines.engine import Outcome
from fedstill.engines.play.in_process import InProcess
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.testing.worlds import (
    CLASSES,
    World,
    around,
    as_bytes,
    engine_for,
    examples,
    experiment,
    finished,
    pictures,
    vectors,
)
from fedstill.testing.worlds import played as played_honestly

__all__ = [
    "CLASSES",
    "World",
    "around",
    "as_bytes",
    "engine_for",
    "examples",
    "experiment",
    "finished",
    "pictures",
    "played",
    "vectors",
]


class Meddler(Protocol):
    """Somebody on the way of every message: hears it, puts another in its place, or loses it."""

    def carry(self, message: Message, sender: str, round: int, step: str) -> Message | None: ...


def played(
    method: Any,
    world: World,
    rounds: int = 4,
    engine: Any = InProcess,
    *,
    meddling: Sequence[Meddler] = (),
    **options: Any,
) -> Any:
    """The engine and the logbook after some rounds; with `meddling`, of messages meddled with."""
    if not meddling:
        return played_honestly(method, world, rounds, engine, **options)
    log, playing = MemoryLog(), engine_for(method, world, engine, rounds, **options)
    honest = playing.play

    def play(step: Any, round: int, inboxes: Any, toward: Any = None) -> dict[str, Outcome]:
        outcomes = honest(step, round, inboxes, toward)
        return {
            sender: _meddled(outcome, meddling, sender, round, step.name)
            for sender, outcome in outcomes.items()
        }

    playing.play = play
    run(playing, log)
    return playing, log


def _meddled(
    outcome: Outcome, meddling: Sequence[Meddler], sender: str, round: int, step: str
) -> Outcome:
    def carried(message: Message) -> Message | None:
        for meddler in meddling:
            found = meddler.carry(message, sender, round, step)
            if found is None:
                return None
            message = found
        return message

    if outcome.message is None:
        return outcome
    if isinstance(outcome.message, Addressed):
        each = {hearer: carried(message) for hearer, message in outcome.message.items()}
        kept = {hearer: message for hearer, message in each.items() if message is not None}
        return replace(outcome, message=Addressed(kept), bad=None)
    changed = carried(outcome.message)
    return replace(outcome, message=changed, bad=None, lost=changed is None)
