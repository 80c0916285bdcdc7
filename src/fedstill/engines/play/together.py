"""Several federations of one method, step by step beside each other; no method knowledge.

Each has its own data, seed and memories, and is what it would be alone. Only the loops of all their
nodes run together: stacked, or beside each other on a GPU. So a hundred small federations, such as
the shadows of an audit, keep a device busy that one of them would leave idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedstill.core.node import Cache
from fedstill.core.records import NodeId
from fedstill.engines.engine import Act, Outcome
from fedstill.engines.play.batched import Batched
from fedstill.engines.play.streams import Streams
from fedstill.federation.experiment import Experiment

if TYPE_CHECKING:
    from fedstill.engines.execution import Execution


class Together:
    """An engine for each of several experiments; the first runs everybody's loops.

    Of experiments that an execution would play `in_process` loops run one after another.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        execution: Execution,
        *,
        cache: Cache | None = None,
    ):
        name = execution.engine_name(experiments[0].networks)
        kind = Batched if name == Batched.name else Streams
        leader = kind(experiments[0], execution, cache=cache)
        quiet = replace(execution, record=False, compile=False)  # these run no loops
        others = [kind(experiment, quiet, cache=cache) for experiment in experiments[1:]]
        self.engines: Sequence[Batched] = [leader, *others]

    def play(self, acts: Mapping[int, Act]) -> dict[int, dict[NodeId, Outcome]]:
        """One step of some of the federations, by their places: the same step of all of them."""
        begun = {
            place: self.engines[place].begun(act.step, act.round, act.inboxes)
            for place, act in acts.items()
        }
        first = next(iter(acts.values()))
        everybody = [actor for _, actors in begun.values() for actor in actors]
        self.engines[0].to_the_end(first.step, first.round, everybody)
        outcomes = {}
        for place, act in acts.items():
            absent, actors = begun[place]
            found = absent | self.engines[place].left_behind(act.step, actors, act.toward)
            outcomes[place] = {id: found[id] for id in act.inboxes}
        return outcomes
