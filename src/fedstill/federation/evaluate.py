"""Own, cross and global scores; no training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fedstill.core.data import Data
from fedstill.core.method import Method, Place
from fedstill.core.node import SERVER, Node
from fedstill.core.records import NodeId
from fedstill.engines.engine import Engine
from fedstill.federation.experiment import Experiment
from fedstill.logbook.events import Number

CHUNK = 1024
EVERYONE = "everyone"  # stands for all clients where a score is theirs alike


def evaluate(experiment: Experiment, engine: Engine, round: int) -> Iterator[Number]:
    """Accuracy and loss of each scored model on the clients' test sets.

    A server's model is tested on every client's set; a client's model on every client's set
    (`cross`) or only on its own. Clients that share the very same test set share the one pass;
    without `cross`, a server's score on the one set of all clients is also written once.
    """
    scored = holders(experiment.method, engine, experiment.population.clients)
    for holder, found in engine.look(scored, round, "evaluate", partial(scores, experiment)):
        for target, (accuracy, loss) in found.items():
            yield Number(round, "evaluate", holder, "accuracy", target, accuracy)
            yield Number(round, "evaluate", holder, "loss", target, loss)


def scores(experiment: Experiment, node: Node[Any]) -> dict[NodeId, tuple[float, float]]:
    """Accuracy and loss of one model by the test set it is scored on."""
    known: dict[int, tuple[float, float]] = {}
    found = {}
    for target, test in _tests(experiment, node.id):
        if not len(test):
            continue
        if id(test) not in known:
            known[id(test)] = score(experiment.method, node, test)
        found[target] = known[id(test)]
    return found


def holders(method: Method, engine: Engine, clients: Sequence[NodeId]) -> Sequence[NodeId]:
    """Whose models are scored: the server's, or those of the clients that have acted, or both."""
    acted = engine.states
    if method.scored is Place.CLIENTS:
        return [c for c in clients if c in acted]
    if not method.scores_own:
        return [SERVER]
    return [SERVER, *(c for c in clients if not acted.is_blank(c))]


def _tests(experiment: Experiment, holder: NodeId) -> Iterator[tuple[NodeId, Data]]:
    """The test sets for somebody's model, each with the name of its client."""
    people, own_only = experiment.population, experiment.scores == "own"
    if holder == SERVER:
        common = people.common_test if own_only else None
        if common is not None:
            yield EVERYONE, common
            return
    elif own_only or experiment.method.scores_own:
        yield holder, people.party(holder).test
        return
    for target in people.clients:
        yield target, people.party(target).test


@torch.no_grad()
def score(method: Method, node: Node[object], test: Data) -> tuple[float, float]:
    """Share of right answers and mean cross-entropy; the host waits once."""
    right = torch.zeros((), dtype=torch.float64, device=test.device)
    loss = torch.zeros_like(right)
    for x, y in test.chunks(CHUNK):
        logits = method.predict(node, x)
        right += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum")
    accuracy, mean_loss = (torch.stack([right, loss]) / len(test)).tolist()
    return accuracy, mean_loss
