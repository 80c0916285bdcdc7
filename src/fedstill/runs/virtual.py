"""Virtual data: clients distil their data once, before a run, and then train on what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedstill.core.data import Data
from fedstill.core.records import NodeId
from fedstill.core.release import Spending
from fedstill.engines.execution import Execution, engine_of
from fedstill.engines.ranks.follower import Follower, serve
from fedstill.engines.ranks.leader import Leader
from fedstill.engines.ranks.protocol import LEADER, Transport
from fedstill.federation.budget import calibrated
from fedstill.federation.cache import FolderCache
from fedstill.federation.experiment import Experiment
from fedstill.federation.run import run
from fedstill.logbook.writer import MemoryLog
from fedstill.methods.virtual import Own, Virtual
from fedstill.runs.session import spread


def distilled(
    experiment: Experiment,
    virtual: Virtual,
    execution: Execution,
    cache: FolderCache,
    transport: Transport | None = None,
) -> tuple[Experiment, str, Sequence[Spending]]:
    """The experiment whose clients learn from sets that they distil first, a note of it, and what
    that cost of their privacy: all of it, so that what follows needs none.
    """
    sets, spent = virtual_sets(experiment, virtual, execution, cache, transport)
    found = f"{cache.made} sets made, {cache.found} found in {cache.folder}"
    if transport is not None:
        found += f" by rank {transport.rank}"
    note = f"trained on virtual data, {virtual.per_class} images per class: {found}"
    learning = experiment.population.learning_from(sets)
    return replace(experiment, population=learning, privacy=None), note, spent


def virtual_sets(
    experiment: Experiment,
    virtual: Virtual,
    execution: Execution,
    cache: FolderCache,
    transport: Transport | None = None,
    key: bytes | None = None,
) -> tuple[dict[NodeId, Data], Sequence[Spending]]:
    """What the clients of an experiment distil from their data; of other ranks, their own.

    At a private site the noise is of its `key`.
    """
    warm_up = Experiment(
        virtual,
        experiment.population,
        rounds=0,
        seed=experiment.seed,
        topology=experiment.topology,
        privacy=experiment.privacy,
    )
    warm_up = calibrated(warm_up, execution, key)
    log = MemoryLog()
    own = engine_of(warm_up, replace(execution, memory_limit=None), cache=cache)
    own.key = key
    engine = spread(own, transport)
    if transport is not None and transport.rank != LEADER:
        serve(Follower(own), transport)
    else:
        run(engine, log)
    each = {node: engine.memory(node) for node in experiment.population.clients}
    made = {node: state for node, state in each.items() if isinstance(state, Own)}
    if isinstance(engine, Leader):
        engine.over()
    return {node: Data.of(*state.as_set().flat()) for node, state in made.items()}, log.privacy
