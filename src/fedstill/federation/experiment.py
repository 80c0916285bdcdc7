"""Experiment: method, population, topology, sampler and rounds as objects; looks up no names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from fedstill.core.errors import BadValue
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER
from fedstill.core.records import NodeId
from fedstill.engines.engine import Everybody
from fedstill.federation.post import BadMessages, Channel, Hearing
from fedstill.federation.sampling import Sampler
from fedstill.metrics import ALWAYS, Metric, chosen


@dataclass(frozen=True, eq=False)
class Experiment:
    """All that decides the outcome of a run."""

    method: Method
    population: Everybody
    hearing: Hearing
    sampler: Sampler
    rounds: int
    seed: int = 0
    evaluate_every: int = 1
    scores: Literal["cross", "own"] = "cross"
    bad_messages: BadMessages = "stop"
    channels: Sequence[Channel] = field(default=())
    metrics: Sequence[str | Metric] = ALWAYS  # names or functions; see fedstill.metrics

    def __post_init__(self) -> None:
        chosen(self.metrics)
        if self.method.needs_public and not len(self.population.public):
            raise BadValue(
                f"{type(self.method).__name__} needs public data, but the population has none; "
                "give it some, in a recipe by a table [data.public]"
            )
        wrong = self.method.unfit(self.population.party(SERVER).model, self.population.models)
        if wrong:
            raise BadValue([f"{type(self.method).__name__}: {line}" for line in wrong])

    def awake(self, round: int) -> Sequence[NodeId]:
        """The clients that take part in a round."""
        return self.sampler.awake(round, self.population.clients, self.seed)


def speaks_to_peers(method: Method) -> bool:
    """Whether some client step reads what a client step before it sends."""
    parts = (method.before(), method.each_round(), method.after())
    return any(
        earlier.place is Place.CLIENTS and later.place is Place.CLIENTS and later.reads is not None
        for steps in parts
        for earlier, later in pairwise(steps)
    )
