"""Clock: how fast clients compute, send and receive; no time passes here, see `timeline`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator

from fedstill.core import ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.node import SERVER
from fedstill.core.ranges import NonNegative, Positive
from fedstill.core.records import NodeId
from fedstill.core.seeds import generator


@runtime_checkable
class Law(Protocol):
    """What a client's speed or link is drawn from."""

    law: ClassVar[str]

    def drawn(self, rng: Generator) -> float:
        """One value."""


@dataclass(frozen=True)
class LogNormal:
    """median · exp(spread · z) with a standard normal z: half of all lie below the median."""

    law: ClassVar[str] = "log-normal"
    median: Positive
    spread: NonNegative

    def __post_init__(self) -> None:
        _refuse(type(self).__name__, ranges.faults(self))

    def drawn(self, rng: Generator) -> float:
        z = torch.randn((), generator=rng, dtype=torch.float64).item()
        return self.median * math.exp(self.spread * z)


@dataclass(frozen=True)
class Uniform:
    """Every value from `low` to `high` alike."""

    law: ClassVar[str] = "uniform"
    low: NonNegative
    high: Positive

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if not wrong and self.low > self.high:
            wrong.append(f"low = {self.low!r} is above high = {self.high!r}")
        _refuse(type(self).__name__, wrong)

    def drawn(self, rng: Generator) -> float:
        share = torch.rand((), generator=rng, dtype=torch.float64).item()
        return self.low + (self.high - self.low) * share


LAWS: Mapping[str, type[LogNormal] | type[Uniform]] = {
    kind.law: kind for kind in (LogNormal, Uniform)
}
Amount = float | LogNormal | Uniform | Mapping[NodeId, float]
BY_CLIENT = ("speed", "up", "down", "latency")  # what each client has one of
MAY_BE_ZERO = ("latency",)


class Pace(NamedTuple):
    """How fast one party is; what is without limit takes no time."""

    speed: float = math.inf  # operations or steps a second
    up: float = math.inf  # bytes a second
    down: float = math.inf
    latency: float = 0.0  # seconds


@dataclass(frozen=True)
class Clock:
    """The simulated time of a federation: speeds and links of its clients, and how long to wait.

        Clock(speed=LogNormal(median=1e10, spread=0.5), up=1e6, down=5e6, deadline=60)

    `speed`, `up`, `down` and `latency` are a number for everybody, a law from which each client's
    is drawn by the seed, or numbers by client's name; what is left out takes no time. Work is
    counted in floating-point operations of the loops that a step awaits, or in their steps. With
    a `deadline` whoever answers later is left out of the rest of the round.
    """

    speed: Amount | None = None  # operations or steps a second
    up: Amount | None = None  # bytes a second
    down: Amount | None = None  # bytes a second
    latency: Amount | None = None  # seconds that every message takes besides
    work: Literal["operations", "steps"] = "operations"
    deadline: Positive | None = None  # seconds that an answer is waited for
    server_speed: Positive | None = None
    server_up: Positive | None = None
    server_down: Positive | None = None

    def __post_init__(self) -> None:
        _refuse("Clock", [*self._faults()])

    def _faults(self) -> Iterator[str]:
        for name in BY_CLIENT:
            yield from amount_faults(name, getattr(self, name))
        named = ranges.hints(Clock)
        for item in fields(self):
            if item.name not in BY_CLIENT:
                wrong = ranges.fault(item.name, getattr(self, item.name), named[item.name])
                yield from [wrong] if wrong else []
        timed = [f.name for f in fields(self) if f.name not in ("work", "deadline")]
        if all(getattr(self, name) is None for name in timed):
            yield f"nothing would take any time; give at least one of {', '.join(timed)}"

    @property
    def counts_operations(self) -> bool:
        """Whether anybody's operations take time."""
        timed = self.speed is not None or self.server_speed is not None
        return timed and self.work == "operations"

    def misfits(self, clients: Sequence[NodeId]) -> Iterator[str]:
        """What does not go with these clients."""
        known = set(clients)
        for name in BY_CLIENT:
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                continue
            yield from (f"{name}: {unknown('client', c, clients)}" for c in given if c not in known)
            lacking = [client for client in clients if client not in given]
            if lacking:
                more = f" and {len(lacking) - 3} others" if len(lacking) > 3 else ""
                yield f"{name}: no number for {', '.join(lacking[:3])}{more}; give one for each"

    def paces(self, clients: Sequence[NodeId], seed: int) -> dict[NodeId, Pace]:
        """Everybody's speeds and links; a client's draws do not depend on who else there is."""
        limits = (self.server_speed, self.server_up, self.server_down)
        server = Pace(*(math.inf if limit is None else float(limit) for limit in limits))
        return {SERVER: server} | {client: self._pace(client, seed) for client in clients}

    def _pace(self, client: NodeId, seed: int) -> Pace:
        found: dict[str, float] = {}
        for name in BY_CLIENT:
            given = getattr(self, name)
            if isinstance(given, Mapping):
                found[name] = float(given[client])
            elif isinstance(given, Law):
                found[name] = given.drawn(generator(seed, "clock", name, f"node:{client}"))
            elif given is not None:
                found[name] = float(given)
        return Pace(**found)

    def table(self) -> dict[str, Any]:
        """The clock as a recipe has it."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: _plain(value) for name, value in found.items() if value is not None}


def amount_faults(name: str, value: Any) -> list[str]:
    """What is wrong with a speed, a link or a latency."""
    if value is None or isinstance(value, (LogNormal, Uniform)):
        if isinstance(value, Uniform) and value.low == 0 and name not in MAY_BE_ZERO:
            return [f"{name}: a uniform law from low = 0 would draw clients that never end"]
        return []
    hint = NonNegative if name in MAY_BE_ZERO else Positive
    if isinstance(value, Mapping):
        if not value:
            return [f"{name} is an empty table; give a number for each client"]
        found = (ranges.fault(f"{name}.{client}", each, hint) for client, each in value.items())
        return [wrong for wrong in found if wrong]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        wrong = ranges.fault(name, value, hint)
        return [wrong] if wrong else []
    return [f"{name} = {value!r}: must be a number, a law, or a number for each client"]


def _plain(value: Any) -> Any:
    if isinstance(value, (LogNormal, Uniform)):
        return {"law": value.law, **asdict(value)}
    return dict(value) if isinstance(value, Mapping) else value


def _refuse(what: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise BadValue([f"{what}: {line}" for line in wrong])
