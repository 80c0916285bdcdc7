"""The kinds of event a run leaves behind: number, traffic, note, spending; no formatting."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.core.records import Direction
from fedstill.core.release import Spending


@dataclass(frozen=True)
class Number:
    """One value: in an evaluation, `node` is whose model and `target` whose test set.

    NaN is a value that is undefined; a table has an empty cell for it.
    """

    round: int
    step: str
    node: str
    name: str
    target: str
    value: float


@dataclass(frozen=True)
class Traffic:
    """One field of one message; `floats` and `bytes` are said once and heard `hearers` times."""

    round: int
    step: str
    sender: str
    direction: Direction
    field: str
    floats: int
    bytes: int
    hearers: int


@dataclass(frozen=True)
class Note:
    """A sentence about the run; kinds in use: engine, data, resumed, warning, absent,
    skipped, lost, late, left out, undefined, privacy."""

    round: int
    kind: str
    node: str
    text: str


Event = Number | Traffic | Note | Spending
EventType = type[Number] | type[Traffic] | type[Note] | type[Spending]

TABLES: dict[str, EventType] = {"metrics.csv": Number, "messages.csv": Traffic, "notes.csv": Note}
"""The file of each kind of event; the columns are the fields, in order."""

LEDGER = "privacy.csv"  # a run that keeps nothing private has none
ALL_TABLES: dict[str, EventType] = {**TABLES, LEDGER: Spending}
