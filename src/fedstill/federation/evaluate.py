"""Own, cross and global scores; no training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def evaluate(experiment: Experiment, engine: Engine, round: int) -> Iterator[Number]:
    """Accuracy and loss of each scored model on the clients' test sets.

    A server's model is tested on every client's set; a client's model on every client's set
    (`cross`) or only on its own. Clients that share the very same test set share the one pass.
    """
    people = experiment.population
    method = experiment.method
    for holder in holders(method, engine, people.clients):
        node = engine.node(holder, round, "evaluate")
        own_only = holder != SERVER and (experiment.scores == "own" or method.scores_own)
        targets = [holder] if own_only else people.clients
        known: dict[int, tuple[float, float]] = {}
        for target in targets:
            test = people.party(target).test
            if not len(test):
                continue
            if id(test) not in known:
                known[id(test)] = score(method, node, test)
            accuracy, loss = known[id(test)]
            yield Number(round, "evaluate", holder, "accuracy", target, accuracy)
            yield Number(round, "evaluate", holder, "loss", target, loss)


def holders(method: Method, engine: Engine, clients: Sequence[NodeId]) -> Sequence[NodeId]:
    """Whose models are scored: the server's, or those of the clients that have acted, or both."""
    if method.scored is Place.CLIENTS:
        return [c for c in clients if c in engine.states]
    kept = engine.states if method.scores_own else {}
    return [SERVER, *(c for c in clients if kept.get(c) is not None)]


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
