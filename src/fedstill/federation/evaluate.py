"""Own, cross and global scores; no training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fedstill.core.data import Data
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER, Node
from fedstill.core.records import NodeId
from fedstill.engines.engine import Engine
from fedstill.federation.experiment import Experiment
from fedstill.federation.population import Population
from fedstill.logbook.events import Number
from fedstill.metrics import Metric, chosen, measured

EVERYONE = "everyone"  # stands for all clients where a score is theirs alike


def evaluate(engine: Engine, round: int) -> Iterator[Number]:
    """Every metric of each scored model on the clients' test sets.

    A server's model is tested on every client's set; a client's model on every client's set
    (`cross`) or only on its own. Clients that share the very same test set share its scores, and
    small sets go through a model together; without `cross`, a server's score on the one set of all
    clients is also written once.
    """
    experiment = engine.experiment
    scored = holders(experiment.method, engine, experiment.population.clients)
    question = partial(scores, experiment, engine.population)
    for holder, found in engine.look(scored, round, "evaluate", question):
        for target, values in found.items():
            for name, value in values.items():
                yield Number(round, "evaluate", holder, name, target, value)


def scores(
    experiment: Experiment, population: Population, node: Node[Any]
) -> dict[NodeId, dict[str, float]]:
    """Metrics of one model by the test set it is scored on."""
    targets = _tests(experiment, population, node.id)
    tests = {target: test for target, test in targets if len(test)}
    different = {id(test): test for test in tests.values()}
    metrics = chosen(experiment.metrics)
    found = score(experiment.method, node, list(different.values()), metrics)
    known = dict(zip(different, found, strict=True))
    return {target: known[id(test)] for target, test in tests.items()}


def holders(method: Method, engine: Engine, clients: Sequence[NodeId]) -> Sequence[NodeId]:
    """Whose models are scored: the server's, or those of the clients that have acted, or both."""
    acted = engine.states
    if method.scored is Place.CLIENTS:
        return [c for c in clients if c in acted]
    if not method.scores_own:
        return [SERVER]
    return [SERVER, *(c for c in clients if not acted.is_blank(c))]


def _tests(
    experiment: Experiment, population: Population, holder: NodeId
) -> Iterator[tuple[NodeId, Data]]:
    """The test sets for somebody's model, each with the name of its client."""
    own_only = not experiment.scores_crosswise
    if holder == SERVER:
        common = population.common_test if own_only else None
        if common is not None:
            yield EVERYONE, common
            return
    elif own_only or experiment.method.scores_own:
        yield holder, population.party(holder).test
        return
    for target in population.clients:
        yield target, population.party(target).test


def score(
    method: Method, node: Node[Any], tests: Sequence[Data], metrics: Mapping[str, Metric]
) -> list[dict[str, float]]:
    """The metrics of a node's model on each test set."""
    return measured(partial(method.predict, node), tests, metrics, apart=not node.model.by_example)
