"""Who is awake; no weighting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

import torch

from fedstill.core import ranges
from fedstill.core.errors import BadValue, unknown
from fedstill.core.ranges import Count, Range
from fedstill.core.records import NodeId
from fedstill.core.seeds import generator


@runtime_checkable
class Sampler(Protocol):
    """Names the clients that take part in a round, from the seed and the round number only."""

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        """The awake clients, in the order of their names."""


@dataclass(frozen=True)
class Everyone:
    """All clients take part in every round."""

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        return sorted(members)


@dataclass(frozen=True)
class Sample:
    """A fixed number of clients, or a share of all, drawn anew in every round."""

    count: Count | None = None
    share: Annotated[float, Range(0, 1, open_low=True)] | None = None  # of all clients, rounded

    def __post_init__(self) -> None:
        wrong = ranges.faults(self)
        if (self.count is None) == (self.share is None):
            wrong.append(
                f"give either count or share, not both or none (count = {self.count}, "
                f"share = {self.share})"
            )
        if wrong:
            raise BadValue([f"Sample: {line}" for line in wrong])

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        """Drawn without replacement; a share of any clients is at least one."""
        names = sorted(members)
        wanted = self.wanted(len(names))
        if wanted > len(names):
            raise BadValue(
                f"Sample: count = {wanted} clients asked for in each round, but {len(names)} "
                f"exist; ask for at most {len(names)}"
            )
        rng = generator(seed, "sampling", round)
        drawn = torch.randperm(len(names), generator=rng)[:wanted].tolist()
        return sorted(names[i] for i in drawn)

    def wanted(self, clients: int) -> int:
        """How many of some clients take part."""
        if self.share is None:
            return self.count or 0
        return max(1, round(self.share * clients)) if clients else 0


@dataclass(frozen=True)
class Scripted:
    """Everyone but those named for a round; for trying out absences."""

    absent: Mapping[int, Sequence[NodeId]] = field(default_factory=dict)

    def awake(self, round: int, members: Sequence[NodeId], seed: int) -> list[NodeId]:
        missing = set(self.absent.get(round, ()))
        strangers = sorted(missing - set(members))
        if strangers:
            raise BadValue([f"Scripted: {unknown('client', s, members)}" for s in strangers])
        return sorted(set(members) - missing)
